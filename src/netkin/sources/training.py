"""Aliases of names in `netkin.training`, imported lazily because training imports this package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = ("accuracy", "trained_digits_net", "untrained_digits_net")


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("netkin.training"), name)
