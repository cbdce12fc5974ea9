"""Serving: a model that runs step by step with a cache, on padded rows or on packed ones, against the whole pass.

A served model sees the same tokens in other places: one after another, shifted by padding, or many sequences in one
row. What each of its modules is given and gives is put back in the places of the whole pass, where the counterpart then
runs on it at once. So no cache is copied, and what a cache does wrong is seen in the module that reads it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.diff.call_arguments import MASKED, CallInputs, Keeper, Told, differing
from netkin.applications.diff.replay import (
    OutputErrors,
    Outputs,
    Replay,
    Replayed,
    ReplayedCall,
    call_name,
    hooked,
    outputs_of,
)
from netkin.applications.diff.routing import Choice, Choices
from netkin.errors import InvalidValue, ShapeError, require_at_least
from netkin.identity.data import LABELS
from netkin.representations.hooks import KeyPath, leaves, parts
from netkin.representations.inputs import inputs_of, prepare_batch
from netkin.representations.layers import unwrapped
from netkin.results.diff import THRESHOLD

SERVED = ("decode", "left", "right", "packed")
CACHES = ("past_key_values", "cache", "kv_cache", "past", "layer_past", "state")  # what arguments of caches are called
TOKENS = ("input_ids", "inputs_embeds")
MASK = re.compile("(?!encoder).*mask")
BLOCK = re.compile(r"(.*\.)?\d+(\..*)?")  # what is in a block is told the mask that all blocks share
SHIFTS = 4  # rows are padded by so many different numbers of tokens, none among them

ToTokens = Callable[[Tensor, int, int], "Tensor | None"]
Serve = str | Callable[[nn.Module, Any], Any]


# --- where tokens are -------------------------------------------------------------------------------------------------


@dataclass
class TokenPlaces:
    """The places of a batch's tokens, examples × positions, in the forward passes of a served model.

    `steps` hold, for each pass, rows × columns of places in the flat batch; -1 where there is no token of it. `valid`
    says which tokens are not masked.
    """

    examples: int
    length: int
    valid: Tensor | None = None
    steps: list[Tensor] = field(default_factory=list)
    _masks: dict[tuple[int, ...], tuple[Tensor, int] | None] = field(default_factory=dict)

    def assembled(self, given: Mapping[int, Tensor], like: Tensor) -> Tensor | None:
        """Return what modules were given or gave in some steps, in the places of `like`, whose values fill the rest.

        None where tensors are not by tokens. One that all examples share becomes one for each.
        """
        by_both, by_token = (self.examples, self.length), (self.examples * self.length,)
        for to_tokens, sizes in ((_by_row, by_both), (_by_head, by_both), (_by_token, by_token), (_shared, by_both)):
            has_heads = to_tokens is _by_head
            whole = like.transpose(1, 2) if has_heads and like.ndim == 4 else like
            forms = (sizes, (1, self.length)) if sizes == by_both else (sizes,)
            if whole.shape[: len(sizes)] in forms and (like.ndim == 4 or not has_heads):
                full = self._filled(given, to_tokens, whole.expand(*sizes, *whole.shape[len(sizes) :]), len(sizes))
                if full is not None:
                    return full.transpose(1, 2) if has_heads else full
        return self._by_column(given, like)

    def _filled(self, given: Mapping[int, Tensor], to_tokens: ToTokens, whole: Tensor, axes: int) -> Tensor | None:
        tokens = {step: to_tokens(tensor, *self.steps[step].shape) for step, tensor in given.items()}
        found = {step: values for step, values in tokens.items() if values is not None}
        if len(found) < len(given) or any(values.shape[1:] != whole.shape[axes:] for values in found.values()):
            return None
        full = whole.to("cpu", next(iter(found.values())).dtype, copy=True, memory_format=torch.contiguous_format)
        flat = full.view(-1, *whole.shape[axes:])
        for step, values in found.items():
            places = self.steps[step].flatten()
            flat[places[places >= 0]] = values[places >= 0]
        return full

    def _by_column(self, given: Mapping[int, Tensor], like: Tensor) -> Tensor | None:
        """Return what has no axis of examples, such as positions in one row."""
        full = like.to("cpu", next(iter(given.values())).dtype, copy=True)
        for step, tensor in given.items():
            columns = self.steps[step] % self.length
            is_one = bool((self.steps[step] >= 0).all() and (columns == columns[:1]).all())
            if not is_one or tensor.shape != (columns.shape[1], *like.shape[1:]) or like.shape[:1] != (self.length,):
                return None
            full[columns[0]] = tensor
        return full

    @property
    def is_mixed(self) -> bool:
        """Whether some row holds padding or more than one example."""
        return any(bool((step // self.length != step[:, :1] // self.length).any()) for step in self.steps)

    def inputs(self, inputs: CallInputs, call: ServedCall) -> tuple[Told, dict[KeyPath, int]]:
        """Return what a served module was given in the places of what its counterpart was given, as far as possible.

        Beside it, for masks that let tokens see what is not theirs, how many tokens these are.
        """
        found: Told = {}
        foreign: dict[KeyPath, int] = {}
        for path, like in leaves(inputs.by_name()):
            given = call.of_all(path)
            whole = self.assembled(given, like.cpu()) if given and isinstance(like, Tensor) else None
            if whole is not None:
                found[path] = whole
            elif given and (masked := self.mask(given, like)) is not None:
                found |= {path: masked[0]} if not masked[1] and _alike(like, masked[0]) else {}
                foreign |= {path: masked[1]} if masked[1] else {}
        return found, foreign

    def covered(self, steps: Iterable[int]) -> Tensor:
        """Return which tokens some steps hold, examples × positions."""
        found = torch.zeros(self.examples * self.length, dtype=torch.bool)
        for step in steps:
            places = self.steps[step]
            found[places[places >= 0]] = True
        return found.view(self.examples, self.length)

    def mask(self, given: Mapping[int, Tensor], like: Any) -> tuple[Tensor, int] | None:
        """Return masks of attention in the places of `like`, and how many tokens see what is not theirs.

        That is padding, or tokens of another sequence in their row, which a mask of the whole pass can't say.
        """
        key = tuple(map(id, given.values()))  # all layers are told the same
        if key not in self._masks:
            empty = torch.zeros(1, 1, self.length, self.length, dtype=next(iter(given.values())).dtype)
            self._masks[key] = self._mask(given, like.cpu() if _alike(like, empty) else empty)
        return self._masks[key]

    def _mask(self, given: Mapping[int, Tensor], like: Tensor) -> tuple[Tensor, int] | None:
        full, foreign = like.expand(self.examples, -1, -1, -1).clone(), 0
        counted = (
            torch.ones(self.examples * self.length, dtype=torch.bool) if self.valid is None else self.valid.flatten()
        )
        for step, tensor in given.items():
            places, columns = self.steps[step], torch.cat(self.steps[: step + 1], 1)
            if tensor.shape[1:-1] != (1, places.shape[1]):
                return None
            seen = tensor.expand(len(places), -1, -1, -1)[
                :, 0, :, : columns.shape[1]
            ]  # without what is yet to be filled
            columns = columns[:, -seen.shape[-1] :]  # of a window the last
            for queries, keys, values in zip(places, columns, seen, strict=True):
                is_token = (queries >= 0) & counted[queries]
                is_own = (queries[:, None] // self.length == keys // self.length) & (keys >= 0)
                sees = values if values.dtype == torch.bool else values > MASKED
                foreign += int(((sees & ~is_own).any(1) & is_token).sum())
                query, key = (is_own & is_token[:, None]).nonzero(as_tuple=True)
                at, of = queries[query], keys[key]
                full[at // self.length, 0, at % self.length, of % self.length] = values[query, key]
        return full, foreign


def _alike(first: Any, second: Tensor) -> bool:
    """Return whether something is a mask of the form of another."""
    return isinstance(first, Tensor) and first.dtype == second.dtype and first.shape[1:] == second.shape[1:]


def _by_row(tensor: Tensor, rows: int, columns: int) -> Tensor | None:
    return tensor.flatten(0, 1) if tensor.shape[:2] == (rows, columns) else None


def _by_head(tensor: Tensor, rows: int, columns: int) -> Tensor | None:
    if tensor.ndim != 4 or (tensor.shape[0], tensor.shape[2]) != (rows, columns):
        return None
    return tensor.transpose(1, 2).flatten(0, 1)


def _by_token(tensor: Tensor, rows: int, columns: int) -> Tensor | None:
    return tensor if tensor.ndim and tensor.shape[0] == rows * columns else None


def _shared(tensor: Tensor, rows: int, columns: int) -> Tensor | None:
    if tensor.shape[:2] != (1, columns):
        return None
    return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1)


# --- how a model is served --------------------------------------------------------------------------------------------


@dataclass
class ServedCall:
    """What a module was given and gave, by the steps in which it was called."""

    inputs: dict[int, Told] = field(default_factory=dict)
    outputs: dict[int, Outputs] = field(default_factory=dict)
    choices: dict[int, list[Choice]] = field(default_factory=dict)
    unmasked: set[KeyPath] = field(default_factory=set)  # arguments for masks that are None

    @property
    def dtypes(self) -> dict[KeyPath, torch.dtype]:
        """Return the types of floating tensors by their places."""
        first = next(iter(self.inputs.values()))
        return {path: leaf.dtype for path, leaf in first.items() if leaf.is_floating_point()}

    def of_all(self, path: KeyPath) -> dict[int, Tensor]:
        """Return an argument in all steps; nothing where some have none."""
        found = {step: told[path] for step, told in self.inputs.items() if path in told}
        return found if len(found) == len(self.inputs) else {}


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    Args:
        serve: "decode", "left", "right" or "packed"; or a function that calls the model itself, as often as it likes.
        prefill: how many tokens the first step of decoding has; by default half of them.
    """

    serve: Serve
    prefill: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.serve) and self.serve not in SERVED:
            raise InvalidValue(
                f"`serve` is one of {', '.join(map(repr, SERVED))}, or a function of a model and its inputs; got "
                f"{self.serve!r}.",
                argument="serve",
                value=self.serve,
            )
        if self.prefill is not None:
            require_at_least(1, prefill=self.prefill)
        if self.prefill is not None and self.serve != "decode":
            raise InvalidValue("`prefill` goes with serve='decode' alone.", argument="prefill", value=self.prefill)

    @property
    def name(self) -> str:
        """How a result calls it."""
        return self.serve if isinstance(self.serve, str) else "by a function"

    def run(
        self, model: nn.Module, batch: Any, names: Sequence[str], transform: Any = None
    ) -> tuple[TokenPlaces, dict[str, ServedCall]]:
        """Run a model on a batch as it is served; return where tokens were, and what the named modules did."""
        model = unwrapped(model)
        inputs = inputs_of(prepare_batch(model, batch, transform))
        by_name = inputs if isinstance(inputs, Mapping) else {_first_argument(model): inputs}
        inputs = {name: value for name, value in by_name.items() if name not in LABELS}
        tokens = next((inputs[name] for name in (*TOKENS, _first_argument(model)) if name in inputs), None)
        if not isinstance(tokens, Tensor) or tokens.ndim < 2 or (tokens.ndim == 2 and tokens.is_floating_point()):
            raise ShapeError(
                "`serve` needs sequences of tokens, examples × positions; take it away for images and vectors.",
                argument="serve",
            )
        mask = inputs.get("attention_mask")
        valid = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == tokens.shape[:2] else None
        layout = TokenPlaces(tokens.shape[0], tokens.shape[1], valid)
        recorder = _Recorder(layout, names)
        with hooked(model, list(dict.fromkeys(["", *names])), recorder.before, recorder.after), recorder.choices:
            if callable(self.serve):
                self.serve(model, inputs)
                if not layout.steps:
                    raise InvalidValue("the function of `serve` never calls the model.", argument="serve")
            elif self.serve == "decode":
                self._decode(model, inputs, layout, recorder)
            else:
                places = _padded(layout, self.serve) if self.serve != "packed" else _packed(layout)
                recorder.planned = places
                model(**_moved(model, inputs, layout, places, self.serve))
        return layout, recorder.calls

    def logits(self, model: nn.Module, batch: Any, like: Tensor | None, transform: Any = None) -> Tensor | None:
        """Return the logits of a served model in the places of those of the whole pass."""
        if like is None:
            return None
        layout, calls = self.run(model, batch, [""], transform)
        outputs = calls[""].outputs if calls else {}
        given = {step: next(iter(own.values())) for step, own in outputs.items() if own}
        return layout.assembled(given, like.cpu()) if given else None

    def _decode(self, model: nn.Module, inputs: dict[str, Any], layout: TokenPlaces, recorder: _Recorder) -> None:
        known = _arguments(model)
        name = next((name for name in CACHES if name in known), None)
        if name is None:
            raise InvalidValue(
                f"{type(model).__name__} takes no cache: none of its arguments is called {', '.join(CACHES)}; give a "
                "function of the model and its inputs as `serve`, which calls the model for each step.",
                argument="serve",
                value=self.serve,
            )
        length, cache = layout.length, None
        prefill = length // 2 if self.prefill is None else self.prefill
        if not 0 < prefill < length:
            raise InvalidValue(
                f"`prefill` is from 1 to {length - 1}, as the sequences have {length} tokens; got {prefill}.",
                argument="prefill",
                value=prefill,
            )
        options = {"use_cache": True} if "use_cache" in known else {}
        every = torch.arange(layout.examples * length).view(layout.examples, length)
        for start, stop in [(0, prefill), *((place, place + 1) for place in range(prefill, length))]:
            recorder.planned = every[:, start:stop]
            step = {key: _columns(key, value, layout, start, stop) for key, value in inputs.items()}
            output = model(**(step | options | {name: cache}))
            cache = parts(output).get(
                name, output[1] if isinstance(output, (tuple, list)) and len(output) > 1 else None
            )
            if cache is None:
                raise InvalidValue(
                    f"{type(model).__name__} gives no cache back: neither {name!r} nor a second output.",
                    argument="serve",
                    value=self.serve,
                )


