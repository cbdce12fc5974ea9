"""Calls: watching the modules of a model run, call by call, and leaving no trace.

Everything that looks inside a forward stands on `watching`: recording keeps what a layer gave, cutting stops there or
puts something else in its place. While it watches

- compiled modules run uncompiled, because compiled code does not see hooks that came after it;
- torch's fused transformer path is off, because it skips the modules inside and passes nested tensors between them.

Both are as before afterwards, and the hooks are gone, also after an exception or Ctrl-C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from netkin.errors import ForwardError
from netkin.representations.layers import modules, split_call, unwrapped

React = Callable[[str, Any], Any]


class Watch:
    """Counts each watched module's calls since the outermost forward of the model began, and reacts to those wanted."""

    def __init__(self, names: Iterable[str], react: React, begin: Callable[[], None]):
        self.react = react
        self.on_begin = begin
        self.depth = 0
        self.counts: Counter[str] = Counter()
        self.wanted: dict[str, set[int | None]] = {}
        for stem, call in map(split_call, names):
            self.wanted.setdefault(stem, set()).add(call)

    def begin(self, root: nn.Module, inputs: Any = None) -> None:
        """Forget the last forward, unless this one is a part of it."""
        if self.depth == 0:
            self.counts.clear()
            self.on_begin()
        self.depth += 1

    def end(self, root: nn.Module, inputs: Any = None, output: Any = None) -> None:
        """Step out of a forward of the model."""
        self.depth = max(0, self.depth - 1)

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
) -> Iterator[None]:
    """Inside the `with`, call ``react(name, output)`` after each call of the named layers, `begin` before a forward.

    What `react` returns, unless None, takes the place of the output.
    """
    watch, known = Watch(names, react, begin), modules(model)
    root = known[""]
    with ExitStack() as stack:
        stack.enter_context(in_the_open(model))
        stack.callback(root.register_forward_pre_hook(watch.begin, prepend=True).remove)
        for stem in watch.wanted:
            stack.callback(known[stem].register_forward_hook(partial(watch.called, stem)).remove)
        stack.callback(root.register_forward_hook(watch.end, always_call=True).remove)
        yield


@contextmanager
def one_forward(model: nn.Module) -> Iterator[None]:
    """Make all that `model` does inside the `with` count as one forward, however many of its parts are called."""
    root = unwrapped(model)
    owners = [getattr(hook, "__self__", None) for hook in root._forward_pre_hooks.values()]
    watches = [(owner, owner.depth) for owner in owners if isinstance(owner, Watch)]
    for watch, _ in watches:
        watch.begin(root)
    try:
        yield
    finally:
        for watch, depth in watches:
            watch.depth = depth


@contextmanager
def in_the_open(model: nn.Module) -> Iterator[None]:
    """Run compiled modules uncompiled and transformers unfused inside the `with`, so that hooks see every module."""
    fused = torch.backends.mha.get_fastpath_enabled()
    saved = [(module, vars(module).copy()) for module in model.modules() if _is_compiled(module)]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module, _ in saved:
            _uncompile(module)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, state in saved:
            vars(module).update({key: state[key] for key in ("forward", "_compiled_call_impl") if key in state})


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _uncompile(module: nn.Module) -> None:
    if vars(module).get("_compiled_call_impl") is not None:
        vars(module)["_compiled_call_impl"] = None
    if "_orig_mod" in module._modules:
        vars(module)["forward"] = module._modules["_orig_mod"]
