"""Matching: which module of one model is the counterpart of which in the other, by name or as the user says."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from torch import nn

from netkin.errors import InvalidValue, UnknownName, did_you_mean
from netkin.representations.layers import children, modules

SHOWN = 4


def counterparts(a: nn.Module, b: nn.Module, match: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the modules of `a` that have a counterpart in `b`, each with its name there.

    A module without one, such as a projection that is fused with others in `b`, is seen in the nearest module around it
    that has one. `match` renames modules of `a` with all that is in them; in it, ``*`` stands for a part between dots.
    Without it, a model that is a module of the other, as in a wrapper, is found.

    Example:
        >>> a, b = (nn.ModuleDict({name: nn.ModuleList([nn.ReLU()])}) for name in ("h", "blocks"))
        >>> counterparts(a, b, {"h": "blocks"})
        {'': '', 'h': 'blocks', 'h.0': 'blocks.0'}
    """
    mine, theirs = modules(a), modules(b)
    found = matched_names(list(mine), theirs, match)
    if not match and len(found) == 1 and len(mine) > 1:
        found = _one_in_the_other(a, b)
    if len(found) <= 1 < len(mine):
        some, others = (", ".join([name for name in known if name][:SHOWN]) for known in (mine, theirs))
        raise InvalidValue(
            f"no module of a has a counterpart of its name in b: a has {some}, …, and b has {others or 'none'}, …; say "
            "which belong together, as in match={'transformer.h.*': 'blocks.*'}.",
            argument="match",
        )
    return found


def _one_in_the_other(a: nn.Module, b: nn.Module) -> dict[str, str]:
    """Return the counterparts where one model is a module of the other, as in a wrapper or below a head."""
    mine, theirs = modules(a), modules(b)
    for name, module in theirs.items():
        if children(a).keys() <= children(module).keys():
            return {inner: other for inner in mine if (other := f"{name}.{inner}".strip(".")) in theirs}
    for name, module in mine.items():
        if children(b).keys() <= children(module).keys():
            return {own: other for other in theirs if (own := f"{name}.{other}".strip(".")) in mine}
    return {}


def matched_names(mine: Sequence[str], theirs: Container[str], match: Mapping[str, str] | None) -> dict[str, str]:
    """Return those names that are also among the others, each with its name there."""
    rules = [_rule(old, new, list(mine)) for old, new in (match or {}).items()]
    renamed = {name: _renamed(name, rules) for name in mine}
    return {name: other for name, other in renamed.items() if other in theirs}


def _renamed(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """Return what a module of `a` is called in `b`; of several rules that fit, the one that says most of the name."""
    fits = [(found, new) for pattern, new in rules if (found := pattern.fullmatch(name))]
    if not fits:
        return name
    found, new = min(fits, key=lambda fit: len(fit[0]["rest"] or ""))
    stars = iter(found.groups()[:-1])
    return ".".join(part for part in (re.sub(r"\*", lambda _: next(stars), new), found["rest"]) if part)


def _rule(old: str, new: str, known: list[str]) -> tuple[re.Pattern[str], str]:
    pattern = re.compile(
        re.escape(old).replace(r"\*", r"([^.]+)") + (r"(?:\.(?P<rest>.+))?" if old else r"(?P<rest>.*)")
    )
    if old.count("*") != new.count("*"):
        sentence = f"`match` needs as many * on both sides; got {old!r} and {new!r}."
        raise InvalidValue(sentence, argument="match", value=old)
    if not any(pattern.fullmatch(name) for name in known):
        sentence = f"`match` names {old!r}, which no module of a is called{did_you_mean(old, known) or '.'}"
        raise UnknownName(sentence, argument="match", value=old)
    return pattern, new
