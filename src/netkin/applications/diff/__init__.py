"""Diff: at which module two versions of a model part, beyond what rounding explains.

Every called module of the one runs on the inputs of its counterpart in the other, and its error is held against a
floor: what rounding alone does to its output on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from scipy.stats import f as f_distribution
from torch import nn

from netkin import __version__
from netkin.applications.diff.floor import counterpart_dtypes
from netkin.applications.diff.logprobs import diff_of_logprobs, is_logprobs, sequences_of
from netkin.applications.diff.matching import counterparts
from netkin.applications.diff.own_code import borrowing
from netkin.applications.diff.patching import patched
from netkin.applications.diff.predictions import Predictions, logits_of
from netkin.applications.diff.recorded import (
    FiledStates,
    diff_of_states,
    fed,
    is_known_by_states,
    states_of,
    station_caveats,
)
from netkin.applications.diff.replay import Examples, OutputErrors, Replay, ReplayedCall, relative, traced
from netkin.applications.diff.serving import Serve, ServedReplay, Serving
from netkin.applications.diff.training_flags import is_inside, training, training_alone
from netkin.applications.diff.weight_relations import is_adapted, weight_relations
from netkin.applications.experiment import DECLARED, Experiment, ExperimentOptions
from netkin.comparing.feed import data_name, require_numbered
from netkin.comparing.spec import takes_options
from netkin.errors import InvalidValue
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.memory import format_bytes
from netkin.progress import with_progress
from netkin.representations.hooks import inference_mode_of
from netkin.representations.inputs import (
    batches_of,
    dtype_of,
    length_if_known,
)
from netkin.representations.layers import modules, split_call, unwrapped
from netkin.results.caveats import Caveat
from netkin.results.diff import SAME, THRESHOLD, ArgumentDiff, Diff, ModuleDiff, RoutingDiff, WeightDiff, blocks_among
from netkin.results.labels import plural
from netkin.sources.batches import Batches
from netkin.sources.recordings import RecordedRows, names_recording
from netkin.sources.tokenized import counts_in_words
from netkin.sources.weights import remark_on

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DiffPlan", "diff", "explain_diff", "not_a_model"]

WITHOUT_NUMBERS = "it gives no floating numbers"
REPLAYS = 3  # of each module: its counterpart, itself in the other precision, and one above
CHANCE = 0.9999  # how surely the errors of a few numbers lie below the threshold, where rounding alone made them


@takes_options(without="test save overwrite partial", declared=DECLARED)
def diff(
    a: nn.Module | str,
    b: nn.Module | RecordedRows | torch.export.ExportedProgram | Sequence[Mapping[str, Any]] | str,
    data: Any = None,
    *,
    match: Mapping[str, str] | None = None,
    serve: Serve | None = None,
    prefill: int | None = None,
    names: tuple[str, str] | None = None,
    **options: Unpack[ExperimentOptions],
) -> Diff:
    """Return at which module two versions of a model part: between precisions, kernels, ports, checkpoints.

    On the first batch of the data every called module of the more precise model is compared with its counterpart in
    the other, which gets the same inputs; their difference is held against what rounding alone does. A module stands
    out where its error exceeds that floor more than threefold, over the whole batch or in one of its examples. The
    outputs of the two models are compared over all of the data.

    Args:
        a: a model, or its name as `nk.load_model` takes it.
        b: the other version of it; or what an engine recorded, as `nk.recorded` opens it, or a program that is compiled
            or exported, of which only what its modules give is known; or log-probabilities that an engine reported, in
            a file of JSON, JSON lines or npz, or as such records.
        data: batches, or the name of data as `nk.load_data` takes it; not needed where the recording holds tokens.
        match: modules of `a` that have another name in `b`, such as ``{"transformer.h.*": "blocks.*"}``; what is inside
            is renamed with them.
        serve: how `b` gets the sequences that `a` gets in one pass: "decode" with its cache, token after token; "left"
            or "right" with padding there; "packed", all in one row; or a function of the model and its inputs, which
            calls the model itself. It needs no second model: ``diff(model, model, data, serve="decode")``.
        prefill: how many tokens the first step of "decode" has, by default half of them; without `serve` it means that.
        names: what the result calls the two models.

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...
        >>> a = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        >>> b = nn.Sequential(a[0], nn.GELU(approximate="tanh"), a[2])
        >>> diff(a, b, torch.randn(20, 8), progress=False).first
        '1'
    """
    serving = _serving(serve, prefill)
    called = names or tuple(given if isinstance(given, str) else name for name, given in (("a", a), ("b", b)))
    if serving is not None and (is_logprobs(b) or is_known_by_states(b)):
        raise InvalidValue(
            "`serve` runs the second model in steps, which a recorded side or a compiled or exported program can't be; "
            "leave it out.",
            argument="serve",
        )
    if is_logprobs(b):
        for name, value in (("data", data), ("match", match)):
            if value is not None:
                raise InvalidValue(
                    f"log-probabilities come with their tokens and are of no module; leave `{name}` out.", argument=name
                )
        return _by_logprobs(a, b, (called[0], called[1]), options)
    if is_known_by_states(b):
        return _by_states(a, b, data, match, (called[0], called[1]), options)
    experiment = Experiment(models={"a": a, "b": cast("nn.Module | str", b)}, data=data, **options)
    models = [experiment.load_model(name) for name in "ab"]
    batches = experiment.load_common_data()
    reading = _Reading(experiment, batches)
    call = described_call(
        "nk.diff",
        a=called[0],
        b=called[1],
        match=match,
        serve=serve,
        prefill=prefill,
        transform=experiment.transform,
        forward=experiment.forward,
    )
    digests = {f"weights of {side}": weights_digest(model) for side, model in zip("ab", models, strict=True)}
    facts: dict[str, Any] = {
        "a": called[0],
        "b": called[1],
        "data": data if isinstance(data, str) else data_name(batches),
        "seed": experiment.seed,
        "provenance": {"call": call} | digests,
        "version": __version__,
    }
    with experiment.lending(*models):
        found = _compared(models[0], models[1], reading, match, facts, serving)
    random = tuple(Caveat("random-weights", remark) for remark in map(remark_on, models) if remark)
    counts = batches.counts(0, found.examples) if isinstance(batches, Batches) else {}
    texts = {"texts": counts_in_words(counts)} if counts else {}
    cut = (Caveat("cut-texts", f"{texts['texts']}."),) if counts.get("cut") else ()
    return replace(found, caveats=(*random, *cut, *found.caveats), provenance={**found.provenance, **texts})


def not_a_model(b: Any) -> bool:
    """Return whether the other side is no model: recorded states, or log-probabilities."""
    return is_logprobs(b) or isinstance(b, RecordedRows) or names_recording(b)


def _by_logprobs(a: nn.Module | str, b: Any, called: tuple[str, str], options: Any) -> Diff:
    """Return the diff of a model with log-probabilities that an engine reported."""
    experiment = Experiment(models={"a": a}, data=None, **options)
    sequences = sequences_of(b)[: experiment.examples]
    model = experiment.load_model("a")
    call = described_call(
        "nk.diff", a=called[0], b=called[1], transform=experiment.transform, forward=experiment.forward
    )
    digest = settings_digest([[list(one.tokens), one.logprobs] for one in sequences])
    provenance = {"call": call, "weights of a": weights_digest(model), "log-probabilities of b": digest}
    with experiment.lending(model):
        found = diff_of_logprobs(unwrapped(model), sequences, fed(experiment.forward, experiment.transform))
    random = (Caveat("random-weights", remark),) if (remark := remark_on(model)) else ()
    return Diff(
        a=called[0], b=called[1], data="the tokens of b", seed=experiment.seed, provenance=provenance, modules={},
        logprobs=found, examples=found.sequences, precision=(_in_words(model), "unknown"), way="log-probabilities",
        caveats=random,
    )  # fmt: skip


def _by_states(
    a: nn.Module | str, b: Any, data: Any, match: Mapping[str, str] | None, called: tuple[str, str], options: Any
) -> Diff:
    """Return the diff of a model with another program of which states are known, at the ends of modules."""
    experiment = Experiment(models={"a": a}, data=data, **options)
    model = experiment.load_model("a")
    run = fed(experiment.forward, experiment.transform)
    states = states_of(b, match, run)
    batches = states.batches() if data is None else experiment.load_data("a")
    if isinstance(states, FiledStates):
        require_numbered(batches, states.recording)
    call = described_call(
        "nk.diff", a=called[0], b=called[1], match=match, transform=experiment.transform, forward=experiment.forward
    )
    provenance = {"call": call, "weights of a": weights_digest(model), **states.origin()}
    with experiment.lending(model, *states.programs()):
        found = diff_of_states(unwrapped(model), states, batches, experiment.examples, run)
    calls, outputs, examples = found
    lowered = str(states.precision()).removeprefix("torch.")
    result = Diff(
        a=called[0], b=called[1], seed=experiment.seed,
        data="the tokens of b" if data is None else data if isinstance(data, str) else data_name(batches),
        provenance=provenance, version=__version__, modules={one.name: _module_diff(one, {}) for one in calls},
        outputs=outputs, examples=examples, precision=(_in_words(model), lowered), way=states.way,
    )  # fmt: skip
    random = [Caveat("random-weights", remark)] if (remark := remark_on(model)) else []
    limits = station_caveats(unwrapped(model), list(result.modules), result.standing_out)
    return replace(result, caveats=(*random, *limits))


@dataclass(frozen=True)
class DiffPlan:
    """What a diff would take.

    Args:
        reference: which model is the reference, "a" or "b".
        modules: how many modules of `a` have a counterpart in `b`, and run on its inputs.
        unmatched: how many have none.
        levels: how deeply modules lie in each other.
        passes: how many times the first batch goes through a model, replays of all levels among them.
        examples: how many examples the first batch has.
        blocks: how many passes of `b` more tell which block costs how much, where modules differ by more than rounding.
        kept: bytes of outputs that are kept on the host for one batch.
        weights: bytes above the models that casting the whole reference takes for a while.
    """

    reference: str
    modules: int
    unmatched: int
    levels: int
    passes: int
    examples: int
    blocks: int
    kept: int
    weights: int

    def __str__(self) -> str:
        lines = [
            f"{plural(self.modules, 'module')} of a with a counterpart in b, and {self.unmatched} without; "
            f"{self.reference} is the reference",
            f"one batch of {plural(self.examples, 'example')}: about {self.passes} forward passes, {REPLAYS} for each "
            f"of {plural(self.levels, 'level')} of modules and two whole runs",
            f"if modules differ: {plural(self.blocks, 'pass')} more of b, one for each block" if self.blocks else "",
            "the other batches: one forward pass of each model",
            f"memory above the models: {format_bytes(self.kept)} of outputs on the host, and for a while "
            f"{format_bytes(self.weights)} of cast weights",
        ]
        return "\n".join(filter(None, lines))


def explain_diff(
    a: nn.Module | str,
    b: nn.Module | str,
    data: Any,
    *,
    match: Mapping[str, str] | None = None,
    serve: Serve | None = None,
    prefill: int | None = None,
    names: tuple[str, str] | None = None,
    **options: Any,
) -> DiffPlan:
    """Return what `diff` would take with the same arguments.

    The model that is not the reference runs once on the first batch, to learn the sizes.
    """
    if is_logprobs(b) or is_known_by_states(b):
        raise InvalidValue(
            "a plan is for two models that run module by module; beside a recorded side or a compiled or exported "
            "program `a` runs up to six times on the first batch and twice on the others.",
            argument="b",
        )
    serving = _serving(serve, prefill)
    experiment = Experiment(models={"a": a, "b": b}, data=data, **options)
    models = [unwrapped(experiment.load_model(name)) for name in "ab"]
    matched = counterparts(models[0], models[1], match)
    reading = _Reading(experiment, experiment.load_data("a"))
    batch = next(reading.batches())
    is_swapped = serving is None and _precision(models[1]) < _precision(models[0])
    reference, other = reversed(models) if is_swapped else models
    watched = list(matched) if is_swapped else list(matched.values())
    with experiment.lending(*models), inference_mode_of(*models):
        calls, kept = _sizes(other, watched, batch, reading, serving)
    levels = max((name.count(".") + 2 if name else 1 for name in calls), default=1)
    weights = sum(2 * tensor.nbytes for tensor in reference.parameters() if tensor.is_floating_point())
    return DiffPlan(
        reference="b" if is_swapped else "a",
        modules=len(matched),
        unmatched=_unmatched(models[0], matched),
        levels=levels,
        passes=2 + REPLAYS * levels,
        examples=length_if_known(batch) or 0,
        blocks=len(blocks_among(name for name, theirs in matched.items() if theirs in calls or name in calls)),
        kept=kept,
        weights=weights,
    )


def _serving(serve: Serve | None, prefill: int | None) -> Serving | None:
    return None if serve is None and prefill is None else Serving(serve or "decode", prefill)


def _sizes(
    model: nn.Module, names: list[str], batch: Any, reading: _Reading, serving: Serving | None
) -> tuple[list[str], int]:
    """Return the calls of a model's run, and the bytes that are kept of them."""
    if serving is None:
        traces = traced(model, names, lambda: reading.run(model, batch))
        return list(traces), sum(tensor.nbytes for call in traces.values() for tensor in call.outputs.values())
    _, served = serving.run(model, batch, names, reading.experiment.transform)
    tensors = (
        tensor
        for call in served.values()
        for steps in (call.inputs, call.outputs)
        for kept in steps.values()
        for tensor in kept.values()
    )
    return list(served), sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


