"""`netkin jobs`: how far long work has come, wherever it runs, and a way to end it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from netkin.cli.documents import as_json
from netkin.cli.options import JSON
from netkin.cli.refusals import refusing

if TYPE_CHECKING:
    from netkin.jobs import State

EXAMPLE = """\b
Example:
  netkin jobs
"""
PAUSE = 0.5  # seconds between two looks


@click.command(epilog=EXAMPLE)
@click.argument("words", nargs=-1, metavar="[watch|cancel] [PATH]")
@JSON
@refusing
def jobs(words: tuple[str, ...], json: bool) -> None:
    """List the jobs below a folder, the present one unless PATH names another; watch one, or cancel it.

    A job is what `--save` of `netkin stitch`, `dynamics`, `federate` and `learn-tasks`, `nk.train(save=...)` and other
    long work leave in a folder such as ab.netkin.job: its finished parts and how far it has come. PATH of `watch` and
    `cancel` is that folder or the result beside it, as in `netkin jobs watch ab.netkin`. A cancelled job stops after
    the part it is at and keeps what is finished; the same command or call continues it.
    """
    from netkin.jobs import cancel, list_jobs, read

    verb, rest = (words[0], words[1:]) if words and words[0] in ("watch", "cancel") else ("", words)
    if len(rest) > 1 or (verb and not rest):
        raise click.UsageError("write `netkin jobs [FOLDER]`, `netkin jobs watch PATH` or `netkin jobs cancel PATH`.")
    if verb == "cancel":
        state = cancel(rest[0])
        click.echo(f"asked {state.folder} to stop after this part; {state.progress} are done.", err=True)
    elif verb == "watch":
        _show([_watched(rest[0])] if not json else [read(rest[0])], json)
    else:
        _show(list_jobs(*rest), json)


def _watched(path: str) -> State:
    """Show a bar on stderr until the job ends, and return how it ended."""
    from tqdm import tqdm

    from netkin.jobs import read

    state = read(path)
    with tqdm(total=state.total, desc=state.kind, unit=f" {state.unit}", initial=state.done, disable=None) as bar:
        while state.condition == "running":
            bar.n, bar.total, bar.unit = state.done, state.total, f" {state.unit}"
            bar.set_postfix_str(state.message)
            time.sleep(PAUSE)
            state = read(path)
        bar.n = state.done
    return state


def _show(states: list[State], json: bool) -> None:
    if json:
        from dataclasses import asdict

        click.echo(as_json([asdict(state) | {"condition": state.condition} for state in states]))
        return
    for state in states:
        click.echo(str(state))
    if not states:
        click.echo("no jobs here")
