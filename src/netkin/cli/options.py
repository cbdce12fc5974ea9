"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from netkin.cli.outputs import SILENT, TITLE, with_refusals
from netkin.cli.running import readable
from netkin.comparing.spec import checked_pairs, default_of, help_of
from netkin.errors import UnknownName

Command = Callable[..., None]
Option = Callable[[Any], Any]

FILE = click.Path(dir_okay=False, path_type=Path)
# names in the library's registries and options of its functions, written by docs/generate.py, so that help and
# completion need no torch
KNOWN = json.loads(files("netkin.cli").joinpath("names.json").read_text(encoding="utf-8"))


def declared(option: str, more: str = "", of: str = "", **settings: Any) -> Option:
    """Return an option with its default and its sentence, followed by `more`.

    They are those of the library's function `of`, or without one those that `Spec` or `Run` declares.
    """
    default, sentence = KNOWN["options"][of][option] if of else (default_of(option), help_of(option))
    text, flag = f"{sentence[:1].upper()}{sentence[1:]} {more}".strip(), f"--{option.replace('_', '-')}"
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", default=default, help=text, **settings)
    if default is not None and not settings.get("multiple"):
        settings |= {"default": default, "show_default": True}
    return click.option(flag, help=text, **settings)


DEVICE = declared("device", "The default is the CPU.", metavar="DEVICE")
UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", start=1)}
UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", start=1)}


def example(line: str) -> str:
    """Return the end of a command's help, an example: `netkin` and `line`, which can be copied and run."""
    return f"\b\nExample:\n  netkin {line}\n"


GROUPS = {  # headings of `--help` with the options below them, after those of the command's own
    "Training": "recipe head method pretrain_epochs head_epochs finetune",
    "Data": "data test test_examples validation public examples balanced batch_size part start transforms",
    "What is compared": "score measures layers layer pairs shape positions tokens resize scores",
    "Standard errors": "errors chunks seeds",
    "Running": "plan device engine address gpus memory rows exact_model seed",
    "Results": "save out report figure csv title names json overwrite",
    "General": "quiet",
}
HEADINGS = {name: heading for heading, names in GROUPS.items() for name in names.split()}


def grouped_options(command: click.Command, context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the options of a command with their help texts, by headings."""
    own = getattr(command, "heading", "") or "Options"
    groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (own, *GROUPS)}
    for option in command.get_params(context):
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record:
            groups["General" if "--help" in option.opts else HEADINGS.get(str(option.name), own)].append(record)
    return {heading: records for heading, records in groups.items() if records}


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups.

    Args:
        heading: What the options of this command alone are about; the others have the headings of `GROUPS`.
    """

    def __init__(self, *arguments: Any, heading: str = "", **settings: Any):
        super().__init__(*arguments, **settings)
        self.heading = heading

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a part of the help for each group of options."""
        for heading, records in grouped_options(self, ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Commands(click.Group):
    """A group of commands whose help shows their whole first sentences; click would cut them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(200)) for name in self.list_commands(ctx)]
            )


def command(line: str, group: click.Group | None = None, heading: str = "") -> Callable[[Command], click.Command]:
    """Return a decorator that makes a function a command with --quiet, whose refusals are one sentence.

    Args:
        line: An example that runs as it stands, with which the help ends; it begins with the command's name.
        group: The group of the command, whose name comes first in `line`.
        heading: What the options are about that this command alone has.
    """

    def made(function: Command) -> click.Command:
        name = line.split()[0 if group is None else 1]
        new = QUIET(
            click.command(name, cls=GroupedCommand, epilog=example(line), heading=heading)(with_refusals(function))
        )
        if group is not None:
            group.add_command(new)
        return new

    return made


def as_bytes(text: str) -> int:
    """Return the number of bytes that `text` stands for.

    Example:
        >>> as_bytes("500MB"), as_bytes("1.5 GiB")
        (500000000, 1610612736)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found.group(2).upper() not in UNITS:
        raise click.BadParameter(f"{text!r} is not an amount of memory; write one such as 500MB, 2GB or 1.5GiB.")
    amount = int(float(found.group(1)) * UNITS[found.group(2).upper()])
    if amount < 1:
        raise click.BadParameter(f"{text!r} is no memory; write an amount such as 500MB, 2GB or 1.5GiB.")
    return amount


def memory_option(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Convert the text of a memory option to bytes, as a callback of click."""
    return None if text is None else as_bytes(text)


