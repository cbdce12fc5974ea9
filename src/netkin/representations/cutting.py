"""Cutting: run a model up to a layer or from a layer on, replace a layer's output, or extract the tail.

Unlike `activations`, these leave gradients and training mode as the caller set them. A *tail* is what a model does
after a layer, so that nothing before the layer is computed: the modules that enclose the layer are traced with
`torch.fx`, all others stay whole, and what does not depend on the layer's output falls away. Where a model can't be
traced, `run_from` gives the same result with hooks, but also computes what comes before the layer.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from netkin.errors import ForwardError, UnknownName
from netkin.representations.hooks import (
    copied,
    leaves,
    main_tensor,
    parts,
    path_to_tensor,
    rebuilt,
    recording,
    replaced_at,
    watching,
)
from netkin.representations.inputs import Forward, feed
from netkin.representations.layers import children, choose, layer_label, modules, split_call, unwrapped
from netkin.settings import model_lock

Traces = dict[frozenset[str], fx.Graph]  # of a model, by the modules that were opened
NO_FEATURES = ("mask", "position_ids", "token_type_ids")  # inputs of a language model that are no text


class _LayerReached(BaseException):
    """Stops a forward once the layer has run; not an `Exception`, so that no model catches it on the way."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


def run_until(model: nn.Module, layer: str, batch: Any, forward: Forward | None = None) -> Any:
    """Return the output of `layer` for `batch`; what comes after it is not computed.

    Of a layer that runs several times the first call is meant; ``"relu#2"`` is the second.
    """

    def stop(name: str, output: Any) -> None:
        raise _LayerReached(output)

    try:
        with model_lock(), watching(model, [_one_call(model, layer)], stop):
            feed(model, batch, forward)
    except _LayerReached as reached:
        return reached.output
    raise _did_not_run(layer)


def run_layers(
    model: nn.Module,
    layers: Iterable[str],
    batch: Any,
    react: Callable[[str, Tensor], None],
    name: str,
    *,
    whole: bool = False,
) -> Any:
    """Run a model on a batch, call `react` with each of the layers and its output, and return the model's answers.

    With one layer the model is run no further than to it, unless the `whole` is wanted.
    """
    calls: dict[str, list[str]] = {}
    for layer in dict.fromkeys(layers):
        stem, number = split_call(layer)
        calls.setdefault(f"{stem}#{number or 1}", []).append(layer)

    def react_all(call: str, output: Tensor) -> None:
        for layer in calls[call]:
            react(layer, output)

    if len(calls) == 1 and not whole:
        (call,) = calls
        output = run_until(model, calls[call][0], batch)
        return react_all(call, main_tensor(output, calls[call][0]))
    with recording(model, list(calls), react_all) as ran:
        answers = feed(model, batch)
    for call in calls.keys() - ran.keys():
        raise ForwardError(
            f"{layer_label(calls[call][0])} of {name!r} did not run in the forward of this batch; choose one that does."
        )
    return answers


def run_from(model: nn.Module, layer: str, output: Any, batch: Any, forward: Forward | None = None) -> Any:
    """Return the model's output for `batch` as if `layer` had given `output`.

    Where the way from the model to the layer leads through ``nn.Sequential`` only, `output` goes straight to what comes
    next and nothing before it is computed; elsewhere the whole model runs. `output` itself is never changed.

    Args:
        model: the model.
        layer: the layer whose output is replaced.
        output: what `run_until` returned, or a tensor that takes the place of the first floating tensor in it.
        batch: the inputs, of which whatever does not pass through the layer is computed.
        forward: a function ``forward(model, batch)`` that runs the model.
    """
    name = _one_call(model, layer)
    if forward is None and _is_in_sequence(model, layer):
        return _tail(modules(model), layer, copied(output))
    ran = []

    def put(_: str, original: Any) -> Any:
        ran.append(True)
        return _in_place_of(original, copied(output))

    with model_lock(), watching(model, [name], put):
        result = feed(model, batch, forward)
    if not ran:
        raise _did_not_run(layer)
    return result


