"""`.ci/run`: the check beside the tests; what fails is shown at once, and nothing is left running."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "run"
pytestmark = pytest.mark.skipif(not SCRIPT.exists() or sys.platform != "linux", reason="needs .ci/run, and Linux")


@pytest.fixture
def ci(tmp_path):
    """Return a function that runs the script with a check and tests of our own, and gives its code and its text."""

    def run(check: str, test: str, unpack: str = ""):
        home = tmp_path / "checkout"
        (home / ".ci").mkdir(parents=True)
        shutil.copy(SCRIPT, home / ".ci")
        recipes = {".venv/.dev": "true", "check": check, "test": test}
        (home / "Makefile").write_text("".join(f"{name}:\n\t@{line}\n" for name, line in recipes.items()))
        for program, lines in {"chromium": "", ".venv/bin/python": unpack}.items():
            place = (home / program) if "/" in program else tmp_path / program
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"#!/bin/sh\n{lines}\n")
            place.chmod(0o755)
        if unpack:
            (tmp_path / "shared" / "data" / "checkpoints").mkdir(parents=True)
            (tmp_path / "shared" / "data" / "unpack.py").touch()
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("NETKIN_", "MAKE", "MFLAGS"))
        }
        done = subprocess.run(
            [home / ".ci" / "run"], env=clean | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.fixture
def endless(tmp_path):
    """Return a line that runs on until it is stopped, and a function that waits until it has been."""

    def wait_for_its_end():
        pid = int((tmp_path / "pid").read_text())
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists():
                return True
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        return False

    return f"echo $$$$ >{tmp_path}/pid; exec sleep 600", wait_for_its_end


@pytest.mark.parametrize("unpack", ["", "sleep 1"], ids=["no data", "data"])
def test_all_that_passes_is_shown(ci, unpack):
    code, text = ci("echo checked", "echo tested", unpack)
    assert code == 0
    assert "checked" in text
    assert "tested" in text


def test_a_check_that_fails_is_shown_and_ends_the_tests(ci, endless):
    code, text = ci("sleep 1; echo a wrong type; exit 1", endless[0])
    assert code != 0
    assert "a wrong type" in text
    assert endless[1]()


def test_failing_tests_end_the_check(ci, endless):
    code, text = ci(endless[0], "sleep 1; echo a failing test; exit 1")
    assert code != 0
    assert "a failing test" in text
    assert endless[1]()


def test_data_that_cannot_be_unpacked_leave_no_check_behind(ci, endless):
    code, _ = ci(endless[0], "true", unpack="sleep 1; exit 3")
    assert code == 3
    assert endless[1]()
