"""Progress: a bar beside a pass over the data, with its end where the data tell how many examples they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netkin.progress import reporting
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, length_if_known


def watched(data: Any, examples: int | None, doing: str) -> Iterator[Any]:
    """Yield the batches of the data, up to `examples` examples, with a bar on stderr if that takes long."""
    with reporting(examples_in(data, examples), doing, "examples") as report:
        for batch in batches_of(data, examples):
            yield batch
            report.update(length_if_known(batch) or 0)
