"""`Statistics`: the result of a pass. It can be saved, merged, and read by any measure later without model or data."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from netkin import __version__, files
from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.planning import Need, ready_collectors
from netkin.comparing.subjects import Runner
from netkin.errors import FileError, InvalidValue, NoValue, ShapeError, UnknownName
from netkin.identity import DataDigest, Form, form_difference, settings_digest, with_call
from netkin.measures.registry import Measure, find
from netkin.progress import ProgressOption, command, showing
from netkin.results import Comparison, Comparisons
from netkin.results.caveats import Caveat
from netkin.results.packing import as_record
from netkin.results.records import now
from netkin.statistics.collector import Collector, Key, LayerSize, Study, name_of
from netkin.statistics.statistic import from_plain, to_plain

KIND = "statistics"
NAMED = 8  # layers that a warning names
PLAIN = (
    "models", "origins", "resizes", "plan", "names", "data", "examples", "settings", "part", "asked", "warnings",
    "created",
)  # fmt: skip
STUDY = ("examples", "chunks", "seed")


class Statistics:
    """What one pass over the data, or over a part of them, left of the layers of some models.

    `examples` counts those that were seen and `ranges` are the numbers they have in the whole data. `compare` reads
    measures from it, `merge` adds another part, `save` and `nk.load` keep it in a file.
    """

    def __init__(
        self, runners: Sequence[Runner], pairs: Pairs, study: Study, alignment: Alignment, needs: Sequence[Need]
    ):
        self.pairs, self.study, self.alignment, self.needs = pairs, study, alignment, list(needs)
        self.models = [runner.name for runner in runners]
        self.origins: dict[str, dict[str, str]] = {}
        self.resizes = any(runner.resizes for runner in runners)
        self.collectors: list[list[Collector]] = [[] for _ in needs]
        self.plan = ""
        self.names: dict[str, str] = {}  # what results call the models, where not by their own names
        self.data, self.examples, self.digest = "", 0, DataDigest()
        self.settings: dict[str, str] = {}  # what was asked of the pass
        self.asked: list[str] = []  # the measures, in the order in which they were asked for
        self.part = ""  # which part of the data, as "3/16", or which of them, where they were split
        self.ended: set[str] = set()  # the stages that were interrupted
        self.warnings: list[str] = []
        self.created = now()

    def finish(self, runners: Sequence[Runner], examples: int, digest: DataDigest, ended: set[str]) -> None:
        """Record what was read, at the end of a pass."""
        self.examples, self.digest, self.ended = examples, digest, set(ended)
        self.origins = {runner.name: runner.origin for runner in runners}
        left_out = {
            f"{layer!r} of {runner.name!r}": why for runner in runners for layer, why in runner.left_out.items()
        }
        if left_out:
            named = ", ".join(list(left_out)[:NAMED])
            more = f" and {len(left_out) - NAMED} others" if len(left_out) > NAMED else ""
            self.warnings.append(f"default layers were left out: {named}{more}. Why: {next(iter(left_out.values()))}.")

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The numbers of the examples that were seen, as ranges (first, one behind the last)."""
        return self.digest.ranges

    @cached_property
    def layers(self) -> dict[str, list[LayerSize]]:
        """The layers of each model, as the first batch showed them."""
        found: dict[str, list[LayerSize]] = {name: [] for name in self.models}
        for layer in self.alignment.result_layers:
            if layer.model in found:
                found[layer.model].append(layer)
        return found

    @property
    def missing(self) -> str:
        """A sentence if parts of the data have not been merged in, else empty."""
        is_part = self.part or self.ranges not in ([], [(0, self.examples)])
        if not is_part or self.examples >= self.expected or self.ended:
            return ""
        return f"these numbers rest on {self.examples:,} of {self.expected:,} examples: not all parts have been merged."

    @property
    def caveats(self) -> list[Caveat]:
        """What to know of the data: that parts are missing, and which layers and examples were left out."""
        parts = [Caveat("missing-parts", self.missing)] if self.missing else []
        return parts + [Caveat("data", text) for text in self.warnings]

    @property
    def expected(self) -> int:
        """How many examples all parts hold together, as far as it is known from these parts."""
        return max([self.study.examples or 0, *(stop for _, stop in self.ranges)])

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The numbers of the examples that are expected and not here, as ranges (first, one behind the last)."""
        ends = [(0, 0), *self.ranges, (self.expected, self.expected)]
        return [(stop, start) for (_, stop), (start, _) in pairwise(ends) if stop < start]

    @property
    def products(self) -> str:
        """The precision of the products."""
        found = {str(getattr(one, "precision", "")).removeprefix("torch.") for one in self.every()} - {""}
        return ", ".join(sorted(found)) or ("float64" if self.study.doubles else "float32")

    def every(self) -> Iterator[Collector]:
        """Yield all collectors."""
        for collectors in self.collectors:
            yield from collectors

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, measure: Measure, a: Key, b: Key, without: int | None = None) -> Any:
        """Return the layers `a` and `b`, each (model, layer), as the measure reads them."""
        collector, x, y = self.place(measure, a, b)
        return collector.pair(x, y) if without is None else collector.pair(x, y, without)

    def place(self, measure: Measure, a: Key, b: Key) -> tuple[Collector, Key, Key]:
        """Return the collector that a measure reads the layers `a` and `b` from, and their keys there."""
        x, y = self.alignment.pair(a, b)
        collector = self.collector(measure, x)
        if y not in getattr(collector, "names", [y]):
            raise NoValue(f"the rows of {name_of(x)!r} and {name_of(y)!r} did not pair up batch by batch.")
        return collector, x, y

    def collector(self, measure: Measure, key: Key | None = None) -> Collector:
        """Return the collector that a measure is read from, of those that hold the layer `key`."""
        known, lacking = [kind.kind for kind in measure.facts.reads.collectors], []
        for collectors in self.collectors:
            for collector in collectors:
                if collector.kind not in known:
                    continue
                missing = collector.serves(type(collector).settings_for(measure))
                if missing:
                    lacking.append(f"{collector.kind} without {missing}")
                elif key is None or key in getattr(collector, "names", [key]):
                    return collector
        held = ", ".join(dict.fromkeys(lacking or [one.kind for one in self.every()])) or "nothing"
        raise InvalidValue(
            f"these statistics can't serve {measure.id!r}: they hold {held}. Collect with measures=[{measure.id!r}]."
        )

    @with_call
    def compare(self, measures: Any = None, *, progress: ProgressOption = None) -> Comparison | Comparisons:
        """Return the comparison by some measures, by default those that were collected for, without model or data.

        Of several pairs of models it gives all their comparisons. Standard errors come where chunks were kept.
        """
        from netkin.comparing.tabulating import comparisons_of  # it reads statistics

        collected = self.asked or [name for need in self.needs for name in need.measures]
        found = found_measures(collected if measures is None else measures)
        with showing(progress):
            for measure in found if any(self.collectors) else ():
                self.collector(measure)
            made = comparisons_of(self, found, self.pairs.of)
        return made[0] if len(made) == 1 else Comparisons(made)

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(one.kind for one in self.every())) or "nothing"
        chunks = f" in {self.study.chunks} chunks" if self.study.chunks else ""
        return f"Statistics({', '.join(map(repr, self.models))}; {self.examples:,} examples{chunks}; {kinds})"

    # --- merging and files --------------------------------------------------------------------------------------------

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the data of both parts; neither is changed."""
        self._refuse_unlike(other)
        merged = copy(self)
        merged.collectors = [
            [mine.like(theirs).merge(theirs.like(mine)) for mine, theirs in zip(x, y, strict=True)]
            for x, y in zip(self.collectors, other.collectors, strict=True)
        ]
        merged.examples, merged.ended = self.examples + other.examples, self.ended | other.ended
        merged.part = ", ".join(part for part in (self.part, other.part) if part)
        merged.digest = DataDigest.from_json(self.digest.to_json())
        merged.digest.merge(other.digest)
        merged.warnings = list(dict.fromkeys([*self.warnings, *other.warnings]))
        if other.data != self.data:
            merged.data = " and ".join(dict.fromkeys([*self.data.split(" and "), *other.data.split(" and ")]))
        return merged

    def _refuse_unlike(self, other: Statistics) -> None:
        if not isinstance(other, Statistics):
            raise ShapeError(f"statistics can't be merged with a {type(other).__name__}; load its file with `nk.load`.")
        if not (self.examples and other.examples):
            raise ShapeError("statistics of weights alone hold no examples, so there is nothing to merge.")
        for what, mine, theirs in _differences(self, other):
            if mine != theirs:
                raise ShapeError(f"these parts can't be merged: their {what} differ, {mine} and {theirs}.")
        common = self.digest.common(other.digest)
        if common:
            raise ShapeError(
                f"these parts overlap: both hold the examples {common[0]:,} to {common[1] - 1:,}; merge each part "
                "once, and give separate loaders their `start`."
            )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all to one file, whole or not at all; over one that holds no statistics only with `overwrite`."""
        files.write(path, KIND, *self.to_arrays(), overwrite=overwrite)

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return all that `from_arrays` needs: a header for JSON, and named arrays in the host's memory."""
        header, tensors = self.to_parts()
        return header, {name: one.detach().cpu().numpy() for name, one in tensors.items()}

    def to_parts(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return all that `from_parts` needs: a header for JSON, and named tensors."""
        tensors: dict[str, torch.Tensor] = {}
        held = to_plain(self.collectors, tensors, "collectors")
        return self._header() | {"collectors": held}, tensors

    def _header(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PLAIN} | {
            "version": __version__,
            "digest": self.digest.to_json(),
            "ended": sorted(self.ended),
            "pairs": [self.pairs.of, self.pairs.which],
            "layers": [asdict(layer) for layer in self.alignment.given.values()],
            "needs": [{"measures": need.measures, "settings": need.settings.to_json()} for need in self.needs],
            "study": {name: getattr(self.study, name) for name in STUDY},
        }


def load_statistics(path: str | os.PathLike[str]) -> Statistics:
    """Return the statistics that were saved at `path`."""
    header, arrays = files.read(path, KIND)
    _refuse_absent_measures(path, header)
    with files.damage_reported(path):
        return from_arrays(header, arrays)


def _refuse_absent_measures(path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
    """Refuse a file that needs a package which is not installed here."""
    with files.damage_reported(path):
        for need in header.get("needs", []):
            try:
                find(need["measures"][0])
            except UnknownName as absent:
                raise FileError(
                    f"{str(path)!r} holds a statistic of a package that is not installed: {absent} Install the package."
                ) from absent


def from_arrays(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Statistics:
    """Return the statistics of a header and arrays; these may be shared with other processes, and are copied."""
    return from_parts(header, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()})


def from_parts(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """Return the statistics that `to_parts` took apart."""
    of, which = header["pairs"]
    of, which = [(a, b) for a, b in of], which if isinstance(which, str) else [(a, b) for a, b in which]
    pairs, given = Pairs(of, which), [as_record(LayerSize, one) for one in header["layers"]]
    plain = {name: header[name] for name in PLAIN}
    names = {model: [layer.name for layer in given if layer.model == model] for model in plain["models"]}
    alignment = Alignment(given, pairs.pair_blocks(names))
    study, needs = (
        Study(alignment.layers, alignment.pair_blocks, **header["study"]),
        [_need(one) for one in header["needs"]],
    )
    statistics = Statistics([], pairs, study, alignment, needs)
    for name, value in plain.items():
        setattr(statistics, name, value)
    statistics.digest = DataDigest.from_json(header["digest"])
    statistics.ended = set(header["ended"])
    statistics.collectors = from_plain(header["collectors"], tensors)
    return statistics


def _need(header: Mapping[str, Any]) -> Need:
    names = [find(name).id for name in header["measures"]]
    candidates = ready_collectors(find(names[0]))
    settings = type(candidates[0].settings_for(find(names[0]))).from_json(header["settings"])
    return Need(candidates, settings, tuple(header["measures"]))


def _differences(one: Statistics, other: Statistics) -> Iterator[tuple[str, Any, Any]]:
    yield "models", one.models, other.models
    for name in one.models:
        weights = [part.origins[name].get("weights", "") for part in (one, other)]
        yield f"weights of {name!r}", weights[0], weights[1]
        origins = [part.origins[name] for part in (one, other)]
        forms = [Form.from_json(origin["form"]) for origin in origins if "form" in origin]
        if len(forms) == 2 and (difference := form_difference(*forms)):
            yield f"architecture of {name!r}, {difference},", f"digest {forms[0].digest}", f"digest {forms[1].digest}"
        mine, theirs = ([(layer.name, layer.width) for layer in part.layers[name]] for part in (one, other))
        yield f"layers of {name!r}", mine, theirs
        shapes = [{layer.name: layer.shape for layer in part.layers[name]} for part in (one, other)]
        yield f"shapes of {name!r}", shapes[0], shapes[1]
    yield "pairs", one.pairs.words, other.pairs.words
    asked = [[list(need.measures) for need in part.needs] for part in (one, other)]
    short = list(map(_unshared, asked, asked[::-1]))
    yield ("measures", *(asked if short[0] == short[1] else short))
    yield "numbers of chunks", one.study.chunks, other.study.chunks
    yield "seeds", one.study.seed, other.study.seed
    for name in {**one.settings, **other.settings}:
        yield f"settings of {name!r}", one.settings.get(name, "none"), other.settings.get(name, "none")
    if one.part and other.part:  # parts of one set; separate loaders may go by other names
        yield "data", one.data, other.data


def _unshared(mine: list[list[str]], theirs: list[list[str]]) -> str:
    """Return as text the measures of one part that the other lacks; all of them where it lacks none."""
    every, others = (list(chain.from_iterable(asked)) for asked in (mine, theirs))
    found = [name for name in every if name not in others] or every
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} others" if len(found) > NAMED else "")


def found_measures(asked: Any) -> list[Measure]:
    """Return the measures requested, each once."""
    listed = [asked] if isinstance(asked, str) or not isinstance(asked, Iterable) else asked
    found = list({measure.id: measure for measure in map(find, listed)}.values())
    if not found:
        raise InvalidValue("`measures` is empty; name at least one, e.g. 'cka'.")
    return found


def provenance_of_all(statistics: Statistics) -> dict[str, str]:
    """Return how all models were compared, as text."""
    return {
        "pairs": statistics.pairs.words,
        "resize": "average" if statistics.resizes else "none",
        "plan": statistics.plan,
        **({"data digest": statistics.digest.hex} if statistics.examples else {}),
        **({"settings digest": settings_digest(statistics.settings)} if statistics.settings else {}),
        **({"call": command()} if command() else {}),
        "products": statistics.products,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