class _Reading:
    """How batches of the data reach a model."""

    def __init__(self, experiment: Experiment, data: Any):
        self.experiment, self.data = experiment, data

    def batches(self) -> Iterator[Any]:
        return batches_of(self.data, self.experiment.examples)

    def run(self, model: nn.Module, batch: Any) -> Any:
        return fed(self.experiment.forward, self.experiment.transform)(model, batch)


def _compared(
    a: nn.Module,
    b: nn.Module,
    reading: _Reading,
    match: Mapping[str, str] | None,
    facts: Mapping[str, Any],
    serving: Serving | None,
) -> Diff:
    a, b = unwrapped(a), unwrapped(b)
    names = counterparts(a, b, match)
    weights = weight_relations(a, b, names)
    batches = reading.batches()
    first = next(batches)
    is_swapped = serving is None and _precision(b) < _precision(a)  # what is served is never the reference
    pair = _Pair(b, a, names, True) if is_swapped else _Pair(a, b, names, False)
    alone, flags = training_alone(a, b, names)
    with inference_mode_of(a, b), training(alone):
        calls = _replayed(pair, names, first, reading, serving)
        outputs, examples = _predicted(a, b, chain([first], batches), reading, serving)
        changes = _changes(weights)
        found = Diff(
            **facts,
            modules={call.name: _module_diff(call, changes) for call in calls},
            arguments=(*flags, *_argument_diffs(calls, pair.is_swapped)),
            routing={call.name: RoutingDiff(*call.routed) for call in calls if call.routed},
            weights=weights,
            outputs=outputs,
            examples=examples,
            reference="b" if pair.is_swapped else "a",
            serve="" if serving is None else serving.name,
            precision=(_in_words(a), _in_words(b)),
            caveats=tuple(_caveats(calls, _unmatched(a, names), _unmatched(b, set(names.values())))),
        )
        if found.by_design and serving is None:
            found = _with_code_ratios(found, pair, first, reading)
        if outputs is None or serving is not None or not (found.by_design or found.standing_out):
            return found
        blocks = [name for name in blocks_among(found.modules) if found[name].ratio is not None]
        if not blocks:
            return found
        whole, left = patched(a, b, {name: names[name] for name in blocks}, first, reading.run)
        return replace(found, patched=left, unpatched=whole)


