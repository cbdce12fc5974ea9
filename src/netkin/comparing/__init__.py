"""Comparing: all pairs of layers, every measure, one pass."""

from netkin.comparing.compare import compare, compare_many, explain
from netkin.comparing.directions import model_directions
from netkin.comparing.planning import Plan
from netkin.comparing.study import Statistics
from netkin.comparing.subjects import Subject

__all__ = ["Plan", "Statistics", "Subject", "compare", "compare_many", "explain", "model_directions"]
