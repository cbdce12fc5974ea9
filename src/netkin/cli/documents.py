"""Results as JSON for other programs: no NaN and no Infinity, null instead."""

from __future__ import annotations

import json
from typing import Any


def as_json(content: Any) -> str:
    """Return a result, or plain lists and mappings, as JSON text; numbers that are not finite become null."""
    from netkin.results import Comparison, Comparisons, Ranking, Series, document
    from netkin.results.packing import plain

    found = document(content) if isinstance(content, (Comparison, Comparisons, Ranking, Series)) else plain(content)
    return json.dumps(found, indent=2, ensure_ascii=False)
