"""Running a command: load the models and data that were named, call the library, and refuse a model that crashes.

Whatever a model raises while it runs, itself or a copy, compared or trained, becomes one sentence that names it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from netkin.errors import ForwardError, NetkinError

if TYPE_CHECKING:
    from torch import nn

    from netkin.comparing.engines import DataSpec
    from netkin.comparing.engines.ray import Ray
    from netkin.sources.batches import Batches, Borrowed

Result = TypeVar("Result")
MODELS = "netkin.models"  # of a command, with their names
FITTING = "Choose data of the size and channels that the model takes; see `netkin data`."
TRANSFORMED = "transformed"  # the function that calls a transform


class Destination(NamedTuple):
    """Where a result goes, beside which a cluster keeps finished parts, and whether that starts again."""

    result: Path | None
    force: bool


def call_library(
    function: Callable[..., Result],
    models: Mapping[str, str],
    options: dict[str, Any],
    place: Destination | None = None,
) -> Result:
    """Return what `function` of the library makes of one or two models, the data and the options that were named."""
    specs, names = list(models.values()), list(models)
    given = options.pop("transforms")
    options |= {"names": (names[0], names[-1]), "transforms": functions_of(given, len(specs))}
    refuse_unknown_names(options, specs)
    networks = load_models(specs) if options.get("engine") != "ray" else []
    data = prepare(options, specs, place)
    if runs_elsewhere(options):  # which loads models where they are used, and functions
        return function(*specs, data=data, **options | {"transforms": one_or_each(given)})
    return function(*networks, data=data, **options)


def call_for_many(
    function: Callable[..., Result],
    models: Mapping[str, str],
    options: dict[str, Any],
    place: Destination | None = None,
) -> Result:
    """Return what `function` of the library makes of several models, which it loads when their turn comes."""
    specs = list(models.values())
    given = options.pop("transforms")
    options["transforms"] = functions_of(given, len(specs))
    refuse_unknown_names(options, specs)
    data = prepare(options, specs, place)
    if runs_elsewhere(options):
        return function(models, data=data, **options | {"transforms": one_or_each(given)})
    loaded = dict(zip(models, load_models(specs), strict=True)) if options["engine"] == "distributed" else models
    return function(loaded, data=data, **options)


def refuse_unknown_names(options: Mapping[str, Any], specs: Sequence[str]) -> None:
    """Refuse what is misspelt, a measure, a device or a model, before data are loaded, which may take long."""
    from netkin.comparing.comparer import found_measures
    from netkin.sources.models import refuse_unknown_model

    if options["measures"]:
        found_measures(list(options["measures"]))
    if options.get("engine") != "ray":  # whose workers may have others
        require_device(options["device"] if options.get("engine") != "distributed" else None)
        for spec in dict.fromkeys(specs):
            refuse_unknown_model(spec)


def prepare(options: dict[str, Any], specs: Sequence[str], place: Destination | None = None) -> Any:
    """Return the data, as `specs` take them, and leave in `options` the engine, measures and layers for the library."""
    data, batch_size, balanced = (options.pop(name) for name in ("data", "batch_size", "balanced"))
    address, gpus = options.pop("address", None), options.pop("gpus", 1.0)
    options |= {name: list(options[name]) or None for name in ("measures", "layers")}
    if options.get("engine") == "ray":
        options["engine"] = _ray_engine(address, gpus, place)
        return data and _data_spec(data, batch_size, options, balanced)
    if options["device"] == "cuda" and options.get("engine") == "distributed":
        options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # each process of a machine has its own
    require_device(options["device"])
    return data and load_batches(data, batch_size, options["examples"], options["seed"], balanced, specs)


def runs_elsewhere(options: Mapping[str, Any]) -> bool:
    """Return whether an engine loads models and data itself, where they are used."""
    return not isinstance(options.get("engine", "local"), str)


def _data_spec(data: str, batch_size: int, options: Mapping[str, Any], balanced: bool) -> DataSpec:
    """Return data by name, with the sample that is drawn of them."""
    from netkin.comparing.engines import DataSpec

    _refuse_balanced(balanced, options["examples"])
    return DataSpec(data, batch_size, options["examples"], options["seed"], balanced)


def _ray_engine(address: str | None, gpus: float, place: Destination | None) -> Ray:
    """Return the engine on a cluster, which keeps finished parts beside the result."""
    from netkin.comparing.engines.ray import Ray
    from netkin.jobs import beside

    job = None if place is None or place.result is None else beside(place.result)
    return Ray(address, job=job, overwrite=place is not None and place.force, gpus=gpus)


def read_from_weights(measures: Sequence[str]) -> bool:
    """Return whether some measures need the weights alone, and no data."""
    from netkin.comparing.comparer import found_measures
    from netkin.comparing.plan import weights_alone

    return weights_alone(found_measures(list(measures)))


def load_models(specs: Sequence[str]) -> list[nn.Module]:
    """Return the models that `specs` name; those without weights have other random ones each."""
    from netkin.sources import load_model

    return [remember(spec, load_model(spec, seed=place)) for place, spec in enumerate(specs)]


def tell_random_weights(models: Sequence[nn.Module]) -> None:
    """Say on stderr which models have random weights, where a result does not carry that."""
    from netkin.sources.weights import remark_on

    for remark in filter(None, map(remark_on, models)):
        click.echo(f"warning: {remark}", err=True)


def load_batches(
    spec: str,
    batch_size: int,
    examples: int | None,
    seed: int,
    balanced: bool = False,
    models: Sequence[str] = (),
) -> Batches | Borrowed:
    """Return the data that `spec` names, as its `models` take them, or a sample of so many of its examples."""
    from netkin.sources import load_data
    from netkin.sources.batches import sample

    _refuse_balanced(balanced, examples)
    return sample(load_data(spec, batch_size=batch_size, models=models), examples, seed=seed, balanced=balanced)


def _refuse_balanced(balanced: bool, examples: int | None) -> None:
    if balanced and examples is None:
        raise click.UsageError("--balanced needs --examples N, the number of examples.")


def resume_hint(save: Path | None) -> str:
    """Say what an interrupted command leaves behind; empty where it left nothing."""
    from netkin.jobs import read

    try:
        state = None if save is None else read(save)
    except NetkinError:  # it had not begun
        state = None
    return (
        f"{state.condition}, with {state.progress} done in {save}; run the same command again to resume."
        if state
        else ""
    )


@contextmanager
def with_resume_hint(save: Path | None) -> Iterator[None]:
    """Inside the `with`, Ctrl-C says what is left behind."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(resume_hint(save) or str(stop)) from stop


