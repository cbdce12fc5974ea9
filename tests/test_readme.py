"""The README's example runs as printed."""

import os
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def elsewhere(tmp_path):
    before = os.getcwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def examples():
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_the_readme_has_an_example_of_eight_lines():
    assert len(examples()) == 1
    assert len([line for line in examples()[0].splitlines() if line.strip()]) <= 8


def test_the_example_runs_and_shows_a_table(elsewhere, capsys):
    exec(compile(examples()[0], str(README), "exec"), {"__name__": "__main__"})
    assert "(rows)" in capsys.readouterr().out