class _Recorder:
    """Keeps what modules are given and give in each forward pass of the model, on the host."""

    def __init__(self, layout: TokenPlaces, names: Iterable[str]):
        self.layout, self.names, self.calls = layout, set(names), dict[str, ServedCall]()
        self.planned: Tensor | None = None  # the places of the pass that comes next
        self._counts, self._opened, self._keeper = Counter[str](), list[tuple[str, int]](), Keeper()
        self.choices = Choices(lambda: self._opened[-1][0] if self._opened else "")

    def before(self, name: str, module: nn.Module, inputs: CallInputs) -> None:
        if not self._opened:
            if name:
                raise InvalidValue(
                    f"the function of `serve` calls {name!r}; it has to call the model itself.", argument="serve"
                )
            self._counts.clear()
            self._keeper = Keeper()
            self.layout.steps.append(self._places(inputs) if self.planned is None else self.planned)
        self._counts[name] += 1
        key = call_name(name, self._counts[name])
        self._opened.append((key, len(self.choices.made)))
        if name in self.names:
            tensors = {path: leaf for path, leaf in leaves(inputs.by_name()) if isinstance(leaf, Tensor)}
            kept = {path: self._keeper.copy(leaf) for path, leaf in tensors.items()}
            call = self.calls.setdefault(key, ServedCall())
            call.inputs[len(self.layout.steps) - 1] = kept
            call.unmasked |= {path for path, leaf in inputs.beside() if leaf is None and MASK.fullmatch(str(path[-1]))}

    def after(self, name: str, module: nn.Module, output: Any) -> None:
        key, start = self._opened.pop()
        if name in self.names:
            self.calls[key].choices[len(self.layout.steps) - 1] = self.choices.made[start:]
            kept = {path: self._keeper.copy(tensor) for path, tensor in outputs_of(output).items()}
            self.calls[key].outputs[len(self.layout.steps) - 1] = kept

    def _places(self, inputs: CallInputs) -> Tensor:
        """Return the places of a pass that a user's function made: those after the ones before."""
        rows, length = self.layout.examples, self.layout.length
        start = sum(step.shape[1] for step in self.layout.steps)
        tokens = next(
            (leaf for _, leaf in leaves(inputs.by_name()) if isinstance(leaf, Tensor) and leaf.ndim > 1), None
        )
        if tokens is None or len(tokens) != rows or start + tokens.shape[1] > length:
            shape = None if tokens is None else tuple(tokens.shape[:2])
            raise ShapeError(
                f"the function of `serve` gave the model tokens of shape {shape} after {start} of {length}; each call "
                f"takes the next tokens of all {rows} examples.",
                argument="serve",
            )
        every = torch.arange(rows * length).view(rows, length)
        return every[:, start : start + tokens.shape[1]]


