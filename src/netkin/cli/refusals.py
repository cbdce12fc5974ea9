"""How the command line says no: one sentence on stderr and an exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from netkin.errors import NetkinError

REFUSED = 1
INTERRUPTED = 130


def refusing(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with its refusals as one sentence on stderr and exit code 1; Ctrl-C gives 130."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as stop:  # a job that was cancelled says so
            click.echo(err=True)  # progress may have left its line unfinished
            _leave(str(stop) or "interrupted.", INTERRUPTED)
        except BrokenPipeError:
            raise
        except (NetkinError, OSError) as error:
            _leave(" ".join(str(error).split()), REFUSED)

    return run


def _leave(sentence: str, code: int) -> None:
    click.echo(f"netkin: {sentence}", err=True)
    raise click.exceptions.Exit(code)
