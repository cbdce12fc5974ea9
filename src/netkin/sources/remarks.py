"""What results say of a model: that its weights are random, as long as it has got no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parameter import is_lazy

# what to say of models that were loaded without weights, and the state of those they have
_drawn: WeakKeyDictionary[nn.Module, tuple[str, list[int]]] = WeakKeyDictionary()


def note(model: nn.Module, remark: str) -> None:
    """Keep a remark on a model, for as long as none of its weights is written to."""
    _drawn[model] = remark, _versions(model)


def remark_on(model: nn.Module) -> str:
    """Return that a model's weights are random, if it was loaded without any and has got no others since."""
    remark, versions = _drawn.get(model, ("", []))
    return remark if versions == _versions(model) else ""


def keep_remark(model: nn.Module, made: nn.Module) -> None:
    """Remark on a network that was made of the weights of a model what is remarked on that."""
    if remark := remark_on(model):
        note(made, remark)


def random_weights(models: Iterable[Any]) -> dict[str, str]:
    """Return, for the provenance of a result, which of its models have random weights; empty if none has."""
    said = " ".join(filter(None, (remark_on(one) for one in models if isinstance(one, nn.Module))))
    return {"random weights": said} if said else {}


def _versions(model: nn.Module) -> list[int]:
    """Return how often each weight was written to, as torch counts it; of some it keeps no count."""
    return [-1 if is_lazy(one) or one.is_inference() else one._version for one in model.parameters()]