def exceeds(errors: OutputErrors) -> bool:
    """Return whether an output's error lies above its floor by more than the threshold."""
    return float(errors.local.sum()) > THRESHOLD**2 * float(errors.floor.sum())


def _arguments(model: nn.Module) -> list[str]:
    """Return what the forward of a model takes, that of its class as well where it was replaced by any function."""
    own, of_class = (inspect.signature(forward).parameters for forward in (model.forward, type(model).forward))
    is_open = any(parameter.kind == parameter.VAR_KEYWORD for parameter in own.values())
    return [name for name in (of_class if is_open else own) if name != "self"]


def _first_argument(model: nn.Module) -> str:
    return next(iter(_arguments(model)), "")


def _columns(key: str, value: Any, layout: TokenPlaces, start: int, stop: int) -> Any:
    """Return an input for some of the positions; a mask covers those before as well."""
    if not isinstance(value, Tensor) or value.shape[:2] not in ((layout.examples, layout.length), (1, layout.length)):
        return value
    return value[:, :stop] if key == "attention_mask" else value[:, start:stop]


def _padded(layout: TokenPlaces, side: str) -> Tensor:
    """Return rows that are padded by different numbers of tokens at one side."""
    rows, length = layout.examples, layout.length
    places = torch.full((rows, length + SHIFTS), -1)
    for row in range(rows):
        shift = SHIFTS - row % (SHIFTS + 1) if side == "left" else 0
        places[row, shift : shift + length] = torch.arange(row * length, (row + 1) * length)
    return places


