"""The guides' code runs as printed: python and netkin commands, block by block, each page in its own folder."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from netkin.cli import cli
from netkin.comparing.compare import compare
from netkin.comparing.many_models import compare_many
from netkin.measures import registry
from netkin.representations import activations
from netkin.sources import examples, load_data, load_model

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = [
    "first-comparison", "choosing-a-measure", "conv-layers-and-tokens", "comparing-many-models", "reading-a-report",
    "adding-a-measure", "adding-a-statistic", "collecting", "own-training-loop", "compression", "diff", "diff-story",
    "gradients",
    "learning-dynamics", "continual", "federated", "cka-sparsity", "sparse-training", "dropping-tokens",
    "freeze-training", "interpretation", "jobs", "recommend", "reproducing", "stitching", "subspaces", "text",
    "training", "two-language-models",
]  # fmt: skip
LONG = {"compression", "gradients", "stitching"}  # their data are a third of the digits; the networks have seen all
FEW = {"train": slice(500), "test": slice(1437, 1587)}
QUICK = {
    "first-comparison",
    "choosing-a-measure",
    "adding-a-measure",
    "adding-a-statistic",
    "diff",
    "jobs",
}
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def saved_results():
    """Save what the guide to reports reads: a comparison, and several."""
    rng = np.random.default_rng(0)
    models = {name: {layer: rng.normal(size=(40, 6)) for layer in ("in", "out")} for name in ("a", "b", "c")}
    compare(models["a"], models["b"]).save("ab.netkin")
    compare_many(models).save("many.netkin")


def saved_weights():
    """Save the weights of the two networks that the guide to the recommender ranks."""
    for seed, name in enumerate(("a.pt", "b.pt")):
        torch.save(load_model("netkin:digits", seed=seed).state_dict(), name)


def saved_versions():
    """Save the weights of a network before and after one layer was changed, and what its layers then give."""
    model = load_model("netkin:digits")
    torch.save(model.state_dict(), "before.pt")
    with torch.no_grad():
        model.get_submodule("conv3").weight *= 1.01
    torch.save(model.state_dict(), "after.pt")
    activations(model, "conv*", load_data("digits:test"), shape="dft", save="after-states", progress=False)


BEFORE = {"diff": saved_versions, "reading-a-report": saved_results, "recommend": saved_weights}


def blocks(page):
    """Yield the line number, the language and the text of a page's blocks of code."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start()) + 2, found.group(1), found.group(2)


def run_python(code, page, line, names):
    """Run a block, or save it where its first line is a comment that names a file."""
    file = re.match(r"# (\w+\.py)\n", code)
    if file:
        Path(file.group(1)).write_text(code)
    else:
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def run_commands(text):
    """Run each line that is a command of netkin."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("netkin "):
            result = CliRunner().invoke(cli, shlex.split(line)[1:], prog_name="netkin")
            assert result.exit_code == 0, f"{line}\n{result.stderr}{result.exception!r}"


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """An empty folder to work in, from which modules can be imported; chance, modules and measures as before after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_MEASURES", dict(registry._MEASURES))
    modules = set(sys.modules)
    with torch.random.fork_rng(devices=[]):
        yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def few_digits(monkeypatch, trained_once):
    """Let netkin read some of the digits, and hand out copies of networks that were trained once, on all of them."""
    whole = examples.DIGIT_PARTS

    def trained(*given, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(examples, "DIGIT_PARTS", whole)
            return trained_once(*given, **options)

    monkeypatch.setattr(examples, "DIGIT_PARTS", FEW)
    monkeypatch.setattr("netkin.training.trained_digits_net", trained)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in GUIDES]
)
def test_the_code_of_a_guide_runs(name, empty_folder, capsys, request):
    request.getfixturevalue("few_digits" if name in LONG else "shared_nets")
    page = DOCS / f"{name}.md"
    names = {"__name__": "guide"}
    BEFORE.get(name, lambda: None)()
    for line, language, text in blocks(page):
        if language == "python":
            run_python(text, page, line, names)
        else:
            run_commands(text)


def test_a_measure_added_by_a_guide_is_gone_afterwards():
    assert "cca_largest" not in registry.measures()