@dataclass(frozen=True)
class _Pair:
    """The reference and the other model; `names` are those of the modules of a, with those of their counterparts."""

    reference: nn.Module
    other: nn.Module
    names: Mapping[str, str]
    is_swapped: bool  # b is the reference

    def own(self, some: Iterable[str]) -> dict[str, str]:
        """Return the names in the reference of modules of a, with those in the other model."""
        return {self.names[name]: name for name in some} if self.is_swapped else {n: self.names[n] for n in some}


def _unmatched(model: nn.Module, names: Container[str]) -> int:
    """Return how many modules that can be called have no counterpart; lists of modules can't."""
    lists, known = (nn.ModuleList, nn.ModuleDict), modules(model)
    adapted = tuple(f"{name}." for name, module in known.items() if is_adapted(module))  # the layer has one itself
    return sum(
        name not in names and not isinstance(module, lists) and not name.startswith(adapted)
        for name, module in known.items()
    )


def _precision(model: nn.Module) -> tuple[float, int]:
    """Return how coarse a model's numbers are, to order two by: by its type, then by how few bytes it takes."""
    dtype = dtype_of(model)
    tensors = [*model.parameters(), *model.buffers()]
    is_packed = any(tensor.dtype in (torch.int8, torch.uint8) for tensor in tensors)
    return torch.finfo(dtype or torch.float16).eps, int(is_packed)


