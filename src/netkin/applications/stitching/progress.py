"""Progress: a bar beside a pass over the data, with its end where the data tell how many examples they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, length_if_known


def watched(data: Any, examples: int | None, doing: str) -> Iterator[Any]:
    """Yield the batches of the data, up to `examples` examples, with a bar on stderr if that takes long."""
    with tqdm(total=examples_in(data, examples), desc=doing, unit=" examples", delay=2, leave=False) as bar:
        for batch in batches_of(data, examples):
            yield batch
            bar.update(length_if_known(batch) or 0)
