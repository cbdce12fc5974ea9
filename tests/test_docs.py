"""The pages that are made from the code say what the code says, and no page points at nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def generate(*arguments):
    script = [sys.executable, DOCS / "generate.py", *arguments]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def test_the_pages_of_measures_and_commands_are_up_to_date():
    check = generate("--check")
    assert check.returncode == 0, check.stderr


def test_a_page_out_of_date_is_named(tmp_path):
    for name in ("generate.py", "measures.md"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    (tmp_path / "cli.md").write_text("old")
    check = subprocess.run([sys.executable, tmp_path / "generate.py", "--check"], capture_output=True, text=True)
    assert (check.returncode, check.stderr) == (1, "out of date: docs/cli.md; run `make docs`.\n")


def test_the_readme_names_only_measures_that_exist():
    from netkin.measures import measures

    section = (ROOT / "README.md").read_text().partition("## Measures")[2].partition("##")[0]
    named = {word for word in section.split("`")[1::2] if word.isidentifier()}
    assert len(named) > 10
    assert named <= set(measures())


def linked(page):
    """Return the files that a page links to, as paths."""
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    return [page.parent / target for target in targets]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert [target for target in linked(page) if not target.exists()] == []


def test_every_page_stands_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages == listed
