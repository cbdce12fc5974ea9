"""Hooks: watching a model's calls and recording outputs; `inference_mode_of` leaves it as it was.

All code that reads intermediate values uses `watching`: `recording` keeps a layer's output, `cutting` stops there or
replaces it. While hooks are on a model

- compiled modules run uncompiled, because compiled code ignores hooks that were added after compilation;
- torch's fused transformer path is off, because it skips the modules inside and passes nested tensors between them.

Both are restored afterwards, and the hooks are removed, also after an exception or Ctrl-C.

Outputs may be nested: the tuples, lists, mappings and dataclasses that models take and return are traversed and rebuilt
by `parts`, `leaves`, `mapped` and `rebuilt`. A Hugging Face ``ModelOutput`` or ``BatchEncoding`` is a mapping like any
other; nothing is imported for them. Any other object is a structure if it has an attribute `last_hidden_state` or
`logits`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from netkin.errors import ForwardError
from netkin.representations.layers import Spec, choose, layer_label, modules, require_weights, split_call, unwrapped
from netkin.settings import (
    SharedSetting,
    evaluating,
    exact_products,
    model_lock,
    random_states_kept,
    unfused_attention,
)

React = Callable[[str, Any], Any]
_uncompiled: WeakKeyDictionary[nn.Module, SharedSetting] = WeakKeyDictionary()
PREFERRED = ("last_hidden_state", "logits")
KeyPath = tuple[Hashable, ...]


class Watch:
    """Counts each watched module's calls since the forward of the model began, and reacts to those wanted."""

    def __init__(self, names: Iterable[str], react: React, begin: Callable[[], None]):
        self.react = react
        self.on_begin = begin
        self.is_within = False  # a forward that `one_forward` has begun
        self.counts: Counter[str] = Counter()
        self.wanted: dict[str, set[int | None]] = {}
        for stem, call in map(split_call, names):
            self.wanted.setdefault(stem, set()).add(call)

    def begin(self, root: nn.Module, inputs: Any = None) -> None:
        """Forget the last forward, unless this one is a part of it."""
        if not self.is_within:
            self.counts.clear()
            self.on_begin()

    def called(self, stem: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Count one call of a watched module and react to it if it is wanted."""
        if getattr(module, "_is_replica", False):
            raise ForwardError(
                "`DataParallel` runs copies of the model on several devices, and only one can be watched; "
                "call `model.module(batch)` instead of `model(batch)`."
            )
        self.counts[stem] += 1
        call = self.counts[stem]
        if None in self.wanted[stem]:
            return self.react(stem if call == 1 else f"{stem}#{call}", output)
        return self.react(f"{stem}#{call}", output) if call in self.wanted[stem] else None


@contextmanager
def watching(
    model: nn.Module, names: Iterable[str], react: React, begin: Callable[[], None] = lambda: None
) -> Iterator[Watch]:
    """Inside the `with`, call ``react(name, output)`` after each call of the named layers, `begin` before a forward.

    What `react` returns, unless None, takes the place of the output. The `Watch` that is given may get another `react`.
    """
    watch, known = Watch(names, react, begin), modules(model)
    # called on the class: a ScriptModule refuses the method, and yet its hooks run
    after = nn.Module.register_forward_hook
    root = known[""]
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        stack.callback(nn.Module.register_forward_pre_hook(root, watch.begin, prepend=True).remove)
        for stem in watch.wanted:
            stack.callback(after(known[stem], partial(watch.called, stem)).remove)
        yield watch


@contextmanager
def inference_mode_of(*models: nn.Module, exact: bool = False) -> Iterator[None]:
    """Inside the `with`, the models are in evaluation mode and build no graph; afterwards all is as it was.

    That is each module's own training flag, and the random states of torch (on the CPU and on the models' CUDA
    devices), of `random` and of NumPy; also after an exception or Ctrl-C. Grad flags and buffers are never touched.
    Other threads that run a model through netkin wait until the `with` is left.
    The models run in the precision that is set around the `with`. With `exact`, float32 on a GPU is not rounded to
    TF32, so that a model gives the numbers it gives on the CPU.
    """
    require_weights(*models)
    precision = exact_products() if exact else nullcontext()
    with model_lock(), evaluating(*models), random_states_kept(*models), torch.no_grad(), precision:
        yield


@contextmanager
def recording(
    model: nn.Module, layers: Spec = None, reduce: Callable[[str, Tensor], Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Give a mapping that holds, after each forward of `model`, the outputs of the chosen layers by name.

    It is emptied when the next forward begins. A layer that ran several times gives ``relu``, ``relu#2``, ``relu#3``;
    one that did not run is absent. Of an output with several parts the first floating tensor is kept, in mappings and
    objects ``last_hidden_state`` or ``logits`` before others. It is a copy, so that an in-place ReLU after the
    layer does not change it. `reduce` is called with the name and the tensor while the model runs, and what it returns
    is kept instead. Modules under ``torch.compile`` run uncompiled inside the `with`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
        >>> with recording(model, ["0"]) as outputs:
        ...     _ = model(torch.ones(3, 4))
        >>> outputs["0"].shape
        torch.Size([3, 8])
    """
    outputs: dict[str, Any] = {}

    def keep(name: str, output: Any) -> None:
        tensor = main_tensor(output, name)
        outputs[name] = tensor.clone() if reduce is None else apart(reduce(name, tensor), tensor)

    with watching(model, choose(model, layers), keep, begin=outputs.clear):
        yield outputs


