"""The pages that are made from the code say what the code says, and no page points at nothing."""

import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest

import netkin as nk
from docs import site_pages
from netkin.cli import cli
from reproductions.record import Claim, Measured

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_pages_of_measures_and_commands_are_up_to_date():
    script = [sys.executable, DOCS / "generate.py", "--check"]  # a process of its own, where no test has added measures
    check = subprocess.run(script, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the generator beside a record of a made-up claim; `copied(*arguments)` runs it, returns its fault."""
    script = tmp_path / "docs" / "generate.py"
    script.parent.mkdir()
    script.write_text((DOCS / "generate.py").read_text())
    claim().save(tmp_path / "reproductions" / "results")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as fault:
            return fault.code
        return None

    return run


def claim(**changes):
    facts = {"figure": "Fig. 3", "sentence": "a copy is half as large", "expected": {"size": "a | half"}}
    ours = {"criterion": "holds below 0.6.", "measured": {"size": Measured(0.512, 0.012, 3), "time": Measured(2)}}
    ours |= {"control": "other toys", "controls": {"size": Measured(0.9, 0.01, 3)}}
    made = {"verdict": "holds", "scale": "cpu", "seeds": (0, 1), "note": "One was larger.", "version": "0.1.0"}
    words = {"paper": "Toy (2020), Toys.", "device": "CPU, 2 threads", "data": "toys, 6 images"}
    return Claim(id="toys/halving", **(facts | ours | made | {"provenance": words, "created": "2025-01-02"} | changes))


def test_a_page_out_of_date_is_named(copied, tmp_path):
    assert copied() is None
    assert copied("--check") is None
    (tmp_path / "docs" / "cli.md").write_text("old")
    claim(verdict="does not hold").save(tmp_path / "reproductions" / "results", overwrite=True)
    assert copied("--check") == "out of date: docs/cli.md, docs/reproductions.md; run `make docs`."


def test_the_page_of_reproductions_is_a_table_that_links_to_the_page_of_claims(copied, tmp_path):
    claim(scale="gpu", verdict="holds in part", note="", seeds=()).save(tmp_path / "reproductions" / "results")
    assert copied() is None
    text = (tmp_path / "docs" / "reproductions.md").read_text()
    for line in (
        "## toys\n\nToy (2020), Toys. 1 claim, of which 1 holds in part.\n",
        "| claim | figure | number | the paper | ours | control | scale | verdict | the paper trains | here |\n",
        '| <a href="claims.html#toys-halving">halving</a> | Fig. 3 | size | a \\| half | 0.512 ± 0.012 (n = 3) |',
        "| gpu | holds in part | – | – |\n",
    ):
        assert line in text
    page = (tmp_path / "docs" / "claims.html").read_text()
    assert 'id="toys-halving"' in page
    assert "a copy is half as large" in page


def test_the_page_of_claims_says_what_was_noted_later_and_which_commit_measured(copied, tmp_path):
    results, words = tmp_path / "reproductions" / "results", {"provenance": {"commit": "0123abcd"}}
    claim(scale="gpu", **words).save(results)
    note = {"date": "2025-02-01", "note": "The disk was slow.", "records": {"toys/halving.cpu": "2025-01-02"}}
    (results / "notes.json").write_text(json.dumps([note]))
    assert copied() is None
    page = (tmp_path / "docs" / "claims.html").read_text()
    assert page.count("Noted later, cpu scale") == page.count("The disk was slow. (2025-02-01)") == 1
    assert "Noted later, gpu scale" not in page
    assert "0123abcd" in page


def test_the_committed_page_of_reproductions_says_how_long_the_papers_and_we_trained():
    text = (DOCS / "reproductions.md").read_text()
    assert len(text.split()) < 10_000
    assert "| 100 rounds of 15 epochs | 15 rounds (cifar100) and 12 rounds (cifar10) of 5 epochs |" in text
    assert "| 200 epochs of batches of 128 | 500 steps of batches of 512 |" in text


def test_the_readme_names_only_measures_that_exist():
    from netkin.measures import measures

    section = (ROOT / "README.md").read_text().partition("## Measures")[2].partition("##")[0]
    named = {word for word in section.split("`")[1::2] if word.isidentifier()}
    assert len(named) > 10
    assert named <= set(measures())


GUIDES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(set(DOCS.glob("*.md")) - {DOCS / "reproductions.md"})]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_names_of_python_on_a_page_exist(page):
    named = set(re.findall(r"\bnk\.(\w+)", page.read_text()))
    assert [name for name in sorted(named) if not hasattr(nk, name)] == []


def unknown_parts(line):
    """Return which words of a command line are no command or option of netkin."""
    command, unknown = cli, []
    for word in line.split()[1:]:
        if word.startswith("--"):
            options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            unknown += [word] if word.partition("=")[0].strip(",") not in options | {"--help"} else []
        elif isinstance(command, click.Group) and word.islower():
            unknown += [] if word in command.commands else [word]
            command = command.commands.get(word, command)
    return unknown


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_on_a_page_exist_with_their_options(page):
    text = page.read_text().replace("\\\n", " ")
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S))
    lines = [*re.findall(r"`(netkin [^`]+)`", text), *re.findall(r"^netkin .+$", blocks, re.M)]
    wrong = {line: unknown for line in lines if (unknown := unknown_parts(line))}
    assert wrong == {}


def test_the_glossary_has_the_nouns_of_the_house():
    text = (DOCS / "glossary.md").read_text()
    nouns = ["Spec", "Run", "ModelInput", "Batch", "Comparer", "Quantity", "Experiment", "Job", "Moments", "Rows",
             "Grams", "Comparison", "Comparisons", "Series", "Ranking", "Recipe", "DynamicsRecorder"]  # fmt: skip
    assert [noun for noun in nouns if f"`{noun}`" not in text] == []


def linked(page):
    """Return the files that a page links to, as paths."""
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    return [page.parent / target for target in targets]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert [target for target in linked(page) if not target.exists()] == []


def anchors(page):
    """Return the anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_links_to_a_part_of_a_page_lead_to_a_heading(page):
    links = re.findall(r"\]\(([^)#:\s]*\.md)?#([^)\s]+)\)", page.read_text())
    wrong = [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)]
    assert wrong == []


