"""Engines that run a pass over the data: this process, the ranks of torchrun, or the workers of a Ray cluster."""

from netkin.comparing.engines.engine import ENGINES, Engine, Local, PassEngine, named_engine

__all__ = ["ENGINES", "Engine", "Local", "PassEngine", "named_engine"]
