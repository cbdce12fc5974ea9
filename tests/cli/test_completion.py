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
ask() {
    COMP_LINE=$1 COMP_POINT=${#1} COMPREPLY=()
    $(complete -p netkin | sed 's/.*-F \\([^ ]*\\).*/\\1/') netkin
    echo "${COMPREPLY[@]}"
}
"""
ASKED = {
    "netkin repo": "report",
    "netkin compare --fig": "--figure",
    "netkin compare netkin:dig": "digits",
    "netkin compare netkin:digits@we": "weights.pt",
    "netkin compare a --data digits:": "test train",
    "netkin compare a --data npz:we": "weights.pt",
    "netkin compare a --measure procrustes_di": "procrustes_disparity procrustes_distance",
    "netkin compare a --shape po": "positions pool",
    "netkin recommend one=netkin:vi": "vit",
    "netkin recommend a --score kernel_ridge_h": "kernel_ridge_hadamard",
    "netkin compare a b netkin:dig": "digits",
    "netkin tasks one=netkin:dig": "digits",
    "netkin list measures cka_rbf_": "cka_rbf_debiased",
    "netkin stitch a b --method reduced": "reduced_rank",
    "netkin stitch a b --score stitched_s": "stitched_svcca",
    "netkin federate a --algorithm fedp": "fedprox fedper",
    "netkin doctor --device c": "cpu cuda",
}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")
def test_bash_completes_commands_and_options(tmp_path):
    program = tmp_path / "netkin"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m netkin "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    (tmp_path / "weights.pt").write_text("")
    script = BASH + "".join(f"ask '{line}'\n" for line in ASKED)
    given = {"env": environment(PATH=path), "cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    result = subprocess.run(["bash", "-c", script], **given)
    found = dict(zip(ASKED, result.stdout.splitlines()[1:], strict=True))
    found["netkin doctor --device c"] = " ".join(found["netkin doctor --device c"].split()[:2])  # GPUs may follow
    assert found == ASKED, result.stderr


@pytest.mark.slow
def test_completing_does_not_import_torch():
    script = "import sys; from netkin.cli import cli\ntry: cli(prog_name='netkin')\nexcept SystemExit: pass\n{}"
    command = [sys.executable, "-c", script.format("sys.exit('torch' in sys.modules)")]
    for line, found in (
        ("netkin comp", ["compare", "completion", "compress"]),
        ("netkin compare --measure cka_rbf_", ["cka_rbf_debiased"]),
    ):
        asked = environment(_NETKIN_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
        result = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (0, "".join(f"plain,{one}\n" for one in found))
