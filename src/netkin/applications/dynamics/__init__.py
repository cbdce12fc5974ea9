"""Learning dynamics: how the layers of a model change during training."""

from netkin.applications.dynamics.dynamics import RunPlan, dynamics, explain_dynamics
from netkin.applications.dynamics.recorder import DynamicsRecorder
from netkin.applications.dynamics.recordings import Progress

__all__ = ["DynamicsRecorder", "Progress", "RunPlan", "dynamics", "explain_dynamics"]
