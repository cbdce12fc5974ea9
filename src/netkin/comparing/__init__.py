"""Comparing: all pairs of layers, every measure, one pass.

`netkin.comparing.compare` is the module; its function is `nk.compare`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netkin.comparing.compare import collect, explain, merge, model_directions
    from netkin.comparing.comparer import Comparer
    from netkin.comparing.many_models import compare_many, explain_many
    from netkin.comparing.plan import Plan
    from netkin.comparing.sides import ModelInput

__all__ = [
    "Comparer",
    "ModelInput",
    "Plan",
    "collect",
    "compare_many",
    "explain",
    "explain_many",
    "merge",
    "model_directions",
]
_HOMES = {
    "compare": ["collect", "explain", "merge", "model_directions"],
    "comparer": ["Comparer"],
    "sides": ["ModelInput"],
    "many_models": ["compare_many", "explain_many"],
    "plan": ["Plan"],
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: commands read the declarations of options, and start without torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