def named_models(typed: Sequence[str], given: Sequence[str] = ()) -> dict[str, str]:
    """Return models by name: that of --name or of NAME=MODEL, else what was typed, numbered if it occurs twice.

    Example:
        >>> named_models(["small=netkin:tiny10,width=8", "netkin:tiny10,width=16"])
        {'small': 'netkin:tiny10,width=8', 'netkin:tiny10,width=16': 'netkin:tiny10,width=16'}
    """
    from netkin.sources.names import numbered

    own, models = zip(*map(_split_name, typed), strict=True)
    if given and any(own):
        raise click.UsageError("models are named either by --name or as NAME=MODEL; leave out one of them.")
    if given:
        refuse_names(given, len(models))
    chosen = [name for name in given or own if name]
    if strange := [name for name in chosen if name != readable(name)]:
        raise click.UsageError(f"a name must be text in UTF-8; got {strange[0]!r}.")
    if len(set(chosen)) < len(chosen):
        raise click.UsageError(f"names of models must differ; got {', '.join(chosen)}.")
    names = given or numbered([name or readable(model) for name, model in zip(own, models, strict=True)])
    return dict(zip(names, models, strict=True))


def readable(typed: str) -> str:
    """Return what was typed as text that can be saved: what is no UTF-8 in a path is replaced."""
    return os.fsencode(typed).decode("utf-8", "replace")


def refuse_names(given: Sequence[str], count: int) -> None:
    """Refuse more or fewer --name than there are models."""
    if len(given) != count:
        models = "1 model" if count == 1 else f"{count} models"
        raise click.UsageError(f"--name is given once for each model, or not at all; got {len(given)} for {models}.")