def _packed(layout: TokenPlaces) -> Tensor:
    """Return one row of all tokens that are not masked."""
    every = torch.arange(layout.examples * layout.length)
    return (every if layout.valid is None else every[layout.valid.flatten()])[None]


def _moved(
    model: nn.Module, inputs: Mapping[str, Any], layout: TokenPlaces, places: Tensor, serve: str
) -> dict[str, Any]:
    """Return inputs in other places, with the mask and positions that belong to them."""
    known = _arguments(model)
    needed = "position_ids" if serve == "packed" else "attention_mask"
    if needed not in known:
        raise InvalidValue(
            f"{type(model).__name__} takes no `{needed}`, so that it can't be told where sequences "
            f"{'begin' if serve == 'packed' else 'are padded'}.",
            argument="serve",
            value=serve,
        )
    size, is_token = (layout.examples, layout.length), places >= 0

    def move(value: Tensor) -> Tensor:
        moved = value.flatten(0, 1)[places.clamp(min=0).to(value.device)]
        return moved.where(is_token.to(value.device).view(*places.shape, *[1] * (moved.ndim - 2)), 0)

    device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
    ones, positions = torch.ones(size, dtype=torch.long), torch.arange(layout.length).expand(size)
    given: dict[str, Any] = {"attention_mask": ones.to(device)}
    if "position_ids" in known and serve != "right":
        given["position_ids"] = positions.to(device)
    given |= inputs
    moved = {
        key: move(value) if isinstance(value, Tensor) and value.shape[:2] == size else value
        for key, value in given.items()
    }
    if serve == "packed":
        del moved["attention_mask"]
        moved |= {"use_cache": False} if "use_cache" in known else {}
    return moved


