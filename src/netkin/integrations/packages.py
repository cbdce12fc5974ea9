"""Packages of others, imported only when an adapter for them is used."""

from __future__ import annotations

import importlib
from typing import Any

from netkin.errors import MissingExtra


def needed(module: str, extra: str, what: str) -> Any:
    """Return a module of an optional package, or refuse with the name of the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise MissingExtra(f"{what} needs {module!r} ({fault}); `pip install 'netkin[{extra}]'` brings it.") from fault
