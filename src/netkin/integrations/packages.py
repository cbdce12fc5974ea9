"""Packages of others, imported only when an adapter for them is used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from netkin.errors import MissingExtra

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def needed(module: str, extra: str, what: str) -> Any:
    """Return a module of an optional package, or refuse with the name of the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise MissingExtra(f"{what} needs {module!r} ({fault}); `pip install 'netkin[{extra}]'` brings it.") from fault


def lightning_packages(what: str) -> tuple[str, ...]:
    """Return the packages whose trainer may call us: those imported already, else the first that can be."""
    imported = tuple(name for name in LIGHTNING if sys.modules.get(name) is not None)
    if imported:
        return imported
    try:
        needed(LIGHTNING[0], "lightning", what)
    except MissingExtra as missing:
        try:
            needed(LIGHTNING[1], "lightning", what)
        except MissingExtra:
            raise missing from None
        return LIGHTNING[1:]
    return LIGHTNING[:1]