# --- the whole pass on what the served model was given ----------------------------------------------------------------


class ServedReplay(Replay):
    """The whole pass of the reference, whose modules run on what their counterparts were given as they were served."""

    def __init__(self, *given: Any):
        *others, self.layout = given
        super().__init__(*others)

    def _differing(self, inputs: CallInputs, trace: ServedCall, call: ReplayedCall) -> list[tuple[str, str]]:
        given, foreign = self.layout.inputs(inputs, trace)
        beside = {path: leaf for path, leaf in inputs.beside() if path in given}
        found = list(
            differing({path: leaf.cpu().expand_as(given[path]) for path, leaf in beside.items()}, given, self.drift)
        )
        for path, tokens in foreign.items():
            call.fault = "it is told a mask that the whole pass can't be told"
            found.append((".".join(map(str, path)), f"{tokens:,} tokens see padding or other sequences"))
        return found

    def _measure(self, call: ReplayedCall, replayed: Replayed, given: Outputs) -> None:
        super()._measure(call, replayed, given)
        hides = self.layout.is_mixed or (self.examples.valid is not None and not self.examples.valid.all())
        if (
            hides
            and BLOCK.fullmatch(call.name)
            and replayed.trace.unmasked
            and any(exceeds(errors) for errors in call.errors)
        ):
            # without a mask attention can't know what to leave out: the fault is where the mask was left out
            call.errors, call.fault = [], "it is told no mask, though its rows hold padding or other sequences"
            how = "None, though rows hold padding or other sequences"
            call.arguments += [(".".join(map(str, path)), how) for path in replayed.trace.unmasked]

    def _replayed(self, *given: Any) -> Replayed:
        return _ServedReplayed(self, *given)


