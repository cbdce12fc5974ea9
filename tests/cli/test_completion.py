import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import netkin as package


def environment(**more):
    return os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])} | more


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(netkin, shell):
    result = netkin(f"completion {shell}")
    assert result.exit_code == 0
    assert f"_NETKIN_COMPLETE={shell}_complete" in result.stdout


def test_another_shell_is_a_misuse(netkin):
    assert netkin("completion dos").exit_code == 2


BASH = """
eval "$(netkin completion bash)"
complete -p netkin
COMP_WORDS=(netkin repo) COMP_CWORD=1
$(complete -p netkin | sed 's/.*-F \\([^ ]*\\).*/\\1/') netkin repo netkin
echo "${COMPREPLY[@]}"
COMPREPLY=() COMP_WORDS=(netkin compare --fig) COMP_CWORD=2
$(complete -p netkin | sed 's/.*-F \\([^ ]*\\).*/\\1/') netkin --fig compare
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")
def test_bash_completes_commands_and_options(tmp_path):
    program = tmp_path / "netkin"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m netkin "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", BASH], env=environment(PATH=path), capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[1:] == ["report", "--figure"], result.stderr


def test_completing_does_not_import_torch():
    script = "import sys; from netkin.cli import cli\ntry: cli(prog_name='netkin')\nexcept SystemExit: pass\n{}"
    command = [sys.executable, "-c", script.format("sys.exit('torch' in sys.modules)")]
    asked = environment(_NETKIN_COMPLETE="bash_complete", COMP_WORDS="netkin comp", COMP_CWORD="1")
    result = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "plain,compare\nplain,completion\nplain,compress\n")
