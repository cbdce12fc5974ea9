"""Tables of results from flat facts: those of their quantity and their own."""

from dataclasses import fields, replace

from netkin.results import Values
from netkin.results.caveats import Caveat
from netkin.results.quantity import Quantity

_OF_QUANTITIES = {field.name for field in fields(Quantity)}


def table_of(**facts):
    """Return a table whose quantity takes those of the facts that are its."""
    own = {name: fact for name, fact in facts.items() if name not in _OF_QUANTITIES}
    return Values(quantity=Quantity(**{name: fact for name, fact in facts.items() if name not in own}), **own)


def changed(table, **facts):
    """Return a table with other facts, of its quantity too."""
    own = {name: fact for name, fact in facts.items() if name not in _OF_QUANTITIES}
    quantity = replace(table.quantity, **{name: fact for name, fact in facts.items() if name not in own})
    return replace(table, quantity=quantity, **own)


def as_caveats(*sentences, code=""):
    """Return caveats of some sentences, each of a kind of its own or all of one."""
    return tuple(Caveat(code or sentence, sentence) for sentence in sentences)


def sentences(result):
    """Return the sentences of a result's caveats."""
    return tuple(map(str, result.caveats))