class _ServedReplayed(Replayed):
    """One call of the whole pass, on what its counterpart was given in all steps."""

    replay: ServedReplay

    def local(self, given: Outputs, call: ReplayedCall) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs on what the counterpart was given, beside what that gave."""
        device = next((leaf.device for _, leaf in leaves(self.inputs.by_name()) if isinstance(leaf, Tensor)), None)
        own, (told, _) = self.inputs.dtypes(), self.replay.layout.inputs(self.inputs, self.trace)
        typed = {path: value.to(own.get(path, value.dtype)) for path, value in told.items()}
        self.inputs = self.inputs.told(typed, device)
        self.choices.clear()
        self.outputs = self._run(self.module, self.inputs.copied())
        self.choices.append(self.chosen(self.choices[0]))
        return [(self.outputs[path], theirs) for path, theirs in self._assembled(self.outputs).items()]

    def chosen(self, like: Sequence[Choice]) -> Sequence[Choice]:
        """Return the choices of experts of all steps, in the places of the whole pass."""
        found, layout = list[Choice](), self.replay.layout
        for place, own in enumerate(like):
            given = {step: made[place] for step, made in self.trace.choices.items() if len(made) == len(like)}
            scores = layout.assembled({step: one.scores for step, one in given.items()}, own.scores) if given else None
            chosen = layout.assembled({step: one.chosen for step, one in given.items()}, own.chosen) if given else None
            if scores is None or chosen is None:
                return []
            found.append(Choice(own.call, scores, chosen))
        return found

    def ends(self, given: Outputs) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs of the whole pass beside those of the counterpart, in its places."""
        return [(given[path], theirs) for path, theirs in self._assembled(given).items()]

    def floors(self) -> list[list[Tensor]]:
        """Return the module's own outputs in other precisions, of those that are by tokens."""
        kept = [place for place, path in enumerate(self.outputs) if path in self._assembled(self.outputs)]
        return [[outputs[place] for place in kept] for outputs in super().floors()]

    def _assembled(self, outputs: Outputs) -> Outputs:
        found: Outputs = {}
        for path, like in outputs.items():
            given = {step: theirs[path] for step, theirs in self.trace.outputs.items() if path in theirs}
            is_whole = given and self.replay.examples.within(self.replay.layout.covered(given))
            whole = self.replay.layout.assembled(given, like.cpu()) if is_whole else None
            if whole is not None:
                found[path] = whole
        return found
