"""Continual learning: a sequence of tasks with filter atoms for each, the usual baselines, and ensembles."""

from netkin.applications.continual.sequences import LearntTasks, ensemble_tasks, learn_tasks
from netkin.results.task_accuracies import TaskAccuracies, TaskEnsembles
from netkin.training.class_splits import Task, split_tasks

__all__ = ["LearntTasks", "Task", "TaskAccuracies", "TaskEnsembles", "ensemble_tasks", "learn_tasks", "split_tasks"]