def _split_name(typed: str) -> tuple[str, str]:
    """Return the name in NAME=MODEL, empty if there is none, and the model."""
    found = None if Path(typed).exists() else re.fullmatch(r"([^=:@/\\]+)=(.+)", typed)
    return (found[1], found[2]) if found else ("", typed)


def functions_of(specs: Sequence[str], models: int) -> Any:
    """Return the functions that --transform names: none, one for all models, or one for each."""
    from netkin.sources.names import find_function

    for spec in specs:
        if not all(spec.partition(":")):
            raise click.UsageError(f"--transform is written package.module:function; got {spec!r}.")
    if len(specs) not in (0, 1, models):
        raise click.UsageError(f"--transform is given once for all models, or once for each; got {len(specs)}.")
    return one_or_each([find_function(spec) for spec in specs])


def one_or_each(given: Sequence[Any]) -> Any:
    """Return what is given once for all models, or as a list for each."""
    return list(given) if len(given) > 1 else next(iter(given), None)


def require_device(name: str | None) -> None:
    """Refuse a device that this machine does not have."""
    if name is None:
        return
    import torch

    from netkin.errors import UnknownName

    try:
        torch.empty(0, device=name)
    except Exception as fault:  # torch says it in several ways
        raise UnknownName(f"there is no device {name!r} here; this machine has {', '.join(devices())}.") from fault


def devices() -> list[str]:
    """Return the devices that torch can compute on, the CPU first."""
    import torch

    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


# --- a model that crashes ---------------------------------------------------------------------------------------------


def remember(spec: str, model: nn.Module) -> nn.Module:
    """Return a model, after its name is kept for the refusal, should it crash in this command."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta.setdefault(MODELS, []).append((spec, model))
    return model


def loaded_models() -> list[nn.Module]:
    """Return the models that this command has loaded."""
    context = click.get_current_context(silent=True)
    return [model for _, model in context.meta.get(MODELS, [])] if context else []


def crash_refusal(fault: Exception) -> ForwardError | None:
    """Return the refusal of a model, or a transform, that raised `fault` while it ran; None for a fault of ours."""
    # where torch was not imported no model has run, and a refusal need not wait for the import
    frame = _foreign_frame(fault) if "torch" in sys.modules else None
    if frame is None:
        return None
    if frame.f_code.co_name == TRANSFORMED:
        return ForwardError(f"--transform raised {_first_line(fault)}; it gets the inputs of a batch.")
    inputs, keywords = frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})
    fed = _shapes_of({"inputs": next(iter(inputs), None), **keywords})
    return ForwardError(
        f"{_name_of(frame.f_locals['self'], fault)!r} could not be run on {fed}: {_first_line(fault)}. {FITTING}"
    )


def _foreign_frame(fault: Exception) -> FrameType | None:
    """Return the call of the model, or the transform, inside which a fault arose; None where code of ours raised it."""
    from torch import nn

    found: FrameType | None = None
    for frame, _ in traceback.walk_tb(fault.__traceback__):
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if code is nn.Module._call_impl.__code__:
            found = found or frame
        elif module == "netkin.representations.inputs" and code.co_name == TRANSFORMED:
            found = frame
        elif module.startswith("netkin.") and not isinstance(frame.f_locals.get("self"), nn.Module):
            # back in code of ours, such as a statistic that hooks feed; reference networks have functions, too
            found = found if module.startswith("netkin.sources.") else None
    return found


def _name_of(model: nn.Module, fault: Exception) -> str:
    """Return what a model was named by, also where it is a copy; else its type."""
    context = click.get_current_context(silent=True)
    known: list[tuple[str, nn.Module]] = context.meta.get(MODELS, []) if context else []
    own = [spec for spec, one in known if one is model]
    alike = {spec for spec, one in known if type(one) is type(model)}
    said = [*own, getattr(fault, "model", None), *(alike if len(alike) == 1 else ())]
    said += [context.params.get("model") if context else None, type(model).__name__]
    return next(name for name in said if name)


def _shapes_of(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} of shape {tuple(x.shape)}" for name, x in given.items() if hasattr(x, "shape")) or "this"


def _first_line(fault: Exception) -> str:
    first = next(iter(str(fault).strip().splitlines()), "").rstrip(".")
    return f"{type(fault).__name__}: {first}" if first else type(fault).__name__
