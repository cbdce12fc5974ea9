"""Engines that run a pass over the data: this process, the ranks of torchrun, or the workers of a Ray cluster."""

from netkin.comparing.engines.engine import Engine, PassEngine
from netkin.comparing.engines.local import Local
from netkin.errors import UnknownName, did_you_mean

ENGINES = ("local", "distributed", "ray")

__all__ = ["ENGINES", "Engine", "Local", "PassEngine", "named_engine"]


def named_engine(name: str | Engine) -> Engine:
    """Return the engine of that name, ready for one call; an engine is one already."""
    if isinstance(name, Engine):
        return name
    if name == "local":
        return Local()
    if name == "distributed":
        from netkin.comparing.engines.distributed import Distributed  # which needs torch's distributed package

        return Distributed()
    if name == "ray":
        from netkin.comparing.engines.ray import Ray

        return Ray()
    known = ", ".join(map(repr, ENGINES))
    raise UnknownName(f"no engine {name!r}{did_you_mean(str(name), ENGINES) or '.'} There are {known}.")
