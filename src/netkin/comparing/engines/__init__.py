"""Engines: who runs a pass over the data. Each decides which part of it this process reads, and joins the parts."""

from netkin.comparing.engines.engine import Engine
from netkin.comparing.engines.local import Local
from netkin.errors import UnknownName, did_you_mean

ENGINES = ("local", "distributed")

__all__ = ["ENGINES", "Engine", "Local", "named_engine"]


def named_engine(name: str) -> Engine:
    """Return the engine of that name, ready for one call."""
    if name == "local":
        return Local()
    if name == "distributed":
        from netkin.comparing.engines.distributed import Distributed  # which needs torch's distributed package

        return Distributed()
    known = ", ".join(map(repr, ENGINES))
    raise UnknownName(f"no engine {name!r}{did_you_mean(str(name), ENGINES) or '.'} There are {known}.")
