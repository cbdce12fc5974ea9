"""The colour scale: the position of a measure's values on it, where 1 is the close or good end, and its colours.

They go from dark violet (far) to bright yellow (close), with lightness rising in even steps. Lightness alone orders
them, so that they read the same to colour-blind people and on a black-and-white print. The anchors are given in OKLCh,
and mixed in OKLab, where equal steps look equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from netkin.results import Values
from netkin.results.labels import is_apart, is_worth, tables_by_name

EXPECTED = {"relative_accuracy": (0.0, 1.0)}  # ends that an open scale shows at least, so that colours say how much
# lightness, chroma, hue in degrees, at equal distances along the scale
ANCHORS = ((0.25, 0.09, 300.0), (0.42, 0.13, 275.0), (0.59, 0.10, 225.0), (0.76, 0.12, 165.0), (0.93, 0.16, 105.0))
SHADES = 256
# lines of layers, the first darkest, each clear of the page behind it: on white, on black, and on either
DEPTHS = {
    "light": ((0.30, 0.14, 300.0), (0.40, 0.14, 258.0), (0.48, 0.09, 205.0), (0.55, 0.13, 145.0), (0.62, 0.16, 50.0)),
    "both": ((0.53, 0.17, 300.0), (0.55, 0.15, 258.0), (0.58, 0.10, 205.0), (0.61, 0.14, 145.0), (0.64, 0.16, 50.0)),
    "dark": ((0.60, 0.16, 300.0), (0.68, 0.13, 258.0), (0.76, 0.11, 205.0), (0.83, 0.13, 145.0), (0.93, 0.09, 80.0)),
}
LEVELS = 32  # of depth

# Ottosson's OKLab: to the cones' cube roots, then from the cones to linear sRGB
_TO_CONES = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
)
_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


@dataclass(frozen=True)
class Scale:
    """The ends of a measure's scale and its direction; `worth` is whether its values are scores of stitches."""

    low: float
    high: float
    higher_is_closer: bool
    open_ended: bool = False
    worth: bool = False

    @classmethod
    def of(cls, table: Values, values: np.ndarray | None = None) -> Scale:
        """Return the scale of a measure: its bounds or, where one is open, the range of the values.

        So it is between tasks of different data too, whose values lie far from the upper bound whatever they are.
        """
        values = table.values if values is None else values
        if all(map(math.isfinite, table.bounds)) and not is_apart(table):
            return cls(*table.bounds, table.higher_is_closer, worth=is_worth(table))
        known = np.concatenate([values[np.isfinite(values)], EXPECTED.get(table.name, ())])
        ends = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        return cls(*ends, table.higher_is_closer, ends != EXPECTED.get(table.name), is_worth(table))

    @property
    def words(self) -> tuple[str, str]:
        """What the far and the close end are called: layers are far or close, stitches are poor or good."""
        return ("poor", "good") if self.worth else ("far", "close")

    @property
    def better(self) -> str:
        """Which way values are closer, or better."""
        return f"{'higher' if self.higher_is_closer else 'lower'} is {'better' if self.worth else 'closer'}"

    @property
    def far(self) -> float:
        """The value at the far end."""
        return self.low if self.higher_is_closer else self.high

    @property
    def close(self) -> float:
        """The value at the close end."""
        return self.high if self.higher_is_closer else self.low

    def closeness(self, values: np.ndarray) -> np.ndarray:
        """Return where the values lie between the far end, 0, and the close end, 1; NaN stays NaN.

        Example:
            >>> Scale(0, 2, higher_is_closer=False).closeness(np.array([0.0, 0.5, 2.0])).tolist()
            [1.0, 0.75, 0.0]
        """
        if self.high <= self.low:  # all values alike
            return np.where(np.isnan(values), np.nan, 0.5)
        place = np.clip((values - self.low) / (self.high - self.low), 0, 1)
        return place if self.higher_is_closer else 1 - place

    def shade_numbers(self, values: np.ndarray) -> np.ndarray:
        """Return the number of each value's shade, and -1 for a hole."""
        place = self.closeness(values)
        return np.where(np.isnan(place), -1, np.rint(np.nan_to_num(place) * (SHADES - 1))).astype(int)


