"""What commands write and print: files, JSON for other programs, plain tables for the terminal, and refusals.

A file that must not be written is refused before the work; one that fails is named after the numbers are printed. What
ends a command becomes one sentence on stderr, in the words of the command line, and an exit code.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from netkin.cli.running import readable
from netkin.errors import FileError, ForwardError, MissingExtra, NetkinError, UnsavedWarning

FIGURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")
TABLES = (".csv",)
# what is written by another option than --out, by the ending of its name
WRITTEN_BY = (
    dict.fromkeys(FIGURES, "--figure") | dict.fromkeys(PAGES, "--report") | {".csv": "--csv", ".json": "--json"}
)
REFUSED = 1
INTERRUPTED = 130
ARGUMENTS, SILENT, TITLE, UNSAVED = "netkin.arguments", "netkin.silent", "netkin.title", "netkin.unsaved"
DRAWN = ("report", "figure", "files")  # the options by which pages and figures are asked for


class OutputFiles:
    """Where a command writes to.

    Args:
        overwrite: Whether files that are there may be written over.
        engine: By which engine; of several processes only the first writes and prints.
        is_job: Whether the work is a job, whose result of before --out names as well.
    """

    def __init__(self, overwrite: bool, engine: str = "local", is_job: bool = False):
        self.writes = engine != "distributed" or os.environ.get("RANK", "0") == "0"
        self.overwrite, self.is_job = overwrite, is_job
        self.save: Path | None = None
        self.page: Path | None = None
        self.figure: Path | None = None
        self.csv: Path | None = None
        self.json = False
        self.places: dict[str, Path] = {}
        self.faults: list[tuple[Path, Exception]] = []

    @classmethod
    def of(cls, options: dict[str, Any], is_job: bool = False) -> OutputFiles:
        """Remove the options of `result_options` from `options`, and refuse files that must not be written."""
        made = cls(options.pop("overwrite"), options.get("engine", "local"), is_job)
        made.json = options.pop("json")
        made.save, made.page, made.figure, made.csv = (
            options.pop(name, None) for name in ("save", "report", "figure", "csv")
        )
        made.check("--out", made.save)
        made.check("--report", made.page, PAGES)
        made.check("--figure", made.figure, FIGURES)
        made.check("--csv", made.csv, TABLES)
        return made

    def deliver(
        self, result: Any, save: Callable[..., Any] | None = None, text: Callable[[], str] | None = None
    ) -> None:
        """Write a result to the requested files, print it, and report what could not be written.

        Args:
            result: What is drawn and printed.
            save: What writes the file of --out; None where the work itself has written it.
            text: What is printed; by default the result as text, or as JSON.
        """
        if save is None:
            self.tell_saved(self.save)
        else:
            self.write(self.save, save, f"saved to {self.save}")
        self.draw(result)
        self.tabulate(result)
        self.show(text or (lambda: as_json(result) if self.json else str(result)))
        self.finish()

    def tell_saved(self, path: Path | None) -> None:
        """Say on stderr that the work itself has written a file, unless it could not."""
        if path is not None and self.writes and not click.get_current_context().meta.get(UNSAVED):
            click.echo(f"saved to {path}", err=True)

    def check(self, option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
        """Refuse a path that can't or should not be written to, or whose name has none of the `endings`, if given."""
        if path is None or not self.writes:
            return
        from netkin import files, jobs

        if not path.absolute().parent.is_dir():
            raise click.BadParameter(f"the folder {str(path.parent)!r} does not exist.", param_hint=option)
        if endings and path.suffix.lower() not in endings:
            what = {FIGURES: "a figure's", PAGES: "a page's", TABLES: "a table's"}[tuple(endings)]
            named = f"{what} name ends in {' or '.join(endings)}; got {path.name!r}."
            raise click.BadParameter(named, param_hint=option)
        if not endings:
            _require_ending(option, path)
        if endings is FIGURES and find_spec("matplotlib") is None:
            raise MissingExtra(
                "a figure needs the package 'matplotlib'; install it with `pip install 'netkin[figures]'`."
            )
        self._require_own_place(option, path)
        _require_other_output(option, path)
        require = jobs.require_output if self.is_job and option.startswith("--out") else files.require_output
        require(path, overwrite=self.overwrite, option=option)
        self.places[option] = path

    def write(self, path: Path | None, write: Callable[..., Any], said: str = "") -> None:
        """Write a file if it is requested, and say so on stderr; a failure is reported after the numbers are shown."""
        if path is None or not self.writes:
            return
        try:
            write(path, overwrite=self.overwrite or (self.is_job and path == self.save))
        except Exception as fault:  # whatever it is, the numbers come first
            self.faults.append((path, fault))
            return
        if said:
            click.echo(said, err=True)

    def draw(self, result: Any) -> None:
        """Write the requested pages and figures, before the result is printed, whose reader may stop (`| head`)."""
        from netkin.reporting import plot, report

        title = click.get_current_context().meta.get(TITLE)
        self.write(self.page, lambda path, **how: report(result, path, title=title, **how), f"report: open {self.page}")
        self.write(
            self.figure, lambda path, **how: plot(result, path=path, title=title, **how), f"figure in {self.figure}"
        )

    def tabulate(self, result: Any) -> None:
        """Write the table of numbers that was requested, of one result or of several of one kind."""
        from netkin.results.packing import write_csv

        results = result if isinstance(result, list) else [result]
        self.write(self.csv, lambda path, **how: write_csv(results, path, **how), f"numbers in {self.csv}")

    def show(self, text: Callable[[], str]) -> None:
        """Print a result."""
        if self.writes:
            click.echo(text())

    def show_plan(self, plan: Any, is_refused: bool = False, facts: Any = None) -> NoReturn:
        """Print a plan, for --json its `facts` if they are others than its own, and end the command."""
        self.show(lambda: as_json(facts or plan) if self.json else str(plan))
        raise click.exceptions.Exit(REFUSED if is_refused else 0)

    def finish(self) -> None:
        """Say, after the numbers, what could not be written."""
        if not self.faults:
            return
        sentences = [
            str(fault) if isinstance(fault, FileError) else f"cannot write {str(path)!r}: {_one_line(fault)}"
            for path, fault in self.faults
        ]
        raise FileError(" ".join(sentences)) from self.faults[0][1]

    def _require_own_place(self, option: str, path: Path) -> None:
        for other, place in self.places.items():
            if os.path.realpath(place) == os.path.realpath(path):
                raise click.UsageError(f"{other} and {option} both name {path}; give each its own file.")


def _require_ending(option: str, path: Path) -> None:
    """Refuse a name for a file of netkin that says it is a page, a figure or a table."""
    writer = WRITTEN_BY.get(path.suffix.lower())
    if writer is None:
        return
    has_it = any(writer in parameter.opts for parameter in click.get_current_context().command.params)
    advice = "--json prints JSON" if writer == "--json" else f"give {path.name!r} to {writer}"
    own = f"{option} writes netkin's own format, as in {path.stem}.netkin"
    sentence = f"{advice}; {own}." if has_it else f"{own}; got {path.name!r}."
    raise click.BadParameter(sentence, param_hint=option)


def _require_other_output(option: str, path: Path) -> None:
    """Refuse the file that the command prints into, as ``/dev/stdout`` is one: what is printed there would be lost."""
    for stream in (1, 2):
        with suppress(OSError):  # there is no such file, or the stream is closed
            if path.is_file() and os.path.samestat(os.stat(path), os.fstat(stream)):
                raise click.UsageError(f"{option} names {path}, into which the command prints; give it its own file.")


def _one_line(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}"


def as_json(content: Any) -> str:
    """Return a result, or plain lists and mappings, as JSON text; numbers that are not finite become null.

    Where stdout is not UTF-8, which has all characters, those beyond ASCII are escaped.
    """
    from netkin.results.compression import Compression
    from netkin.results.packing import Result, document
    from netkin.results.records import plain

    found = document(content) if isinstance(content, (Result, Compression)) else plain(content)
    escaped = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8"
    return json.dumps(found, indent=2, ensure_ascii=escaped)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` as lines whose columns stand below each other.

    Example:
        >>> print(align_columns([["conv1", "Conv2d"], ["fc", "Linear"]]))
        conv1  Conv2d
        fc     Linear
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


# --- refusals ---------------------------------------------------------------------------------------------------------


def with_refusals(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with its refusals as one sentence on stderr and exit code 1; Ctrl-C gives 130.

    What the work itself could not save is reported in the same way, after the numbers.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        from netkin.progress import as_command, showing

        context = click.get_current_context(silent=True)
        silent = context is not None and context.meta.get(SILENT)
        if context is not None and context.meta.get(TITLE) and not any(options.get(name) for name in DRAWN):
            raise click.UsageError("--title needs --report or --figure.")
        unsaved: list[str] = []
        try:
            with as_command(_command_line()), showing(False if silent else None), _collecting(unsaved, context):
                command(*arguments, **options)
            if unsaved:
                raise FileError(unsaved.pop(0))
        except KeyboardInterrupt as stop:  # a job that was cancelled says so
            click.echo(err=True)  # progress may have left its line unfinished
            _leave(" ".join([str(stop) or "interrupted.", *unsaved]), INTERRUPTED)
        except (BrokenPipeError, click.ClickException, click.Abort, click.exceptions.Exit):  # click says these itself
            raise
        except Exception as error:
            _leave_refused(error, unsaved)

    return run


def _leave_refused(error: Exception, unsaved: Sequence[str]) -> None:
    """End the command with one line: what went wrong, and what could not be saved."""
    if click.get_current_context().find_root().params.get("debug"):
        click.echo("".join(traceback.format_exception(error)), err=True)
    sentence, model = str(error), getattr(error, "model", None)
    if isinstance(error, ForwardError) and model and repr(model) not in sentence:
        sentence = f"{model!r}: {sentence}"
    if not isinstance(error, (NetkinError, OSError)):
        where = f" with {model!r}" if model else ""
        sentence = f"met an unexpected error{where}: {_one_line(error)}; `netkin --debug ...` shows where it arose."
    option = option_of(getattr(error, "argument", None))
    _leave(" ".join(" ".join([f"{option}: {sentence}" if option else sentence, *unsaved]).split()), REFUSED)


@contextmanager
def _collecting(unsaved: list[str], context: click.Context | None) -> Iterator[None]:
    """Inside the `with`, collect the library's warnings about files that it could not save."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UnsavedWarning)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UnsavedWarning):
                unsaved.append(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show
        if context is not None:
            context.meta[UNSAVED] = unsaved
        yield


def _command_line() -> str:
    """Return the command line as typed, for the provenance of results."""
    context = click.get_current_context(silent=True)
    typed = context.meta.get(ARGUMENTS) if context else None
    return f"netkin {shlex.join(map(readable, typed))}" if typed else ""


def _leave(sentence: str, code: int) -> None:
    click.echo(f"netkin: {sentence}", err=True)
    raise click.exceptions.Exit(code)


def option_of(argument: str | None) -> str:
    """Return the option of the running command for an argument of the library; "" if it has none."""
    context = click.get_current_context(silent=True)
    if context is None or argument is None:
        return ""
    options: dict[str, str] = {}
    for option in context.command.get_params(context):
        if isinstance(option, click.Option):
            long = max(option.opts, key=len)
            options |= {str(option.name): long, long.lstrip("-").replace("-", "_"): long}
    found = options.get(argument, "")
    return found or (options["recipe"] if "recipe" in options and argument in _recipe_settings() else "")


def _recipe_settings() -> Sequence[str]:
    from netkin.training import Recipe

    return [field.name for field in fields(Recipe)]
