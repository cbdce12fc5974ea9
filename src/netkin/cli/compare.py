"""`netkin compare`: the layers of two or more models, pair by pair.

`netkin collect` and `netkin merge` keep the statistics of a pass over the data, or over a part, in a file, from which
measures are read later.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netkin.cli.options import (
    FILE,
    JSON,
    OVERWRITE,
    PLAN,
    ROWS,
    collecting_options,
    command,
    comparing_options,
    engine_options,
    is_typed,
    result_options,
)
from netkin.cli.outputs import REFUSED, OutputFiles, as_json
from netkin.cli.running import (
    Destination,
    all_recorded,
    call_for_many,
    call_library,
    loaded_models,
    named_models,
    read_from_weights,
    require_name_of_each,
    tell_random_weights,
    with_resume_hint,
)
from netkin.errors import FileError, InflatedWarning, InvalidValue, NetkinError

if TYPE_CHECKING:
    from netkin.comparing import Comparer, Plan
    from netkin.comparing.many_models import ManyPlan
    from netkin.results import Comparison, Comparisons


READING = (  # they concern no pass
    "a", "measures", "errors", "names", "save", "report", "figure", "csv", "title", "overwrite", "json", "quiet",
)  # fmt: skip


@command('compare netkin:digits --data digits:test --measure cka --measure nbs --layers "relu*" --report digits.html')
@click.argument("a", metavar="A|STATISTICS")
@click.argument("b", required=False)
@click.argument("more", nargs=-1, metavar="[C]...")
@partial(comparing_options, needs_data=False)
@ROWS
@engine_options
@PLAN
@result_options("ab")
@click.pass_context
def compare(context: click.Context, a: str, b: str | None, more: tuple[str, ...], plan: bool, **options: Any) -> None:
    """Compare every layer of model A with every layer of model B; with more models, compare all pairs of them.

    Without B, the layers of A are compared with each other. All measures are computed in one pass over the data. For
    more than two models the mean of each pair is printed; the saved file and the report hold all layers. With more than
    two models, or --engine ray, --out also keeps finished parts beside the file: run the same command again to resume,
    or with --overwrite to start again.

    A and B may also be recorded rows: a file of safetensors, npz or npy, or a folder of such shards. Two recordings
    need no --data; a recording and a model are compared on the --data that were recorded.

    STATISTICS is a file written by `netkin collect` or `netkin merge`. Measures are read from it without the models and
    the data.

    --plan prints layers, pairs, forward passes and memory. Each model then runs on a few examples, twice (on a whole
    batch if it can't run on few), to learn its layers; of several models, and with --engine ray, one of each
    architecture runs. The exit code is 1 if the comparison would be refused.
    """
    typed = [one for one in (a, b, *more) if one]
    is_read = _is_statistics(*typed)
    models = {a: a} if is_read else named_models(typed, options.pop("names"))
    grows = bool(more) and options["engine"] != "distributed"  # the work itself writes the file
    outputs = OutputFiles.of(options, is_job=grows or options["engine"] == "ray")
    if plan and not is_read:
        _print_plan(models, options, outputs.json)
        return
    with warnings.catch_warnings(), with_resume_hint(outputs.save if more else None):
        # the comparison carries these warnings and its text shows them
        warnings.simplefilter("ignore", InflatedWarning)
        place = Destination(outputs.save, outputs.overwrite)
        found = _read_statistics(context, a) if is_read else _compare(models, options, place, grows)
    outputs.deliver(found, None if grows else found.save)


def _is_statistics(a: str, *others: str) -> bool:
    """Return whether the first argument is a file of statistics; beside other arguments it is refused."""
    found = next((one for one in (a, *others) if kind_of_file(one) == "statistics"), None)
    if found and others:
        raise click.UsageError(
            f"{found!r} is a file of statistics, which holds both models; give it alone. `netkin merge` joins parts."
        )
    return found is not None


def _compare(
    models: Mapping[str, str], options: dict[str, Any], place: Destination, grows: bool
) -> Comparison | Comparisons:
    """Return the comparison of two models, or of all pairs of several, from one pass over the data."""
    from netkin.comparing import compare_many
    from netkin.comparing.compare import compare as compare_models

    _require_data(models, options)
    if len(models) > 2:
        kept = {"save": place.result, "overwrite": place.overwrite} if grows else {}
        return call_for_many(compare_many, models, options | kept)
    _require_no_rows(options.pop("rows"))
    return call_library(compare_models, models, options, place)


def _require_data(models: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse measures of activations without data to run the models on."""
    if options["data"] is not None or all_recorded(models.values()) or read_from_weights(options["measures"]):
        return
    first = next(iter(models.values()))
    require_no_result(first)
    statistics = "" if ":" in first else f" A file of statistics needs none, but {first!r} is no such file."
    raise click.UsageError(f"--data is missing: models need examples to run on.{statistics}")


def _require_no_rows(rows: int | None) -> None:
    if rows is not None:
        raise click.UsageError("--rows is for three models or more, of which all pairs are compared; use --examples.")


def _read_statistics(context: click.Context, path: str) -> Comparison:
    """Return the comparison computed from a file of statistics; options of the pass over the data are refused."""
    for parameter in context.command.get_params(context):
        name = str(parameter.name)
        if name not in READING and is_typed(context, name):
            raise click.UsageError(
                f"{parameter.opts[0]} concerns the pass over the data, which {path!r} already holds; leave it out, "
                "or collect again."
            )
    statistics = open_statistics(Path(path))
    if context.params["errors"] and not statistics.study.chunks:
        raise InvalidValue(
            f"{path!r} has no chunks of examples, so there are no standard errors; collect with --errors."
        )
    measures = context.params["measures"] if is_typed(context, "measures") else default_measures(statistics)
    if names := context.params["names"]:
        require_name_of_each(names, len(statistics.models))
        statistics.note(names=dict(zip(statistics.models, names, strict=True)))
    warn_of_missing_parts(statistics)
    return cast("Comparison", statistics.compute(list(measures)))


def _print_plan(models: Mapping[str, str], options: dict[str, Any], json: bool) -> None:
    """Print what the comparison would do and cost, and exit with 1 where it would be refused."""
    if options["engine"] == "distributed":
        raise click.UsageError("--plan runs in one process; leave out --engine distributed.")
    _require_data(models, options)
    plan, facts = _plan(models, options)
    facts["refused"] = plan.refused
    for remark in facts.get("warnings", ()):  # of many models, most of which are loaded by name in the library
        click.echo(f"warning: {remark}", err=True)
    tell_random_weights(loaded_models())
    click.echo(as_json(facts) if json else "\n".join(plan.lines))
    if plan.refused:
        raise click.exceptions.Exit(REFUSED)


def _plan(models: Mapping[str, str], options: dict[str, Any]) -> tuple[Plan | ManyPlan, dict[str, Any]]:
    """Return the plan for one or two models, or for all pairs of several, and its facts for JSON."""
    from netkin.comparing import explain as explain_models
    from netkin.comparing import explain_many

    if len(models) > 2 or (options["engine"] == "ray" and len(models) == 2):
        many = call_for_many(explain_many, models, options)
        facts = asdict(many)
        facts["schedule"]["blocks"] = len(many.schedule.blocks)
        return many, facts
    if options.pop("engine") == "ray":
        raise click.UsageError("--engine ray plans for two models or more; leave it out for one.")
    _require_no_rows(options.pop("rows"))
    plan = call_library(explain_models, models, options)
    return plan, {key: value for key, value in asdict(plan).items() if key != "kinds"}


FINISHED = ("comparison", "comparisons", "ranking", "series", "federation", "sparsity", "task accuracies")


def kind_of_file(path: str | Path) -> str:
    """Return what kind of result the file at `path` holds; empty if it is none of netkin's files, or no file."""
    from netkin import files

    if not Path(path).is_file():
        return ""
    try:
        return str(files.read_header(path).get("kind"))
    except FileError:
        return ""


def require_no_result(path: str | Path) -> None:
    """Refuse a file that holds a finished result where a model or statistics are expected."""
    if kind_of_file(path) in FINISHED:
        raise FileError(f"{str(path)!r} holds a finished result and no statistics; `netkin report {path}` shows it.")


def open_statistics(path: Path) -> Comparer:
    """Return the statistics in a file; any other file is refused."""
    from netkin.comparing.comparer import load_comparer

    require_no_result(path)
    return load_comparer(path)


def default_measures(statistics: Comparer) -> list[str]:
    """Return the measures to compute if none is named: cka if the file serves it, else all it was collected for."""
    collected = [name for need in statistics.needs for name in need.measures]
    return ["cka"] if "cka" in collected else collected


def warn_of_missing_parts(statistics: Comparer) -> None:
    """Say on stderr that parts are missing, as when one job of many has failed."""
    if statistics.gaps:
        click.echo(
            f"warning: {statistics.examples:,} of {statistics.expected:,} examples are present; missing: "
            f"{_ranges_as_text(statistics.gaps)}",
            err=True,
        )


def statistics_line(statistics: Comparer, path: Path) -> str:
    """Return one line that says what a file holds."""
    chunks = f" in {statistics.study.chunks} chunks" if statistics.study.chunks else ""
    models = " and ".join(dict.fromkeys(statistics.record.names.get(name, name) for name in statistics.models))
    numbers = f" ({_ranges_as_text(statistics.ranges)})" if statistics.ranges else ""
    return f"{path}: {models} on {statistics.record.data}, {statistics.examples:,} examples{numbers}{chunks}"


def statistics_document(statistics: Comparer, path: Path) -> dict[str, Any]:
    """Return what a file of statistics holds, for other programs."""
    from netkin.identity import settings_digest

    return {
        "file": str(path),
        "models": [statistics.record.names.get(name, name) for name in statistics.models],
        "layers": {model: [layer.name for layer in layers] for model, layers in statistics.layers.items()},
        "data": statistics.record.data,
        "examples": statistics.examples,
        "ranges": statistics.ranges,
        "expected": statistics.expected,
        "missing": statistics.gaps,
        "chunks": statistics.study.chunks,
        "seed": statistics.study.seed,
        "measures": [name for need in statistics.needs for name in need.measures],
        "weights": {model: origin.get("weights") for model, origin in statistics.record.origins.items()},
        "data_digest": statistics.digest.hex,
        "settings": statistics.record.settings,
        "settings_digest": settings_digest(statistics.record.settings),
        "plan": statistics.record.plan,
    }


def _ranges_as_text(ranges: list[tuple[int, int]]) -> str:
    """Return ranges of the numbers of examples, which begin at 0."""
    return ", ".join(f"{start:,} to {stop - 1:,}" if stop - start > 1 else f"{start:,}" for start, stop in ranges)


def _part(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    from netkin.comparing.spec import parse_part

    try:
        return parse_part(text)
    except InvalidValue as fault:
        raise click.BadParameter(str(fault)) from fault


@command('collect netkin:digits --data digits:test --layers "relu*" --part 1/3 --out 1.stats')
@click.argument("a")
@click.argument("b", required=False)
@collecting_options
@engine_options
@click.option("--part", callback=_part, metavar="I/N", help="Use part I of N of the examples, such as 3/16.")
@click.option(
    "--start",
    type=click.IntRange(min=0),
    metavar="N",
    help="Index of the first example, if --data contains only one part; 0 for the first part.",
)
@click.option("-o", "--out", type=FILE, required=True, help="Write the statistics to this file, such as 3.stats.")
@OVERWRITE
@JSON
def collect(a: str, b: str | None, out: Path, overwrite: bool, json: bool, **options: Any) -> None:
    """Run the models over the data, or over one part of it, and save the statistics.

    `netkin merge` joins parts, which may be collected in any order and on different machines. `netkin compare` reads
    measures from such a file without the models and the data.
    """
    from netkin.comparing.compare import collect as collect_from

    models = named_models([one for one in (a, b) if one], options.pop("names"))
    outputs = OutputFiles(overwrite, options["engine"])
    outputs.check("--out", out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        statistics = call_library(collect_from, models, options, Destination(out, overwrite))
    tell_random_weights(loaded_models())
    outputs.write(out, statistics.save)
    outputs.finish()  # what is printed names the file
    outputs.show(lambda: as_json(statistics_document(statistics, out)) if json else statistics_line(statistics, out))


@command("merge 1.stats 2.stats 3.stats --out all.stats")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option(
    "-o", "--out", type=FILE, required=True, help="Write the merged statistics to this file, such as all.stats."
)
@OVERWRITE
@JSON
def merge(files: tuple[Path, ...], out: Path, overwrite: bool, json: bool) -> None:
    """Merge the statistics of parts of the same data, written by `netkin collect`.

    Parts with other weights, code, layers, settings or data are refused, and so are parts that overlap. A warning names
    the examples of missing parts.
    """
    from netkin.progress import with_progress

    outputs = OutputFiles(overwrite)
    outputs.check("--out", out)
    statistics = open_statistics(files[0])
    for file in with_progress(files[1:], "merging", "files"):  # one at a time, as each may be large
        part = open_statistics(file)
        try:
            statistics = statistics.merge(part)
        except NetkinError as fault:
            raise type(fault)(f"{str(file)!r} does not fit the previous parts: {fault}") from fault
    outputs.write(out, statistics.save)
    warn_of_missing_parts(statistics)
    outputs.finish()  # what is printed names the file
    click.echo(as_json(statistics_document(statistics, out)) if json else statistics_line(statistics, out))
