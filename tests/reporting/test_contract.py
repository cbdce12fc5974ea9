"""The document that a page carries is the one that docs/page.md describes."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from netkin import diff
from netkin.applications.sparsity import sparsity_study
from netkin.reporting import blocks
from netkin.reporting.html import html_of, notebook_of
from netkin.reporting.page import page, page_of
from netkin.results import Comparisons
from netkin.results.packing import RESULTS
from result_worlds import JOINT, compressed, ensembles, federation, ranking, studied, way

jsonschema = pytest.importorskip("jsonschema")
DOCS = Path(__file__).parents[2] / "docs" / "page.md"
TEMPLATES = Path(__file__).parents[2] / "src" / "netkin" / "reporting" / "templates"


@pytest.fixture(scope="module")
def schema():
    return json.loads(re.search(r"(?s)```json\n(.*?)```", DOCS.read_text(encoding="utf-8"))[1])


def results_of(made):
    pairs = [
        made.comparison(made.jackknifed(), made.holed(), a=a, b=b) for a, b in [("x", "y"), ("x", "z"), ("y", "z")]
    ]
    learnt = [way(), way("joint", JOINT), ensembles()]
    return {
        "comparison": pairs[0],
        "comparisons": Comparisons(pairs),
        "stitches": made.sweep(),
        "hostile": made.hostile(),
        "series": made.series(measures=("svcca", "cka"), constant=10),
        "series of weights": replace(made.series(), between=made.comparison(made.table("svcca of fc", tuple("abcd")))),
        "federation": federation(),
        "federation that was not tested": federation(tested=False, alike=False),
        "ranking": ranking(reliability={"knn": (0.59, 0.07)}),
        "tasks": learnt,
        "ensembles": learnt[-1],
        "compression": compressed(),
        "sparsity": studied(),
        "sparsity of weights": sparsity_study(nn.Linear(4, 2)),
        "diff": diff(nn.Linear(4, 2), nn.Linear(4, 2), torch.randn(20, 4), progress=False),
    }


def test_the_page_of_each_kind_of_result_is_as_the_schema_says(made, schema):
    for kind, results in results_of(made).items():
        held = json.loads(re.search(r'id="data">([^<]*)</script>', page(results))[1])
        faults = [f"{kind}: {fault.json_path}: {fault.message[:200]}"
                  for fault in jsonschema.Draft202012Validator(schema).iter_errors(held)]  # fmt: skip
        assert not faults


def test_all_results_that_are_saved_have_a_page_and_show_themselves_in_notebooks(made):
    shown = results_of(made)
    for results in shown.values():
        for one in results if isinstance(results, list) else [results]:
            text = one._repr_html_()
            assert "<script" not in text
            assert "<style" not in text
    kinds = {getattr(one, "kind", "") for own in shown.values() for one in (own if isinstance(own, list) else [own])}
    assert kinds >= RESULTS.keys() | {"compressed"}


def test_the_schema_is_strict_about_blocks(made, schema):
    held = made.page_in(page(made.comparison()))
    held["blocks"].append({"kind": "fireworks"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(held)


def test_a_block_kind_is_added_as_the_docs_say(made, tmp_path, monkeypatch):
    text = DOCS.read_text(encoding="utf-8")
    template = re.search(r"Write `templates/figure.html`: `(.*?)`", text)[1]
    source = dedent(re.search(r"(?s)Declare it beside the others in `blocks.py`:\n\n(.*?)\n\n3\.", text)[1])
    (tmp_path / "figures_of_ours" / "templates").mkdir(parents=True)
    (tmp_path / "figures_of_ours" / "__init__.py").touch()
    (tmp_path / "figures_of_ours" / "templates" / "figure.html").write_text(template)
    monkeypatch.syspath_prepend(tmp_path)
    exec(source, scope := vars(blocks).copy())
    figure = type("Figure", (scope["Figure"],), {"package": "figures_of_ours"})("0.91", made.NAME)
    own = page_of(made.comparison())
    own = replace(own, blocks=[figure, *own.blocks])
    drawn = f"<strong>0.91</strong> {html.escape(made.NAME)}"
    assert drawn in html_of(own)
    assert drawn in notebook_of(own)
    assert made.page_in(html_of(own))["blocks"][0] == {"kind": "figure", "value": "0.91", "words": made.NAME}


def test_each_kind_of_block_has_its_template_and_its_row(schema):
    kinds = {one["$ref"].rpartition("/")[2] for one in schema["$defs"]["block"]["oneOf"]}
    told = set(re.findall(r"\| `(\w+)` \| .* \| `(\w+)\.html` \|", DOCS.read_text(encoding="utf-8")))
    assert told == {(kind, kind) for kind in kinds}
    assert all((TEMPLATES / f"{kind}.html").exists() for kind in kinds)
