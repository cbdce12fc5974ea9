"""Show a docstring's ``Example:`` as the section of doctests that griffe knows under the name ``Examples:``."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section in every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of one function or class."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