@contextmanager
def replacing(model: nn.Module, layer: str, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the `with`, the layer gives ``function(output)``; of an output in parts only the first floating tensor.

    ``"relu"`` means every call of `relu`, ``"relu#2"`` only the second in a forward.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> with replacing(model, "0", lambda output: -output.abs()):
        ...     model(torch.ones(2, 4)).max().item()
        0.0
    """
    known_layer(model, layer)

    def put(name: str, original: Any) -> Any:
        # copied, since a later in-place step would otherwise write into what the function keeps
        return _in_place_of(original, function(main_tensor(original, name)).clone())

    with watching(model, [layer], put):
        yield


def _in_place_of(original: Any, output: Any) -> Any:
    path = path_to_tensor(original)
    if not isinstance(output, Tensor) or path is None:
        return output
    return replaced_at(original, path, output)


def _one_call(model: nn.Module, layer: str) -> str:
    return layer if known_layer(model, layer)[1] else f"{layer}#1"


def known_layer(model: nn.Module, layer: str) -> tuple[str, int | None]:
    """Return the module's name and the call that `layer` means, if it is one layer of the model."""
    stem, call = split_call(layer)
    if stem not in modules(model):
        matching = choose(model, layer)
        raise UnknownName(f"{layer!r} matches {len(matching)} layers, and one is needed; choose {matching[0]!r}.")
    return stem, call


def _is_in_sequence(model: nn.Module, layer: str) -> bool:
    """Return whether what follows `layer` is a plain run through the rest of nested `nn.Sequential`s."""
    known = modules(model)
    if layer not in known:
        return False
    above = [known[name] for name in _names_above(layer)]
    are_hooked = any(module._forward_hooks or module._forward_pre_hooks for module in above)
    once = sum(module is known[layer] for module in known.values()) == 1
    return once and not are_hooked and all(type(module).forward is nn.Sequential.forward for module in above)


def _names_above(layer: str) -> list[str]:
    """Return the names of the modules that enclose `layer`, the nearest first."""
    keys = layer.split(".") if layer else []
    return [".".join(keys[:depth]) for depth in reversed(range(len(keys)))]


def _tail(known: dict[str, nn.Module], layer: str, output: Any) -> Any:
    """Return what the rest of the enclosing sequences make of `output`."""
    for above in _names_above(layer):
        key = layer.removeprefix(above).strip(".").split(".")[0]
        steps = children(known[above])
        for step in list(steps)[list(steps).index(key) + 1 :]:
            output = steps[step](output)
    return output


def _did_not_run(layer: str) -> ForwardError:
    return ForwardError(f"{layer_label(layer)} did not run in the forward of this batch; choose a layer that does.")


@dataclass(frozen=True)
class Tail:
    """What follows a layer: called with the layer's output (and the batch) it gives the model's output.

    `graph` is None where the model could not be cut, for the reason `why`; then the whole model runs.
    """

    layer: str
    model: nn.Module
    graph: fx.GraphModule | None
    why: str = ""

    def __call__(self, output: Tensor, batch: Any, forward: Forward | None = None) -> Any:
        if self.graph is None:
            return run_from(self.model, self.layer, output, batch, forward)
        return self.graph(output)

    @property
    def cut_words(self) -> str:
        """How the model was cut, and what is wasted, as text."""
        if self.graph is not None:
            return f"cut after {self.layer!r}: nothing before it is computed"
        return f"hooks at {self.layer!r}: the whole model runs, what comes before is computed for nothing ({self.why})"


def tail(model: nn.Module, layer: str, *, traces: dict[frozenset[str], fx.Graph] | None = None) -> Tail:
    """Return what `model` does after `layer`; of a layer that runs several times the first call is meant.

    In `traces` calls for several layers of the same model share what they have in common.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> tail(model, "0")(torch.ones(3, 8), None).shape
        torch.Size([3, 2])
    """
    stem, call = known_layer(model, layer)
    try:
        return Tail(layer, model, _cut(unwrapped(model), stem, call or 1, {} if traces is None else traces))
    except _Uncut as reason:
        return Tail(layer, model, None, str(reason))


def reaches_around(model: nn.Module, layer: str, output: Tensor, batch: Any) -> bool:
    """Return whether the model's output still depends on its input once the layer's `output` is fixed.

    So it is inside a residual block: the shortcut carries the model's own features past the layer. What says only which
    tokens count, or where they stand, may go past it.
    """
    first, second = (run_from(model, layer, output, inputs) for inputs in (batch, _other_batch(batch)))
    return not _same(first, second, tolerance=0.0)


def agrees(tail: Tail, output: Tensor, batch: Any, whole: Any) -> bool:
    """Return whether a tail, given the layer's own output, gives `whole`, as the whole model does."""
    try:
        answers = tail(output.clone(), batch)
    except (RuntimeError, ValueError, IndexError):  # the layer has another number of examples than the model's input
        return False
    return _same(answers, whole, tolerance=1e-4)


class _Uncut(Exception):
    """The reason why a model can't be cut."""


class _Enclosing(fx.Tracer):
    """Opens the modules that enclose the layer, and no others."""

    def __init__(self, stem: str):
        super().__init__()
        keys = stem.split(".")
        self.open = frozenset(".".join(keys[:depth]) for depth in range(1, len(keys)))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keep a module whole unless it encloses the layer."""
        return module_qualified_name not in self.open


def _cut(model: nn.Module, stem: str, call: int, traces: Traces) -> fx.GraphModule:
    known = modules(model)
    if not stem:
        raise _Uncut("nothing follows the model itself")
    above = [name for name in known if not name or stem.startswith(f"{name}.")]
    if any(known[name]._forward_hooks or known[name]._forward_pre_hooks for name in above):
        raise _Uncut("a module around the layer has hooks")
    tracer = _Enclosing(stem)
    if tracer.open not in traces:
        traces[tracer.open] = _trace(model, tracer)
    graph = copy.deepcopy(traces[tracer.open])
    _begin_at(graph, _call(graph, model, known[stem], call))
    return fx.GraphModule(model, graph, class_name=f"{type(model).__name__}Tail")


def _trace(model: nn.Module, tracer: fx.Tracer) -> fx.Graph:
    try:
        return tracer.trace(model)
    except Exception as fault:
        said = re.split(r"\n|\.\s", str(fault).strip(), maxsplit=1)[0].removesuffix(".")
        raise _Uncut(f"torch.fx can't trace it: {type(fault).__name__}{f', {said}' if said else ''}") from fault


def _call(graph: fx.Graph, model: nn.Module, module: nn.Module, call: int) -> fx.Node:
    known = dict(model.named_modules(remove_duplicate=False))
    nodes = [node for node in graph.nodes if node.op == "call_module" and known[str(node.target)] is module]
    if len(nodes) < call:
        raise _Uncut("the layer is not called as a module")
    return nodes[call - 1]


def _begin_at(graph: fx.Graph, layer: fx.Node) -> None:
    """Make the graph begin with the layer's output, and drop all that this does not need."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(iter(graph.nodes))):
        output = graph.placeholder("layer_output")
    for user in list(layer.users):
        first = user.op == "call_function" and user.target is operator.getitem and user.args[1] == 0
        if first and any(other.target is operator.getitem for other in layer.users):
            user.replace_all_uses_with(output)
    for node in list(graph.nodes):
        if _counting(node) in inputs:  # the layer gives as many
            with graph.inserting_after(output):
                node.replace_all_uses_with(graph.call_method("size", (output, 0)))
    graph.eliminate_dead_code(_is_end)
    if not all(user.target is operator.getitem and isinstance(user.args[1], int) for user in layer.users):
        layer.replace_all_uses_with(output)
        graph.eliminate_dead_code(_is_end)
    if layer in graph.nodes and layer.users:
        raise _Uncut("more than the first part of the layer's output is used")
    for node in inputs:
        if node.users:
            raise _Uncut("a path around the layer needs the model's own input")
        graph.erase_node(node)
    graph.lint()


def _counting(node: fx.Node) -> fx.Node | None:
    """Return whose examples a node counts: x of ``x.size(0)``, ``x.shape[0]`` and ``x.size()[0]``."""
    if node.target == "size" and node.args[1:] == (0,):
        return node.all_input_nodes[0]
    sizes = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if isinstance(sizes, fx.Node) and (sizes.target, *sizes.args[1:]) in (("size",), (getattr, "shape")):
        return sizes.all_input_nodes[0]
    return None


def _is_end(node: fx.Node) -> bool:
    # in-place steps whose result is not read are dropped too; `agrees` detects when that was wrong
    return node.op in ("placeholder", "output")


def _other_batch(batch: Any) -> Any:
    inside = parts(batch)
    if not inside:
        return _other_input(batch)
    features = {key: part for key, part in inside.items() if not str(key).endswith(NO_FEATURES)}
    return rebuilt(batch, {key: _other_batch(part) for key, part in features.items()})


def _other_input(leaf: Any) -> Any:
    """Return other inputs of the same kind: noise of the same spread, or the examples in another order."""
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    if leaf.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        return leaf + leaf.std(correction=0) * torch.randn(leaf.shape, generator=generator).to(leaf)
    return leaf.roll(1, 0).flip(-1)


def _same(first: Any, second: Any, tolerance: float) -> bool:
    pairs = zip(leaves(first), leaves(second), strict=True)
    return all(_close(x, y, tolerance) for (_, x), (_, y) in pairs if isinstance(x, Tensor))


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    if x.shape != y.shape:
        return False
    return bool((x.double() - y.double()).abs().max() <= tolerance * y.double().abs().max().clamp(min=1e-30))
