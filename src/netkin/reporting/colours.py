"""The colour scale: from dark violet (far) to bright yellow (close), with lightness rising in even steps.

Lightness alone orders the colours, so that they read the same to colour-blind people and on a black-and-white print.
The anchors are given in OKLCh, and mixed in OKLab, where equal steps look equal.
"""

from __future__ import annotations

from functools import cache

import numpy as np

# lightness, chroma, hue in degrees, at equal distances along the scale
ANCHORS = ((0.25, 0.09, 300.0), (0.42, 0.13, 275.0), (0.59, 0.10, 225.0), (0.76, 0.12, 165.0), (0.93, 0.16, 105.0))
SHADES = 256
# lines of layers, the first darkest, each clear of the page behind it: on white, and on black
DEPTHS = {
    "light": ((0.30, 0.14, 300.0), (0.40, 0.14, 258.0), (0.48, 0.09, 205.0), (0.55, 0.13, 145.0), (0.62, 0.16, 50.0)),
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


@cache
def palette() -> tuple[str, ...]:
    """Return the shades from far to close as ``#rrggbb``."""
    return tuple("#{:02x}{:02x}{:02x}".format(*rgb) for rgb in shades().tolist())


def shades(count: int = SHADES) -> np.ndarray:
    """Return `count` colours from far to close as rows of red, green and blue, 0 to 255."""
    return _mixed(ANCHORS, count)


def depths(page: str = "light") -> list[str]:
    """Return the colours of lines from the first layer to the last, on a light or a dark page, as ``#rrggbb``."""
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
