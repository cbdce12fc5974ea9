"""Write the pages made from the code and the records: `measures.md`, `cli.md`, `reproductions.md` and `claims.html`.

In `recommend.md`, a guide, and in `map.md` the part between two marks is written. `names.json` of the command line has
the names and sentences that its help and its completion show, so that these need no torch. With ``--check``, say which
of these is out of date.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from os.path import normpath
from pathlib import Path
from typing import Any

import click

import netkin as nk
from netkin.measures import Measure, measures

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent))  # for `reproductions`, which is not installed

from reproductions.page import NOT_STATED, anchor, grouped, report_claims, tally  # noqa: E402
from reproductions.record import Claim, later_notes, recorded  # noqa: E402
from reproductions.running import trainings  # noqa: E402

RESULTS = FOLDER.parent / "reproductions" / "results"
MEASURES = """# Measures

Generated from the declarations in the code, by `make docs`. X is n × p, Y is n × q, rows are the same examples.
Parameters are written as `svcca(variance=0.95)`; an id without them has their defaults.

| measure | value | direction, range | invariant to | statistic | metric |
|---|---|---|---|---|---|
"""
COMMANDS = """# Command line

Generated from the commands, by `make docs`; `netkin COMMAND --help` prints the same.

"""
REPRODUCTIONS = """# Reproductions

What papers claim, measured again. Generated from the records in `reproductions/results` by `make docs`. Each claim
links to <a href="claims.html">the page of all claims</a>, which is made while the site is built: criterion, control,
all numbers, charts and how they were measured (`python -m reproductions --page FILE` writes it too). [Reproducing a
paper](reproducing.md) explains how to run a claim, how to add one, and what a verdict means.

