"""HTML written piece by piece; whatever is not marked as HTML already is escaped."""

from __future__ import annotations

import html
import json
from typing import Any

_EMPTY = frozenset({"meta", "input", "col", "br", "img"})
# as JSON escapes, none of these can end a script or start a tag; U+2028 and U+2029 end a line in older JavaScript
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(element: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return an element; ``class_`` stands for ``class`` and ``aria_label`` for ``aria-label``.

    Example:
        >>> tag("p", "2 < 3", tag("br"), class_="note", hidden=True, id=None)
        '<p class="note" hidden>2 &lt; 3<br></p>'
    """
    opening = f"<{element}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Markup(opening if element in _EMPTY else f"{opening}{joined(*children)}</{element}>")


def joined(*children: Any) -> Markup:
    """Return pieces one after the other; None is left out, text is escaped."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def escaped(value: Any) -> str:
    """Return `value` as HTML: markup as it is, anything else as text."""
    return str(value) if isinstance(value, Markup) else html.escape(_writable(str(value)))


def name(text: str) -> Markup:
    """Return a name that keeps its direction of writing to itself."""
    return tag("bdi", text)


def data_script(data: Any) -> Markup:
    """Return `data` as a JSON element that a script can read, and from which no text can break out."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(f'<script type="application/json" id="data">{_writable(text).translate(_UNSAFE)}</script>')


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(_writable(str(value)))}"'


def _writable(text: str) -> str:
    # a lone half of a surrogate pair, as in a badly decoded file name, has no UTF-8
    return text.encode("utf-8", "replace").decode("utf-8")