def test_every_page_stands_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    made = {"api/comparing.md"} | {f"notebooks/{notebook.stem}.md" for notebook in site_pages.NOTEBOOKS}
    assert pages | made == listed
    assert next(iter(site_pages.api_pages())) == "comparing.md"


def test_the_map_names_files_that_exist():
    named = set(re.findall(r"`([\w/.-]+\.(?:py|json|md)|[\w/]+/)`", (DOCS / "map.md").read_text()))
    assert len(named) > 40
    rooms = (ROOT, ROOT / "src" / "netkin")
    assert [name for name in sorted(named) if not any((room / name).exists() for room in rooms)] == []


RESULTS = ("Comparison", "Ranking", "Series", "Statistics")  # made by netkin, not by users


@pytest.mark.parametrize("name", sorted(set(nk.__all__) - {*RESULTS, "NetkinError", "__version__", "shapes"}))
def test_calls_with_many_parameters_describe_each(name):
    parameters = set(inspect.signature(getattr(nk, name)).parameters) - {"X", "Y"}
    described = re.findall(r"^ +\**(\w+): ", inspect.getdoc(getattr(nk, name)), re.M)
    assert len(parameters) <= 4 or parameters <= set(described)


@pytest.mark.parametrize("name", [
    "activations", "barrier", "class_sensitivity", "collect", "compare", "compare_many", "compress", "dynamics",
    "ensemble_tasks", "explain", "gradients", "learn_tasks", "lottery_tickets", "model_directions", "recommend",
    "sparsify", "sparsity_study", "stitch", "stitch_all", "stitch_many", "train", "train_many",
])  # fmt: skip
def test_every_long_call_takes_progress(name):
    assert inspect.signature(getattr(nk, name)).parameters["progress"].default is None
