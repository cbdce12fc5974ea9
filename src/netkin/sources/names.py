"""Specifications as text: `NAME,option=value,...`, `package.module:function`, models and data by name, and files.

Files that are absent or not readable are refused in one sentence.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from netkin.errors import InvalidValue, SourceError, UnknownName, did_you_mean
from netkin.settings import loaders_kept

Function = TypeVar("Function", bound=Callable[..., Any])


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of `text`.

    Example:
        >>> split_options("images,size=64")
        ('images', {'size': '64'})
    """
    name, *rest = text.split(",")
    pairs = [part.partition("=") for part in rest]
    for option, equals, value in pairs:
        if not (option and equals and value):
            raise InvalidValue(f"{option!r} in {text!r} is no option; write NAME,option=value.")
    return name, {option: value for option, _, value in pairs}


def typed_options(function: Callable[..., Any], options: Mapping[str, Any], name: str, skip: int = 0) -> dict[str, Any]:
    """Return `options` as the keywords of `function`: whole numbers where its defaults are such, text elsewhere.

    Its first `skip` parameters are no options; a parameter whose name begins with an underscore is none either.
    """
    parameters = list(inspect.signature(function).parameters.items())[skip:]
    defaults = {option: parameter.default for option, parameter in parameters if not option.startswith("_")}
    typed = dict(options)
    for option, value in options.items():
        if option not in defaults:
            have = f" It has {', '.join(defaults)}." if defaults else " It has none."
            raise UnknownName(f"{name!r} has no option {option!r}{did_you_mean(option, defaults) or '.'}{have}")
        if isinstance(defaults[option], int):
            if not str(value).isdecimal() or not 0 < int(value) < 2**31:
                raise InvalidValue(f"option {option!r} of {name!r} must be a whole number from 1; got {value!r}.")
            typed[option] = int(value)
    return typed


def find_function(spec: str, known: Iterable[str] = ()) -> Callable[[], Any]:
    """Return the function that `spec` names; `known` are prefixes with another meaning."""
    module_name, _, name = spec.partition(":")
    with current_directory_importable():
        module = _module(module_name, spec, list(known))
    function = getattr(module, name, None)
    if function is None:
        near = did_you_mean(name, [public for public in vars(module) if not public.startswith("_")])
        raise SourceError(f"module {module_name!r} has no function {name!r}{near or '.'}")
    return function


def call_named(function: Callable[[], Any], spec: str) -> Any:
    """Return what `function` returns; what it raises becomes one sentence that names `spec`."""
    try:
        with current_directory_importable():
            return function()
    except (Exception, SystemExit) as error:
        raise SourceError(f"{spec!r} was called without arguments and raised {in_short(error)}") from error


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Let modules of the current directory be imported inside the `with`."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if directory in sys.path:
            sys.path.remove(directory)


def _module(name: str, spec: str, known: list[str]) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise SourceError(_not_found(name, spec, known))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise SourceError(_not_found(name, spec, known)) from error
        raise SourceError(f"module {name!r} of {spec!r} could not be imported: {in_short(error)}") from error


def _not_found(name: str, spec: str, known: list[str]) -> str:
    near = did_you_mean(name, known)
    advice = near or "; run netkin in the folder that holds it, or install its package."
    return f"found no module {name!r} for {spec!r}{advice}"


