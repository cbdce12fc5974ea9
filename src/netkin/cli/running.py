"""Running a command: load the models and data that were named, and call the library."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from netkin.errors import NetkinError

if TYPE_CHECKING:
    from torch import nn

    from netkin.comparing.engines.plain import DataSpec
    from netkin.comparing.engines.ray import Ray
    from netkin.sources.batches import Data

Result = TypeVar("Result")
MODELS = "netkin.models"  # that a command has loaded


class Destination(NamedTuple):
    """The file of a result, beside which a cluster keeps finished parts, and whether to start again."""

    result: Path | None
    overwrite: bool


def call_library(
    function: Callable[..., Result],
    models: Mapping[str, str],
    options: dict[str, Any],
    place: Destination | None = None,
) -> Result:
    """Call `function` of the library with one or two models, the data and the options, all given by name."""
    specs, names = list(models.values()), list(models)
    given = options.pop("transforms")
    options |= {"names": (names[0], names[-1]), "transforms": functions_of(given, len(specs))}
    options["layers"] = layers_by_model(options["layers"], list(dict.fromkeys(names)))
    require_known_names(options, specs)
    networks = load_sides(specs) if options.get("engine") != "ray" else []
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
    """Call `function` of the library with several models, each of which it loads when it is needed."""
    specs = list(models.values())
    given = options.pop("transforms")
    options["transforms"] = functions_of(given, len(specs))
    options["layers"] = layers_by_model(options["layers"], list(models))
    require_known_names(options, specs)
    data = prepare(options, specs, place)
    if runs_elsewhere(options):
        return function(models, data=data, **options | {"transforms": one_or_each(given)})
    loaded = dict(zip(models, load_sides(specs), strict=True)) if options["engine"] == "distributed" else models
    return function(loaded, data=data, **options)


def require_known_names(options: Mapping[str, Any], specs: Sequence[str]) -> None:
    """Refuse misspelt measures, devices and models before the data are loaded, which may take long."""
    from netkin.comparing.comparer import measures_of
    from netkin.sources.models import require_known_model
    from netkin.sources.recordings import names_recording

    if options["measures"]:
        measures_of(list(options["measures"]))
    if options.get("engine") != "ray":  # whose workers may have others
        require_device(options["device"] if options.get("engine") != "distributed" else None)
        for spec in dict.fromkeys(specs):
            if not names_recording(spec):
                require_known_model(spec)


def prepare(options: dict[str, Any], specs: Sequence[str], place: Destination | None = None) -> Any:
    """Return the data for the models `specs`, and put the engine and the measures into `options` for the library."""
    data, batch_size, balanced = (options.pop(name) for name in ("data", "batch_size", "balanced"))
    address, gpus = options.pop("address", None), options.pop("gpus", 1.0)
    options["measures"] = list(options["measures"]) or None
    if options.get("engine") == "ray":
        options["engine"] = _ray_engine(address, gpus, place)
        return data and _data_spec(data, batch_size, options, balanced)
    if options["device"] == "cuda" and options.get("engine") == "distributed":
        options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # each process of a machine has its own
    require_device(options["device"])
    return data and load_batches(data, batch_size, options["examples"], options["seed"], balanced, specs)


def runs_elsewhere(options: Mapping[str, Any]) -> bool:
    """Return whether the engine loads models and data itself, on the machines where they are used."""
    return not isinstance(options.get("engine", "local"), str)


def _data_spec(data: str, batch_size: int, options: Mapping[str, Any], balanced: bool) -> DataSpec:
    """Return data by name, with the sample that is drawn of them."""
    from netkin.comparing.engines.plain import DataSpec

    _require_examples(balanced, options["examples"])
    return DataSpec(data, batch_size, options["examples"], options["seed"], balanced)


def _ray_engine(address: str | None, gpus: float, place: Destination | None) -> Ray:
    """Return the engine on a cluster, which keeps finished parts beside the result."""
    from netkin.comparing.engines.ray import Ray
    from netkin.jobs import beside

    job = None if place is None or place.result is None else beside(place.result)
    return Ray(address, job=job, overwrite=place is not None and place.overwrite, gpus=gpus)


def read_from_weights(measures: Sequence[str]) -> bool:
    """Return whether some measures need the weights alone, and no data."""
    from netkin.comparing.comparer import measures_of
    from netkin.comparing.plan import weights_alone

    return weights_alone(measures_of(list(measures)))


def load_models(specs: Sequence[str], *, same_weights: bool = False) -> list[nn.Module]:
    """Return the models that `specs` name; those without weights get random ones, each its own or all the same."""
    from netkin.sources import load_model

    return [remember(load_model(spec, seed=0 if same_weights else place)) for place, spec in enumerate(specs)]


def load_sides(specs: Sequence[str]) -> list[Any]:
    """Return the models and recordings that `specs` name; see `load_models`."""
    from netkin.comparing.sides import load_side

    loaded = [load_side(spec, seed=place) for place, spec in enumerate(specs)]
    return [remember(side) if hasattr(side, "state_dict") else side for side in loaded]


def all_recorded(specs: Iterable[str]) -> bool:
    """Return whether all names are those of recordings, which need no data."""
    from netkin.sources.recordings import names_recording

    return all(map(names_recording, specs))


def tell_random_weights(models: Sequence[nn.Module]) -> None:
    """Warn on stderr of models with random weights, for results that don't have a caveat about them."""
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
) -> Data:
    """Return the data that `spec` names, prepared for the `models`, or a sample of them."""
    from netkin.sources import load_data
    from netkin.sources.batches import sample

    _require_examples(balanced, examples)
    return sample(load_data(spec, batch_size=batch_size, models=models), examples, seed=seed, balanced=balanced)


