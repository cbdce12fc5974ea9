"""`PairsJob`: all pairs of many models as a job: the sums of a pass while it lasts, then its tables, are its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from netkin.comparing.engines.worker import to_message, to_statistics
from netkin.comparing.model_blocks import ModelBlock, Pair
from netkin.comparing.pairs_plan import PairsPlan, PairsWay
from netkin.comparing.study import Statistics
from netkin.comparing.tabulating import comparisons_of
from netkin.errors import ValueFault
from netkin.identity import DataDigest, in_words, settings_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.representations import batches_of
from netkin.representations.inputs import length_if_known
from netkin.results import Comparison
from netkin.results.columns import packed_columns, unpacked_columns

PARTS = 32  # files of tables that a pass leaves at most
LEAST = 32  # pairs of models in such a file, if there are as many

Collect = Callable[[int, int], Statistics]  # the statistics of the share i of n of the data


class PairsJob:
    """The parts of a job that compares all pairs of many models, pass by pass.

    The tables of some pairs are a part, so that a pass whose tables are all there is not taken again. The sums of a
    pass are a part after each share of the data; it goes when the tables are there.
    """

    def __init__(self, job: Job, measures: Sequence[Measure], blocks: Sequence[ModelBlock]):
        self.job, self.measures = job, measures
        job.expect(name for block in blocks for name in _groups(block))

    def compared(self, block: ModelBlock, shares: int, collect: Collect) -> list[Comparison]:
        """Return the comparisons of a block; what is missing is collected, share by share, and read."""
        groups = _groups(block)
        found = {
            name: self.job.recall(name, lambda part: unpacked_columns(part.values, part.arrays)) for name in groups
        }
        missing = [name for name, own in found.items() if own is None]
        if missing:
            whole = self._whole(block, shares, collect)
            found |= {name: self._read(name, whole, groups[name]) for name in missing}
        self.job.drop(_sums(block))
        return list(chain.from_iterable(own or () for own in found.values()))

    def _whole(self, block: ModelBlock, shares: int, collect: Collect) -> Statistics:
        """Return the statistics of all shares, which are kept after each."""
        part = self.job.find(_sums(block))
        if part is not None and part.values.get("of") != shares:  # of a plan that also had other models
            part = None
        whole = None if part is None else to_statistics((part.values["statistics"], part.arrays))
        for share in range(1 if part is None else part.values["shares"] + 1, shares + 1):
            own = collect(share, shares)
            whole = own if whole is None else whole.merge(own)
            header, arrays = to_message(whole)
            self.job.keep(_sums(block), {"shares": share, "of": shares, "statistics": header}, arrays)
        assert whole is not None
        whole.part = ""
        return whole

    def _read(self, name: str, whole: Statistics, pairs: Sequence[Pair]) -> list[Comparison]:
        made = comparisons_of(whole, self.measures, pairs)
        self.job.keep(name, *packed_columns(made))
        return made


def _groups(block: ModelBlock) -> dict[str, Sequence[Pair]]:
    """Return the pairs of a block whose tables are a part each, by its name."""
    size = max(LEAST, -(-len(block.pairs) // PARTS))
    groups = [block.pairs[place : place + size] for place in range(0, len(block.pairs), size)]
    return {f"values of {_label(block)}, {i} of {len(groups)}": own for i, own in enumerate(groups, start=1)}


def _sums(block: ModelBlock) -> str:
    return f"sums of {_label(block)}"


def _label(block: ModelBlock) -> str:
    count = f"{block.models[0]} to {block.models[-1]}" if len(block.models) > 2 else " and ".join(block.models)
    return f"{count} ({settings_digest(block.pairs)[:8]})"


def unpacked_plan(told: Mapping[str, Any]) -> PairsPlan:
    """Return the plan that was taken apart by `asdict` and has been JSON since."""
    return PairsPlan(**dict(told) | {"way": unpacked_way(told["way"]), "lines": tuple(told["lines"])})


def unpacked_way(told: Mapping[str, Any]) -> PairsWay:
    """Return the way that was taken apart by `asdict` and has been JSON since."""
    blocks = (ModelBlock(tuple(one["models"]), tuple((a, b) for a, b in one["pairs"])) for one in told["blocks"])
    return PairsWay(**dict(told) | {"blocks": tuple(blocks)})


def identity_of_study(
    weights: Mapping[str, str], data: str, layers: Any, settings: Mapping[str, str], measures: Sequence[Measure]
) -> dict[str, Any]:
    """Return all that the numbers of a study depend on, as texts by name, so that a job of another is refused.

    Args:
        weights: the digest of each model.
        data: by what the data are known again.
        layers: the choice of layers.
        settings: what else changes the numbers.
        measures: what is read.
    """
    return {
        "models": dict(weights), "data": data, "layers": in_words(layers), "settings": dict(settings),
        "measures": ", ".join(measure.id for measure in measures),
        "measures digest": settings_digest([measure.function for measure in measures]),
    }  # fmt: skip


def digest_of(data: Any, examples: int | None) -> str:
    """Return by what data are known again, after reading all of them."""
    digest, seen = DataDigest(), 0
    for batch in batches_of(data, examples):
        length = length_if_known(batch)
        if length is None:
            raise ValueFault("a batch of the data has no length, so that they can't be known again; leave `save` out.")
        digest.update(batch, range(seen, seen + length))
        seen += length
    return digest.hex
