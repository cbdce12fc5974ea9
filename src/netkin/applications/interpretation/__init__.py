"""Interpretation: which directions of a layer matter, and in which layers a class is represented."""

from netkin.applications.interpretation.projecting import (
    Neurons,
    aligned_neurons,
    largest_neurons,
    project,
    random_neurons,
)
from netkin.applications.interpretation.sensitivity import class_sensitivity

__all__ = ["Neurons", "aligned_neurons", "class_sensitivity", "largest_neurons", "project", "random_neurons"]