def shape_option(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> Any:
    """Convert the texts of --shape to one shape for all layers, or to a mapping from names and globs of layers.

    Example:
        >>> shape_option(None, None, ["encoder.*=cls", "pool"]), shape_option(None, None, ["mean"])
        ({'encoder.*': 'cls', '**': 'pool'}, 'mean')
    """
    for_all = [text for text in texts if "=" not in text]
    if len(for_all) > 1:
        raise click.BadParameter(f"without a pattern of layers it is given once; got {', '.join(for_all)}.")
    by_layer = {pattern: name for pattern, equals, name in (text.rpartition("=") for text in texts) if equals}
    if not by_layer:
        return for_all[0] if for_all else None
    return {**by_layer, "**": for_all[0]} if for_all else by_layer


def _silence(context: click.Context, parameter: click.Parameter, quiet: bool) -> None:
    context.meta[SILENT] = quiet  # for `with_refusals`, which runs the command


def _for_ray(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse the options of a Ray cluster without --engine ray."""
    if is_typed(context, str(parameter.name)) and context.params["engine"] != "ray":
        raise click.UsageError(f"{parameter.opts[0]} needs --engine ray.")
    return value


def _keep_title(context: click.Context, parameter: click.Parameter, title: str | None) -> None:
    context.meta[TITLE] = title and readable(title)  # for `OutputFiles.draw`


TITLED = click.option(
    "--title",
    metavar="TEXT",
    expose_value=False,
    callback=_keep_title,
    help="Title of the report, and of the figure if any.",
)
NAMES = click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of each model in the result, in the order of the models; or write NAME=MODEL.",
)
TRANSFORM, TRANSFORMS = (
    click.option("--transform", "transforms", multiple=True, metavar="MODULE:FUNCTION", help=text)
    for text in (
        "Function of a batch of inputs, applied before the model.",
        "Function of a batch of inputs, applied before the model; once for all models, or once for each.",
    )
)
QUIET = click.option("--quiet", is_flag=True, expose_value=False, callback=_silence, help="Hide progress.")
SAMPLE_SEED = click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Random seed for --examples."
)
EXAMPLES = click.option(
    "--examples",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of examples to use, sampled from all of the data with --seed; of a stream, the first N.",
)
BALANCED = click.option("--balanced", is_flag=True, help="With --examples: sample the same number from each class.")
RECIPE = click.option(
    "--recipe",
    multiple=True,
    metavar="NAME=VALUE",
    help="Training settings, such as epochs=2,batch=32,lr=0.05; can be repeated. See the guide to training.",
)
ENGINES = {
    "local": "this process",
    "distributed": "all processes of torchrun, of which rank 0 writes",
    "ray": "a Ray cluster",
}
_ENGINE = (
    click.option(
        "--address",
        metavar="ADDRESS",
        callback=_for_ray,
        help="With --engine ray: address of a running cluster, such as 10.0.0.1:6379 or auto; by default a new one.",
    ),
    click.option(
        "--gpus",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        metavar="SHARE",
        callback=_for_ray,
        help="With --engine ray and --device cuda: share of a GPU for each task.",
    ),
)
COUNT = click.IntRange(min=1)


def _pairs_option(context: click.Context, parameter: click.Parameter, which: str) -> Any:
    try:
        return checked_pairs(which)
    except UnknownName as refusal:
        raise click.BadParameter(str(refusal)) from refusal


RESUMED = "run the same command again to resume, with --overwrite to start again"
ROWS = declared("rows", "For three models or more.", type=COUNT, metavar="N")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Write over files that are there.")
PLAN = click.option("--plan", is_flag=True, help="Print what the command would do and cost, and stop.")
JSON = click.option("--json", "json", is_flag=True, help="Print JSON instead of text.")
LAYERS, LAYERS_BY_MODEL = (
    declared("layers", f"{more}Can be repeated. See `netkin list layers`.", multiple=True, metavar="PATTERN")
    for more in ("", "a:PATTERN is for the first of two models, b:PATTERN for the second, NAME:PATTERN for any. ")
)
SHAPE = declared(
    "shape", f"One of {', '.join(KNOWN['shapes'])}; PATTERN=NAME for the layers of that name or glob. Can be repeated.",
    multiple=True, callback=shape_option, metavar="NAME",
)  # fmt: skip
_RESIZE = declared("resize", type=click.Choice(["average"]))
_EXACT = declared("exact_model")
_TOKENS = declared("tokens", type=COUNT, metavar="N")
_POSITIONS = declared("positions", metavar="SLICE")
BATCH_SIZE = click.option("--batch-size", type=COUNT, default=128, show_default=True, metavar="N", help="Batch size.")
MEMORY = declared("memory", "Write 500MB or 2GB.", callback=memory_option, metavar="SIZE")
SEED = declared("seed", "Also for the sample of --examples.", type=int, metavar="N")
_COMPARING = (
    declared("pairs", callback=_pairs_option, metavar="[all|corresponding|band:K]"),
    SHAPE,
    _RESIZE,
    EXAMPLES,
    BALANCED,
    BATCH_SIZE,
    MEMORY,
    DEVICE,
    SEED,
)


def _require_errors(context: click.Context, parameter: click.Parameter, chunks: int) -> int:
    """Refuse --chunks without --errors, where they would do nothing."""
    if is_typed(context, "chunks") and not context.params["errors"]:
        raise click.UsageError("--chunks needs --errors.")
    return chunks


_ERRORS = (
    declared("errors", is_eager=True),
    declared("chunks", "Needs --errors.", type=click.IntRange(min=2), metavar="K", callback=_require_errors),
    _EXACT,
)
_SKETCHING = (
    declared("seeds", of="compare_tasks", type=click.IntRange(min=1), metavar="N"),
    click.option(
        "--independent-buckets",
        is_flag=True,
        help="Use independent random buckets for each task, even where tasks share data.",
    ),
)


def comparing_options(command: Command, *, needs_data: bool = True) -> Command:
    """Give a command all options of a comparison."""
    return with_options(
        command,
        _data(needs_data),
        _measures(["cka"]),
        LAYERS_BY_MODEL,
        *_COMPARING,
        _POSITIONS,
        _TOKENS,
        *_ERRORS,
        NAMES,
        TRANSFORMS,
    )


def engine_options(command: Command, *, but: str = "") -> Command:
    """Give a command the options of engines; `but` is an engine that the command does not support."""
    known = [name for name in KNOWN["engines"] if name != but]
    engine = click.option(
        "--engine",
        type=click.Choice(known),
        default="local",
        show_default=True,
        is_eager=True,
        help=" ".join(f"{name}: {ENGINES[name]}." for name in known),
    )
    return with_options(command, engine, *_ENGINE)


def collecting_options(command: Command) -> Command:
    """Give a command the options of a pass whose statistics are saved; without a measure they serve all linear ones."""
    measures = _measures(
        [], "Measures that can be read from the file later; by default all linear ones. Can be repeated."
    )
    return with_options(
        command, _data(), measures, LAYERS_BY_MODEL, *_COMPARING, _POSITIONS, _TOKENS, *_ERRORS, NAMES, TRANSFORMS
    )


def task_options(command: Command) -> Command:
    """Give a command the options of sketches, one of each task."""
    text = "Measures of sketches; by default sketched_cka and sketched_cka_by_buckets, or those of the STATISTICS file."
    shared = [one for one in _COMPARING if one is not _RESIZE]
    return with_options(command, _measures([], text), LAYERS, *shared, *_SKETCHING, _EXACT, TRANSFORM)


def following_options(command: Command) -> Command:
    """Give a command the options of a comparison that is made at every step of a run."""
    return with_options(command, _data(False), _measures(["svcca"]), LAYERS, *_COMPARING, TRANSFORM)


def result_options(
    stem: str, saved: str | None = "the comparison", drawn: str = "the tables", more: str = ""
) -> Option:
    """Return a decorator that adds the options for writing and printing a result; see `OutputFiles.of`.

    Args:
        stem: How the names of files begin in the help.
        saved: What --out writes; None for a command that has another one.
        drawn: What --figure shows.
        more: What else to say of --out, such as that work is resumed.
    """
    text = f"Write {saved} to this file, such as {stem}.netkin{more}."
    save = [click.option("-o", "--out", "save", type=FILE, help=text)] if saved else []
    figure = f"Draw {drawn} to this file, such as {stem}.png, {stem}.svg or {stem}.pdf."
    options = (
        *save,
        click.option("--report", type=FILE, help=f"Write an HTML report to this file, such as {stem}.html."),
        click.option("--figure", type=FILE, help=figure),
        click.option("--csv", type=FILE, help=f"Write all numbers to this file as one table, such as {stem}.csv."),
        TITLED,
        OVERWRITE,
        JSON,
    )
    return lambda command: with_options(command, *options)


def _data(required: bool = True) -> Option:
    return click.option(
        "--data", required=required, metavar="DATA", help="Examples to run the models on; see `netkin list data`."
    )


DATA = _data()


def _measures(
    default: list[str], text: str = "Measure to compute; can be repeated. See `netkin list measures`."
) -> Option:
    return click.option(
        "--measure", "measures", multiple=True, default=default, show_default=True, metavar="NAME", help=text
    )


def with_options(command: Command, *options: Option) -> Command:
    """Give a command some options, in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def recipe_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a recipe by their names.

    Example:
        >>> recipe_settings(["epochs=2,lr=0.05", "flip=true", "optimizer=adam"])
        {'epochs': 2, 'lr': 0.05, 'flip': True, 'optimizer': 'adam'}
    """
    found: dict[str, Any] = {}
    for text in (part for one in texts for part in one.split(",")):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise click.BadParameter(
                f"a setting is written NAME=VALUE, as lr=0.05; got {text!r}.", param_hint="--recipe"
            )
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice.", param_hint="--recipe")
        found[name] = _as_value(value)
    return found


def _as_value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def is_typed(context: click.Context, name: str) -> bool:
    """Return whether a parameter was typed on the command line, and does not just have its default."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE
