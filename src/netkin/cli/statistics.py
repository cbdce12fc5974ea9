"""Files of statistics: what they hold, in words, in JSON, and what of the data is missing in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netkin.errors import FileFault

if TYPE_CHECKING:
    from netkin.comparing import Statistics

FINISHED = ("comparison", "comparisons", "ranking", "series")


def held_by(path: str | Path) -> str:
    """Return what kind of result the file at `path` holds; empty if it is none of netkin's files, or no file."""
    from netkin import files

    if not Path(path).is_file():
        return ""
    try:
        return str(files.read_header(path).get("kind"))
    except FileFault:
        return ""


def refuse_result(path: str | Path) -> None:
    """Refuse a file that holds a finished result where a model or statistics are expected."""
    if held_by(path) in FINISHED:
        raise FileFault(f"{str(path)!r} holds values and no statistics; `netkin report {path}` shows them.")


def opened(path: Path) -> Statistics:
    """Return the statistics in a file; any other file is refused."""
    from netkin.comparing.study import load_statistics

    refuse_result(path)
    return load_statistics(path)


def usual_measures(statistics: Statistics) -> list[str]:
    """Return what is read where no measure is named: cka if it was collected for, else all that was."""
    collected = [name for need in statistics.needs for name in need.measures]
    return ["cka"] if "cka" in collected else collected


def warn_of_missing(statistics: Statistics) -> None:
    """Say on stderr that parts are missing, as when one job of many has failed."""
    if statistics.gaps:
        click.echo(
            f"warning: {statistics.examples:,} of {statistics.expected:,} examples are here; missing are "
            f"{_in_words(statistics.gaps)}",
            err=True,
        )


def described(statistics: Statistics, path: Path) -> str:
    """Return one line that says what a file holds."""
    chunks = f" in {statistics.study.chunks} chunks" if statistics.study.chunks else ""
    models = " and ".join(dict.fromkeys(statistics.names.get(name, name) for name in statistics.models))
    numbers = f" ({_in_words(statistics.ranges)})" if statistics.ranges else ""
    return f"{path}: {models} on {statistics.data}, {statistics.examples:,} examples{numbers}{chunks}"


def statistics_document(statistics: Statistics, path: Path) -> dict[str, Any]:
    """Return what a file of statistics holds, for other programs."""
    from netkin.identity import settings_digest

    return {
        "file": str(path),
        "models": [statistics.names.get(name, name) for name in statistics.models],
        "layers": {model: [layer.name for layer in layers] for model, layers in statistics.layers.items()},
        "data": statistics.data,
        "examples": statistics.examples,
        "ranges": statistics.ranges,
        "expected": statistics.expected,
        "missing": statistics.gaps,
        "chunks": statistics.study.chunks,
        "seed": statistics.study.seed,
        "measures": [name for need in statistics.needs for name in need.measures],
        "weights": {model: origin.get("weights") for model, origin in statistics.origins.items()},
        "data_digest": statistics.digest.hex,
        "settings": statistics.settings,
        "settings_digest": settings_digest(statistics.settings),
        "plan": statistics.plan,
    }


def _in_words(ranges: list[tuple[int, int]]) -> str:
    """Return ranges of the numbers of examples, which begin at 0."""
    return ", ".join(f"{start:,} to {stop - 1:,}" if stop - start > 1 else f"{start:,}" for start, stop in ranges)
