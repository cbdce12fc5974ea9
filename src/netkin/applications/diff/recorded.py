"""A recorded side: a model's code between the places at which another program's states are known, run on these states.

At each such *station*, the output of a module or the input of the first block, the model's own value gives way to the
recorded one. So what it computes up to the next station starts from what the other program had there, and differs from
the next recorded value by what lies between the two alone. One run of the model shows all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.diff.adapting import is_floating
from netkin.applications.diff.floor import ABOVE, coarser, rounding_of, run_in_precision
from netkin.applications.diff.matching import SHOWN, matched_names
from netkin.applications.diff.predictions import Predictions, logits_of
from netkin.applications.diff.replay import Examples, OutputErrors, ReplayedCall, difference
from netkin.errors import ForwardError, InvalidValue, ShapeError
from netkin.identity import weights_digest
from netkin.progress import with_progress
from netkin.representations.activations import content_hashes, token_hashes
from netkin.representations.hooks import at, inference_mode_of, leaves, parts, path_to_tensor, replaced_at, watching
from netkin.representations.inputs import (
    FLOATING,
    batches_of,
    dtype_of,
    feed,
    inputs_of,
    length_if_known,
)
from netkin.representations.layers import modules, split_call, unwrapped
from netkin.results.caveats import Caveat
from netkin.results.diff import OutputDiff, blocks_among
from netkin.results.labels import plural
from netkin.sources.exported_programs import unflattened
from netkin.sources.models import load_model
from netkin.sources.recordings import COLUMN, HIDDEN, RecordedRows, names_recording, recorded

INPUT = "input of "  # a station before a module, in place of one after it
HALVES = (torch.bfloat16, torch.float16)
PADDED = 8  # sequences of a recording that are run at a time, where no data are given


@dataclass(frozen=True)
class KnownState:
    """What the other program had at a station: examples first, and which of their tokens are there.

    An exported module gives, before its output, what is computed in it and read elsewhere; `given` are all of these.
    """

    values: Tensor
    mask: Tensor | None = None
    given: Sequence[Tensor] = ()

    def among(self, count: int) -> KnownState | None:
        """Return the state of a module that gives so many floating tensors; None where it can't be told which it is."""
        if len(self.given) in (0, count):
            return self
        return KnownState(self.given[-1]) if count == 1 else None

    def placed(self, output: Tensor, valid: Tensor | None, station: str) -> Tensor:
        """Return a copy of a model's own output in which these values have taken their places."""
        if self.mask is None and self.values.shape == output.shape:
            return self.values.to(output.device, output.dtype, copy=True)
        if output.ndim != 3 or self.values.ndim != 3:
            raise ShapeError(
                f"the recorded states at {station!r} have shape {tuple(self.values.shape)}, and the model gives "
                f"{tuple(output.shape)} there; record what the module gives as it is, of tokens with shape='tokens'.",
                argument="b",
            )
        kept = self.values.flatten(0, 1) if self.mask is None else self.values[self.mask]
        places = torch.ones(output.shape[:2], dtype=torch.bool) if valid is None else valid
        if kept.shape != (int(places.sum()), output.shape[2]):
            raise ShapeError(
                f"the recorded states at {station!r} are {len(kept):,} tokens of {kept.shape[1]:,} numbers, and the "
                f"batch has {int(places.sum()):,} tokens, for which the model gives {output.shape[2]:,}; give the data "
                "and the architecture that were recorded.",
                argument="b",
            )
        placed = output.clone()
        placed[places.to(output.device)] = kept.to(output.device, output.dtype)
        return placed


