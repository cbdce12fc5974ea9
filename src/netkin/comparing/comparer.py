"""`Comparer`: what one pass over the data leaves of the layers of some models, and what any measure reads from it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import __version__, files
from netkin.arrays import as_tensor, require_finite
from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.plan import (
    Need,
    Plan,
    aligned,
    make_plan,
    memory_limit,
    needs_of,
    ready_collectors,
    require_within,
)
from netkin.comparing.sides import Reads
from netkin.comparing.spec import DECLARED, Options, Spec, documented, layers_by_name, split, takes_options
from netkin.comparing.stream import Batch, KeptLayer, make_batch
from netkin.errors import FileError, ForwardError, InvalidValue, MemoryLimit, NoValue, ShapeError, UnknownName
from netkin.identity import DataDigest, Form, form_difference, form_of, settings_digest, weights_digest, with_call
from netkin.measures.registry import Measure, find
from netkin.progress import ProgressOption, command, showing
from netkin.representations import recording, rows_of, shape_for
from netkin.representations.inputs import attention_mask, length_if_known
from netkin.representations.layers import unwrapped
from netkin.representations.shapes import has_first, require_positions, token_mask, valid_tokens
from netkin.results import Comparison, Comparisons
from netkin.results.caveats import Caveat
from netkin.results.records import as_record
from netkin.settings import exact_matrix_products
from netkin.sources.tokenized import counts_in_words, joined_counts
from netkin.statistics.collector import Collector, Key, LayerSize, Owned, Study, name_of
from netkin.statistics.massive import FirstTokens, first_places
from netkin.statistics.storage import from_plain, to_plain

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

KIND = "statistics"
# options without running models
FED = ("measures", "layers", "pairs", "shape", "positions", "memory", "tokens", "seed", "errors", "chunks")
NAMED = 8  # layers that a warning names
STUDY = ("examples", "chunks", "seed", "tokens")


@dataclass(frozen=True)
class PassRecord:
    """What is known of a pass beside its statistics.

    Args:
        measures: the ids of the measures, in the order of the call.
        origins: what each model is, and how it was run.
        names: what results call the models, where not by their own names.
        data: what the data are called.
        part: which part of them, as "3/16", or which of them; empty for all.
        settings: what changes the numbers.
        resizes: whether larger feature maps were averaged down.
        plan: the statistics that were chosen, and their cost.
        ended: the stages that were interrupted.
        warnings: what to know of the data.
        texts: what was made of texts: how many there are, how many were cut, or how they were packed; by model where
            they have data of their own.
    """

    measures: Sequence[str] = ()
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    part: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    resizes: bool = False
    plan: str = ""
    ended: Sequence[str] = ()
    warnings: Sequence[str] = ()
    texts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def joined(self, other: PassRecord) -> PassRecord:
        """Return the record of the data of both."""
        data = self.data
        if other.data != data:
            data = " and ".join(dict.fromkeys([*data.split(" and "), *other.data.split(" and ")]))
        return replace(
            self, data=data, part=", ".join(part for part in (self.part, other.part) if part),
            ended=sorted({*self.ended, *other.ended}),
            warnings=list(dict.fromkeys([*self.warnings, *other.warnings])),
            texts={name: joined_counts(counts, other.texts.get(name, {})) for name, counts in self.texts.items()},
        )  # fmt: skip


class Comparer:
    """Compares the layers of models batch by batch, for people who have their own loop.

    Each batch is folded into statistics and forgotten: by `update` from rows, or by `watching` models that run anyway.
    `compute` reads the measures; `merge` adds another part of the data; `save` and `nk.load` keep it all in a file.
    `nk.compare` is a comparer that is fed by running the models on data; `nk.collect` returns it.

    Args:
        measures: one measure or several, by name with parameters, or as functions.

    Example:
        >>> comparer = Comparer(["cka", "nbs"])
        >>> for seed in range(3):
        ...     X = torch.randn(40, 8, generator=torch.Generator().manual_seed(seed))
        ...     comparer.update({"X": {"rows": X}, "its square": {"rows": X**2}})
        >>> comparer.examples, 0 < comparer.compute()["cka"]["rows", "rows"] < 1
        (120, True)
    """

    @takes_options(without=" ".join(name for name in DECLARED if name not in FED))
    def __init__(self, measures: Any = ("cka",), **options: Unpack[Options]):
        spec, _ = split({**options, "measures": measures})
        self._set(spec, measures_of(measures), Pairs([], spec.pairs), None)

    @classmethod
    def of(cls, spec: Spec, measures: Sequence[Measure], pairs: Pairs, study: Study) -> Self:
        """Return a comparer of some pairs of models, for one pass."""
        comparer = cls.__new__(cls)
        comparer._set(spec, measures, pairs, study)
        return comparer

    def _set(self, spec: Spec, measures: Sequence[Measure], pairs: Pairs, study: Study | None) -> None:
        self.spec, self.needs, self.pairs, self.is_loaded = spec, needs_of(measures), pairs, False
        self.record = PassRecord([measure.id for measure in measures], resizes=bool(spec.resize))
        limit = memory_limit(spec.limit)
        self.study = study or Study(
            {}, [], limit=limit, chunks=spec.chunk_count, seed=int(spec.seed), tokens=spec.tokens
        )
        self.alignment, self.collectors = Alignment([], []), [[] for _ in self.needs]  # type: Any, list[list[Collector]]
        self.firsts, self._with_first = FirstTokens(), set[Key]()  # layers whose first tokens are among their rows
        self.examples, self.digest = 0, DataDigest()
        self._doubt: Any = None  # of the latest batch on a GPU, which is settled with the next one
        self._fits = 0  # examples that are known to fit the memory
        self._reducers: dict[Key, list[Collector]] = {}
        self._regular = True  # until examples have different numbers of rows

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return list(dict.fromkeys(chain.from_iterable(self.pairs.of)))

    def note(self, **facts: Any) -> None:
        """Record facts on the pass, fields of its record."""
        self.record = replace(self.record, **facts)

    # --- what is read of models ---------------------------------------------------------------------------------------

    @property
    def reads(self) -> Reads:
        """What a stream must give beside rows."""
        return Reads(
            reduce=self.reduce if any(need.reduces for need in self.needs) and not self.record.resizes else None,
            targets=list(dict.fromkeys(need.target for need in self.needs if need.target is not None)),
            outputs=any("outputs" in need.feeds for need in self.needs),
            hashes=any(kind.by_content for need in self.needs for kind in need.candidates),
            resizes=self.record.resizes,
        )

    # --- feeding ------------------------------------------------------------------------------------------------------

    def begin(self, sizes: Sequence[LayerSize]) -> None:
        """Plan and start the collectors for layers of these sizes."""
        vars(self).pop("layers", None)  # where it was asked for before
        require_positions((size.shape for size in sizes), self.spec.positions)
        self.alignment, self.study = aligned(sizes, self.pairs, self.study)
        if not self.alignment.layers:
            return
        plan = make_plan(self.needs, self.study)
        self.note(plan=str(plan))
        self.firsts = FirstTokens()
        of_tokens = {key: layer for key, layer in self.study.layers.items() if layer.kind == "tokens"}
        self._with_first = {key for key, layer in of_tokens.items() if has_first(layer.shape)}
        self.collectors = [self._started(need, kind) for need, kind in zip(self.needs, plan.kinds, strict=True)]
        for need, collectors in zip(self.needs, self.collectors, strict=True):
            for collector in collectors if need.reduces else ():
                for key in collector.names:  # type: ignore[attr-defined]
                    self._reducers.setdefault(key, []).append(collector)

    def _started(self, need: Need, kind: type[Collector]) -> list[Collector]:
        """Return collectors for a need: one, or one for each number of rows an example where they are reduced."""
        if not kind.reduces:
            return [kind.start(need.settings, self.study)]
        started = []
        for rows in dict.fromkeys(layer.rows for layer in self.study.layers.values()):
            here = {key: layer for key, layer in self.study.layers.items() if layer.rows == rows}
            pair_blocks = [pair for pair in self.study.pair_blocks if pair[0][0] in here]
            started.append(kind.start(need.settings, replace(self.study, layers=here, pair_blocks=pair_blocks)))
        return started

    def take_weights(self, weights: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Feed the collectors of weights, which come once and without data."""
        for need, collectors in zip(self.needs, self.collectors, strict=True):
            for collector in collectors if need.of_weights else ():
                collector.update({"weights": weights}, np.arange(0))

    def reduce(self, key: Key, rows: Tensor, valid: Tensor | None, numbers: np.ndarray) -> KeptLayer | Tensor:
        """Return what is kept of a layer that has just run until its batch is complete."""
        collectors = self._reducers.get(key)
        if collectors is None:
            return rows
        regular = valid is None and len(rows) == self.study.layers[key].rows_of(len(numbers))
        self._regular = self._regular and regular
        if not self._regular:
            return rows
        reduced: tuple[Any, ...] = tuple(collector.reduce(key, rows, numbers) for collector in collectors)
        others = sum(not need.of_weights for need in self.needs) > len(collectors)
        # the rows themselves are gone by the time the batch is looked at
        witness = reduced[0][0] if isinstance(reduced[0], tuple) else None if others else rows.sum()
        return KeptLayer(rows if others else None, reduced, witness, len(rows))

    def take(self, batch: Batch) -> int:
        """Fold a batch in, and return how many examples it adds."""
        before, self._doubt = self._doubt, batch.doubt
        if before is not None:
            before.require_finite()
        rows = {key: kept.rows for key, kept in batch.layers.items() if kept.rows is not None}
        devices = {matrix.device for matrix in rows.values()}
        if len(devices) > 1:  # all on an accelerator
            home = next(device for device in devices if device.type != "cpu")
            rows = {key: matrix.to(home) for key, matrix in rows.items()}
        if self._with_first:
            self._count_first_tokens(rows, batch)
        rows = self.alignment.resized(rows) if self.record.resizes else rows
        place = -1  # among the needs that reduce
        with exact_matrix_products():
            for need, collectors in zip(self.needs, self.collectors, strict=True):
                if need.of_weights:
                    continue
                values: Mapping[Key, Any] = rows
                if need.reduces and not self.record.resizes:
                    place += 1
                    values = {
                        key: kept.reduced[place] if kept.reduced else rows[key] for key, kept in batch.layers.items()
                    }
                    collectors[:] = [part for whole in collectors for part in _by_rows(whole, batch.layers)]
                for collector in collectors:
                    self._feed(need, collector, values, batch)
        if batch.content is not None:
            self.digest.update(batch.content, batch.numbers)
        self.examples += batch.count
        if self.examples > max(self.study.examples or 0, self._fits):
            self._require_room()
        return batch.count

    def _count_first_tokens(self, rows: Mapping[Key, Tensor], batch: Batch) -> None:
        """Count the first tokens of the sequences, where they are among the rows."""
        places: dict[tuple[int, torch.device], Tensor] = {}  # by mask, which many layers share
        for key in self._with_first & rows.keys():
            matrix = rows[key]
            valid, count = batch.valid.get(key), len(batch.numbers)
            if valid is None:
                if len(matrix) % count == 0:
                    self.firsts.add(key, matrix, slice(None, None, len(matrix) // count))
                continue
            where = id(valid), matrix.device
            if where not in places:
                places[where] = first_places(valid).to(matrix.device)
            self.firsts.add(key, matrix, places[where])

    def flush(self) -> None:
        """Look for NaN and Inf in the latest batch, if that has not been done yet."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            doubt.require_finite()

    def _feed(self, need: Need, collector: Collector, values: Mapping[Key, Any], batch: Batch) -> None:
        names = getattr(collector, "names", self.study.layers)
        here = {key: values[key] for key in names if key in values}
        owners = self._owners(here, batch) if collector.numbers_rows or self.study.chunks else {}
        fed: dict[str, Any] = {"activations": Owned(here) if batch.owns_rows else here}
        if need.target is not None:
            gradients = batch.gradients[need.target]
            fed["gradients"] = {key: rows for key, rows in gradients.items() if key in here}
        if "outputs" in need.feeds:
            fed["outputs"] = {key[0]: batch.outputs[key[0]] for key in here}  # type: ignore[index]
        parts = _by_model(fed, batch) if collector.by_content else [(fed, batch.numbers)]
        for part, numbers in parts:
            collector.update(part, numbers, **({"owners": owners} if owners else {}))

    def _owners(self, values: Mapping[Key, Any], batch: Batch) -> dict[Key, np.ndarray]:
        """Return for layers whose examples have different numbers of rows the place of each row's example."""
        n, owners = len(batch.numbers), {}
        for key, rows in values.items():
            valid = batch.valid.get(key)
            if valid is not None:
                owners[key] = valid.nonzero()[:, 0].cpu().numpy()
            elif isinstance(rows, Tensor) and len(rows) != self.study.layers[key].rows_of(n) and len(rows) % n == 0:
                owners[key] = np.repeat(np.arange(n), len(rows) // n)
        return owners

    def _require_room(self) -> None:
        """Refuse to continue if the data have more examples than their length said, and these take too much memory."""
        self._require_room_for(self.examples)
        try:  # estimates take a while: where twice as many examples fit, they are not asked for until then
            self._require_room_for(2 * self.examples)
            self._fits = 2 * self.examples
        except MemoryLimit:
            self._fits = self.examples

    def _require_room_for(self, examples: int) -> None:
        grown = replace(self.study, examples=examples, seen=True)
        for need, collectors in zip(self.needs, self.collectors, strict=True):
            for collector in collectors[:1]:
                cost = type(collector).cost(need.settings, grown)
                if cost is not None:
                    require_within(self.study, cost.bytes, cost.what, cost.advice)

    # --- one's own loop -----------------------------------------------------------------------------------------------

    def plan(self, a: Any, b: Any = None, data: Any = None) -> Plan:
        """Return what comparing two models on data would cost; nothing is collected."""
        from netkin.comparing.compare import explain  # it makes comparers

        options: Any = {name: getattr(self.spec, name) for name in FED if name != "measures"}
        return explain(a, b, data, self.record.measures, **options)

    def update(self, rows: Mapping[str, Mapping[str, Any]], *, valid: Any = None, numbers: Any = None) -> None:
        """Fold in one batch: of each model, by its name, what its layers gave for the same examples.

        A batch that is refused leaves the comparer as it was. Calls from several threads must wait for each other.

        Args:
            rows: what layers gave, examples first, by model and layer; in every batch of the same ones.
            valid: which tokens count, examples × tokens, for all models or by name; None for all tokens.
            numbers: the numbers of the examples, by which parts of the data are told apart; counted if None.
        """
        if self.is_loaded:
            raise InvalidValue("a comparer from a file is read and merged; feed a new one, and merge the two.")
        if any(need.of_weights or need.feeds != {"activations"} for need in self.needs):
            raise InvalidValue(
                "these measures read gradients, outputs or weights, which rows do not hold; use `nk.compare`."
            )
        before = dict(vars(self))
        try:
            self._update(rows, valid, numbers)
        except BaseException:
            if not self.examples:  # what the first batch has set
                vars(self).clear()
                vars(self).update(before)
            raise

    def _update(self, rows: Mapping[str, Mapping[str, Any]], valid: Any, numbers: Any) -> None:
        are_named = isinstance(rows, Mapping) and all(isinstance(of_model, Mapping) for of_model in rows.values())
        if not (are_named and any(rows.values())):
            raise InvalidValue("`rows` are given by model and layer, as {'a': {'layer': rows}}.", argument="rows")
        outputs = {
            (model, layer): as_tensor(output, f"{model}/{layer}").detach()
            for model, of_model in rows.items()
            for layer, output in of_model.items()
        }
        (first, examples), *others = ((key, len(output) if output.ndim else 0) for key, output in outputs.items())
        for key, count in others:
            if count != examples:
                raise ShapeError(
                    f"layer {name_of(first)!r} has {examples:,} examples and layer {name_of(key)!r} {count:,}; give "
                    "both for the same batch, examples first."
                )
        if not examples:
            raise ShapeError(f"layer {name_of(first)!r} has no examples; give at least one.")
        if isinstance(valid, Mapping) and (strange := [name for name in valid if name not in rows]):
            raise InvalidValue(f"`valid` names {strange[0]!r}, which is none of the models.", argument="valid")
        by_name = {model: valid.get(model) if isinstance(valid, Mapping) else valid for model in rows}
        token_masks = {model: None if mask is None else token_mask(mask) for model, mask in by_name.items()}
        layers, masks, sizes = dict[Key, KeptLayer](), dict[Key, Tensor](), list[LayerSize]()
        for (model, layer), output in outputs.items():
            mask = token_masks[model]
            matrix, shape = rows_of(output, shape_for(layer, self.spec.shape), mask)
            layers[model, layer] = KeptLayer(matrix, length=len(matrix))
            if (tokens := valid_tokens(mask, shape)) is not None:
                masks[model, layer] = tokens
            width, item = matrix.shape[1:].numel(), matrix.element_size()
            sizes.append(LayerSize(model, layer, width, len(matrix), examples, shape, itemsize=item))
        if not self.models:
            self._name_models(list(rows))
            self.begin(sizes)
        self._require_same_layers(layers)
        places = self._numbered(numbers, examples)

        def locate() -> None:
            for key, kept in layers.items():
                assert kept.rows is not None
                require_finite(kept.rows, f"layer {name_of(key)!r}")

        content = {name_of(key): output for key, output in outputs.items()}
        sizes_before = self.alignment.given
        self.take(make_batch(layers, sizes_before, examples, lambda _: places, locate, valid=masks, content=content))

    def _numbered(self, numbers: Any, examples: int) -> np.ndarray:
        """Return the numbers of the next examples; those that were given before are refused."""
        if numbers is None:
            return max((stop for _, stop in self.ranges), default=0) + np.arange(examples)
        places = np.asarray(numbers, dtype=np.int64)
        if len(places) != examples:
            raise ShapeError(
                f"`numbers` holds {len(places):,} numbers for {examples:,} examples; give one for each.",
                argument="numbers",
            )
        repeated = [int(number) for number in places if any(start <= number < stop for start, stop in self.ranges)]
        if repeated or len(np.unique(places)) < len(places):
            which = repeated[0] if repeated else "a number"
            raise InvalidValue(
                f"`numbers` has {which} twice; each example is given once, with its own.", argument="numbers"
            )
        return places

    def _name_models(self, models: Sequence[str]) -> None:
        of = [(models[0], models[0])] if len(models) == 1 else list(combinations(models, 2))
        self.pairs = Pairs(of, self.spec.pairs)
        origins = {model: self.record.origins.get(model, {"model": "recorded"}) for model in models}
        self.note(origins=origins, data="recorded")

    def _require_same_layers(self, layers: Mapping[Key, Any]) -> None:
        missing = [key for key in self.alignment.given if key not in layers]
        strange = [key for key in layers if key not in self.alignment.given]
        if missing or strange:
            key, what = (missing[0], "lacks") if missing else (strange[0], "has, unlike those before,")
            raise ShapeError(f"this batch {what} the layer {name_of(key)!r}; every batch needs the same layers.")

    @contextmanager
    def watching(self, **models: nn.Module) -> Iterator[None]:
        """Fold in the batch on which these models are run inside the `with`, each of them once.

        The first axis of every output is taken for that of the examples; which tokens count is read from the model's
        keyword `attention_mask`. Modes, gradients and random states are left alone; what layers give is detached. An
        exception drops the batch.
        """
        choices, fed = layers_by_name(self.spec.layers, list(models)), dict[str, tuple[Any, Any]]()
        outputs: dict[str, Mapping[str, Tensor]] = {}
        with ExitStack() as stack:
            for name, model in models.items():
                keep = recording(model, choices[name], lambda _, output: output.detach().clone())
                outputs[name] = stack.enter_context(keep)

                def before(_: Any, inputs: Any, keywords: Any, name: str = name) -> None:
                    if name in fed:
                        raise ForwardError(
                            f"{name!r} ran twice inside one `watching`; give each run a `with` of its own."
                        )
                    fed[name] = (inputs, keywords)

                stack.callback(unwrapped(model).register_forward_pre_hook(before, with_kwargs=True).remove)
            yield
            rows = {name: dict(of_model) for name, of_model in outputs.items()}
        absent = [name for name in models if name not in fed]
        if absent:
            raise ForwardError(f"{absent[0]!r} did not run inside `watching`; run each model once in every `with`.")
        if not self.record.origins:
            self.note(
                origins={
                    name: {
                        "model": type(model).__name__,
                        "weights": weights_digest(model),
                        "form": form_of(model).to_json(),
                    }
                    for name, model in models.items()
                }
            )
        masks = {name: mask for name, (_, keywords) in fed.items() if (mask := attention_mask(keywords)) is not None}
        for name, (inputs, keywords) in fed.items():
            length = length_if_known(inputs or keywords)
            rows[name] = _of_examples(name, rows[name], length, is_default=choices[name] is None)
        self.update(rows, valid=masks)

    # --- reading ------------------------------------------------------------------------------------------------------

    @with_call
    def compute(self, measures: Any = None, *, progress: ProgressOption = None) -> Comparison | Comparisons:
        """Return the comparison by some measures, by default those that were collected for.

        Of several pairs of models it gives all their comparisons. Standard errors come where chunks were kept.
        """
        from netkin.comparing.tabulating import comparisons_of  # it reads comparers

        self.flush()
        collected = self.record.measures or [name for need in self.needs for name in need.measures]
        wanted = measures_of(collected if measures is None else measures)
        if not self.models:
            raise InvalidValue("nothing was compared yet; call `update`, or run models inside `watching`.")
        with showing(progress):
            for measure in wanted if any(self.collectors) else ():
                self.collector(measure)
            comparisons = comparisons_of(self, wanted, self.pairs.of)
        return comparisons[0] if len(comparisons) == 1 else Comparisons(comparisons)

    def finish(self, origins: Mapping[str, dict[str, Any]], left_out: Mapping[str, Mapping[str, str]]) -> None:
        """Record of what models the statistics are, and which of their default layers were left out, at the end."""
        self.note(origins=dict(origins))
        reasons = {
            f"{layer!r} of {model!r}": why for model, layers in left_out.items() for layer, why in layers.items()
        }
        if reasons:
            named = ", ".join(list(reasons)[:NAMED])
            more = f" and {len(reasons) - NAMED} others" if len(reasons) > NAMED else ""
            left = f"default layers were left out: {named}{more}. Why: {next(iter(reasons.values()))}."
            self.note(warnings=[*self.record.warnings, left])

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The numbers of the examples that were seen, as ranges (first, one behind the last)."""
        return self.digest.ranges

    @cached_property
    def layers(self) -> dict[str, list[LayerSize]]:
        """The layers of each model."""
        layers: dict[str, list[LayerSize]] = {name: [] for name in self.models}
        for layer in self.alignment.result_layers:
            if layer.model in layers:
                layers[layer.model].append(layer)
        return layers

    @property
    def missing(self) -> str:
        """A sentence if parts of the data have not been merged in, else empty."""
        is_part = self.record.part or self.ranges not in ([], [(0, self.examples)])
        if not is_part or self.examples >= self.expected or self.record.ended:
            return ""
        return f"these numbers rest on {self.examples:,} of {self.expected:,} examples: not all parts have been merged."

    @property
    def caveats(self) -> list[Caveat]:
        """What to know of the data: that parts are missing, and which layers and examples were left out."""
        parts = [Caveat("missing-parts", self.missing)] if self.missing else []
        cut = [
            Caveat("cut-texts", f"{counts_in_words(counts)}{f', for {name!r}' if name else ''}.")
            for name, counts in self.record.texts.items()
            if counts.get("cut")
        ]
        return parts + cut + [Caveat("data", text) for text in self.record.warnings]

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
        precisions = {str(getattr(collector, "precision", "")).removeprefix("torch.") for collector in self.every()}
        return ", ".join(sorted(precisions - {""})) or ("float64" if self.study.doubles else "float32")

    def every(self) -> Iterator[Collector]:
        """Yield all collectors."""
        for collectors in self.collectors:
            yield from collectors

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
        for collector in self.every():
            if collector.kind not in known:
                continue
            missing = collector.serves(type(collector).settings_for(measure))
            if missing:
                lacking.append(f"{collector.kind} without {missing}")
            elif key is None or key in getattr(collector, "names", [key]):
                return collector
        held = ", ".join(dict.fromkeys(lacking or [collector.kind for collector in self.every()])) or "nothing"
        raise InvalidValue(
            f"these statistics can't serve {measure.id!r}: they hold {held}. Collect with measures=[{measure.id!r}]."
        )

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(collector.kind for collector in self.every())) or "nothing"
        chunks = f" in {self.study.chunks} chunks" if self.study.chunks else ""
        return f"Comparer({', '.join(map(repr, self.models))}; {self.examples:,} examples{chunks}; {kinds})"

    # --- merging and files --------------------------------------------------------------------------------------------

    def merge(self, other: Comparer) -> Comparer:
        """Return a comparer of the data of both parts; neither is changed."""
        if not isinstance(other, Comparer):
            raise ShapeError(f"a comparer can't be merged with a {type(other).__name__}; load its file with `nk.load`.")
        for part in (self, other):
            part.flush()
        self._require_mergeable(other)
        merged = copy(self)
        merged.collectors = [
            [mine.like(theirs).merge(theirs.like(mine)) for mine, theirs in zip(x, y, strict=True)]
            for x, y in zip(self.collectors, other.collectors, strict=True)
        ]
        merged.examples, merged.record = self.examples + other.examples, self.record.joined(other.record)
        merged.firsts = self.firsts.merged(other.firsts)
        merged.digest = DataDigest.from_json(self.digest.to_json())
        merged.digest.merge(other.digest)
        return merged

    def _require_mergeable(self, other: Comparer) -> None:
        if not (self.examples and other.examples):
            raise ShapeError("statistics of weights alone hold no examples, so there is nothing to merge.")
        for name in self.models:
            forms = [str(part.record.origins.get(name, {}).get("form", "")) for part in (self, other)]
            if all(forms) and (difference := form_difference(*map(Form.from_json, forms))):
                raise ShapeError(f"these parts can't be merged: the architecture of {name!r} differs in {difference}.")
        if list(map(bool, self.collectors)) != list(map(bool, other.collectors)):
            raise ShapeError(
                "these parts can't be merged: in one of them no layers give rows that pair; take a shape with one row "
                "for each example, such as 'mean'."
            )
        for what, (mine, theirs) in _differences(self, other):
            if mine != theirs:
                raise ShapeError(f"these parts can't be merged: their {what} differ, {mine} and {theirs}.")
        common = self.digest.common(other.digest)
        if common:
            raise ShapeError(
                f"these parts overlap: both hold the examples {common[0]:,} to {common[1] - 1:,}; merge each part "
                "once, and give separate loaders their `start`."
            )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all to one file, whole or not at all; over another file only with `overwrite`."""
        self.flush()
        files.write(path, KIND, *self.to_arrays(), overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparer:
        """Return the comparer that was saved at `path`."""
        return load_comparer(path)

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return all that `from_arrays` needs: a header for JSON, and named arrays in the host's memory."""
        self.flush()
        tensors: dict[str, Tensor] = {}
        collectors = to_plain(self.collectors, tensors, "collectors")
        firsts = to_plain(self.firsts, tensors, "firsts")
        header = {
            "version": __version__,
            "record": asdict(self.record),
            "examples": self.examples,
            "digest": self.digest.to_json(),
            "pairs": [self.pairs.of, self.pairs.which],
            "layers": [asdict(layer) for layer in self.alignment.given.values()],
            "needs": [{"measures": need.measures, "settings": to_plain(need.settings, {}, "")} for need in self.needs],
            "study": {name: getattr(self.study, name) for name in STUDY},
            "collectors": collectors,
            "firsts": firsts,
        }
        return header, {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


Comparer.__doc__ = documented(Comparer.__doc__ or "", FED)


def load_comparer(path: str | os.PathLike[str]) -> Comparer:
    """Return the comparer that was saved at `path`."""
    header, arrays = files.read(path, KIND)
    with files.damage_reported(path):
        for need in header["needs"]:
            try:
                find(need["measures"][0])
            except UnknownName as absent:
                raise FileError(
                    f"{str(path)!r} holds a statistic of a package that is not installed: {absent} Install the package."
                ) from absent
        return from_arrays(header, arrays)


def from_arrays(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Comparer:
    """Return the comparer that `to_arrays` took apart; arrays may be shared with other processes, and are copied."""
    of, which = header["pairs"]
    which = which if isinstance(which, str) else [tuple(pair) for pair in which]
    study, tensors = Study({}, [], **header["study"]), {name: torch.from_numpy(arrays[name].copy()) for name in arrays}
    errors: dict[str, Any] = {"errors": True, "chunks": study.chunks} if study.chunks else {}
    spec = Spec(measures=header["record"]["measures"], pairs=which, seed=study.seed, **errors)
    comparer = Comparer.of(spec, [], Pairs(of, which), study)
    sizes = [as_record(LayerSize, layer) for layer in header["layers"]]
    comparer.alignment, comparer.study = aligned(sizes, comparer.pairs, study)
    comparer.needs = [_need(need) for need in header["needs"]]
    comparer.record, comparer.examples = PassRecord(**header["record"]), header["examples"]
    comparer.digest = DataDigest.from_json(header["digest"])
    comparer.collectors, comparer.is_loaded = from_plain(header["collectors"], tensors), True
    comparer.firsts = from_plain(header["firsts"], tensors)
    return comparer


def _need(header: Mapping[str, Any]) -> Need:
    measure = find(header["measures"][0])
    return Need(ready_collectors(measure), from_plain(header["settings"], {}), tuple(header["measures"]))


def _differences(*parts: Comparer) -> Iterator[tuple[str, list[Any]]]:
    """Yield what must be the same in two parts: what it is called, and what each has."""
    first, second = parts
    yield "models", [part.models for part in parts]
    for name in first.models:
        yield f"weights of {name!r}", [part.record.origins[name].get("weights", "") for part in parts]
        yield f"layers of {name!r}", [[(layer.name, layer.width) for layer in part.layers[name]] for part in parts]
        yield f"shapes of {name!r}", [{layer.name: layer.shape for layer in part.layers[name]} for part in parts]
    yield "pairs", [part.pairs.words for part in parts]
    measures = [[list(need.measures) for need in part.needs] for part in parts]
    short: list[Any] = list(map(_unshared, measures, measures[::-1]))
    yield "measures", measures if short[0] == short[1] else short
    yield "numbers of chunks", [part.study.chunks for part in parts]
    yield "seeds", [part.study.seed for part in parts]
    for name in {**first.record.settings, **second.record.settings}:
        yield f"settings of {name!r}", [part.record.settings.get(name, "none") for part in parts]
    if first.record.part and second.record.part:  # parts of one set; separate loaders may go by other names
        yield "data", [part.record.data for part in parts]


def _unshared(mine: list[list[str]], theirs: list[list[str]]) -> str:
    """Return as text the measures of one part that the other lacks; all of them where it lacks none."""
    names, others = (list(chain.from_iterable(measures)) for measures in (mine, theirs))
    lacking = [name for name in names if name not in others] or names
    return ", ".join(lacking[:NAMED]) + (f" and {len(lacking) - NAMED} others" if len(lacking) > NAMED else "")


def measures_of(measures: Any) -> list[Measure]:
    """Return the measures requested, each once."""
    requested = [measures] if isinstance(measures, str) or not isinstance(measures, Iterable) else measures
    by_id = {measure.id: measure for measure in map(find, requested)}
    if not by_id:
        raise InvalidValue("`measures` is empty; name at least one, e.g. 'cka'.", argument="measures")
    return list(by_id.values())


def provenance_of_all(comparer: Comparer) -> dict[str, str]:
    """Return how all models were compared, as text."""
    return {
        "pairs": comparer.pairs.words,
        "resize": "average" if comparer.record.resizes else "none",
        "plan": comparer.record.plan,
        **{f"texts {name}".rstrip(): counts_in_words(counts) for name, counts in comparer.record.texts.items()},
        **({"data digest": comparer.digest.hex} if comparer.examples else {}),
        **({"settings digest": settings_digest(comparer.record.settings)} if comparer.record.settings else {}),
        **({"call": command()} if command() else {}),
        "products": comparer.products,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _by_rows(collector: Any, layers: Mapping[Key, KeptLayer]) -> list[Collector]:
    """Return a collector, or several where its layers give different numbers of rows from now on."""
    groups: dict[int, list[Key]] = {}
    for key in collector.names:
        groups.setdefault(layers[key].length, []).append(key)
    return [collector] if len(groups) == 1 else [collector.restricted(keys) for keys in groups.values()]


def _by_model(fed: Mapping[str, Any], batch: Batch) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield the rows of each model with hashes of what its examples are."""
    for model in dict.fromkeys(key[0] for key in fed["activations"]):
        keys = {key: key for key in fed.get("outputs", ())} | {key: key[0] for key in fed["activations"]}
        of_model = {feed: {key: rows[key] for key in rows if keys[key] == model} for feed, rows in fed.items()}
        yield of_model, batch.hashes.get(model, batch.numbers)


def _of_examples(name: str, outputs: Mapping[str, Tensor], length: int | None, is_default: bool) -> dict[str, Tensor]:
    """Return the outputs of layers whose first axis counts the examples; others are left out, or refused if named."""
    with_examples = {layer: out for layer, out in outputs.items() if length is None or out.shape[:1] == (length,)}
    strange = [layer for layer in outputs if layer not in with_examples]
    if strange and not (is_default and with_examples):
        raise ShapeError(
            f"layer {strange[0]!r} of {name!r} gives an output of shape {tuple(outputs[strange[0]].shape)} for a batch "
            f"of {length} examples, whose first axis does not count them; choose other `layers=`."
        )
    return with_examples
