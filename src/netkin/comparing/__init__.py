"""Comparing: all pairs of layers, every measure, one pass."""

from netkin.comparing.compare import compare, compare_many, explain
from netkin.comparing.directions import model_directions
from netkin.comparing.plan import Plan

__all__ = ["Plan", "compare", "compare_many", "explain", "model_directions"]
