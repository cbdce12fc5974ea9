"""Small worlds for tasks that are learnt in a row."""

from torch import nn

from netkin.applications.continual import Task

RECIPE = {"epochs": 2, "batch": 16, "lr": 0.05, "progress": False}


def small_net():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10),
    )  # fmt: skip


def fewer(task, count=48):
    return Task(task.name, *(tuple(one[:count] for one in part) for part in (task.train, task.test)), task.classes)
