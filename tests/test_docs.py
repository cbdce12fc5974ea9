"""The pages that are made from the code say what the code says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_of_measures_is_up_to_date():
    check = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_the_readme_names_only_measures_that_exist():
    from netkin.measures import measures

    section = (ROOT / "README.md").read_text().partition("## Measures")[2].partition("##")[0]
    named = {word for word in section.split("`")[1::2] if word.isidentifier()}
    assert len(named) > 10
    assert named <= set(measures())
