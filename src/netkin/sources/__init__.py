"""Models, weights and data sets, loaded by name.

`load_model("netkin:tiny10@seed0.pt")` gives a model, `load_data("digits:test")` gives batches.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from netkin.sources import architectures
from netkin.sources.datasets import Batches, load_data
from netkin.sources.models import load_model

__all__ = ["Batches", "load_data", "load_model"]

# the networks lay in three more modules once
sys.modules.update({f"{__name__}.{earlier}": architectures for earlier in ("classics", "residual", "sequences")})


class _Training(ModuleType):
    """`netkin.training` under its earlier name, imported at first use because it imports this package."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("netkin.training"), name)


training = sys.modules[f"{__name__}.training"] = _Training(f"{__name__}.training")
