"""Training: one loop for all networks, with a recipe and a seed; an interrupted training resumes exactly."""

from netkin.training.checkpoints import Checkpoints
from netkin.training.example_order import moved
from netkin.training.loop import accuracy, explain_train, train, trained_digits_net, untrained_digits_net
from netkin.training.many import train_many
from netkin.training.recipe import Hook, Recipe, Record
from netkin.training.work_plan import WorkPlan

__all__ = [
    "Checkpoints",
    "Hook",
    "Recipe",
    "Record",
    "WorkPlan",
    "accuracy",
    "explain_train",
    "moved",
    "train",
    "train_many",
    "trained_digits_net",
    "untrained_digits_net",
]