def scales_of(tables: Sequence[Values]) -> dict[str, Scale]:
    """Return the scales of tables by their ids; those of one name share one, so that they can be compared."""
    together = {name: np.concatenate([t.values.ravel() for t in own]) for name, own in tables_by_name(tables).items()}
    return {table.id: Scale.of(table, together[table.name]) for table in tables}


def zoomed(table: Values, own: np.ndarray) -> Scale:
    """Return the scale of a measure without the far part that no layer enters, in tenths.

    The lines of layers that are close throughout would else all lie on one another.
    """
    whole = Scale.of(table, own)
    if not np.isfinite(own).any():
        return whole
    least = math.floor(10 * float(np.nanmin(whole.closeness(own))) + 1e-9) / 10
    cut = min(least, 0.9) * (whole.high - whole.low)
    if whole.higher_is_closer:
        return Scale(whole.low + cut, whole.high, True, whole.open_ended)
    return Scale(whole.low, whole.high - cut, False, whole.open_ended)


@cache
def palette() -> tuple[str, ...]:
    """Return the shades from far to close as ``#rrggbb``."""
    return tuple("#{:02x}{:02x}{:02x}".format(*rgb) for rgb in shades().tolist())


def shades(count: int = SHADES) -> np.ndarray:
    """Return `count` colours from far to close as rows of red, green and blue, 0 to 255."""
    return _mixed(ANCHORS, count)


def depths(page: str = "light") -> list[str]:
    """Return the colours of lines from the first layer to the last, on a light page, a dark one or "both"."""
    return ["#{:02x}{:02x}{:02x}".format(*rgb) for rgb in _mixed(DEPTHS[page], LEVELS).tolist()]


def level(place: int, count: int) -> int:
    """Return the number of the colour of layer `place` among `count`.

    Example:
        >>> level(0, 5), level(4, 5), level(0, 1)
        (0, 31, 0)
    """
    return round(place / max(count - 1, 1) * (LEVELS - 1))


def _mixed(anchors: tuple[tuple[float, float, float], ...], count: int) -> np.ndarray:
    lightness, chroma, hue = np.array(anchors).T
    lab = np.stack([lightness, chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))])
    places, steps = np.linspace(0, 1, len(anchors)), np.linspace(0, 1, count)
    mixed = np.stack([np.interp(steps, places, channel) for channel in lab], axis=1)
    linear = np.clip((mixed @ _TO_CONES.T) ** 3 @ _TO_RGB.T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.rint(255 * encoded).astype(int)


def ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on `colour`.

    Example:
        >>> ink("#fde725"), ink("#2a1a4a")
        ('#000', '#fff')
    """
    return "#000" if contrast(colour, "#000000") >= contrast(colour, "#ffffff") else "#fff"


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by the rule of WCAG 2, from 1 to 21."""
    dark, light = sorted([_luminance(first), _luminance(second)])
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


# --- style rules ------------------------------------------------------------------------------------------------------


def shade_rules() -> str:
    """Return the style rules of all shades, with a colour of text that is readable on each."""
    return "".join(f".c{i}{{background:{shade};color:{ink(shade)}}}" for i, shade in enumerate(palette()))


def bar_rule() -> str:
    """Return the style rule of the legend's bar."""
    stops = ",".join(palette()[i] for i in range(0, 256, 15))
    return f".bar{{background:linear-gradient(90deg,{stops})}}"


def depth_rules() -> str:
    """Return the style rules of the layers' colours on light and dark pages, and on paper."""
    light, dark = ("".join(f"--d{i}:{colour};" for i, colour in enumerate(depths(page))) for page in ("light", "dark"))
    system = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    paper = f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}"
    return f":root{{{light}}}{system}:root[data-theme=dark]{{{dark}}}{paper}"
