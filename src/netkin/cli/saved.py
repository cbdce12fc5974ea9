"""Commands that read files of earlier ones, without torch: `netkin show`, `netkin report` and `netkin jobs`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.compare import kind_of_file
from netkin.cli.options import FILE, JSON, OVERWRITE, TITLED, Commands, command, example
from netkin.cli.outputs import PAGES, SILENT, TABLES, TITLE, OutputFiles, align_columns, as_json
from netkin.errors import FileError, InvalidValue

if TYPE_CHECKING:
    from netkin.jobs import State

LONGEST = 100  # characters of a value
UNFOLDED = ("identity", "provenance")  # whose entries stand in lines of their own
LEFT_OUT = (
    "kind",
    "format",
    "state",
    *UNFOLDED,
)  # of no use to a reader, or told in other words
SAID = ("data", "examples", "version")  # of several comparisons
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
PAUSE = 0.5  # seconds between two looks


@command("show ab.netkin")
@click.argument("file", type=FILE)
@click.argument("new", type=FILE, required=False)
@click.option("--csv", type=FILE, help="Write all numbers of FILE to this file as one table, such as ab.csv.")
@OVERWRITE
@JSON
def show(file: Path, new: Path | None, csv: Path | None, overwrite: bool, json: bool) -> None:
    """Show what kind of result FILE holds, how it was made, and which arrays it contains.

    With NEW, a result of the same kind, the two are set side by side: the numbers that differ, and what differs in how
    they were made. No model is needed. Of one FILE only the header is read, so large files are shown at once.
    """
    from netkin import files
    from netkin.results import load
    from netkin.results.side_by_side import side_by_side

    outputs = OutputFiles(overwrite)
    outputs.csv = csv
    outputs.check("--csv", csv, TABLES)
    if new is not None:
        if csv is not None:
            raise click.UsageError("--csv writes the numbers of one FILE; leave out the other.")
        changes = side_by_side(file, new)
        click.echo(as_json(changes) if json else f"{file} → {new}: {changes.kind}\n\n{changes}")
        return
    if csv is not None:
        outputs.tabulate(load(file))
        outputs.finish()
    header, arrays = files.read_header(file), files.array_shapes(file)
    shapes = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in arrays.items()}
    click.echo(as_json({**header, "arrays": shapes}) if json else _describe(file, header, arrays))


def _describe(file: Path, header: Mapping[str, Any], arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    numbers = sum(prod(shape) for _, shape in arrays.values())
    size = sum(prod(shape) * WIDTHS.get(dtype, 1) for dtype, shape in arrays.values())
    facts = {**header, **_describe_many(header)}
    rows = [(name.replace("_", " "), _shorten(value)) for name, value in facts.items() if name not in LEFT_OUT]
    for origin in (header.get(name) for name in UNFOLDED):
        rows += [(str(name), _shorten(value)) for name, value in origin.items()] if isinstance(origin, Mapping) else []
    rows.append(("arrays", f"{len(arrays):,} of {numbers:,} numbers, {size:,} bytes" if arrays else "none"))
    return f"{file}: {header.get('kind')}\n{align_columns([(f'  {name}', value) for name, value in rows])}"


def _describe_many(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that the comparisons of a series share: pairs, measures, data and versions."""
    if header.get("kind") != "series":
        return {}
    comparisons = [_mapped(comparison) for comparison in _listed(header.get("comparisons"))]
    facts = {name: _distinct([comparison.get(name) for comparison in comparisons]) for name in SAID}
    ids = _distinct([name for comparison in comparisons for name in _mapped(comparison.get("tables"))])
    pairs = [f"{comparison.get('a')} and {comparison.get('b')}" for comparison in comparisons]
    return {"comparisons": pairs, "tables": ids} | facts


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapped(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _distinct(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(one for one in values if isinstance(one, (str, int, float))))


def _shorten(value: Any) -> str:
    if isinstance(value, Mapping):
        return _cut(", ".join(_entry(name, one) for name, one in value.items())) or "none"
    if isinstance(value, list):
        items = [_mapped(one).get("sentence", one) for one in value]  # of caveats
        plain = [one for one in items if isinstance(one, (str, int, float))]
        return _cut(", ".join(map(str, plain))) if plain else f"{len(value):,}" if value else "none"
    return " ".join(str(value).split())


def _entry(name: Any, value: Any) -> str:
    """Return a name with its value if that is a text or a number, else the name.

    Example:
        >>> _entry("relu1", "pool"), _entry("accuracy", 0.97222), _entry("tables", [])
        ('relu1 pool', 'accuracy 0.9722', 'tables')
    """
    value = value.get("value", value) if isinstance(value, Mapping) else value  # a number of a claim
    plain = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{name} {plain}" if isinstance(value, (str, int, float)) else str(name)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


@command("report ab.netkin --out ab.html")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("-o", "--out", type=FILE, help="HTML file to write; by default the name of the first FILE with .html.")
@TITLED
@OVERWRITE
@JSON
def report(files: tuple[Path, ...], out: Path | None, overwrite: bool, json: bool) -> None:
    """Write one HTML report of saved results.

    Each FILE was written by --out of `netkin compare`, `stitch`, `tasks`, `atoms`, `dynamics`, `recommend`,
    `classes`, `sparsity`, `compress`, `federate` or `continual`, or by `save` in Python. Several files share a
    report if they hold comparisons, or accuracies of tasks; other results need a report each.
    """
    from netkin.reporting import report as write_report
    from netkin.results import load

    page = out or files[0].with_suffix(".html")
    OutputFiles(overwrite).check("--out", page, PAGES)
    for file in files:
        if kind_of_file(file) == "statistics":
            raise InvalidValue(
                f"{str(file)!r} holds statistics and no values yet; "
                f"`netkin compare {file} --report {page}` computes them."
            )
    saved = [load(file) for file in files]
    title = click.get_current_context().meta.get(TITLE)
    written = write_report(saved[0] if len(saved) == 1 else _join(files, saved), page, title=title, overwrite=overwrite)
    click.echo(as_json({"report": str(written)}) if json else str(written))


def _join(files: Sequence[Path], saved: list[Any]) -> list[Any]:
    """Return the results of several files for one page: all of tasks, or comparisons, of which a file may hold many."""
    from netkin.results import Comparison, Comparisons, TaskAccuracies, TaskEnsembles

    if all(isinstance(result, (TaskAccuracies, TaskEnsembles)) for result in saved):
        return saved
    found: list[Any] = []
    for file, result in zip(files, saved, strict=True):
        if not isinstance(result, (Comparison, Comparisons)):
            raise InvalidValue(
                f"{str(file)!r} holds a {type(result).__name__}, which needs a report of its own; run `netkin report` "
                "on that file alone."
            )
        found += result.values() if isinstance(result, Comparisons) else [result]
    return found


@click.group(cls=Commands, epilog=example("jobs list"))
def jobs() -> None:
    """List jobs, show or watch one, or cancel it.

    A job is the folder, such as ab.netkin.job, in which --out of `netkin stitch`, `dynamics`, `federate`,
    `continual` and `compare` (of three models or more, or with --engine ray), `nk.train(save=...)` and other long
    work keep their finished parts and progress. A job is named by its folder, or by the result beside it, as in
    `netkin jobs watch ab.netkin`. A cancelled job stops after the current part and keeps what is finished; run the same
    command or call again to resume.
    """


@command("jobs list", jobs)
@click.argument("folder", default=".", type=click.Path(), metavar="[FOLDER]")
@JSON
def list_jobs(folder: str, json: bool) -> None:
    """List the jobs in FOLDER and below, by default the current one; the job that was active last comes first."""
    from netkin.jobs import list_jobs as jobs_below

    states = jobs_below(folder)
    click.echo(as_json(list(map(_job_document, states))) if json else "\n".join(map(str, states)) or "no jobs found")


@command("jobs show ab.netkin", jobs)
@click.argument("path", type=click.Path(), metavar="JOB")
@JSON
def show_job(path: str, json: bool) -> None:
    """Show how far JOB is, what started it, where it runs, and what it works on."""
    from netkin.jobs import read

    state = read(path)
    click.echo(as_json(_job_document(state)) if json else _describe_job(state))


@command("jobs watch ab.netkin", jobs)
@click.argument("path", type=click.Path(), metavar="JOB")
@JSON
def watch_job(path: str, json: bool) -> None:
    """Show the progress of JOB until it ends."""
    try:
        state = _watch(path)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("stopped watching; the job goes on.") from stop
    click.echo(as_json(_job_document(state)) if json else str(state))


@command("jobs cancel ab.netkin", jobs)
@click.argument("path", type=click.Path(), metavar="JOB")
def cancel_job(path: str) -> None:
    """Ask JOB to stop after its current part; what is finished is kept."""
    from netkin.jobs import cancel

    state = cancel(path)
    click.echo(f"{state.folder} will stop after the current part; {state.progress} are done.", err=True)


def _job_document(state: State) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(state) | {"condition": state.condition}


def _describe_job(state: State) -> str:
    facts = {
        "call": state.call,
        "process": f"{state.pid} on {state.host}" if state.host else "",
        "last active": state.heartbeat,
        **{name: value for name, value in state.identity.items() if _says_something(value)},
    }
    return f"{state}\n{align_columns([(f'  {name}', _shorten(value)) for name, value in facts.items() if value != ''])}"


def _says_something(value: Any) -> bool:
    """Return whether a field of an identity is not just a default, such as no transform."""
    values = value.values() if isinstance(value, Mapping) else [value]
    return any(str(one).lower() not in ("none", "false") for one in values)


def _watch(path: str) -> State:
    """Show a bar on stderr until the job ends, and return how it ended."""
    from tqdm import tqdm

    from netkin.jobs import read

    state, hidden = read(path), click.get_current_context().meta.get(SILENT) or None  # None: if stderr is no terminal
    with tqdm(total=state.total, desc=state.kind, unit=f" {state.unit}", initial=state.done, disable=hidden) as bar:
        while state.condition == "running":
            bar.n, bar.total, bar.unit = state.done, state.total, f" {state.unit}"
            bar.set_postfix_str(state.message)
            time.sleep(PAUSE)
            state = _next_state(path, state)
        bar.n = state.done
    return state


def _next_state(path: str, last: State) -> State:
    """Return the state of a job now; one whose folder was deleted, as those of finished claims are, is done."""
    from dataclasses import replace

    from netkin.jobs import read

    try:
        return read(path)
    except FileError:
        if Path(last.folder).exists():
            raise
        return replace(last, status="done", done=last.total or last.done)
