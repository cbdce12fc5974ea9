"""A map of networks: a tree in which the nearest join first, and places in a plane that keep their distances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from netkin.reporting.markup import Markup, tag
from netkin.reporting.wording import shortened
from netkin.results import Comparison, Values

MOST = 200  # networks that a tree can show
ROW, WIDTH, LETTER = 16, 460, 6.6  # pixels
TREE = "Average linkage of angles, arccos of the similarity. Groups that join far left have little in common."
PLANE = "Classical scaling of the same angles; it keeps {share:.0%} of their squared spread."


def network_map(comparison: Comparison, what: str = "networks") -> Markup | None:
    """Return a tree and a plane of the networks by the first table, or None where they are few, many or unlike.

    `what` they are called stands in the heading.
    """
    table = next(iter(comparison.tables.values()))
    if not 3 <= len(table.layers_a) <= MOST or not np.isfinite(table.values).all():
        return None
    angles, names = angles_of(table), shortened(table.layers_a)
    places, share = scaled(angles)
    parts = [
        tag("figure", tag("h3", "Which join first"), _tree(angles, names), tag("figcaption", TREE), class_="card"),
        tag("figure", tag("h3", "In a plane"), _plane(places, names), tag("figcaption", PLANE.format(share=share)),
            class_="card"),
    ]  # fmt: skip
    return tag("section", tag("h2", f"A map of the {what}"), tag("div", *parts, class_="cards"), class_="map")


def angles_of(table: Values) -> np.ndarray:
    """Return the angles between networks, symmetric and with zeros on the diagonal."""
    values = np.arccos(np.clip(table.values, -1, 1)) if table.higher_is_closer else table.values
    angles = (values + values.T) / 2
    np.fill_diagonal(angles, 0)
    return angles


def joined_pairs(angles: np.ndarray) -> np.ndarray:
    """Return SciPy's table of which groups join at which mean angle, the nearest first."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    return linkage(squareform(angles, checks=False), method="average")


def scaled(angles: np.ndarray) -> tuple[np.ndarray, float]:
    """Return places in a plane by classical scaling, and the share of the squared spread that they keep."""
    centring = np.eye(len(angles)) - 1 / len(angles)
    values, vectors = np.linalg.eigh(-centring @ angles**2 @ centring / 2)
    leading = np.clip(values[::-1][:2], 0, None)
    total = np.abs(values).sum()
    return vectors[:, ::-1][:, :2] * np.sqrt(leading), float(leading.sum() / total) if total else 1.0


def _tree(angles: np.ndarray, names: Sequence[str]) -> Markup:
    from scipy.cluster.hierarchy import dendrogram

    found = dendrogram(joined_pairs(angles), no_plot=True)
    far = max(max(heights) for heights in found["dcoord"]) or 1.0
    room = max(map(len, names)) * LETTER + 12
    lines = []
    for across, heights in zip(found["icoord"], found["dcoord"], strict=True):
        # SciPy puts leaves at 5, 15, 25, ...
        points = [f"{WIDTH * (1 - h / far):.1f},{a / 10 * ROW:.1f}" for a, h in zip(across, heights, strict=True)]
        lines.append(tag("polyline", points=" ".join(points), fill="none", stroke="currentColor"))
    labels = [
        tag("text", names[leaf], x=WIDTH + 6, y=f"{(k + 0.5) * ROW + 4:.1f}", fill="currentColor", font_size=11)
        for k, leaf in enumerate(found["leaves"])
    ]
    axis = tag("text", f"{far:.2f} rad", x=0, y=len(names) * ROW + 14, fill="currentColor", font_size=11)
    size = f"0 0 {WIDTH + room:.0f} {len(names) * ROW + 20}"
    return tag("svg", *lines, *labels, axis, viewBox=size, role="img", aria_label="Tree of the networks")


def _plane(places: np.ndarray, names: Sequence[str]) -> Markup:
    span = float(np.ptp(places, axis=0).max()) or 1.0
    shown = (places - places.mean(0)) / span * (WIDTH - 60) + WIDTH / 2
    dots = [tag("circle", tag("title", name), cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill="currentColor")
            for (x, y), name in zip(shown, names, strict=True)]  # fmt: skip
    few = len(names) <= 4 * math.isqrt(WIDTH)
    labels = [
        tag("text", name, x=f"{x + 6:.1f}", y=f"{y + 4:.1f}", fill="currentColor", font_size=11)
        for (x, y), name in zip(shown, names, strict=True)
        if few
    ]
    size = f"0 0 {WIDTH + max(map(len, names)) * LETTER:.0f} {WIDTH}"
    return tag("svg", *dots, *labels, viewBox=size, role="img", aria_label="Networks in a plane")
