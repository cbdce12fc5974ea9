"""Training: one loop for all networks, by a recipe and a seed, that can stop and go on without a trace."""

from netkin.training.course import moved
from netkin.training.loop import Hook, Record, accuracy, train
from netkin.training.recipe import Recipe

__all__ = ["Hook", "Recipe", "Record", "accuracy", "moved", "train"]