The cpu scale is small: part of the data and narrow networks, minutes on a CPU. The gpu scale has larger networks and
all images of the data, but mostly shorter trainings than the papers; both lengths are in the table, and [The papers'
settings and ours](reproducing.md#the-papers-settings-and-ours) compares the rest. A value after ± is a standard error,
and a claim is decided by the 95% interval of Student's t; if the interval contains the threshold, it is undecided. The
table shows one number of each claim. The control is a case in which the claim should fail, measured by the same code.
Records of another criterion, control or recipe than the present ones are not shown. Claims are counted at the largest
scale at which they were measured.
"""


# --- measures.md ------------------------------------------------------------------------------------------------------


def page_of_measures() -> str:
    """Return the text of `docs/measures.md`."""
    found = sorted(measures().values(), key=lambda measure: measure.name)
    return MEASURES + "".join(map(row, found)) + "\n" + "\n".join(map(section, found))


def row(measure: Measure) -> str:
    """Return a measure's line of the table."""
    facts = measure.facts
    direction = "similarity" if facts.higher_is_closer else "distance"
    unchanged = ", ".join(sorted(facts.unchanged_by)) or "–"
    unchanged += " (of other settings see `netkin list measures`)" if callable(measure.declared.unchanged_by) else ""
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
    text = re.sub(r"^ +(\w+): ", r"- `\1`: ", text.replace("\nArgs:\n", "\n"), flags=re.M)
    defaults = ", ".join(f"`{name}={value}`" for name, value in measure.defaults.items())
    lines = [f"## {measure.name}", "", text, "", f"*Convention:* {measure.facts.convention}."]
    lines += [f"*Parameters:* {defaults}."] if defaults else []
    return "\n".join([*lines, f"*Reference:* {measure.facts.reference}.", ""])


def bounds(measure: Measure) -> str:
    """Return the range of a measure in figures."""
    named = {math.pi / 2: "π/2", math.sqrt(2): "√2", math.inf: "∞"}
    low, high = (named.get(bound, f"{bound:g}") for bound in measure.facts.bounds)
    return f"{low} to {high}"


# --- cli.md -----------------------------------------------------------------------------------------------------------


def page_of_commands() -> str:
    """Return the text of `docs/cli.md`."""
    from netkin.cli import cli, commands  # which read names.json, written before

    return COMMANDS + paragraphs(cli) + "\n" + "\n".join(command(name, one) for name, one in commands().items())


def command(name: str, one: click.Command) -> str:
    """Return a command's own part: what it does, its usage, its options and its example."""
    from netkin.cli.options import grouped_options

    context = click.Context(one, info_name=f"netkin {name}")
    usage = " ".join([context.command_path, *one.collect_usage_pieces(context)])
    tables = "".join(option_table(*group) for group in grouped_options(one, context).items())
    return f"## netkin {name}\n\n{paragraphs(one)}\n{fenced(usage)}\n{tables}{fenced(example(one), 'bash')}"


def option_table(heading: str, records: list[tuple[str, str]]) -> str:
    """Return the options below one heading of a command's help."""
    rows = "".join(f"| `{names.replace('|', ' or ')}` | {text} |\n" for names, text in records)
    return f"| {heading} | |\n|---|---|\n{rows}\n"


def paragraphs(one: click.Command) -> str:
    """Return a command's text; what click must not wrap is fenced."""
    parts = inspect.cleandoc(one.help or "").split("\n\n")
    return "\n".join(fenced(part[1:].strip()) if part.startswith("\b") else f"{part}\n" for part in parts)


def example(one: click.Command) -> str:
    """Return the example that ends a command's help."""
    return (one.epilog or "").partition("Example:")[2].strip()


def fenced(text: str, language: str = "") -> str:
    """Return `text` as a block of code."""
    return f"```{language}\n{text}\n```\n"


# --- reproductions.md -------------------------------------------------------------------------------------------------


def page_of_reproductions() -> str:
    """Return the text of `docs/reproductions.md`: a table for each paper."""
    papers = grouped(records())
    parts = [paper_table(paper, by_id) for paper, by_id in papers.items()] or ["\nNothing is recorded yet.\n"]
    return REPRODUCTIONS + "".join(parts)


@cache
def records() -> list[Claim]:
    """Return the records of claims that are still judged so; without the claims, all of them."""
    if not (FOLDER.parent / "reproductions" / "running.py").exists():
        return recorded(RESULTS)
    return import_module("reproductions.running").current(RESULTS)


@cache
def beside_records() -> dict[str, Any]:
    """Return what was said of records after they were measured, and how long the papers trained and we did."""
    return {"notes": later_notes(RESULTS, records()), "trainings": trainings(records())}


def paper_table(paper: str, by_id: dict[str, list[Claim]]) -> str:
    """Return a paper's reference, how many claims hold, and the table of them."""
    found = [claim for scales in by_id.values() for claim in scales]
    reference = found[0].provenance.get("paper", paper).rstrip(".")
    lines = [f"\n## {paper}\n", f"{reference}. {tally(found)}.\n"]
    head = list(cells_of(found[0]))
    return "\n".join([*lines, f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n" + "".join(map(claim_row, found))])


def claim_row(claim: Claim) -> str:
    """Return a claim's line of the table at one scale."""
    return f"| {' | '.join(map(in_cell, cells_of(claim).values()))} |\n"


def cells_of(claim: Claim) -> dict[str, str]:
    """Return the cells of a claim's line, with a link to all that was found."""
    papers, ours = beside_records()["trainings"].get((claim.id, claim.scale), ("", ""))
    trained = {"the paper trains": papers or (NOT_STATED if ours else "–"), "here": ours or "–"}
    return claim.row | {"claim": f'<a href="claims.html#{anchor(claim)}">{claim.name}</a>'} | trained


def in_cell(text: str) -> str:
    """Return text that stays in its cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


# --- recommend.md -----------------------------------------------------------------------------------------------------


def page_of_recommending() -> str:
    """Return the guide to the recommender with the table of the recorded claim, at gpu scale where there is one."""
    start, rest = GUIDE.read_text().split(MARKS[0])
    found = sorted((one for one in records() if one.id == "gradients/recommender"), key=lambda one: one.scale)
    table = judged_scores(found[-1]) if found else "The scores are not judged yet.\n"
    return f"{start}{MARKS[0]}\n{table}{MARKS[1]}{rest.split(MARKS[1])[1]}"


def page_of_the_map() -> str:
    """Return the map with a line for each file of the package that defines anything, by its docstring's beginning."""
    start, rest = MAP.read_text().split(FILES[0])
    rows = ["| file | what is in it |", "|---|---|"]
    for path in sorted(HOUSE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if path.name.startswith("_") and not any(isinstance(one, ast.FunctionDef | ast.ClassDef) for one in tree.body):
            continue
        first, *_ = (ast.get_docstring(tree) or "").split("\n\n")
        rows.append(f"| `{path.relative_to(HOUSE).as_posix()}` | {in_cell(first)} |")
    return "\n".join([f"{start}{FILES[0]}\n", *rows, f"\n{FILES[1]}{rest.split(FILES[1])[1]}"])


def judged_scores(claim: Claim) -> str:
    """Return how well each score agrees with what fine-tuning and a probe reach, and what it costs."""
    tuned, probed = (curve for title, curve in claim.curves.items() if title.startswith("Agreement with"))
    costs = next(curve for title, curve in claim.curves.items() if title.startswith("Behind the best"))
    head = ["score", "τ, fine-tuning", "weighted τ", "τ, linear probe", "weighted τ", "shuffled labels", "passes"]
    rows = []
    for k, name in enumerate(tuned["score"]):
        numbers = [f"{curve[word][k]:.2f} ± {curve[f'{word} ±'][k]:.2f}" for curve in (tuned, probed)
                   for word in ("τ", "weighted τ")]  # fmt: skip
        control = f"{claim.controls[name].value:.2f}" if name in claim.controls else "–"
        passes = f"{costs['forward passes'][costs['score'].index(name)]:g}" if name in costs["score"] else "–"
        rows.append(f"| {' | '.join([name, *numbers, control, passes])} |\n")
    lines = [f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{''.join(rows)}\n"]
    lines += [f"Random ranks: {claim.measured['random ranks']}. {claim.note}\n\n"]
    facts = [f"{claim.scale} scale", claim.provenance.get("data", ""), claim.provenance.get("device", "")]
    return "".join([*lines, f"*{'; '.join(filter(None, [*facts, claim.created[:10]]))}.*\n"])


# --- names.json -------------------------------------------------------------------------------------------------------


CALLS = (  # whose arguments are options of commands
    nk.recommend,
    nk.compare_tasks,
    nk.task2vec,
    nk.task_similarity,
    nk.learn_tasks,
    nk.federate,
    nk.split_by_classes,
    nk.stitch_all,
    nk.compress,
    nk.share_coefficients,
    nk.atom_similarity,
    nk.Recipe,
    nk.sparsity_study,
)
ARGUMENT = r"^ {4}(\w+): (.+(?:\n {8}.+)*)"  # with its sentence, in a docstring


def names_of_the_library() -> str:
    """Return what the command line shows of the library: names that are registered, and options of functions."""
    from netkin.applications.continual.learners import LEARNERS
    from netkin.applications.federated import ALGORITHMS, SOURCES
    from netkin.applications.sparsity.sparsify import METHODS as SPARSITY_METHODS
    from netkin.applications.stitching import METHODS
    from netkin.applications.stitching.evaluating import SCORES as STITCH_SCORES
    from netkin.applications.transfer.scores import SCORES
    from netkin.applications.transfer.task_similarity import SCORES as TASK_SCORES
    from netkin.comparing.engines import ENGINES
    from netkin.representations.shapes import SHAPES
    from netkin.sources.architectures import ARCHITECTURES
    from netkin.sources.datasets import NAMED
    from netkin.training.class_splits import PARTITIONS
    from netkin.training.recipe import OPTIMIZERS, ORDERS, PRECISIONS, SCHEDULES

    ours = [name for name, one in measures().items() if one.function.__module__.startswith("netkin.")]
    kinds = {
        "networks": ARCHITECTURES, "data": NAMED, "shapes": SHAPES, "measures": sorted(ours), "engines": ENGINES,
        "stitching methods": [*METHODS, "task_loss"], "stitching scores": STITCH_SCORES, "transfer scores": SCORES,
        "task scores": TASK_SCORES,
        "algorithms": ALGORITHMS, "coefficients": SOURCES, "partitions": PARTITIONS, "learners": LEARNERS,
        "optimizers": OPTIMIZERS, "schedules": SCHEDULES, "orders": ORDERS, "precisions": [*PRECISIONS, "auto"],
        "sparsity methods": SPARSITY_METHODS,
    }  # fmt: skip
    lines = [f"{json.dumps(kind)}: {json.dumps(list(names))}" for kind, names in kinds.items()]
    lines += [f'"options of learners": {json.dumps({name: list(one.options) for name, one in LEARNERS.items()})}']
    options = [f"{json.dumps(call.__name__)}: {json.dumps(options_of(call), ensure_ascii=False)}" for call in CALLS]
    lines += ['"options": {\n  ' + ",\n  ".join(options) + "\n }"]
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def options_of(call: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the default and the sentence of each argument of a function that its command has as an option."""
    described = (inspect.getdoc(call) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    sentences = {name: " ".join(text.split()) for name, text in re.findall(ARGUMENT, described, re.MULTILINE)}
    for name, option in getattr(call, "declared", {}).items():  # without what is for Python alone
        sentence = option.metadata["sentence"]
        if name in sentences and sentences[name].startswith(sentence.rstrip(".")):
            sentences[name] = sentence
    options = {}
    for name, parameter in inspect.signature(call).parameters.items():
        default = None if parameter.default is parameter.empty else parameter.default
        if name in sentences and (default is None or isinstance(default, bool | int | float | str)):
            options[name] = [default, sentences[name]]
    return options


PAGES = {"measures.md": page_of_measures, "cli.md": page_of_commands, "reproductions.md": page_of_reproductions}
GUIDE, MARKS = FOLDER / "recommend.md", ("<!-- the table: made by generate.py -->", "<!-- end of the table -->")
if GUIDE.exists():
    PAGES["recommend.md"] = page_of_recommending
MAP, FILES = FOLDER / "map.md", ("<!-- every file: made by generate.py -->", "<!-- end of the files -->")
HOUSE = FOLDER.parent / "src" / "netkin"
if MAP.exists():
    PAGES["map.md"] = page_of_the_map
NAMES = "../src/netkin/cli/names.json"
if (FOLDER / NAMES).parent.exists():
    PAGES = {NAMES: names_of_the_library, **PAGES}


def out_of_date() -> list[str]:
    """Return the names of the pages that do not say what the code says."""
    files = {name: FOLDER / name for name in PAGES}
    return [name for name, file in files.items() if not file.exists() or file.read_text() != PAGES[name]()]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page())
        if RESULTS.exists() and (found := records()):
            report_claims(found, FOLDER / "claims.html", **beside_records(), overwrite=True)
    elif stale := out_of_date():
        sys.exit(f"out of date: {', '.join(normpath(f'docs/{name}') for name in stale)}; run `make docs`.")