def main_tensor(output: Any, name: str) -> Tensor:
    """Return the tensor that represents the output of layer `name`: the first floating one in it."""
    path = _path_in(output)
    fault = unrecordable(output)
    if path is None or fault:
        # stitching asks for the first call of a module by its number
        raise ForwardError(f"{layer_label(name.removesuffix('#1'))} {fault}; choose another layer.")
    return at(output, path)


def unrecordable(output: Any) -> str:
    """Return why an output can't be recorded, as the rest of a sentence about its layer; empty if it can."""
    path = _path_in(output)
    if path is None:
        kind = f"Tensor of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        return f"gives no floating tensor to record, but {kind}"
    tensor = at(output, path)
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"gives a {'nested' if tensor.is_nested else 'sparse'} tensor, and only dense ones can be recorded"
    return ""


def _path_in(output: Any) -> KeyPath | None:
    return () if isinstance(output, Tensor) and output.is_floating_point() else path_to_tensor(output)


def apart(value: Any, output: Tensor) -> Any:
    """Return `value`, copied if it is a tensor that shares its memory with `output`."""
    if isinstance(value, tuple):
        parts = [apart(part, output) if isinstance(part, (Tensor, tuple)) else part for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if not isinstance(value, Tensor) or value.device != output.device or value.layout != torch.strided:
        return value
    same = value.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return value.clone() if same else value


@contextmanager
def one_forward(model: nn.Module) -> Iterator[None]:
    """Make all that `model` does inside the `with` count as one forward, however many of its parts are called."""
    root = unwrapped(model)
    owners = [getattr(hook, "__self__", None) for hook in root._forward_pre_hooks.values()]
    watches = [watch for watch in owners if isinstance(watch, Watch) and not watch.is_within]
    for watch in watches:
        watch.begin(root)
        watch.is_within = True
    try:
        yield
    finally:
        for watch in watches:
            watch.is_within = False


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled modules uncompiled and transformers unfused inside the `with`, so that hooks run for all modules."""
    with ExitStack() as stack:
        stack.enter_context(unfused_attention())
        for module in model.modules():
            compiled = "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None
            if module in _uncompiled or compiled:
                stack.enter_context(_setting_of(module).changed())
        yield


def _setting_of(module: nn.Module) -> SharedSetting:
    """Return whether a module runs compiled, as a setting: it does again once the last user has left."""
    weak = ref(module)  # the setting lives as long as the module, and must not keep it alive
    return _uncompiled.setdefault(module, SharedSetting(lambda: _uncompile(weak())))


def _uncompile(module: nn.Module | None) -> Callable[[], None]:
    assert module is not None
    state: dict[str, Any] = {
        key: vars(module)[key] for key in ("forward", "_compiled_call_impl") if key in vars(module)
    }
    if vars(module).get("_compiled_call_impl") is not None:
        vars(module)["_compiled_call_impl"] = None
    if "_orig_mod" in module._modules:
        vars(module)["forward"] = module._modules["_orig_mod"]
    return lambda: vars(module).update(state)


# --- nested outputs ---------------------------------------------------------------------------------------------------


def parts(structure: Any) -> dict[Any, Any]:
    """Return what `structure` holds, by key, index or field name; nothing for what is no structure."""
    if isinstance(structure, Mapping):
        return dict(structure)
    if isinstance(structure, (tuple, list)):
        return dict(enumerate(structure))
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        return {field.name: getattr(structure, field.name) for field in dataclasses.fields(structure)}
    attributes = {} if isinstance(structure, type) else getattr(structure, "__dict__", {})
    return dict(attributes) if any(name in attributes for name in PREFERRED) else {}


def rebuilt(structure: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of `structure`, of its own type, with the parts in `changed` put in their places."""
    if isinstance(structure, Mapping) and not isinstance(structure, MutableMapping):
        return {**structure, **changed}
    if isinstance(structure, (tuple, list)):
        return _same_sequence(structure, [changed.get(index, part) for index, part in enumerate(structure)])
    made = copy.copy(structure)
    for key, part in changed.items():
        if isinstance(made, MutableMapping):
            made[key] = part
        else:  # frozen dataclasses refuse plain assignment, and nothing else holds this copy yet
            object.__setattr__(made, key, part)
    return made


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with `function` applied to everything in it that is not a structure itself."""
    if isinstance(structure, (tuple, list)) and structure:  # nearly always, of tensors
        arrays = (Tensor, np.ndarray)
        return _same_sequence(
            structure, [function(p) if isinstance(p, arrays) else mapped(function, p) for p in structure]
        )
    inside = parts(structure)
    if not inside:
        return function(structure)
    return rebuilt(structure, {key: mapped(function, part) for key, part in inside.items()})


def copied(structure: Any) -> Any:
    """Return `structure` with copies of the tensors and arrays in it."""
    return mapped(copied_leaf, structure)


def copied_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor or array, with its gradient's history; anything else as it is."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def leaves(structure: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield everything in `structure` that is not a structure, depth first, with the path to it.

    In mappings and objects `last_hidden_state` and `logits` come before the other parts.
    """
    inside = parts(structure)
    if not inside:
        yield (), structure
    for key in sorted(inside, key=lambda key: PREFERRED.index(key) if key in PREFERRED else len(PREFERRED)):
        for path, leaf in leaves(inside[key]):
            yield (key, *path), leaf


def path_to_tensor(output: Any) -> KeyPath | None:
    """Return the way to the first floating tensor in a layer's `output`, or None if it has none."""
    return next((path for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def at(structure: Any, path: KeyPath) -> Any:
    """Return what lies in `structure` at the end of `path`."""
    for key in path:
        structure = parts(structure)[key]
    return structure


def replaced_at(structure: Any, path: KeyPath, part: Any) -> Any:
    """Return a copy of `structure` that holds `part` at the end of `path`."""
    if not path:
        return part
    inner = parts(structure)[path[0]]
    return rebuilt(structure, {path[0]: replaced_at(inner, path[1:], part)})


def _same_sequence(structure: Any, items: list[Any]) -> Any:
    if hasattr(structure, "_make"):
        return structure._make(items)
    return type(structure)(items)
