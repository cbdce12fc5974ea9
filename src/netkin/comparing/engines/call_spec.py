"""The terms of a call as plain values, with models, data and functions by the names under which all machines find them.

Nothing else is sent to the workers of a cluster: no module, loader or function is pickled. `terms_of` makes plain
values of a call, or refuses what has no name; `request_of` makes the call of them again, on the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from netkin.comparing.alignment import Pairs
from netkin.errors import ValueFault
from netkin.identity import settings_digest
from netkin.measures.registry import Measure, find
from netkin.representations.inputs import batches_of, examples_in, loader_of, reshuffles
from netkin.representations.shapes import is_custom, shape_name
from netkin.sources.batches import Batches, Borrowed, sample
from netkin.sources.datasets import load_data
from netkin.sources.names import find_function
from netkin.statistics.collector import Study

if TYPE_CHECKING:
    from netkin.comparing.request import Options, Request

Terms = dict[str, Any]  # a call, as values that JSON can hold
MODEL = "'module:function@weights.pt', 'hf:DIR' or the path of a '.pt2' file"
DATA = "'npz:FILE', 'cifar10:DIR' or 'module:function' (see `netkin data`)"


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


# --- from a call to plain values --------------------------------------------------------------------------------------


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
        raise ValueFault(
            f"engine='ray' loads models where they run, and {name!r} is a live {type(thing).__name__}; give it by "
            f"name: {MODEL}."
        )
    return {"model": thing, "seed": place}


def plain_data(data: Any) -> DataSpec:
    """Return data that were given by name."""
    if isinstance(data, DataSpec):
        return data
    if not isinstance(data, str):
        raise ValueFault(
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
        raise ValueFault(
            "engine='ray' takes shapes by their names, as 'pool', and `shape` is a function; give its name, or put it "
            "into the model."
        )
    return shape_name(shape) or None


def _functions(what: str, given: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: plain_function(what, one) for name, one in given.items()}


def plain_function(what: str, function: Any) -> str | None:
    """Return a function that was given by name."""
    if function is not None and not isinstance(function, str):
        raise ValueFault(
            f"engine='ray' loads functions where models run, and `{what}` is a live function; give it by name, as "
            "'module:function'."
        )
    return function


def plain_device(device: Any) -> str | None:
    """Return a kind of device; Ray chooses among several."""
    if device is None or torch.device(device).index is None:
        return None if device is None else str(device)
    raise ValueFault(f"under engine='ray' each task is given its GPU; write device='cuda' in place of {str(device)!r}.")


def plain_measures(measures: Sequence[Measure]) -> list[list[str]]:
    """Return measures as (module, id): a worker imports the one and finds the other."""
    homes = [measure.function.__module__ for measure in measures]
    strange = next((one for one, home in zip(measures, homes, strict=True) if home == "__main__"), None)
    if strange is not None:
        raise ValueFault(
            f"engine='ray' finds measures by their module, and {strange.name!r} is defined in the script itself; put "
            "it into a module."
        )
    return [[home, measure.id] for home, measure in zip(homes, measures, strict=True)]


# --- and back, on a worker --------------------------------------------------------------------------------------------


def measures_of(plain: Sequence[Sequence[str]]) -> list[Measure]:
    """Return the measures that `plain_measures` named."""
    from netkin.sources.names import current_directory_importable

    with current_directory_importable():
        for home in dict.fromkeys(home for home, _ in plain):
            __import__(home)
    return [find(name) for _, name in plain]


def request_of(terms: Terms, models: Mapping[str, Any], data: Any, of: Sequence[Sequence[str]], **more: Any) -> Request:
    """Return the call for some of its models, already loaded, and the pairs of them that are compared."""
    from netkin.comparing.request import Request

    return Request(models, *asked_of(terms, list(models), of), data, terms["examples"], **more)


def asked_of(terms: Terms, models: Sequence[str], of: Sequence[Sequence[str]]) -> tuple[Options, Pairs, Study]:
    """Return the request for some models, which of them are compared, and the study."""
    from netkin.comparing.request import Options

    given = dict(terms_for(terms, models)["options"])
    for what in ("transforms", "forward"):
        given[what] = {name: text and find_function(text) for name, text in given[what].items()}
    which = terms["pairs"]
    pairs = Pairs([(a, b) for a, b in of], which if isinstance(which, str) else [(x, y) for x, y in which])
    return Options(**given), pairs, Study({}, [], **terms["study"])


def data_identity(data: Batches | Borrowed) -> str:
    """Return a text that identifies data: of those in memory all, of a user's loader its first batch."""
    if isinstance(data, Batches):
        return settings_digest([data.stored, data.labels])
    if not is_ordered(data):
        return "in another order each time"
    first = next(iter(batches_of(data)), None)
    return f"{settings_digest(first, strict=False)}, the first batch of {examples_in(data)} examples"


def is_ordered(data: Any) -> bool:
    """Return whether data give their examples in the same order each time."""
    return not reshuffles(loader_of(data))


def named_models(pairs: Sequence[Sequence[str]]) -> list[str]:
    """Return all models of some pairs, each once."""
    return list(dict.fromkeys(chain.from_iterable(pairs)))
