"""The document that a page carries is the one that docs/page.md describes."""

import json
import re
from pathlib import Path

import pytest

from netkin.reporting.page import page

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
    return {
        "comparison": pairs[0],
        "comparisons": pairs,
        "stitches": made.sweep(),
        "hostile": made.hostile(),
        "series": made.series(measures=("svcca", "cka"), constant=10),
    }


@pytest.mark.parametrize("kind", ["comparison", "comparisons", "stitches", "hostile", "series"])
def test_the_page_of_each_kind_of_result_is_as_the_schema_says(made, schema, kind):
    text = page(results_of(made)[kind])
    held = json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])
    jsonschema.Draft202012Validator(schema).validate(held)


def test_the_schema_is_strict_about_blocks(made, schema):
    held = made.page_in(page(made.comparison()))
    held["blocks"].append({"kind": "fireworks"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(held)


def test_each_kind_of_block_has_its_template_and_its_row(schema):
    kinds = {one["$ref"].rpartition("/")[2] for one in schema["$defs"]["block"]["oneOf"]}
    told = set(re.findall(r"\| `(\w+)` \| .* \| `(\w+)\.html` \|", DOCS.read_text(encoding="utf-8")))
    assert told == {(kind, kind) for kind in kinds}
    assert all((TEMPLATES / f"{kind}.html").exists() for kind in kinds)