def _in_words(model: nn.Module) -> str:
    dtype = dtype_of(model)
    return "no weights" if dtype is None else str(dtype).removeprefix("torch.")


def _replayed(
    pair: _Pair, some: Iterable[str], batch: Any, reading: _Reading, serving: Serving | None = None
) -> list[ReplayedCall]:
    """Return the calls of some modules, by their names in a, replayed on a batch."""
    reference, other, names = pair.reference, pair.other, pair.own(some)
    examples = Examples.of(batch)
    dtype_of_theirs = counterpart_dtypes(reference, other, names, dtype_of(other) or torch.float32)
    given = reference, other, names
    if serving is None:
        traces = traced(other, list(names.values()), lambda: reading.run(other, batch))
        replay = Replay(*given, traces, dtype_of_theirs, examples)
    else:
        layout, served = serving.run(other, batch, list(names.values()), reading.experiment.transform)
        replay = ServedReplay(*given, served, dtype_of_theirs, examples, layout)
    calls = replay.run(lambda: reading.run(reference, batch))
    if pair.is_swapped:
        for call in calls:
            call.name = _renamed(call.name, names)
            call.caller = None if call.caller is None else _renamed(call.caller, names)
    return calls


def _with_code_ratios(found: Diff, pair: _Pair, batch: Any, reading: _Reading) -> Diff:
    """Return a result with the ratios of modules' own code, where what is in them was changed on purpose."""
    stems = {found.modules[name].stem for name in found.by_design if found.modules[name].ratio is not None}
    innermost = [name for name in stems if not any(is_inside(other, name) for other in stems)]
    if not innermost or innermost == [""]:
        return found
    with borrowing(pair.other, pair.reference, pair.own(pair.names), pair.own(innermost)):
        calls = _replayed(
            pair, [name for name in pair.names if name in stems and name not in innermost], batch, reading
        )
    ratios = {call.name: _module_diff(call, {}).ratio for call in calls}
    changed = {name: replace(one, code_ratio=ratios.get(name)) for name, one in found.modules.items()}
    return replace(found, modules=changed)


