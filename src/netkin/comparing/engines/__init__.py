"""Engines that run a pass over the data: their interface, their names, and a call as plain values for other machines.

Engines on other machines get the terms of a call as plain values, with models, data and functions by the names under
which all machines find them. Nothing else is sent to the workers of a cluster: no module, loader or function is
pickled. `terms_of` makes plain values of a call, or refuses what has no name; `request_of` of `worker` makes the call
of them again, on the worker.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from netkin.comparing.alignment import Pairs
from netkin.errors import InvalidValue, UnknownName, did_you_mean
from netkin.measures.registry import Measure
from netkin.representations.shapes import is_custom, shape_name
from netkin.sources.batches import Batches, Borrowed, sample
from netkin.sources.datasets import load_data
from netkin.statistics.collector import Study

if TYPE_CHECKING:
    from netkin.comparing.pass_statistics import Statistics
    from netkin.comparing.request import Options, Request
    from netkin.results import Comparison

__all__ = ["ENGINES", "Engine", "Local", "PassEngine", "named_engine"]

ENGINES = ("local", "distributed", "ray")
Terms = dict[str, Any]  # a call, as values that JSON can hold
MODEL = "'module:function@weights.pt', 'hf:DIR' or the path of a '.pt2' file"
DATA = "'npz:FILE', 'cifar10:DIR' or 'module:function' (see `netkin data`)"
Result = TypeVar("Result", bound="Statistics | list[Comparison]")


class Engine(ABC):
    """What does the work of a call of `compare`, `collect` or `compare_many`; each call has its own."""

    @abstractmethod
    def working(self) -> AbstractContextManager[None]:
        """Return a context for a whole call; where several processes make it, a fault of one ends all."""

    def beside(self, result: str | os.PathLike[str], overwrite: bool) -> Engine:
        """Return an engine that keeps finished parts beside a result, where it has a job of its own."""
        return self

    @abstractmethod
    def request(self, *given: Any) -> Any:
        """Return the call, with what was given to `Request`."""


class PassEngine(Engine):
    """An engine that runs the pass in this process alone, or in several, of which each reads its part of the data."""

    part: tuple[int, int] | None = None  # which part of the data this process reads; None for all of them

    def request(self, *given: Any) -> Request:
        from netkin.comparing.request import Request  # which knows engines

        return partial(Request, engine=self)(*given)

    @abstractmethod
    def prepared(self, request: Request, settings: dict[str, str]) -> AbstractContextManager[None]:
        """Return a context for the pass; processes that were called with other settings are refused."""

    @abstractmethod
    def least(self, number: int) -> int:
        """Return the minimum over the processes, so that all make the same plan."""

    @abstractmethod
    def check_others(self) -> None:
        """Raise the fault of another process, if one has failed; called before each batch."""

    @abstractmethod
    def opening(self, statistics: Statistics) -> AbstractContextManager[None]:
        """Return a context in which the first batch is folded in, all processes by the same shifts and scales."""

    @abstractmethod
    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        """Return the statistics of all processes, of which this one had `length` examples to read."""

    @abstractmethod
    def shared(self, make: Callable[[], Result]) -> Result:
        """Return what `make` returns, which is called in one process only and given to all."""


class Local(PassEngine):
    """This process reads all data."""

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepared(self, request: Request, settings: dict[str, str]) -> AbstractContextManager[None]:
        return nullcontext()

    def least(self, number: int) -> int:
        return number

    def check_others(self) -> None:
        return None

    def opening(self, statistics: Statistics) -> AbstractContextManager[None]:
        return nullcontext()

    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        return statistics

    def shared(self, make: Callable[[], Result]) -> Result:
        return make()


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


# --- a call as plain values ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSpec:
    """Data by their name, as `nk.load_data` takes it, with the sample that is drawn of them.

    Args:
        name: as "digits:test" or "module:function".
        batch_size: examples in a batch.
        examples: how many are drawn over the whole set; None for all.
        seed: of the sample.
        balanced: whether as many of each class are drawn.
    """

    name: str
    batch_size: int = 128
    examples: int | None = None
    seed: int = 0
    balanced: bool = False

    def load(self, models: Sequence[str] = ()) -> Batches | Borrowed:
        """Return the data, as the `models` of these names take them."""
        data = load_data(self.name, batch_size=self.batch_size, models=models)
        return sample(data, self.examples, seed=self.seed, balanced=self.balanced)


@dataclass(frozen=True)
class ClusterTask:
    """One task: a function of `worker`, or another "module:function", its arguments and its predecessors.

    `name` is what faults and the parts of a job call it; with `kept` its result is a part of the job. `gpus` is the
    share of a GPU that it needs.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    after: tuple[str, ...] = ()
    kept: bool = False
    gpus: float = 0.0