class KnownStates(Protocol):
    """What is known of the other program: its states for a batch, and their precision."""

    way: str  # how they came to be known

    def origin(self) -> dict[str, str]:
        """Return what identifies the program, for the provenance."""

    def programs(self) -> list[nn.Module]:
        """Return the program, if it runs here."""

    def batches(self) -> Any:
        """Return the data of the program, where none are given."""

    def stations(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the stations in a model, each with what its states are called."""

    def read(self, stations: Mapping[str, Any], batch: Any, numbers: np.ndarray) -> dict[str, KnownState]:
        """Return the states at the stations for a batch, whose examples have these numbers."""

    def precision(self) -> torch.dtype:
        """Return the precision in which the other program computes."""


# --- states in files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FiledStates:
    """States that were recorded in files."""

    recording: RecordedRows
    match: Mapping[str, str] | None = None
    way = "recorded"

    def origin(self) -> dict[str, str]:
        """Return what identifies the recording: its files' layout, and the digest of its model's weights if known."""
        weights = self.recording.facts.get("weights")
        return {"recording of b": self.recording.layout} | ({"weights of b": str(weights)} if weights else {})

    def programs(self) -> list[nn.Module]:
        """Return nothing, as files don't run."""
        return []

    def stations(self, model: nn.Module) -> dict[str, str]:
        """Return the modules of a model after which states are known, and the first block where those before it are."""
        known, layers = modules(model), self.recording.layers
        found = matched_names(list(known), list(layers), self.match)
        if not found and all(re.fullmatch(rf"({HIDDEN}|{COLUMN})\.\d+", name) for name in layers):
            found = self._boundaries(list(known))
        if not found:
            some, others = (", ".join([name for name in names if name][:SHOWN]) for names in (known, layers))
            raise InvalidValue(
                f"none of the recorded layers belongs to a module of a: a has {some}, …, and the recording {others}; "
                "say which belong together, as in match={'model.layers.*': 'layer_*'}.",
                argument="match",
            )
        return found

    def _boundaries(self, known: Sequence[str]) -> dict[str, str]:
        """Return the blocks of a model with the residual streams behind them, which engines number from 0."""
        blocks = blocks_among(known)
        is_numbered = all(name.startswith(HIDDEN) for name in self.recording.layers)
        if not is_numbered and len(self.recording.layers) != len(blocks) + 1:
            raise InvalidValue(
                f"{self.recording.name!r} holds {plural(len(self.recording.layers), 'layer')} and a has "
                f"{plural(len(blocks), 'block')}: nothing tells which these are. Give the engine's "
                f"eagle_aux_hidden_state_layer_ids, as in {self.recording.name + ',layers=2+16+29'!r}.",
                argument="b",
            )
        numbers = {int(name.rpartition(".")[2]): name for name in self.recording.layers}
        if max(numbers) > len(blocks):
            raise InvalidValue(
                f"{self.recording.name!r} holds the state before block {max(numbers)}, and a has "
                f"{plural(len(blocks), 'block')}; give the model that was recorded.",
                argument="b",
            )
        stations = {f"{INPUT}{blocks[0]}": numbers[0]} if 0 in numbers else {}
        return stations | {blocks[number - 1]: numbers[number] for number in sorted(numbers) if number}

    def read(self, stations: Mapping[str, str], batch: Any, numbers: np.ndarray) -> dict[str, KnownState]:
        """Return the states at the stations for a batch, whose examples have these numbers."""
        if not self.recording.pairs_with_data:
            raise InvalidValue(
                f"nothing tells which examples {self.recording.name!r} holds; record with `nk.activations(save=)`, or "
                "write `ids` that are their numbers into the files.",
                argument="b",
            )
        places = self.recording.places_of(numbers, token_hashes(batch), content_hashes(batch, len(numbers)))
        return {name: KnownState(*self.recording.layers[layer].read(places)) for name, layer in stations.items()}

    def precision(self) -> torch.dtype:
        """Return the coarsest type of the states, also where their numbers were raised to a wider one in the files."""
        said = str(self.recording.facts.get("precision", "")).partition(",")[0]
        dtypes = [layer.dtype for layer in self.recording.layers.values() if layer.dtype in FLOATING]
        dtypes += [dtype for dtype in FLOATING if str(dtype) == f"torch.{said}"]
        if not dtypes:
            raise InvalidValue(f"{self.recording.name!r} holds no floating numbers.", argument="b")
        coarsest = coarser(*dtypes)
        few = (
            [layer.read(np.arange(1))[0] for layer in self.recording.layers.values()] if coarsest not in HALVES else []
        )
        raised = (half for half in HALVES if all(torch.equal(one.to(half).to(one.dtype), one) for one in few))
        return next(raised, coarsest) if few else coarsest

    def batches(self) -> list[Any]:
        """Return the tokens of the recording as batches, where no data are given."""
        tokens = self.recording.tokens
        if tokens is None:
            raise InvalidValue(
                f"{self.recording.name!r} does not hold the tokens of its examples; give the data.", argument="data"
            )
        found = []
        for start in range(0, tokens.examples, PADDED):
            ids, mask = tokens.read(np.arange(start, min(start + PADDED, tokens.examples)))
            mask = torch.ones_like(ids) if mask is None else mask
            found.append({"input_ids": ids.long(), "attention_mask": mask.long()})
        return found


# --- states of a program that runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramStates:
    """States of a compiled or exported program, which runs as it is: those that it shows from outside."""

    program: nn.Module
    match: Mapping[str, str] | None
    run: Callable[[nn.Module, Any], Any]
    way = "program"

    def origin(self) -> dict[str, str]:
        """Return the digest of the program's weights."""
        return {"weights of b": weights_digest(self.program)}

    def programs(self) -> list[nn.Module]:
        """Return the program."""
        return [self.program]

    def batches(self) -> Any:
        """Refuse to run without data."""
        raise InvalidValue("`data` is missing: give batches on which both run.", argument="data")

    def stations(self, model: nn.Module) -> dict[str, str]:
        """Return the modules of a model whose counterparts can be seen in the program, the whole among them."""
        return matched_names(list(modules(model)), [name for name, _ in visible(self.program)], self.match)

    def read(self, stations: Mapping[str, str], batch: Any, numbers: np.ndarray) -> dict[str, KnownState]:
        """Return what the program's modules gave for a batch, at their first calls."""
        seen, named = dict[str, KnownState](), {theirs: mine for mine, theirs in stations.items()}

        def keep(name: str, output: Any) -> None:
            found = [leaf.detach().clone() for _, leaf in leaves(output) if is_floating(leaf)]
            if found and named[name] not in seen:
                seen[named[name]] = KnownState(found[0], given=found)

        with ExitStack() as stack:
            for name, module in visible(self.program):
                if name in named:
                    stack.enter_context(_output_seen(module, partial(keep, name)))
            _run_as_it_is(self.program, batch, self.run)
        return seen

    def precision(self) -> torch.dtype:
        """Return the precision of the program."""
        return dtype_of(self.program) or torch.float32


@contextmanager
def _output_seen(module: nn.Module, keep: Callable[[Any], None]) -> Iterator[None]:
    """Inside the `with`, call ``keep(output)`` after each call of a module, outside what is compiled of it."""
    compiled = vars(module).get("_compiled_call_impl")
    if compiled is None:
        handle = module.register_forward_hook(lambda module, inputs, output: keep(output))
        try:
            yield
        finally:
            handle.remove()
        return

    def called(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        keep(output)
        return output

    vars(module)["_compiled_call_impl"] = called  # a hook would be compiled along with the module
    try:
        yield
    finally:
        vars(module)["_compiled_call_impl"] = compiled


def _run_as_it_is(program: nn.Module, batch: Any, run: Callable[[nn.Module, Any], Any]) -> None:
    if is_compiled(program) and unwrapped(program) is not program:

        class Whole(nn.Module):  # so that the wrapper is called, and not what is in it
            def __init__(self) -> None:
                super().__init__()
                self.inner = program

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return program(*args, **kwargs)

        run(Whole(), batch)
    else:
        run(program, batch)


def is_compiled(model: Any) -> bool:
    """Return whether a module, or one in it, runs compiled."""
    return isinstance(model, nn.Module) and any(map(_is_compiled, model.modules()))


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def visible(program: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a program that are called from outside what is compiled, by their names without wrappers."""
    yield name, program
    if not _is_compiled(program):
        for key, child in program.named_children():
            yield from visible(child, f"{name}.{key}" if name else key)


# --- a model's code between stations ----------------------------------------------------------------------------------


@contextmanager
def stationed(
    model: nn.Module, stations: Sequence[str], react: Callable[[str, Tensor, int], Tensor | None]
) -> Iterator[None]:
    """Inside the `with`, call ``react(station, value, count)`` at each station.

    `value` is the first floating tensor there, of `count`; what is returned, unless None, takes its place.
    """
    known, done = modules(model), set[str]()

    def met(station: str, structure: Any) -> Any:
        path = path_to_tensor(structure)
        if path is None or station in done:
            return None
        done.add(station)
        value = react(station, at(structure, path), sum(is_floating(leaf) for _, leaf in leaves(structure)))
        return None if value is None else replaced_at(structure, path, value)

    def enter(station: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return met(station, (args, kwargs))

    def leave(name: str, output: Any) -> Any:
        return met(name, output) if split_call(name)[1] is None else None

    with ExitStack() as stack:
        for station in stations:
            if station.startswith(INPUT):
                module = known[station.removeprefix(INPUT)]
                stack.callback(module.register_forward_pre_hook(partial(enter, station), with_kwargs=True).remove)
        after = [station for station in stations if not station.startswith(INPUT)]
        stack.enter_context(watching(model, after, leave, begin=done.clear))
        yield


class StationRuns:
    """The runs of a model on one batch that are held against the states of the other program.

    Args:
        model: The model, as precise as the other program or more.
        states: Those of the other program, by station.
        run: Runs a model on the batch.
        batch: The batch.
        lowered: The precision of the other program.
    """

    def __init__(
        self,
        model: nn.Module,
        states: Mapping[str, KnownState],
        run: Callable[[], Any],
        batch: Any,
        lowered: torch.dtype,
    ):
        self.model, self.states, self.run, self.lowered = model, dict(states), run, lowered
        self.examples = Examples.of(batch)

    def free(self, react: Callable[[str, Tensor], None] = lambda station, value: None) -> Any:
        """Return what the model gives by itself; afterwards it is known which states are those of its modules."""

        def settle(station: str, value: Tensor, count: int) -> None:
            state = self.states[station].among(count)
            if state is None:
                del self.states[station]
                return
            self.states[station] = state
            react(station, value)

        with stationed(self.model, list(self.states), settle):
            return self.run()

    def forced(self, react: Callable[[str, Tensor], None] = lambda station, value: None) -> Any:
        """Return what the model gives with the recorded states at all stations; `react` is given its own values."""

        def put(station: str, value: Tensor, count: int) -> Tensor:
            react(station, value)
            return self.states[station].placed(value, self.examples.valid, station)

        with stationed(self.model, list(self.states), put):
            return self.run()

    def calls(self) -> list[ReplayedCall]:
        """Return for each station what the model computes up to it from the ones before, beside what was recorded."""
        own, errors, ends = dict[str, Tensor](), dict[str, OutputErrors](), dict[str, tuple[Tensor, Tensor]]()

        def end(station: str, value: Tensor) -> None:
            size = self._squares(torch.zeros_like(value), value)
            ends[station] = self._apart(station, value), size

        def compare(station: str, value: Tensor) -> None:
            own[station] = value.detach().to("cpu", copy=True)
            size = self._squares(torch.zeros_like(own[station]), own[station])
            numbers = own[station].numel() // max(1, int((size > 0).sum(1).gt(0).sum()))
            rounded = size * rounding_of(value.dtype, self.lowered) ** 2
            apart = self._apart(station, value)
            errors[station] = OutputErrors(size, apart, rounded, numbers, *ends.get(station, (None, None)))

        self.free(end)
        self.forced(compare)
        dtype = dtype_of(self.model)
        if dtype is not None:
            others = [] if dtype == self.lowered else [self.lowered]
            for other in (*others, ABOVE.get(coarser(dtype, self.lowered), torch.float64)):
                for station, value in run_in_precision(self.model, other, self._values).items():
                    errors[station].floor = errors[station].floor + self._squares(own[station], value)
        kinds = {station: type(modules(self.model)[station.removeprefix(INPUT)]).__name__ for station in errors}
        return [ReplayedCall(station, None, kinds[station], [found]) for station, found in errors.items()]

    def _apart(self, station: str, value: Tensor) -> Tensor:
        return self._squares(
            value.detach().cpu(), self.states[station].placed(value, self.examples.valid, station).cpu()
        )

    def _squares(self, first: Tensor, second: Tensor) -> Tensor:
        return self.examples.squares(difference(first, second))

    def _values(self) -> dict[str, Tensor]:
        """Return the model's own values at the stations, each computed from the recorded ones before."""
        found = dict[str, Tensor]()
        self.forced(lambda station, value: found.update({station: value.detach().to("cpu", copy=True)}))
        return found


def require_precise(model: nn.Module, lowered: torch.dtype) -> None:
    """Refuse a model that is less precise than the states it is held against, which can't be run again."""
    dtype = dtype_of(model)
    if dtype is not None and torch.finfo(dtype).eps > torch.finfo(lowered).eps:
        mine, theirs = (str(one).removeprefix("torch.") for one in (dtype, lowered))
        raise InvalidValue(
            f"a computes in {mine} and the recorded side in {theirs}, which can't be run to tell rounding from faults; "
            f"load a in {theirs}.",
            argument="a",
        )


def station_caveats(model: nn.Module, stations: Sequence[str], standing_out: Sequence[str]) -> Iterator[Caveat]:
    """Yield what limits the verdict: blocks that were not recorded, and faults everywhere."""
    blocks = blocks_among(list(modules(model)))
    absent = [name for name in blocks if name not in stations]
    if stations and absent and len(absent) < len(blocks):
        yield Caveat(
            "not-recorded",
            f"{plural(len(absent), 'block')} of {len(blocks)} were not recorded; the next one that was stands for all "
            "since the one before.",
        )
    known = [name for name in blocks if name in stations]
    apart = [name for name in known if name in standing_out]
    if len(known) > 2 and len(apart) > len(known) / 2:
        yield Caveat(
            "everywhere",
            f"{len(apart)} of {len(known)} blocks stand out: the recorded program has other weights, another "
            "quantisation or other positions throughout, and the first of them is no fault of its own.",
        )


def is_known_by_states(b: Any) -> bool:
    """Return whether something is a recording, or a program whose code can't be run module by module."""
    return isinstance(b, (RecordedRows, torch.export.ExportedProgram, torch.export.UnflattenedModule)) or (
        is_compiled(b) or names_recording(b) or (isinstance(b, str) and b.endswith(".pt2"))
    )


def states_of(b: Any, match: Mapping[str, str] | None, run: Callable[[nn.Module, Any], Any]) -> KnownStates:
    """Return what is known of a recording, or of a compiled or exported program."""
    if isinstance(b, RecordedRows) or names_recording(b):
        return FiledStates(recorded(b) if isinstance(b, str) else b, match)
    program = load_model(b) if isinstance(b, str) else b
    if isinstance(program, torch.export.ExportedProgram):
        program = unflattened(program)
    return ProgramStates(program, match, run)


def diff_of_states(
    model: nn.Module, states: KnownStates, data: Any, examples: int | None, run: Callable[[nn.Module, Any], Any]
) -> tuple[list[ReplayedCall], OutputDiff | None, int]:
    """Return what the first batch shows at each station, how predictions differ on all data, and their examples.

    The predictions of the other program are those that the model makes of its last states.
    """
    stations, lowered = states.stations(model), states.precision()
    require_precise(model, lowered)
    calls: list[ReplayedCall] = []
    predictions, seen = Predictions(), 0
    with inference_mode_of(model, *states.programs()):
        for batch in with_progress(batches_of(data, examples), "comparing states", "batches"):
            count = length_if_known(batch) or 0
            known = states.read(stations, batch, np.arange(seen, seen + count))
            runs = StationRuns(model, known, partial(run, model, batch), batch, lowered)
            calls = calls or runs.calls()
            logits = [logits_of(output) for output in (runs.free(), runs.forced())]
            if logits[0] is not None and logits[1] is not None:
                predictions.update(model, batch, logits[0], logits[1])
            seen += count
    return calls, predictions.compute(), seen


def fed(forward: Any, transform: Any) -> Callable[[nn.Module, Any], Any]:
    """Return a function that runs a model on a batch."""

    def run(model: nn.Module, batch: Any) -> Any:
        try:
            return feed(model, batch, forward, transform)
        except IndexError as fault:
            raise ForwardError(
                f"{type(model).__name__} has no embedding for some of the tokens or positions{_sizes(model, batch)}; "
                "take the tokenizer that belongs to both models, or data made by it, no longer than the models take.",
                argument="data",
            ) from fault

    return run


def _sizes(model: nn.Module, batch: Any) -> str:
    """Return how large the tokens of a batch are, and how many rows a model's embeddings have, for a refusal."""
    ids = parts(inputs_of(batch)).get("input_ids", inputs_of(batch))
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or not ids.numel():
        return ""
    rows = ", ".join(
        f"{name} has {module.num_embeddings:,} rows"
        for name, module in modules(model).items()
        if isinstance(module, nn.Embedding)
    )
    return f": they go from {int(ids.min()):,} to {int(ids.max()):,} in {ids.shape[-1]:,} positions" + (
        f", and {rows}" if rows else ""
    )
