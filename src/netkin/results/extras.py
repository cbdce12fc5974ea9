"""Optional packages, imported only when a method needs them."""

from __future__ import annotations

import importlib
from typing import Any

from netkin.errors import MissingExtra


def optional(package: str) -> Any:
    """Return the optional `package`, or refuse with the name of the extra that brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as fault:
        raise MissingExtra(
            f"`to_{package}` needs the package {package!r}; install it with `pip install 'netkin[{package}]'`."
        ) from fault
