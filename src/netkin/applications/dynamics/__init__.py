"""Learning dynamics: how the layers of a model change during training."""

from netkin.applications.dynamics.dynamics import RunPlan, dynamics, explain_dynamics
from netkin.applications.dynamics.recorder import DynamicsRecorder, Progress

__all__ = ["DynamicsRecorder", "Progress", "RunPlan", "dynamics", "explain_dynamics"]
