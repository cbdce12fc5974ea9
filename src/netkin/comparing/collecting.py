"""One pass over the data: every model runs once on each batch, and the collectors are updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import require_finite
from netkin.comparing.alignment import ONE_ROW, Alignment, Pairs, size_of_layer, size_of_weights
from netkin.comparing.engines import PassEngine
from netkin.comparing.feed import Feed, content_of
from netkin.comparing.pass_statistics import Statistics
from netkin.comparing.planning import Need, make_plan, needs_of, refuse_over, weights_of
from netkin.comparing.subjects import Keep, Runner
from netkin.errors import InvalidValue, ShapeError, blame
from netkin.identity import DataDigest
from netkin.identity.data import contents
from netkin.measures.registry import Measure
from netkin.progress import Interruption, reporting
from netkin.representations.gradients import Target
from netkin.settings import exact_matrix_products
from netkin.statistics.collector import Collector, Key, LayerSize, Owned, Study, name_of


class KeptLayer(NamedTuple):
    """What is kept of one layer's rows until the batch is folded in."""

    rows: Tensor | None
    reduced: tuple[Any, ...]  # by the collectors that reduce, in their order
    witness: Tensor | None  # numbers that are finite if the rows are; None where the rows are there themselves
    length: int


class Pass:
    """One pass over the data, which makes a `Statistics`."""

    def __init__(
        self,
        runners: Sequence[Runner],
        measures: Sequence[Measure],
        pairs: Pairs,
        study: Study,
        *,
        engine: PassEngine,
        partial: bool = False,
    ):
        self.engine, self._feed = engine, cast(Feed, None)
        self.runners, self.needs, self.pairs, self.study = runners, needs_of(measures), pairs, study
        self.interruption = Interruption(partial)
        self.statistics: Statistics | None = None
        self.examples, self.batches, self._digest = 0, 0, DataDigest()
        self._of_weights = [need for need in self.needs if need.feeds == {"weights"}]
        self._paired = any(kind.pairs_rows for need in self.needs for kind in need.candidates)
        self._numbered = self._paired  # whether one number identifies an example for all models
        self._one_content = False  # whether the batch itself is what the examples are, for all models
        self._seen: dict[str, int] = {}  # examples of each model, where their data differ
        self._reducing = [need for need in self.needs if all(kind.reduces for kind in need.candidates)]
        self._reducers: dict[tuple[int, int], Collector] = {}  # by the place of their need, and the number of rows
        self._layers: dict[Key, LayerSize] = {}
        self._numbers = np.arange(0)
        self._doubt: tuple[Tensor, Any, Mapping[Runner, Any], int] | None = None  # a batch not looked at yet
        self._searching: int | None = None  # the batch that is run again to find NaN and Inf
        self._resizes = any(runner.resizes for runner in runners)
        self._regular = True  # until examples have different numbers of rows
        self._owns = all(runner.hands_over for runner in runners)
        self._targets = list(dict.fromkeys(need.target for need in self.needs if need.target is not None))
        self._gradients: dict[Target, dict[Key, Tensor]] = {}
        self._outputs: dict[str, tuple[Tensor, Any]] = {}  # logits and labels of a batch, for each model
        self._wants_outputs = any("outputs" in need.feeds for need in self.needs)
        self._by_content = any(kind.by_content for need in self.needs for kind in need.candidates)
        self._contents: dict[str, np.ndarray] = {}  # hashes of what the examples of a batch are, for each model
        self._rounds = torch.cuda.is_available()  # as products on a GPU may be

    def run(self, feed: Feed) -> Statistics:
        """Run the pass; a requested interruption ends it after the current batch."""
        self._feed, self._numbered = feed, self._paired or feed.is_one
        self._one_content = feed.is_one and all(runner.has_content for runner in self.runners)
        with ExitStack() as stack:
            stack.enter_context(self.interruption.ending("reading", lambda: self.examples > 0))
            stack.enter_context(self.interruption.handling())
            for runner in self.runners:
                runner.targets, runner.wants_outputs = self._targets, self._wants_outputs
                stack.enter_context(runner.ready(self._keeper(runner)))
            report = stack.enter_context(reporting(feed.length, "reading", "examples"))
            for batches in feed:
                self.engine.check_others()
                report.update(self._take(batches))
            self._settle()
        assert self.statistics is not None
        self.statistics.finish(self.runners, self.examples, self._digest, self.interruption.ended)
        return self.statistics

    def collect_weights(self) -> Statistics:
        """Feed the weights alone to their collectors, where no measure needs data."""
        found = {runner: weights_of(runner, self.needs) for runner in self.runners}
        sizes = [size_of_weights(runner.name, *one) for runner, layers in found.items() for one in layers.items()]
        self._layers = {size.key: size for size in sizes}
        statistics = self._begin({runner.name: 1 for runner in self.runners})
        statistics.finish(self.runners, 0, self._digest, set())
        return statistics

    # --- one batch ----------------------------------------------------------------------------------------------------

    def _take(self, batches: Mapping[Runner, Any]) -> int:
        """Run every model on its batch, fold in what they gave and return the number of examples."""
        first, known = next(iter(batches)), self._feed.known
        numbers = self._numbers = self._feed.numbers(first, self.examples, known or 0)
        kept = self._run_models(batches)
        self._check_finite(kept, batches)
        if self._paired:
            count = self._examples_in(kept, known)
        else:  # those of different data together
            count = sum({id(own): runner.length(own) or 0 for runner, own in batches.items()}.values())
        if count != known:
            numbers = self._numbers = self._feed.numbers(first, self.examples, count)
        with ExitStack() as stack:
            if self.interruption.wanted:  # which waits for the end of the batch
                stack.enter_context(self.interruption.deferring())
            if self._rounds:
                stack.enter_context(exact_matrix_products())
            if self.statistics is None:
                counts = {one.name: count if self._paired else one.length(own) or 1 for one, own in batches.items()}
                stack.enter_context(self.engine.opening(self._begin(counts)))
            if self._paired:
                self._fold(kept)
            for runner in () if self._paired else batches:
                self._fold({key: one for key, one in kept.items() if self._layers[key].model == runner.name})
            if known is not None and self._numbered:
                self._digest.update(batches[first] if self._one_content else content_of(batches), numbers)
            self.examples, self.batches = self.examples + count, self.batches + 1
        if self.examples > (self.study.examples or 0):
            self._refuse_outgrown()
        return count

    def _run_models(self, batches: Mapping[Runner, Any]) -> dict[Key, KeptLayer]:
        """Run every model on its batch and return what is kept of each layer."""
        kept: dict[Key, KeptLayer] = {}
        for runner, own in batches.items():
            try:
                found = runner.rows(own)
            except Exception as fault:
                self._blame(fault, runner, own, self.batches)
                raise
            for layer, value in found.items():
                if not isinstance(value, KeptLayer):
                    if self.statistics is None:
                        self._layers[runner.name, layer] = size_of_layer(runner, layer, value)
                    value = KeptLayer(value, (), None, len(value))
                kept[runner.name, layer] = value
            if self._targets or self._by_content or self._wants_outputs:
                self._keep_other_feeds(runner, own)
        return kept

    def _keep_other_feeds(self, runner: Runner, batch: Any) -> None:
        """Keep gradients at a model's latest rows, its outputs and what its examples are, as collectors request."""
        if self._wants_outputs:
            self._outputs[runner.name] = runner.outputs(batch)
        for target in self._targets:
            found = self._gradients.setdefault(target, {})
            found |= {(runner.name, layer): rows for layer, rows in runner.gradients(target).items()}
        length = runner.length(batch)
        if self._by_content and runner.has_content and length is not None:
            self._contents[runner.name] = contents(runner.content(batch), length).cpu().numpy()

    def _keeper(self, runner: Runner) -> Keep:
        """Return what a hook keeps of a layer's rows: the rows, or what collectors reduce them to at once."""
        if self._resizes or not self._reducing:
            return lambda layer, rows, valid: rows

        def keep(layer: str, rows: Tensor, valid: Tensor | None) -> KeptLayer:
            if self.statistics is None:
                self._layers[runner.name, layer] = size_of_layer(runner, layer, rows)
            if self._searching is not None:
                require_finite(rows, self._where(runner, layer))
            try:
                with exact_matrix_products():
                    reduced = tuple(self._reduce((runner.name, layer), rows, valid))
            except InvalidValue:
                require_finite(rows, self._where(runner, layer))
                raise
            needed = len(self._reducing) + len(self._of_weights) < len(self.needs)
            # the rows themselves are gone by the time the batch is looked at
            witness = reduced[0][0] if isinstance(reduced[0], tuple) else None if needed else rows.sum()
            return KeptLayer(rows if needed else None, reduced, witness, rows.shape[0])

        return keep

    def _where(self, runner: Runner, layer: str) -> str:
        number = self.batches if self._searching is None else self._searching
        return f"layer {layer!r} of {runner.name!r} in batch {number}"

    def _reduce(self, key: tuple[str, str], rows: Tensor, valid: Tensor | None) -> Iterator[Any]:
        """Yield what each collector that reduces keeps of rows; the rows where examples differ in their numbers."""
        begun = None if self.statistics is None else self.study.layers.get(key)
        regular = valid is None and (begun is None or len(rows) == begun.rows_of(len(self._numbers)))
        self._regular = self._regular and regular
        for place, need in enumerate(self._reducing):
            if not self._regular:
                yield rows
                continue
            group = (place, self._layers[key].rows)
            if group not in self._reducers:  # before the first batch has named the layers
                self._reducers[group] = need.candidates[0].start(
                    need.settings, replace(self.study, layers={}, pair_blocks=[])
                )
            yield self._reducers[group].reduce(key, rows, self._numbers)

    def _check_finite(self, kept: Mapping[Key, KeptLayer], batches: Mapping[Runner, Any]) -> None:
        """Look for NaN and Inf, at the price of one number for each layer, whose square would be finite but for them.

        Numbers over 1e19 in float32 raise the same doubt, which a second run of the batch lifts. On a GPU one batch
        behind: by then its numbers are there, and the current batch is not waited for.
        """
        rows = [one.rows for one in kept.values() if one.witness is None and one.rows is not None]
        rows += [one for own in self._gradients.values() for one in own.values()]
        rows += [logits for logits, _ in self._outputs.values()]
        found = list(torch._foreach_norm(rows)) if rows else []
        witnesses = [one.witness for one in kept.values() if one.witness is not None]
        found += torch._foreach_norm(witnesses, 1) if witnesses else []  # sums, as Gram matrices are squares already
        together = torch.stack([one if one.device == found[0].device else one.to(found[0].device) for one in found])
        fine = torch.isfinite(together).all()  # of each layer alone it would be four kernels a layer
        if fine.is_cuda:
            self._settle()
            # sent now: asked for later, it would wait for all that the device has been given until then
            here = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fine, non_blocking=True)
            sent = torch.cuda.current_stream(fine.device).record_event()
            self._doubt = (here, sent, batches, self.batches)
        elif not bool(fine):
            self._doubt = (fine, None, batches, self.batches)
            self._settle()

    def _settle(self) -> None:
        """Refuse the batch in doubt if it holds NaN or Inf; a second run finds where they are."""
        if self._doubt is None:
            return
        (fine, sent, batches, self._searching), self._doubt = self._doubt, None
        if sent is not None:
            sent.synchronize()
        for runner, batch in {} if bool(fine) else batches.items():
            try:
                self._refuse_non_finite(runner, batch)
            except Exception as fault:
                self._blame(fault, runner, batch, self._searching)
                raise
        self._searching = None

    def _blame(self, fault: Exception, runner: Runner, batch: Any, number: int) -> None:
        """Give a fault the name of its model; NaN and Inf that were in the inputs are no fault of a layer."""
        blame(fault, runner.name)
        if isinstance(fault, InvalidValue):
            runner.require_finite_inputs(batch, number)

    def _refuse_non_finite(self, runner: Runner, batch: Any) -> None:
        for layer, value in runner.rows(batch).items():
            if not isinstance(value, KeptLayer):
                require_finite(value, self._where(runner, layer))
        for target in self._targets:
            for layer, rows in runner.gradients(target).items():
                require_finite(rows, f"the gradient at {self._where(runner, layer)}")
        if self._wants_outputs:
            require_finite(runner.outputs(batch)[0], f"the output of {runner.name!r} in batch {self._searching}")

    def _examples_in(self, kept: Mapping[Key, KeptLayer], known: int | None) -> int:
        """Return the number of examples in a batch, which all models must have kept."""
        single = {key: one.length for key, one in kept.items() if self._layers[key].shape in ONE_ROW}
        if len(set(single.values())) > 1:
            (a, n), (b, m) = min(single.items(), key=lambda one: one[1]), max(single.items(), key=lambda one: one[1])
            raise ShapeError(
                f"layer {name_of(a)!r} gave {n:,} rows and layer {name_of(b)!r} {m:,} for the same batch; models and "
                "transforms must keep every example."
            )
        return next(iter(single.values()), None) or known or min(one.length for one in kept.values())

    def _fold(self, kept: Mapping[Key, KeptLayer]) -> None:
        """Feed the collectors what layers gave for the same examples: all of them, or those of one model."""
        assert self.statistics is not None
        if not self._paired:
            self._numbers = self._own_numbers(kept)
        rows = {key: one.rows for key, one in kept.items() if one.rows is not None}
        devices = {matrix.device for matrix in rows.values()}
        if len(devices) > 1:  # all on an accelerator
            home = next(device for device in devices if device.type != "cpu")
            rows = {key: matrix.to(home) for key, matrix in rows.items()}
        rows = self.statistics.alignment.resized(rows) if self._resizes else rows
        for need, collectors in zip(self.needs, self.statistics.collectors, strict=True):
            if need in self._of_weights:
                continue
            given: Mapping[Key, Any] = rows
            if not self._resizes and need in self._reducing:
                place = self._reducing.index(need)
                given = {key: one.reduced[place] for key, one in kept.items()}
                collectors[:] = [one for collector in collectors for one in _by_rows(collector, kept)]
            for collector in collectors:
                names = getattr(collector, "names", self.study.layers)
                here = {key: given[key] for key in names if key in given}
                owners = self._owners(here) if collector.numbers_rows or self.study.chunks else {}
                fed: dict[str, Any] = {"activations": Owned(here) if self._owns else here}
                if need.feeds != {"activations"}:
                    fed |= self._other_feeds(need, here)
                every = self._rows_by_model(fed) if collector.by_content else [(fed, self._numbers)]
                for part, numbers in every:
                    collector.update(part, numbers, **({"owners": owners} if owners else {}))

    def _other_feeds(self, need: Need, keys: Mapping[Key, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the gradients at some layers and the outputs of their models, as a need requests them, by feed."""
        if need.target is not None:
            yield "gradients", {key: one for key, one in self._gradients[need.target].items() if key in keys}
        if "outputs" in need.feeds:
            yield "outputs", {self.study.layers[key].model: self._outputs[self.study.layers[key].model] for key in keys}

    def _rows_by_model(self, fed: dict[str, Any]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """Yield the rows of each model with hashes of what its examples are."""
        for model in dict.fromkeys(key[0] for key in fed["activations"]):
            keys = {key: key for key in fed.get("outputs", ())} | {key: key[0] for key in fed["activations"]}
            own = {feed: {key: one for key, one in rows.items() if keys[key] == model} for feed, rows in fed.items()}
            yield own, self._contents.get(model, self._numbers)

    def _own_numbers(self, kept: Mapping[Key, KeptLayer]) -> np.ndarray:
        """Return the numbers of one model's examples in its own data."""
        key, one = next(iter(kept.items()))
        model, count = self._layers[key].model, round(one.length / self._layers[key].rows_per_example)
        seen = self._seen.get(model, 0)
        self._seen[model] = seen + count
        return self._feed.numbers(next(one for one in self.runners if one.name == model), seen, count)

    def _owners(self, given: Mapping[Key, Any]) -> dict[Key, np.ndarray]:
        """Return for layers whose examples have different numbers of rows the place of each row's example."""
        n, found = len(self._numbers), {}
        by_name = {runner.name: runner for runner in self.runners}
        for key, rows in given.items():
            layer = self.study.layers[key]
            valid = by_name[layer.model].valid(layer.name)
            if valid is not None:
                found[key] = valid.nonzero()[:, 0].cpu().numpy()
            elif isinstance(rows, Tensor) and len(rows) != layer.rows_of(n) and len(rows) % n == 0:
                found[key] = np.repeat(np.arange(n), len(rows) // n)
        return found

    # --- the first batch ----------------------------------------------------------------------------------------------

    def _begin(self, counts: Mapping[str, int]) -> Statistics:
        """Plan and start the collectors, now that the first batch has told names, widths and examples of each model."""
        for key, layer in self._layers.items():
            count = counts[layer.model]
            # where they are not paired, batches may differ in size; what matters is how many rows an example has
            rows, examples = (layer.rows, count) if self._paired else (layer.rows // count, 1)
            self._layers[key] = replace(layer, rows=rows, examples=examples)
        everything = list(self._layers.values())
        names = {one.name: [layer.name for layer in everything if layer.model == one.name] for one in self.runners}
        alignment = Alignment(everything, self.pairs.pair_blocks(names))
        self.study = replace(self.study, layers=alignment.layers, pair_blocks=alignment.pair_blocks)
        self.statistics = Statistics(self.runners, self.pairs, self.study, alignment, self.needs)
        if alignment.layers:
            plan = make_plan(self.needs, self.study)
            collectors = [self._start(*one) for one in zip(self.needs, plan.kinds, strict=True)]
            self.statistics.plan, self.statistics.collectors = str(plan), collectors
            for need, own in zip(self.needs, collectors, strict=True):
                if need in self._of_weights:
                    own[0].update({"weights": self._weights(names)}, np.arange(0))
        return self.statistics

    def _weights(self, names: Mapping[str, Sequence[str]]) -> dict[Key, Mapping[str, Tensor]]:
        """Return the weights of every layer by its key."""
        found = {(one.name, layer): own for one in self.runners for layer, own in one.weights(names[one.name]).items()}
        return {key: {name: tensor.detach() for name, tensor in own.items()} for key, own in found.items()}

    def _start(self, need: Need, kind: type[Collector]) -> list[Collector]:
        """Return collectors for a need: one, or one for each number of rows an example where they are reduced."""
        if not kind.reduces:
            return [kind.start(need.settings, self.study)]
        found, place = [], self._reducing.index(need)
        for rows in dict.fromkeys(layer.rows for layer in self.study.layers.values()):
            here = {key: layer for key, layer in self.study.layers.items() if layer.rows == rows}
            pair_blocks = [pair for pair in self.study.pair_blocks if pair[0][0] in here]
            part = replace(self.study, layers=here, pair_blocks=pair_blocks)
            early = self._reducers.get((place, rows))
            if early is None:
                found.append(kind.start(need.settings, part))
            else:
                early.open_pairs(pair_blocks)  # type: ignore[attr-defined]
                found.append(early)
        return found

    def _refuse_outgrown(self) -> None:
        """Refuse to go on where the data give more examples than they said, and these take too much memory."""
        assert self.statistics is not None
        grown = replace(self.study, examples=self.examples, seen=True)
        for need, collectors in zip(self.needs, self.statistics.collectors, strict=True):
            for collector in collectors[:1]:
                price = type(collector).cost(need.settings, grown)
                if price is not None:
                    refuse_over(self.study, price.bytes, price.what, price.ways)


def _by_rows(collector: Any, kept: Mapping[Key, KeptLayer]) -> list[Collector]:
    """Return a collector, or several where its layers give different numbers of rows from now on."""
    groups: dict[int, list[Key]] = {}
    for key in collector.names:
        groups.setdefault(kept[key].length, []).append(key)
    return [collector] if len(groups) == 1 else [collector.restricted(keys) for keys in groups.values()]
