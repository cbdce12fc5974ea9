"""Freeze training: lower layers stop learning before upper ones, by a schedule or when they have stopped changing."""

from netkin.applications.freezing.freeze_training import FreezeTraining

__all__ = ["FreezeTraining"]
