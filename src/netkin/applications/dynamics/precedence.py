"""Precedence: what runs before what, seen in the first training step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.dynamics.units import Units
from netkin.errors import ForwardError
from netkin.representations.nesting import leaves


class FirstStep:
    """Hooks that note, until `settle`, in which order a model's pieces run and on what each unit depends.

    On what a unit depends is read from the autograd graph of what goes into it: all parameters found there run before
    it. Compiled modules do not show themselves; then the order of registration is trusted.
    """

    def __init__(self, units: Units):
        self.units = units
        self.seen: dict[str, None] = {}
        self.recomputed: set[str] = set()
        self.before: dict[str, list[Tensor]] = {}
        self._visited: set[Any] = set()
        pieces = [piece for piece in units.order if piece in units.modules]
        self._handles = [
            units.modules[piece].register_forward_pre_hook(partial(self._called, piece), with_kwargs=True)
            for piece in pieces
        ]

    @property
    def has_seen(self) -> bool:
        """Whether the model has run; compiled code does not show it."""
        return bool(self.seen or self.recomputed)

    def close(self) -> None:
        """Take the hooks off the model and forget the graph."""
        for handle in self._handles:
            handle.remove()
        self._visited.clear()

    def settle(self) -> None:
        """Put the pieces in the order seen, or refuse units that were not seen to run one after another."""
        self.close()
        names = self.units.names
        absent = [name for name in names if name not in self.seen]
        if absent:
            raise ForwardError(self._why_absent(absent[0]))
        ran = [name for name in self.seen if name in names]
        if ran != list(names):
            raise ForwardError(f"the units run in another order than they are frozen in; pass `layers={ran}`.")
        self.units.reorder(self._order())
        self._refuse_live_before_frozen()

    def _called(self, piece: str, module: nn.Module, inputs: Any, keywords: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass: checkpointing computes it again
            self.recomputed.add(piece)
            return
        self.seen[piece] = None
        if piece in self.units.names and piece not in self.before:
            self.before[piece] = list(self._upstream((inputs, keywords)))
        if len(self.before) == len(self.units.names):
            self._visited.clear()

    def _upstream(self, values: Any) -> Iterator[Tensor]:
        """Yield the leaves of the graph of `values` that no unit before had in its graph."""
        tensors = [leaf for _, leaf in leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
        yield from (tensor for tensor in tensors if tensor.grad_fn is None)
        waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while waiting:
            node: Any = waiting.pop()
            if node in self._visited:
                continue
            self._visited.add(node)
            if node.name() == "torch::autograd::AccumulateGrad":
                yield node.variable
            waiting.extend(following for following, _ in node.next_functions if following is not None)

    def _why_absent(self, name: str) -> str:
        if name in self.recomputed:
            return (
                f"unit {name!r} is checkpointed with `use_reentrant=True`, which gives no gradients behind a frozen "
                "unit; checkpoint with `use_reentrant=False`."
            )
        return f"unit {name!r} did not run in the first training step; choose units that always run."

    def _order(self) -> list[str]:
        """Return the pieces as they ran, each loose parameter before the first unit that depends on it."""
        loose = {id(tensor): name for name, tensor in self.units.loose().items()}
        order = [name for name, tensor in self.units.loose().items() if not tensor.requires_grad]  # not in any graph
        for piece in self.seen:
            order += [loose[id(tensor)] for tensor in self.before.get(piece, []) if id(tensor) in loose]
            order.append(piece)
        return order + [piece for piece in self.units.order if piece not in order]

    def _refuse_live_before_frozen(self) -> None:
        owners = self.units.owners()
        for number, unit in enumerate(self.units.names):
            for tensor in self.before[unit]:
                for name, owner in owners.get(id(tensor), {}).items():
                    if owner is None or owner > number:
                        raise ForwardError(
                            f"unit {unit!r} depends on {name!r}, which would still be trained when the unit is frozen; "
                            "name units with `layers=` such that each depends only on itself and those before it."
                        )
