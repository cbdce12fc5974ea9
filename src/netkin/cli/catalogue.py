"""Lists of what there is: `netkin measures`, `netkin layers` of a model, `netkin data`, saved results and jobs.

`netkin show`, `netkin report` and `netkin jobs` read files of earlier commands; none of them needs torch.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.cli.compare import kind_of_file
from netkin.cli.options import FILE, JSON, OVERWRITE, TITLED, example
from netkin.cli.outputs import PAGES, SILENT, TITLE, OutputFiles, align_columns, as_json, with_refusals
from netkin.errors import FileError, InvalidValue, PackageWarning

if TYPE_CHECKING:
    from netkin.jobs import State
    from netkin.measures import Measure

WORDS = ("name", "what", "where", "example", "options")  # on a kind of data
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


@click.command(epilog=example("measures procrustes_distance"))
@click.argument("name", required=False)
@JSON
@with_refusals
def measures(name: str | None, json: bool) -> None:
    """List all measures, or describe the measure NAME."""
    from netkin.measures import broken_packages, find
    from netkin.measures import measures as all_measures

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackageWarning)  # said below, in a line each
        chosen = [find(name)] if name else list(all_measures().values())
    if json:
        click.echo(as_json([_document(measure) for measure in chosen]))
    else:
        click.echo(_describe_measure(chosen[0]) if name else _list_measures(chosen))
    for sentence in broken_packages().values():
        click.echo(f"warning: {sentence}", err=True)


def _list_measures(chosen: list[Measure]) -> str:
    return align_columns([[m.name, _direction(m), _range(m.facts.bounds), m.summary] for m in chosen])


def _describe_measure(measure: Measure) -> str:
    document = _document(measure)
    words = {
        key.replace("_", " "): _as_text(value) for key, value in document.items() if key not in ("name", "summary")
    }
    return f"{measure.id}: {inspect.getdoc(measure.function)}\n\n{align_columns(list(words.items()))}"


def _document(measure: Measure) -> dict[str, Any]:
    facts = measure.facts
    return {
        "name": measure.name,
        "summary": measure.summary,
        "direction": _direction(measure),
        "bounds": facts.bounds,
        "symmetric": facts.symmetric,
        "is_metric": facts.is_metric,
        "unchanged_by": sorted(facts.unchanged_by),
        "parameters": measure.settings,
        "reads": facts.reads.__name__,
        "convention": facts.convention,
        "reference": facts.reference,
    }


def _direction(measure: Measure) -> str:
    return "similarity" if measure.facts.higher_is_closer else "distance"


def _range(bounds: tuple[float, float]) -> str:
    return "..".join(_number(bound) for bound in bounds)


def _number(bound: float) -> str:
    return f"{bound:.4g}" if math.isfinite(bound) else f"{bound:.0f}".replace("inf", "∞")


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _range(value)
    if isinstance(value, dict):
        value = [f"{key}={setting}" for key, setting in value.items()]
    return ", ".join(value) or "none" if isinstance(value, list) else value


@click.command(epilog=example("layers netkin:tiny10"))
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="List every module, not only the default layers.")
@JSON
@with_refusals
def layers(model: str, every: bool, json: bool) -> None:
    """List the layers of MODEL that are compared by default, with their types."""
    from netkin.representations.layers import layers as default_layers
    from netkin.representations.layers import modules
    from netkin.sources import load_model

    loaded = load_model(model)
    types = {name: type(module).__name__ for name, module in modules(loaded).items()}
    names = [name for name in types if name] if every else default_layers(loaded)
    rows = [{"name": name, "type": types[name]} for name in names]
    click.echo(as_json(rows) if json else align_columns([[row["name"], row["type"]] for row in rows]))


@click.command(epilog=example("data"))
@JSON
@with_refusals
def data(json: bool) -> None:
    """List the kinds of data that --data accepts, and where each is expected."""
    from netkin.sources.datasets import CATALOGUE

    rows = [{word: getattr(source, word) for word in WORDS} for source in CATALOGUE]
    click.echo(as_json(rows) if json else "\n\n".join(map(_describe_source, rows)))


def _describe_source(row: dict[str, str]) -> str:
    details = [row["what"], f"where: {row['where']}", f"example: --data {row['example']}"]
    details += [f"options: {row['options']}"] if row["options"] else []
    return "\n".join([row["name"], *map(_wrap, details)])


def _wrap(text: str) -> str:
    """Return `text` in lines of a hundred characters; what people will type is not broken."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


# --- files of earlier commands ----------------------------------------------------------------------------------------


@click.command(epilog=example("show ab.netkin"))
@click.argument("file", type=FILE)
@JSON
@with_refusals
def show(file: Path, json: bool) -> None:
    """Show what kind of result FILE holds, how it was made, and which arrays it contains.

    Only the header is read, so large files are shown at once, and no model is needed.
    """
    from netkin import files

    is_claim = files.read_start(file, 1) == b"{"
    header = files.read_json(file) if is_claim else files.read_header(file)
    arrays = {} if is_claim else files.array_shapes(file)
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
    """Return what the comparisons of a series hold together: their pairs and all that they were made of and by."""
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
    """Return a name with its value, where that is a text or a number.

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


@click.command(epilog=example("report ab.netkin --out ab.html"))
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("-o", "--out", type=FILE, help="HTML file to write; by default the name of the first FILE with .html.")
@TITLED
@OVERWRITE
@JSON
@with_refusals
def report(files: tuple[Path, ...], out: Path | None, overwrite: bool, json: bool) -> None:
    """Write one HTML report of saved results.

    Each FILE was written by --out of `netkin compare`, `stitch`, `tasks`, `atoms`, `dynamics`, `recommend`,
    `sensitivity`, `sparsity`, `compress`, `federate` or `learn-tasks`, or by `save` in Python. Several files share a
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
    """Return what several files hold for one page: all about tasks, or comparisons, of which a file may hold many."""
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


@click.command(epilog=example("jobs"))
@click.argument("words", nargs=-1, metavar="[watch|cancel] [PATH]")
@JSON
@with_refusals
def jobs(words: tuple[str, ...], json: bool) -> None:
    """List the jobs in a folder and below (by default the current one), show one, watch it, or cancel it.

    A job is the folder, such as ab.netkin.job, in which --out of `netkin stitch`, `dynamics`, `federate`,
    `learn-tasks` and `compare` (of three models or more, or with --engine ray), `nk.train(save=...)` and other long
    work keep their finished parts and progress. PATH is a folder, or the result beside a job, as in `netkin jobs watch
    ab.netkin`. A cancelled job stops after the current part and keeps what is finished; run the same command or call
    again to resume.
    """
    from netkin.jobs import cancel, list_jobs, read

    verb, rest = (words[0], words[1:]) if words and words[0] in ("watch", "cancel") else ("", words)
    if len(rest) > 1 or (verb and not rest):
        raise click.UsageError("write `netkin jobs [PATH]`, `netkin jobs watch PATH` or `netkin jobs cancel PATH`.")
    if verb == "cancel":
        state = cancel(rest[0])
        click.echo(f"{state.folder} will stop after the current part; {state.progress} are done.", err=True)
    elif verb == "watch":
        try:
            _show([_watch(rest[0])] if not json else [read(rest[0])], json)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt("stopped watching; the job goes on.") from stop
    else:
        _show(list_jobs(*rest), json)


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


def _show(states: list[State], json: bool) -> None:
    if json:
        from dataclasses import asdict

        click.echo(as_json([asdict(state) | {"condition": state.condition} for state in states]))
        return
    for state in states:
        click.echo(str(state))
    if not states:
        click.echo("no jobs found")
