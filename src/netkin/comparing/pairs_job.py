"""`PairsJob`: the finished parts of a comparison of many models, which are checked when they are read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from netkin.comparing.comparer import Comparer, from_arrays
from netkin.comparing.tabulating import comparisons_of
from netkin.identity import DataDigest, in_words, settings_digest
from netkin.jobs import Job, Part
from netkin.measures.registry import Measure
from netkin.progress import together
from netkin.representations import batches_of
from netkin.representations.inputs import batch_length
from netkin.results import Comparison
from netkin.results.packing import packed_columns, unpacked_columns
from netkin.results.values import Pair

if TYPE_CHECKING:
    from netkin.comparing.many_models import ModelBlock

PARTS = 32  # files of tables that a pass leaves at most
LEAST = 32  # pairs of models in such a file, if there are as many

Collect = Callable[[int, int], Comparer]  # the statistics of the share i of n of the data


class PairsJob:
    """The parts of a job that compares all pairs of many models, pass by pass.

    The tables of some pairs are a part, so that a pass whose tables are all there is not taken again. The sums of a
    pass are a part after each share of the data; it goes when the tables are there.
    """

    def __init__(
        self,
        job: Job,
        measures: Sequence[Measure],
        blocks: Sequence[ModelBlock],
        sample: int | None = None,
        examples: int | None = None,
    ):
        self.job, self.measures, self.sample = job, measures, sample
        self.examples, self.passes, self.finished = examples, len(blocks), 0
        job.expect(name for block in blocks for name in groups_of(block.pairs, self.sample))

    def comparisons_of(self, block: ModelBlock, shares: int, collect: Collect) -> list[Comparison]:
        """Return the comparisons of a block; what is missing is collected, share by share, and read."""
        groups = groups_of(block.pairs, self.sample)
        comparisons = {
            name: self.job.recall(name, lambda part: unpacked_columns(part.values, part.arrays)) for name in groups
        }
        missing = [name for name, of_group in comparisons.items() if of_group is None]
        if missing:
            whole = self._whole(block, shares, collect)
            comparisons |= {name: self._read(name, whole, groups[name]) for name in missing}
        self.job.drop(f"sums of {label_of(block.pairs, self.sample)}")
        self.finished += 1
        self._advance(0)
        return list(chain.from_iterable(of_group or () for of_group in comparisons.values()))

    def _whole(self, block: ModelBlock, shares: int, collect: Collect) -> Comparer:
        """Return the statistics of all shares, which are kept after each."""
        name = f"sums of {label_of(block.pairs, self.sample)}"
        done, whole = self.job.recall(name, partial(_unpacked_sums, shares)) or (0, None)
        with together(self.examples, "reading", "examples", done=0 if whole is None else whole.examples):
            for share in range(done + 1, shares + 1):
                part = collect(share, shares)
                whole = part if whole is None else whole.merge(part)
                header, arrays = whole.to_arrays()
                self.job.keep(name, {"shares": share, "of": shares, "statistics": header}, arrays)
                self._advance(whole.examples)
        assert whole is not None
        whole.note(part="")
        return whole

    def _advance(self, examples: int) -> None:
        """Report how many examples are read: all of the finished passes, and so many of the one that is taken."""
        if self.examples is not None:
            total = self.passes * self.examples
            self.job.advance(min(self.finished * self.examples + examples, total), total, "examples")

    def _read(self, name: str, whole: Comparer, pairs: Sequence[Pair]) -> list[Comparison]:
        comparisons = comparisons_of(whole, self.measures, pairs)
        self.job.keep(name, *packed_columns(comparisons))
        return comparisons


def groups_of(pairs: Sequence[Pair], sample: int | None = None) -> dict[str, Sequence[Pair]]:
    """Return the pairs of a block whose tables are a part each, by its name."""
    size = max(LEAST, -(-len(pairs) // PARTS))
    groups = [pairs[place : place + size] for place in range(0, len(pairs), size)]
    label = label_of(pairs, sample)
    return {f"values of {label}, {i} of {len(groups)}": group for i, group in enumerate(groups, start=1)}


def label_of(pairs: Sequence[Pair], sample: int | None = None) -> str:
    """Return how parts call a block; a job to which models are added has several plans, some of a sample."""
    names = list(dict.fromkeys(chain.from_iterable(pairs)))
    models = f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
    return f"{models} ({settings_digest(pairs if sample is None else [pairs, sample])[:8]})"


def _unpacked_sums(shares: int, part: Part) -> tuple[int, Comparer | None]:
    """Return how many of the shares were summed, and their sums; nothing of a plan that also had other models."""
    if part.values["of"] != shares:
        return 0, None
    return part.values["shares"], from_arrays(part.values["statistics"], part.arrays)


def identity_of_study(
    weights: Mapping[str, str],
    data: str,
    layers: Mapping[str, Any],
    settings: Mapping[str, str],
    measures: Sequence[Measure],
) -> dict[str, Any]:
    """Return all that the numbers of a study depend on, as texts by name, so that a job of another is refused.

    Args:
        weights: the digest of each model.
        data: the text that identifies the data.
        layers: the choice of layers for each model.
        settings: what else changes the numbers.
        measures: what is read.
    """
    functions = {
        what: {name: settings.get(f"{what} of {name}", "none") for name in weights} for what in ("transform", "forward")
    }
    rest = {name: text for name, text in settings.items() if name.partition(" of ")[0] not in functions}
    rest["errors"] = "none" if (chunks := rest.pop("chunks")) == "0" else f"{chunks} chunks"
    named, code = ", ".join(measure.id for measure in measures), [measure.function for measure in measures]
    return {
        "weights": dict(weights), "data": data, "layers": {name: in_words(layers[name]) for name in weights},
        **functions, **rest,
        "measures": f"{named}; digest {settings_digest(code)}",
    }  # fmt: skip


def data_digest(data: Any, examples: int | None) -> str:
    """Return a text that identifies data, after reading all of them."""
    digest, seen = DataDigest(), 0
    for batch in batches_of(data, examples):
        length = batch_length(batch)
        digest.update(batch, range(seen, seen + length))
        seen += length
    return digest.hex