def _predicted(
    a: nn.Module, b: nn.Module, batches: Iterator[Any], reading: _Reading, serving: Serving | None
) -> tuple[Any, int]:
    """Return how the predictions differ over all of the data, and how many examples these hold."""
    predictions, examples = Predictions(), 0
    for batch in with_progress(batches, "comparing outputs", "batches"):
        examples += length_if_known(batch) or 0
        first = logits_of(reading.run(a, batch))
        if serving is None:
            logits = first, logits_of(reading.run(b, batch))
        else:
            logits = first, serving.logits(b, batch, first, reading.experiment.transform)
        if logits[0] is not None and logits[1] is not None:
            predictions.update(a, batch, logits[0], logits[1])
    return predictions.compute(), examples


# --- what the calls say -----------------------------------------------------------------------------------------------


def _renamed(call: str, names: Mapping[str, str]) -> str:
    name, number = split_call(call)
    return names[name] + ("" if number is None else f"#{number}")


def _changes(weights: Mapping[str, WeightDiff]) -> dict[str, list[str]]:
    """Return how weights differ, where they do by more than their type, by the modules that hold them."""
    found: dict[str, list[str]] = {}
    for name, one in weights.items():
        if one.relation not in (*SAME, "new"):
            found.setdefault(name.rpartition(".")[0], []).append(one.relation)
    return found