def in_short(error: BaseException) -> str:
    """Return an error's type and the first line of its message as the end of a sentence.

    The message of an error in a worker process of a `DataLoader` is that process's trace, which ends in the cause.
    """
    lines = str(error).strip().splitlines()
    sentence = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    worker = re.match(r"Caught (\w+) in DataLoader worker process", lines[0] if lines else "")
    if worker:
        causes = [line for line in lines if re.match(rf"([\w.]+\.)?{worker[1]}\b", line)]
        sentence = f"{causes[-1] if causes else worker[1]} (in a worker process of the DataLoader)"
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def by_name(models: str = "", data: str = "", *, recordings: bool = False) -> Callable[[Function], Function]:
    """Let a function take models and data by their names, too: texts as `load_model` and `load_data` read them.

    `models` and `data` list its arguments. With `recordings` a text may also name what `nk.recorded` opens. Models may
    also be in a list or a mapping, there also with their data as ``(model, data)``; those without weights have other
    random ones each. Where a function of two models has an argument `names` that is not given, or one of one model an
    argument `name`, the texts become the names. Loaders among the data draw afterwards as if they had not been read.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def called(*arguments: Any, **keywords: Any) -> Any:
            try:
                bound = signature.bind(*arguments, **keywords)
            except TypeError:
                return function(*arguments, **keywords)  # which says what is wrong
            if bound.arguments.get("engine", "local") in ("local", "distributed"):  # others load where they work
                _load(bound.arguments, models.split(), data.split(), signature, recordings)
            with loaders_kept(*(bound.arguments.get(name) for name in data.split())):
                return function(*bound.args, **bound.kwargs)

        return cast("Function", called)

    return decorate


def _load(
    arguments: dict[str, Any], models: list[str], data: list[str], signature: inspect.Signature, recordings: bool
) -> None:
    """Put models and data in the places of their names."""
    from netkin.sources.datasets import is_to_load, load_data, require_no_characters

    texts = {name: arguments[name] for name in models if isinstance(arguments.get(name), str)}
    if texts and len(models) == 2 and "names" in signature.parameters and "names" not in arguments:
        arguments["names"] = tuple(unique_names([texts.get(name, name) for name in models]))
    if len(texts) == len(models) == 1 and "name" in signature.parameters and "name" not in arguments:
        (arguments["name"],) = texts.values()
    fed = list[Any]()  # the models, by name or live
    for name in models:
        value: Any = arguments.get(name)
        value = list(value.values()) if isinstance(value, Mapping) else value
        fed += map(_model_in, value if isinstance(value, (list, tuple)) else [value])
    seeds = itertools.count()
    for name in models:
        if name in arguments:
            arguments[name] = _loaded(arguments[name], seeds, recordings)
    for name in data:
        if is_to_load(arguments.get(name), fed):
            arguments[name] = load_data(arguments[name], models=fed)
        else:
            require_no_characters(arguments.get(name), fed)


def _model_in(value: Any) -> Any:
    """Return a model, or that of an `nk.ModelInput`."""
    return value.model if is_dataclass(value) and hasattr(value, "model") else value


def loaded_by_name(models: Any, *, same_weights: bool = False) -> Any:
    """Return models in the places of their names; random weights differ by place, or are the same for one name."""
    return _loaded(models, itertools.repeat(0) if same_weights else itertools.count(), recordings=False)


def _loaded(models: Any, seeds: Iterator[int], recordings: bool) -> Any:
    """Return models in the places of their names, alone, in a list, or in a mapping."""
    from netkin.sources import load_data, load_model
    from netkin.sources.recordings import names_recording, recorded

    if isinstance(models, str):
        is_recorded = recordings and names_recording(models)
        return recorded(models) if is_recorded else load_model(models, seed=next(seeds))
    if isinstance(models, (list, tuple)) and models and all(isinstance(model, str) for model in models):
        models = dict(zip(unique_names(models), models, strict=True))
    if not isinstance(models, Mapping):
        return models
    loaded: dict[Any, Any] = {}
    for name, model in models.items():
        if isinstance(model, tuple) and len(model) == 2:  # a model with its data
            data = load_data(model[1], models=[model[0]]) if isinstance(model[1], str) else model[1]
            loaded[name] = _loaded(model[0], seeds, recordings), data
        else:
            loaded[name] = _loaded(model, seeds, recordings)
    return loaded


def unique_names(texts: Sequence[str]) -> list[str]:
    """Return texts as names that all differ: one that occurs twice gets its place, or a later number that is free.

    Example:
        >>> unique_names(["netkin:digits", "netkin:digits", "netkin:vit"])
        ['netkin:digits (1)', 'netkin:digits (2)', 'netkin:vit']
        >>> unique_names(["a", "a", "a (2)"])
        ['a (1)', 'a (5)', 'a (2)']
    """
    times = Counter(texts)
    taken, names = set(texts), list[str]()
    for place, text in enumerate(texts, start=1):
        free = (f"{text} ({number})" for number in itertools.count(place, len(texts)))
        names.append(text if times[text] == 1 else next(name for name in free if name not in taken))
        taken.add(names[-1])
    return names


# --- files that are named ---------------------------------------------------------------------------------------------


def require_file(path: Path, what: str = "file") -> None:
    """Refuse a path that is no file, and suggest the most similar name in its folder."""
    try:
        if path.is_dir():
            raise SourceError(f"{str(path)!r} is a folder; name the {what} in it.")
        if not path.is_file():
            raise SourceError(f"found no {what} {str(path)!r}{near(path) or '.'}")
    except OSError as error:
        raise SourceError(unreadable(path, error)) from error


def near(path: Path) -> str:
    """Return a suggestion of the most similar name in the folder of `path`, or an empty string."""
    beside = {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else set()
    return did_you_mean(path.name, sorted(beside - {path.name}))


def content(path: Path, what: str = "file") -> bytes:
    """Return all bytes of the file at `path`."""
    require_file(path, what)
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(unreadable(path, error)) from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object that the JSON file at `path` holds."""
    with reading(path, what, "write it again"):
        document = json.loads(content(path, what))
        if not isinstance(document, dict):
            raise ValueError(f"it holds a {type(document).__name__} instead of an object")
        return document


class Refused(Exception):
    """Raised for contents of a file that are not read; `reading` turns it into a refusal that names the file."""


@contextmanager
def reading(path: Path, what: str, advice: str) -> Iterator[None]:
    """Turn any error inside the `with`, where the file at `path` is read, into one refusal.

    Its bytes may be anything, and so may be the error.
    """
    try:
        yield
    except SourceError:
        raise
    except Refused as refusal:
        raise SourceError(
            f"{str(path)!r} holds or asks for {refusal}, and netkin runs nothing that comes in a file; {advice}."
        ) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise SourceError(unreadable(path, error)) from error
        said = "" if isinstance(error, LookupError) else str(error).strip().partition("\n")[0].rstrip(".")
        raise SourceError(f"{str(path)!r} is damaged or no {what}{said and f' ({said})'}; {advice}.") from error


def unreadable(path: Path, error: OSError) -> str:
    """Return the sentence for a file that the system does not let us read."""
    return f"{str(path)!r} cannot be read: {(error.strerror or type(error).__name__).lower()}."


@contextmanager
def refusing_unreadable(place: str) -> Iterator[None]:
    """Turn errors of the operating system inside the `with` into a refusal that names the file."""
    try:
        yield
    except OSError as error:
        raise SourceError(unreadable(Path(error.filename or place), error)) from error