def _require_examples(balanced: bool, examples: int | None) -> None:
    if balanced and examples is None:
        raise click.UsageError("--balanced needs --examples N, the number of examples.")


def resume_hint(save: Path | None) -> str:
    """Return a sentence on what an interrupted command has kept; empty if it kept nothing."""
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
    """Inside the `with`, the message after Ctrl-C says what is kept."""
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
    from netkin.sources.names import unique_names

    own, models = zip(*map(_split_name, typed), strict=True)
    if given and any(own):
        raise click.UsageError("models are named either by --name or as NAME=MODEL; leave out one of them.")
    if given:
        require_name_of_each(given, len(models))
    chosen = [name for name in given or own if name]
    if strange := [name for name in chosen if name != readable(name)]:
        raise click.UsageError(f"a name must be text in UTF-8; got {strange[0]!r}.")
    if len(set(chosen)) < len(chosen):
        raise click.UsageError(f"names of models must differ; got {', '.join(chosen)}.")
    names = given or unique_names([name or readable(model) for name, model in zip(own, models, strict=True)])
    return dict(zip(names, models, strict=True))


def readable(typed: str) -> str:
    """Return a typed text in a form that can be saved: bytes of a path that are not UTF-8 are replaced."""
    return os.fsencode(typed).decode("utf-8", "replace")


def require_name_of_each(given: Sequence[str], count: int) -> None:
    """Refuse more or fewer --name than there are models."""
    if len(given) != count:
        models = "1 model" if count == 1 else f"{count} models"
        raise click.UsageError(f"--name is given once for each model, or not at all; got {len(given)} for {models}.")


def _split_name(typed: str) -> tuple[str, str]:
    """Split NAME=MODEL into the name, empty if there is none, and the model."""
    found = None if Path(typed).exists() else re.fullmatch(r"([^=:@/\\,]+)=(.+)", typed)
    return (found[1], found[2]) if found else ("", typed)


def layers_by_model(texts: Sequence[str], names: Sequence[str]) -> Any:
    """Return the patterns of --layers: a list for all models, or one for each where some are written NAME:PATTERN.

    Example:
        >>> layers_by_model(["relu*", "b:fc"], ["first", "second"])
        {'first': ['relu*'], 'second': ['relu*', 'fc']}
    """
    from netkin.comparing.spec import by_model

    known = sorted([*names, *("ab" if len(names) == 2 else ())], key=len, reverse=True)  # a name may hold a colon
    own: dict[str, list[str]] = {}
    for text in (text for text in texts if ":" in text):
        name = next((name for name in known if text.startswith(f"{name}:")), text.partition(":")[0])
        own.setdefault(name, []).append(text[len(name) + 1 :])
    common = [text for text in texts if ":" not in text]
    if not own:
        return common or None
    return {name: common + (patterns or []) or None for name, patterns in by_model("layers", own, names).items()}


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
    """Return the only item, for all models, or a list with one for each; None if there are none."""
    return list(given) if len(given) > 1 else next(iter(given), None)


def require_device(name: str | None) -> None:
    """Refuse a device that this machine does not have."""
    if name is None:
        return
    import torch

    from netkin.errors import UnknownName

    try:
        torch.zeros(1, device=name)
    except Exception as fault:  # torch says it in several ways
        raise UnknownName(f"there is no device {name!r} here; this machine has {', '.join(devices())}.") from fault


def devices() -> list[str]:
    """Return the devices that torch can compute on, the CPU first."""
    import torch

    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def remember(model: nn.Module) -> nn.Module:
    """Note a model among those that this command has loaded, and return it."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta.setdefault(MODELS, []).append(model)
    return model


def loaded_models() -> list[nn.Module]:
    """Return the models that this command has loaded."""
    context = click.get_current_context(silent=True)
    return context.meta.get(MODELS, []) if context else []
