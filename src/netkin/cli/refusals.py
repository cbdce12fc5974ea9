"""Refusals: what ends a command becomes one sentence on stderr, in the words of the command line, and an exit code."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from netkin.errors import ForwardError, NetkinError

if TYPE_CHECKING:
    from torch import nn

REFUSED = 1
INTERRUPTED = 130
ARGUMENTS, SILENT, TITLE = "netkin.arguments", "netkin.silent", "netkin.title"
DRAWN = ("report", "figure", "files")  # the options by which pages and figures are asked for
# what the library calls an option, or what it has a function for
OWN_WORDS = {"overwrite": "force", "decompose": "atoms", "share-coefficients": "atoms"}
# an argument in backticks; a text in quotes or a measure with its parameters, which stay; an argument with its value
_ARGUMENT = re.compile(
    r"`(?P<name>\w+)(?:=(?P<value>[^`]*))?`"
    r"|`nk\.(?P<command>\w+)(?:\((?P<of>[^`)]*)\))?[^`]*`"
    r"|`[^`]*`|(?<!\w)'[^']*'(?!\w)|\w\([^()]*\)"
    r"|(?<![\w`'\"(,.:=-])(?P<bare>[a-z_]+)=(?P<set>'[^']*'|\"[^\"]*\"|\[[^\]]*\]|True|False|None|[\d.]*\d)"
)
_REPEATED = re.compile(r"(--[\w-]+) \(\1(?: [^)]*)?\)")


@contextmanager
def crash_refusals(specs: Sequence[str], models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the `with`, what a model raises while it runs becomes a refusal that names it and what it was fed."""
    from torch import nn

    running: list[str] = []  # at most one
    with ExitStack() as stack:
        for spec, model in zip(specs, models, strict=True):
            begin = nn.Module.register_forward_pre_hook(
                model, functools.partial(_begin, running, spec), with_kwargs=True
            )
            stack.callback(begin.remove)
            stack.callback(nn.Module.register_forward_hook(model, functools.partial(_end, running)).remove)
        try:
            yield
        except NetkinError:
            raise
        except Exception as fault:
            if not running or _is_ours(fault):
                raise
            raise ForwardError(
                f"{running[0]}: {_first_line(fault)}. "
                "Choose data of the size and channels that the model takes; see `netkin data`."
            ) from fault


@contextmanager
def blamed_crash_refusals() -> Iterator[None]:
    """Inside the `with`, what a model raises while it runs becomes a refusal, where the library says which it was."""
    try:
        yield
    except NetkinError:
        raise
    except Exception as fault:
        model = getattr(fault, "model", None)
        if model is None or _is_ours(fault):
            raise
        raise ForwardError(
            f"{model!r} could not be run: {_first_line(fault)}. "
            "Choose data of the size and channels that the model takes; see `netkin data`."
        ) from fault


