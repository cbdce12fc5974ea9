"""Comparing: all pairs of layers, every measure, one pass."""

from netkin.comparing.compare import collect, compare, compare_many, explain, merge
from netkin.comparing.directions import model_directions
from netkin.comparing.planning import Plan
from netkin.comparing.study import Statistics
from netkin.comparing.subjects import Subject

__all__ = [
    "Plan",
    "Statistics",
    "Subject",
    "collect",
    "compare",
    "compare_many",
    "explain",
    "merge",
    "model_directions",
]
