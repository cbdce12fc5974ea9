"""How a series shows itself in a notebook: the run at a glance and the layers' lines, with their styles in them."""

from __future__ import annotations

import numpy as np

from netkin.reporting.colours import depths, level
from netkin.reporting.grids import frames
from netkin.reporting.layer_lines import drawing, tick_names, zoomed
from netkin.reporting.markup import Markup, name, tag
from netkin.reporting.panes import picture
from netkin.reporting.settling import series_headline
from netkin.reporting.step_axis import StepAxis, spread
from netkin.reporting.wording import shortened
from netkin.results import Series

PANES = 5
PAPER = "background:#fff;color:#222;padding:10px 14px;max-width:760px"
STRIP = "display:flex;flex-wrap:wrap;gap:10px;margin:0 0 12px"
HATCHED = "background:repeating-linear-gradient(45deg,#fff 0 3px,#aaa 3px 4.5px)"
FIELD = "position:relative;height:220px;margin:10px 12px 28px 44px"


def series_view(series: Series) -> str:
    """Return a series as HTML for a notebook: its first measure, and the names of the others."""
    if not series.measures:
        return tag("div", tag("p", series_headline(series)))
    measure, *rest = series.measures
    notes = [f"warning: {warning}" for warning in series.warnings]
    notes += [f"not shown here: {', '.join(rest)}"] if rest else []
    about = f"{series.run}: {measure} of the layers (rows) with those of the final {series.unit} (columns)"
    shown = [tag("p", series_headline(series)), tag("p", about, style="font-weight:600"), _strip(series, measure)]
    return tag("div", *shown, _lines(series, measure), *(tag("p", tag("small", note)) for note in notes), style=PAPER)


def _strip(series: Series, measure: str) -> Markup:
    grids, side = frames(series, measure), f"width:120px;height:120px;image-rendering:pixelated;display:block;{HATCHED}"
    items = [
        tag("div", picture(grids[k], side), tag("small", f"{series.unit} {series.steps[k]:,}"))
        for k in spread(StepAxis.of(series.steps), PANES)
    ]
    return tag("div", *items, style=STRIP)


def _lines(series: Series, measure: str) -> Markup | None:
    own, axis = series.own(measure), StepAxis.of(series.steps)
    if not np.isfinite(own).any():
        return None
    scale = zoomed(series.table(measure), own)
    colours = [depths()[level(k, own.shape[1])] for k in range(own.shape[1])]
    field = tag("div", drawing(own, scale, axis, colours), *tick_names(scale, axis), style=FIELD)
    key = [
        tag(
            "span",
            tag("span", "━ ", style=f"color:{colour}"),
            name(label),
            style="margin-right:12px;display:inline-block",
            title=layer,
        )
        for layer, label, colour in zip(series.layers, shortened(series.layers), colours, strict=True)
    ]
    kind = " (logarithmic axis)" if axis.logarithmic else ""
    words = tag("small", f"each layer with its own final state, over the {series.unit}s{kind}", style="display:block")
    return tag("div", words, field, tag("small", *key))
