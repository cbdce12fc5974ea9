"""How the command line says no: one sentence on stderr and an exit code."""

from __future__ import annotations

import functools
import shlex
import traceback
from collections.abc import Callable
from typing import Any

import click

from netkin.errors import NetkinError

REFUSED = 1
INTERRUPTED = 130
ARGUMENTS, SILENT = "netkin.arguments", "netkin.silent"


def refusing(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with its refusals as one sentence on stderr and exit code 1; Ctrl-C gives 130."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        from netkin.progress import commanded, showing

        context = click.get_current_context(silent=True)
        silent = context is not None and context.meta.get(SILENT)
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
            _leave(" ".join(str(error).split()), REFUSED)

    return run


def _command_line() -> str:
    """Return what was typed, as results remember it."""
    context = click.get_current_context(silent=True)
    typed = context.meta.get(ARGUMENTS) if context else None
    return f"netkin {shlex.join(typed)}" if typed else ""


def _leave(sentence: str, code: int) -> None:
    click.echo(f"netkin: {sentence}", err=True)
    raise click.exceptions.Exit(code)