def _module_diff(call: ReplayedCall, changes: Mapping[str, Sequence[str]]) -> ModuleDiff:
    """Return what a call shows: that of the output, among several, which exceeds its floor most."""
    name, _ = split_call(call.name)
    inside = {one for inner, own in changes.items() if not name or f"{inner}.".startswith(f"{name}.") for one in own}
    facts: dict[str, Any] = {
        "name": call.name, "kind": call.kind, "caller": call.caller, "changed": ", ".join(sorted(inside)),
    }  # fmt: skip
    if not call.errors:
        return ModuleDiff(**facts, missing=call.fault or WITHOUT_NUMBERS)
    worst = max(map(_judged, call.errors), key=lambda one: one["ratio"])
    ends = [
        relative(errors.end_to_end, errors.whole)
        for errors in call.errors
        if errors.end_to_end is not None and errors.whole is not None
    ]
    return ModuleDiff(**facts, **worst, end_to_end=max(ends, default=None))


def _judged(errors: OutputErrors) -> dict[str, Any]:
    """Return the error and floor of one output, and the larger of two ratios: over all, and in the worst example."""
    whole = _ratios(errors.local.sum()[None], errors.floor.sum()[None], errors.numbers * len(errors.size))
    each = _ratios(errors.local.sum(1), errors.floor.sum(1), errors.numbers)
    worst = int(each.argmax())
    found = {
        "local": relative(errors.local, errors.size),
        "floor": relative(errors.floor, errors.size),
        "ratio": max(float(whole), float(each[worst])),
    }
    if len(each) > 1:
        found["worst_sequence"] = worst
    if errors.local.shape[1] > 1:
        found["worst_position"] = int(errors.local[worst].argmax())
    return found


def _ratios(errors: torch.Tensor, floors: torch.Tensor, numbers: int) -> torch.Tensor:
    """Return errors over floors, both sums of squares of so many numbers.

    Of few numbers the floor may be small by chance; it is then as much larger as errors made by rounding alone need it
    to be, so that they stay below the threshold.
    """
    chance = math.sqrt(f_distribution.ppf(CHANCE, numbers, numbers)) if numbers < 1000 else 1.0
    ratios = (errors / floors).sqrt().nan_to_num(nan=math.inf, posinf=math.inf)  # of infinite errors too
    ratios = ratios.masked_fill(errors == 0, 0.0)
    return ratios / max(1.0, chance / THRESHOLD)


def _argument_diffs(calls: Sequence[ReplayedCall], is_swapped: bool) -> list[ArgumentDiff]:
    """Return the arguments that differ, each for the call that comes first."""
    found: dict[str, ArgumentDiff] = {}
    for call in calls:
        for name, how in call.arguments:
            if name in found:
                found[name] = replace(found[name], calls=found[name].calls + 1)
                continue
            values = how.rpartition(": ")
            said = "".join(values[:2]) + " and ".join(reversed(values[2].split(" and "))) if is_swapped else how
            found[name] = ArgumentDiff(name=name, module=call.name, computed_in=call.caller, how=said)
    return list(found.values())


def _caveats(calls: Iterable[ReplayedCall], *unmatched: int) -> Iterator[Caveat]:
    for one, other, count in zip("ab", "ba", unmatched, strict=True):
        if count:
            have = "has" if count == 1 else "have"
            said = f"{plural(count, 'module')} of {one} {have} no counterpart of their name in {other}; see `match`."
            yield Caveat("unmatched", said)
    faults: dict[str, list[str]] = {}
    for call in calls:
        if call.fault:
            faults.setdefault(call.fault, []).append(call.name)
    for fault, modules_with in faults.items():
        few = ", ".join(map(repr, modules_with[:3])) + (", …" if len(modules_with) > 3 else "")
        yield Caveat("not-replayed", f"{plural(len(modules_with), 'module')} could not be replayed ({few}): {fault}.")