def _is_ours(fault: Exception) -> bool:
    """Return whether a fault arose in a statistic, which hooks call while the model runs, and not in the model."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(fault.__traceback__))
    return any(module.startswith("netkin.statistics.") for module in modules)


def refuse_crash(spec: str, model: nn.Module, data: Any) -> None:
    """Run a model on one batch, so that a crash becomes one sentence: for work that takes the model apart later."""
    from netkin.representations import guest
    from netkin.representations.inputs import feed

    with guest(model), crash_refusals([spec], [model]):
        for batch in islice(data, 1):  # the work itself refuses data without any
            feed(model, batch)


def _begin(running: list[str], spec: str, model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    running[:] = [f"{spec!r} could not be run on {_shapes_of({'inputs': next(iter(inputs), None), **keywords})}"]


def _end(running: list[str], model: nn.Module, inputs: Any, output: Any) -> None:
    # a crash skips this, and what was running stays noted
    running.clear()


def _shapes_of(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} of shape {tuple(x.shape)}" for name, x in given.items() if hasattr(x, "shape")) or "this"


def _first_line(fault: Exception) -> str:
    first = next(iter(str(fault).strip().splitlines()), "").rstrip(".")
    return f"{type(fault).__name__}: {first}" if first else type(fault).__name__


def with_refusals(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with its refusals as one sentence on stderr and exit code 1; Ctrl-C gives 130."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        from netkin.progress import commanded, showing

        context = click.get_current_context(silent=True)
        silent = context is not None and context.meta.get(SILENT)
        if context is not None and context.meta.get(TITLE) and not any(options.get(name) for name in DRAWN):
            raise click.UsageError("--title needs --report or --figure.")
        try:
            with commanded(_command_line()), showing(False if silent else None):
                command(*arguments, **options)
        except KeyboardInterrupt as stop:  # a job that was cancelled says so
            click.echo(err=True)  # progress may have left its line unfinished
            _leave(str(stop) or "interrupted.", INTERRUPTED)
        except BrokenPipeError:
            raise
        except (NetkinError, OSError) as error:
            if click.get_current_context().find_root().params.get("debug"):
                click.echo("".join(traceback.format_exception(error)), err=True)
            _leave(in_options(" ".join(str(error).split())), REFUSED)

    return run


def _command_line() -> str:
    """Return what was typed, as results remember it."""
    context = click.get_current_context(silent=True)
    typed = context.meta.get(ARGUMENTS) if context else None
    return f"netkin {shlex.join(typed)}" if typed else ""


def _leave(sentence: str, code: int) -> None:
    click.echo(f"netkin: {sentence}", err=True)
    raise click.exceptions.Exit(code)


def in_options(sentence: str, context: click.Context | None = None) -> str:
    """Return a sentence of the library in which its arguments are the options of the command that runs.

    Example:
        >>> command = click.Command("f", params=[click.Option(["--measure", "measures"]), click.Option(["--force"])])
        >>> in_options("give `overwrite=True`, or collect with measures=['cka', 'nbs'].", click.Context(command))
        'give --force, or collect with --measure cka --measure nbs.'
    """
    context = context or click.get_current_context(silent=True)
    if context is None:
        return sentence
    known = _options_of(context)
    settings = _recipe_settings() if "recipe" in known else ()
    root = context.find_root().command
    commands = root.commands if isinstance(root, click.Group) else {}

    def written(found: re.Match[str]) -> str:
        command = (found["command"] or "").replace("_", "-")
        if OWN_WORDS.get(command) in known:
            return known[OWN_WORDS[command]]
        if command in commands:
            of = found["of"] if (found["of"] or "").isalpha() else ""
            return f"`netkin {command} {of.upper()}".rstrip() + "`"
        name, value = found["name"] or found["bare"], found["value"] or found["set"]
        if value and name in settings:
            return f"--recipe {name}={value}"
        # a list of pairs has no form as an option
        return _with_value(known[name], value) if name in known and not (value or "").startswith("[(") else found[0]

    return _REPEATED.sub(r"\1", _ARGUMENT.sub(written, sentence))


def _options_of(context: click.Context) -> dict[str, str]:
    """Return the options of a command by what the library may call them."""
    found: dict[str, str] = {}
    for option in (one for one in context.command.get_params(context) if isinstance(one, click.Option)):
        long = max(option.opts, key=len)
        found |= {str(option.name): long, long.lstrip("-").replace("-", "_"): long}
    return found | {theirs: found[own] for theirs, own in OWN_WORDS.items() if own in found}


def _recipe_settings() -> Sequence[str]:
    from netkin.training import Recipe

    return [one.name for one in fields(Recipe)]


def _with_value(option: str, value: str | None) -> str:
    if not value or value in ("True", "...") or value.startswith("("):
        return option
    if value in ("False", "None"):
        return f"no {option}"
    items = [value.strip("'\"")]
    if value.startswith("["):
        with suppress(ValueError, SyntaxError):  # no list of plain values
            items = ast.literal_eval(value)
    return " ".join(f"{option} {shlex.quote(str(one))}" for one in items)
