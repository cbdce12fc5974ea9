"""A measure's id, such as ``svcca(variance=0.95)``, taken apart to see whether two ids ask for the same."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


def taken_apart(identifier: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the parameters that an id spells out, or None where it is no id.

    Example:
        >>> taken_apart("svcca(variance=0.95)")
        ('svcca', {'variance': 0.95})
        >>> taken_apart("rsa(compare=spearman)")
        ('rsa', {'compare': 'spearman'})
    """
    try:
        tree = ast.parse(identifier.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            return tree.func.id, {word.arg or "**": _value(word.value) for word in tree.keywords}
    except (SyntaxError, ValueError):
        pass
    return None


def asks_for(identifier: str, table_id: str, parameters: Mapping[str, Any]) -> bool:
    """Tell whether `identifier` means the table called `table_id`, whose full `parameters` are known.

    What either id leaves out is a default; so all that the table's id spells out must be asked for, and all that
    is asked for must be what the table has.
    """
    asked, held = taken_apart(identifier), taken_apart(table_id)
    return fits(identifier, table_id, parameters) and bool(asked and held and held[1].keys() <= asked[1].keys())


def fits(identifier: str, table_id: str, parameters: Mapping[str, Any]) -> bool:
    """Tell whether the table has the name that `identifier` asks for, and the parameters as far as it names them.

    Example:
        >>> fits("svcca", "svcca(variance=0.95)", {"variance": 0.95})
        True
    """
    asked, held = taken_apart(identifier), taken_apart(table_id)
    return bool(asked and held and asked[0] == held[0] and asked[1].items() <= dict(parameters).items())


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):  # a method as a parameter: agreement(how=reduced_rank(k=8))
        return ast.unparse(node)
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