def terms_of(
    given: Mapping[str, Any], options: Options, pairs: Pairs, study: Study, data: Any, examples: int | None
) -> Terms:
    """Return a call as plain values; a live model, loader or function is refused, with the form to give it in.

    Args:
        given: the models by their names.
        options: options for all models, or for each.
        pairs: which models and layers are compared.
        study: the memory limit, chunks and seed.
        data: a text, a `DataSpec`, or None for measures of weights alone.
        examples: the number of examples after which a pass ends.
    """
    return {
        "models": {name: _model(name, thing, place) for place, (name, thing) in enumerate(given.items())},
        "data": asdict(plain_data(data)) if data is not None else None,
        "data_for": list(dict.fromkeys(one for one in given.values() if one.startswith("hf:"))),  # also in a block
        "examples": examples,
        "options": {
            "layers": plain_layers(options.layers), "places": dict(options.places), "shape": plain_shape(options.shape),
            "resize": "average" if options.resizes else None, "device": plain_device(options.device),
            "transforms": _functions("transforms", options.transforms), "exact_model": options.exact_model,
            "forward": _functions("forward", options.forward),
        },
        "pairs": pairs.which if isinstance(pairs.which, str) else [list(pair) for pair in pairs.which],
        "study": {"limit": study.limit, "chunks": study.chunks, "seed": study.seed},
    }  # fmt: skip


def terms_for(terms: Terms, models: Sequence[str]) -> Terms:
    """Return the terms of a call for some of its models."""
    options = dict(terms["options"])
    for what in ("places", "transforms", "forward"):
        options[what] = {name: options[what][name] for name in models}
    if isinstance(options["layers"], Mapping):
        known = {*options["places"], *options["places"].values()}
        options["layers"] = {name: one for name, one in options["layers"].items() if name in known}
    return terms | {"models": {name: terms["models"][name] for name in models}, "options": options}


def _model(name: str, thing: Any, place: int) -> dict[str, Any]:
    if not isinstance(thing, str):
        raise InvalidValue(
            f"engine='ray' loads models where they run, and {name!r} is a live {type(thing).__name__}; give it by "
            f"name: {MODEL}."
        )
    return {"model": thing, "seed": place}


def plain_data(data: Any) -> DataSpec:
    """Return data that were given by name."""
    if isinstance(data, DataSpec):
        return data
    if not isinstance(data, str):
        raise InvalidValue(
            f"engine='ray' reads data where models run, and `data` is a live {type(data).__name__}; give it by name: "
            f"{DATA}."
        )
    return DataSpec(data)


def plain_layers(layers: Any) -> Any:
    """Return a choice of layers as names: module types by theirs."""
    if isinstance(layers, Mapping):
        return {name: plain_layers(one) for name, one in layers.items()}
    if layers is None or isinstance(layers, str):
        return layers
    return layers.__name__ if isinstance(layers, type) else [plain_layers(one) for one in layers]


def plain_shape(shape: Any) -> Any:
    """Return what one example is, by name, for all layers or by layer."""
    if isinstance(shape, Mapping):
        return {layer: plain_shape(one) for layer, one in shape.items()}
    if is_custom(shape):
        raise InvalidValue(
            "engine='ray' takes shapes by their names, as 'pool', and `shape` is a function; give its name, or put it "
            "into the model."
        )
    return shape_name(shape) or None


def _functions(what: str, given: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: plain_function(what, one) for name, one in given.items()}


def plain_function(what: str, function: Any) -> str | None:
    """Return a function that was given by name."""
    if function is not None and not isinstance(function, str):
        raise InvalidValue(
            f"engine='ray' loads functions where models run, and `{what}` is a live function; give it by name, as "
            "'module:function'."
        )
    return function


def plain_device(device: Any) -> str | None:
    """Return a kind of device; Ray chooses among several."""
    if device is None or torch.device(device).index is None:
        return None if device is None else str(device)
    raise InvalidValue(
        f"under engine='ray' each task is given its GPU; write device='cuda' in place of {str(device)!r}."
    )


def plain_measures(measures: Sequence[Measure]) -> list[list[str]]:
    """Return measures as (module, id): a worker imports the one and finds the other."""
    homes = [measure.function.__module__ for measure in measures]
    strange = next((one for one, home in zip(measures, homes, strict=True) if home == "__main__"), None)
    if strange is not None:
        raise InvalidValue(
            f"engine='ray' finds measures by their module, and {strange.name!r} is defined in the script itself; put "
            "it into a module."
        )
    return [[home, measure.id] for home, measure in zip(homes, measures, strict=True)]


def named_models(pairs: Sequence[Sequence[str]]) -> list[str]:
    """Return all models of some pairs, each once."""
    return list(dict.fromkeys(chain.from_iterable(pairs)))
