"""Thin adapters to other training loops and loggers; each imports its package when it is first used."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_MOVED = {  # modules that are part of others now, with names that were changed
    "freezing": {
        "lightning_callback": "lightning.freezing_callback",
        "trainer_callback": "huggingface.freezing_callback",
    },
    "sparsity_loss": {
        "lightning_callback": "lightning.sparsity_callback",
        "trainer_callback": "huggingface.sparsity_callback",
    },
    "tensorboard": {"TensorBoardLog": "training_loops.TensorBoardLog"},
    "mlflow": {"MlflowLog": "training_loops.MlflowLog"},
    "logs": {"TensorBoardLog": "training_loops.TensorBoardLog", "MlflowLog": "training_loops.MlflowLog"},
}


class _Moved(ModuleType):
    """A module under its old name, whose names are looked up where they are now."""

    def __getattr__(self, name: str) -> Any:
        place = _MOVED[self.__name__.rpartition(".")[2]].get(name)
        if place is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, _, found = place.partition(".")
        return getattr(import_module(f"{__name__}.{module}"), found)


for _old in _MOVED:
    sys.modules[f"{__name__}.{_old}"] = _Moved(f"{__name__}.{_old}")
