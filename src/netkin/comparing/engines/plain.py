"""A call as plain values, for workers on other machines, and the call made of them again.

Models, data and functions go by the names under which all machines find them; what has no name is refused, with the
form to give it in. Nothing else is sent: no module, loader or function is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from netkin.comparing.compare import Call, inputs_in
from netkin.comparing.sides import ModelInput, Side
from netkin.comparing.spec import Run, Spec
from netkin.errors import InvalidValue
from netkin.measures.registry import Measure, find
from netkin.representations.shapes import is_custom, shape_name
from netkin.results.values import Pair
from netkin.sources.batches import Batches, Borrowed, OwnBatches, sample
from netkin.sources.datasets import load_data
from netkin.sources.names import current_directory_importable, find_function

FORMS = {  # in which things are given, by the arguments
    "models": "'module:function@weights.pt', 'hf:DIR' or the path of a '.pt2' file",
    "data": "'npz:FILE', 'cifar10:DIR' or 'module:function' (see `netkin list data`)",
    "shape": "'pool'; or put the function into the model",
}
# of a spec, as they are
COPIED = ("pairs", "examples", "resize", "rows", "tokens", "seed", "errors", "chunks", "exact_model")
OF_ONE_PROCESS = ("part", "start", "partial")
PlainCall = dict[str, Any]  # values that JSON can hold


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
        data = sample(data, self.examples, seed=self.seed, balanced=self.balanced)
        if isinstance(data, OwnBatches):
            raise data.refusal
        return data


def plain_call(call: Call, measures: Sequence[Measure]) -> PlainCall:
    """Return a call as plain values."""
    for name in OF_ONE_PROCESS:
        if getattr(call.spec, name, getattr(call.run, name, None)) not in (None, False):
            raise InvalidValue(
                f"`{name}` is for one process, and engine='ray' shares the data by itself; leave it out.", argument=name
            )
    models: dict[str, str] = {}
    for name, source in inputs_in(call.models).items():
        # what all models do not share is not sent
        has_more = source.data is not None or source.weights is not None or source.device != call.run.device
        models[name] = by_name("models", source if has_more else source.model, repr(name))
    return {
        "models": models,
        "seeds": {name: place for place, name in enumerate(models)},  # of random weights
        "data": None if call.data is None else asdict(plain_data(call.data)),
        "data_for": [model for model in models.values() if model.startswith("hf:")],  # also in a block without them
        "measures": plain_measures(measures),
        "inputs": {
            name: {
                "layers": plain_layers(source.layers),
                "shape": plain_shape(source.shape),
                "forward": by_name("forward", source.forward),
                "transform": by_name("transforms", source.transform),
            }
            for name, source in inputs_in(call.models).items()
        },
        "spec": {name: getattr(call.spec, name) for name in COPIED} | {"shape": plain_shape(call.spec.shape)},
        "device": plain_device(call.run.device),
    }


def call_from(
    plain: PlainCall,
    models: Mapping[str, Any],
    data: Any,
    of: Sequence[Pair],
    limit: int | None = None,
    part: Any = None,
) -> Call:
    """Return the call for some of its models, and the pairs of them that are compared."""
    inputs: dict[str, ModelInput | Side] = {}
    for name, model in models.items():
        options = dict(plain["inputs"][name])
        functions = {what: options[what] and find_function(options[what]) for what in ("forward", "transform")}
        inputs[name] = ModelInput(model, **options | functions, device=plain["device"])
    spec = Spec(measures=[name for _, name in plain["measures"]], part=part, **plain["spec"])
    return Call(inputs, data, spec, Run(device=plain["device"]), of, limit=limit)


# --- its parts --------------------------------------------------------------------------------------------------------


def by_name(argument: str, thing: Any, name: str = "") -> Any:
    """Return what was given by its name, or None; a live object is refused, with the form to give it in."""
    if thing is None or isinstance(thing, str):
        return thing
    form = FORMS.get(argument, "'module:function'")
    raise InvalidValue(
        f"engine='ray' loads things where they are used, and {name or f'`{argument}`'} is a live "
        f"{type(thing).__name__}; give it by name, as {form}.",
        argument=argument,
    )


def plain_data(data: Any) -> DataSpec:
    """Return data that were given by name."""
    return data if isinstance(data, DataSpec) else DataSpec(by_name("data", data))


def plain_layers(layers: Any) -> Any:
    """Return a choice of layers as names: module types by theirs."""
    if layers is None or isinstance(layers, str):
        return layers
    return layers.__name__ if isinstance(layers, type) else [plain_layers(layer) for layer in layers]


def plain_shape(shape: Any) -> Any:
    """Return what one example is, by name, for all layers or by layer."""
    if isinstance(shape, Mapping):
        return {layer: plain_shape(own) for layer, own in shape.items()}
    return by_name("shape", shape) if is_custom(shape) else shape_name(shape) or None


def plain_device(device: Any) -> str | None:
    """Return a kind of device; Ray chooses among several."""
    if device is not None and torch.device(device).index is not None:
        raise InvalidValue(
            f"under engine='ray' each task is given its GPU; write device='cuda' in place of {str(device)!r}.",
            argument="device",
        )
    return None if device is None else str(device)


def plain_measures(measures: Sequence[Measure]) -> list[list[str]]:
    """Return measures as (module, id): a worker imports the one and finds the other."""
    for measure in measures:
        if measure.function.__module__ == "__main__":
            raise InvalidValue(
                f"engine='ray' finds measures by their module, and {measure.name!r} is defined in the script itself; "
                "put it into a module.",
                argument="measures",
            )
    return [[measure.function.__module__, measure.id] for measure in measures]


def measures_from(plain: Sequence[Sequence[str]]) -> list[Measure]:
    """Return the measures that `plain_measures` named."""
    with current_directory_importable():
        for module in dict.fromkeys(module for module, _ in plain):
            __import__(module)
    return [find(name) for _, name in plain]
