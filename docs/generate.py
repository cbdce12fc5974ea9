"""Write the pages that are made from the code: `docs/measures.md`. With ``--check``, say if they are out of date."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path

from netkin.measures import Measure, measures

PAGE = Path(__file__).parent / "measures.md"
HEAD = """# Measures

Made from what the code declares, by `make docs`. X is n × p, Y is n × q, rows are the same examples. Parameters are
written as `svcca(variance=0.95)`; an id without them means their defaults.

| measure | what it says | direction, range | unchanged by | reads | a metric |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of `docs/measures.md`."""
    found = sorted(measures().values(), key=lambda measure: measure.name)
    return HEAD + "".join(map(row, found)) + "\n" + "\n".join(map(section, found))


def row(measure: Measure) -> str:
    """Return a measure's line of the table."""
    facts = measure.facts
    direction = "similarity" if facts.higher_is_closer else "distance"
    unchanged = ", ".join(sorted(facts.unchanged_by)) or "–"
    name = f"[`{measure.name}`](#{measure.name})"
    says = measure.summary.removeprefix("Return ").rstrip(".")
    return (
        f"| {name} | {says} | {direction}, {bounds(measure)}{'' if facts.symmetric else ', asymmetric'} | {unchanged} "
        f" | {facts.reads.__name__} | {'yes' if facts.is_metric else ''} |\n"
    )


def section(measure: Measure) -> str:
    """Return a measure's own paragraph."""
    text = inspect.getdoc(measure.function) or ""
    text = text.partition("\nExample:")[0].replace("``", "`").strip()
    defaults = ", ".join(f"`{name}={value}`" for name, value in measure.defaults.items())
    lines = [f"## {measure.name}", "", text, "", f"*Convention:* {measure.facts.convention}."]
    lines += [f"*Parameters:* {defaults}."] if defaults else []
    return "\n".join([*lines, f"*Reference:* {measure.facts.reference}.", ""])


def bounds(measure: Measure) -> str:
    """Return the range of a measure in figures."""
    named = {math.pi / 2: "π/2", math.sqrt(2): "√2", math.inf: "∞"}
    low, high = (named.get(bound, f"{bound:g}") for bound in measure.facts.bounds)
    return f"{low} to {high}"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit("docs/measures.md is out of date; run `make docs`.")
