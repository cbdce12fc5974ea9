"""`Spec`, what is compared and how, and `Run`, how a call runs: each option is declared once, with a sentence.

`takes_options` gives a function the keywords of both: its signature, its docstring and the refusal of an unknown
keyword are made of the declarations here, and so are the options of commands. For type checkers there are `Options`,
a `TypedDict` of them all. The module needs no torch, so that commands start fast.
"""

# defaults are declared by `_option`, and none is mutable

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from netkin.errors import InvalidValue, UnknownName, did_you_mean

if TYPE_CHECKING:  # commands read the declarations, and start without torch
    import torch

    from netkin.comparing.engines import Engine
    from netkin.progress import ProgressOption
    from netkin.representations.layers import Spec as Layers
    from netkin.representations.shapes import Shape

Function = TypeVar("Function", bound=Callable[..., Any])
Measures = str | Callable[..., Any] | Sequence[Any]
MOST = 2.0**62  # bytes, where `memory` is infinite


def option(default: Any, sentence: str, python: str = "") -> Any:
    """Declare an option by its default and the sentence that says what it means.

    The command line shows the sentence alone; `python` is what to add where one writes Python, as other types it takes.
    """
    return field(default=default, metadata={"sentence": sentence, "python": python})


@dataclass(frozen=True)
class Spec:
    """What is compared, and how."""

    measures: Measures | None = option(("cka",), "one measure or several, by name with parameters, or as functions.")
    layers: Layers | Mapping[str, Layers] = option(
        None,
        "layers by name, glob (`*` within a level, `**` across levels) or type.",
        "a mapping gives each model its own.",
    )
    pairs: Any = option(
        "all",
        "which pairs of layers: all, corresponding ones, which have the same name, or band:2, each layer with those at "
        "its depth and up to two places from it.",
        'that is "all", "corresponding", "band:K" or a list of (layer, layer).',
    )
    examples: int | None = option(None, "the number of examples after which the pass ends.")
    part: str | tuple[int, int] | None = option(
        None, 'which part of indexable data, as "3/16": the third of sixteen contiguous ranges.'
    )
    start: int | None = option(
        None, "the number of the first example, for parts that are given as separate loaders; 0 for the first of them."
    )
    shape: Shape | Mapping[str, Shape] = option(
        None,
        "what one example is; by default pool for feature maps and mean for tokens.",
        "a mapping gives it by layer or glob.",
    )
    positions: str | None = option(
        None,
        "which tokens of each sequence count, as a slice of them without padding: 1: leaves out the first of each, "
        "1:-1 the last as well; by default all.",
        'that is a text, such as "1:".',
    )
    resize: str | None = option(
        None,
        "average larger feature maps down to the smaller size, with the shape positions or dft.",
        'that is "average".',
    )
    memory: float | None = option(
        None, "the most memory that statistics may take; by default a quarter of all.", "it is given in bytes."
    )
    rows: int | None = option(
        None, "number of examples to sample if models would run several times otherwise; the result says so."
    )
    tokens: int | None = option(
        None,
        "number of tokens to sample with the shape tokens; by default all, or 4,096 where statistics of all do not fit "
        "the memory.",
    )
    seed: int = option(0, "random seed for samples of tokens, and of the rows that kernel measures read.")
    transforms: Any = option(None, "a function of the inputs, or one for each model.")
    forward: Any = option(None, "a function ``forward(model, batch)``, or one for each model.")
    names: tuple[str, str] = option(("a", "b"), "what the result calls the two.")
    errors: bool = option(
        False, "compute standard errors of the values, by leaving out one chunk of the examples in turn."
    )
    chunks: int = option(20, "number of chunks of the examples for standard errors.")
    exact_model: bool = option(
        False, "compute float32 in models on a GPU without rounding to TF32, which gives the CPU's numbers."
    )

    def __post_init__(self) -> None:
        if self.part is not None:
            object.__setattr__(self, "part", parse_part(self.part))
        object.__setattr__(self, "pairs", checked_pairs(self.pairs))
        self._check_numbers()
        if self.positions is not None:
            from netkin.representations.shapes import with_positions

            object.__setattr__(self, "shape", with_positions(self.shape, self.positions))
        self._check_shape()
        if not (
            isinstance(self.names, (tuple, list))
            and len(self.names) == 2
            and all(isinstance(name, str) for name in self.names)
        ):
            self._fail("names", "must be two texts")

    def _check_numbers(self) -> None:
        for name, least, meaning in (
            ("examples", 1, "is a number of examples"),
            ("start", 0, "is the number of the first example"),
            ("rows", 1, "is the size of a sample of the examples"),
            ("tokens", 4, "is the size of a sample of the tokens"),
        ):
            value = getattr(self, name)
            if value is not None and not _is_whole(value, least):
                self._fail(name, f"{meaning}, {least} or more")
        if not _is_whole(self.seed):
            self._fail("seed", "is a whole number")
        if self.errors and not _is_whole(self.chunks, 2):
            self._fail("chunks", "is the number of chunks for standard errors, 2 or more")
        memory: Any = self.memory
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, Real) or not float(memory) > 0):
            self._fail("memory", "is a number of bytes, such as 2e9")

    def _check_shape(self) -> None:
        from netkin.representations.shapes import dft, positions, shape_name  # which need torch

        if self.resize not in (None, "average"):
            raise UnknownName(f"`resize` is None or 'average'; got {self.resize!r}.", argument="resize")
        if self.resize and self.shape not in ("positions", positions, "dft", dft):
            sentence = f"`resize` goes with shape='positions' or shape='dft'; got shape={self.shape!r}."
            raise InvalidValue(sentence, argument="resize", value=self.resize)
        shapes = [shape_name(shape) for shape in self.shape.values()] if isinstance(self.shape, Mapping) else []
        several = next((shape for shape in shapes if shape.partition("[")[0] in ("positions", "tokens")), None)
        if "dft" in shapes and several:
            raise InvalidValue(
                f"with 'dft' every layer must give one row per example, and {several!r} gives several; "
                "use 'pool' or 'mean' for the others.",
                argument="shape",
            )

    def _fail(self, name: str, meaning: str) -> None:
        value = getattr(self, name)
        raise InvalidValue(f"`{name}` {meaning}; got {value!r}.", argument=name, value=value)

    @property
    def chunk_count(self) -> int:
        """How many chunks are kept apart; 0 where no standard errors are wanted."""
        return self.chunks if self.errors else 0

    @property
    def limit(self) -> int | None:
        """The most bytes that statistics may take; None where the device decides."""
        return None if self.memory is None else int(min(float(self.memory), MOST))


@dataclass(frozen=True)
class Run:
    """How a call runs."""

    device: torch.device | str | None = option(
        None, "device on which the models run, such as cpu, cuda, cuda:1 or mps.", "by default the one they are on."
    )
    partial: bool = option(False, "whether Ctrl-C returns what is finished.")
    engine: str | Engine = option(
        "local",
        '"local" for this process, "distributed" for those that torchrun started, "ray" or an `nk.Ray` for a '
        "cluster; models, data and functions are then given by name.",
    )
    save: str | os.PathLike[str] | None = option(
        None, "the file for the result, beside which finished parts are kept, and where the same call continues."
    )
    overwrite: bool = option(
        False, "whether another result or job that is there is deleted, and the work starts again."
    )
    progress: ProgressOption = option(
        None, "None for a bar in a terminal, False for nothing, or a function of (done, total, what)."
    )


class Options(TypedDict, total=False):
    """The keywords of `Spec` and `Run`, for type checkers; a test holds it equal to them."""

    layers: Layers | Mapping[str, Layers]
    pairs: Any
    examples: int | None
    part: str | tuple[int, int] | None
    start: int | None
    shape: Shape | Mapping[str, Shape]
    positions: str | None
    resize: str | None
    memory: float | None
    rows: int | None
    tokens: int | None
    seed: int
    transforms: Any
    forward: Any
    names: tuple[str, str]
    errors: bool
    chunks: int
    exact_model: bool
    device: torch.device | str | None
    partial: bool
    engine: str | Engine
    save: str | os.PathLike[str] | None
    overwrite: bool
    progress: ProgressOption


Declared = Mapping[str, Field[Any]]


def declarations(*kinds: Any) -> Declared:
    """Return the declared options of dataclasses such as `Spec`: their fields that have a sentence."""
    return {option.name: option for kind in kinds for option in fields(kind) if "sentence" in option.metadata}


DECLARED = declarations(Spec, Run)


def sentence_of(option: str, declared: Declared = DECLARED) -> str:
    """Return the sentence that says what an option means in Python."""
    sentence, python = (str(declared[option].metadata[word]) for word in ("sentence", "python"))
    return f"{sentence.removesuffix('.')}; {python}" if python else sentence


def help_of(option: str) -> str:
    """Return the sentence that says what an option means on the command line."""
    sentence = str(DECLARED[option].metadata["sentence"])
    return sentence[0].upper() + sentence[1:]


def default_of(option: str) -> Any:
    """Return what an option is where it is not given."""
    return DECLARED[option].default


def run_option(name: str) -> Any:
    """Declare elsewhere an option of `Run`, with the same default and sentence."""
    return option(default_of(name), *(DECLARED[name].metadata[word] for word in ("sentence", "python")))


def split(options: Mapping[str, Any]) -> tuple[Spec, Run]:
    """Return the two halves of some options; those that were not given have their defaults."""
    of_spec = {option.name for option in fields(Spec)}
    return (
        Spec(**{name: value for name, value in options.items() if name in of_spec}),
        Run(**{name: value for name, value in options.items() if name not in of_spec}),
    )


def take_declared(settings: dict[str, Any], declared: Declared) -> dict[str, Any]:
    """Take the declared options out of keywords that hold other settings too, such as those of a recipe."""
    return {name: settings.pop(name) for name in declared if name in settings}


def takes_options(without: str = "", declared: Declared = DECLARED) -> Callable[[Function], Function]:
    """Let a function that ends in ``**options`` show the declared options as its keywords, but for some.

    Its docstring has an `Args:` for its own arguments, which those of the options follow. One that ends in
    ``**settings`` takes others too, and refuses them itself.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *parameters, rest = signature.parameters.values()
        takes_more = rest.name == "settings"
        left_out = {*without.split(), *(parameter.name for parameter in parameters)}
        names = [name for name in declared if name not in left_out]
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=declared[name].default, annotation=declared[name].type
            )
            for name in names
        ]
        known = [*(parameter.name for parameter in parameters), *names]

        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in known and not takes_more:
                    hint = did_you_mean(name, known) or "."
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}")
            return function(*arguments, **options)

        called.declared = declared  # type: ignore[attr-defined]
        called.__signature__ = signature.replace(parameters=[*parameters, *added, *[rest] * takes_more])  # type: ignore[attr-defined]
        called.__doc__ = documented(
            function.__doc__ or "", ["measures"] * (declared is DECLARED and "measures" in known) + names, declared
        )
        return cast("Function", called)

    return decorate


def documented(text: str, names: Sequence[str], declared: Declared = DECLARED) -> str:
    """Return a docstring in which a line for each option follows those of the function's own arguments."""
    text = inspect.cleandoc(text)  # as Python does from 3.13 on
    begin, args, rest = text.partition("\nArgs:\n")
    described, example, end = rest.partition("\nExample:")
    added = [name for name in names if f" {name}: " not in described]
    lines = "".join(f"\n    {name}: {sentence_of(name, declared)}" for name in added)
    return f"{begin}{args}{described.rstrip()}{lines}\n{example}{end}" if args else text


def by_model(option: str, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return for each model what a mapping has for it; two models also go by "a" and "b"."""
    places = dict(zip(names, "ab", strict=False)) if len(names) <= 2 else {}
    strange = sorted(map(str, set(values) - set(names) - set(places.values())))
    if strange:
        sentence = f"`{option}` names {strange[0]!r}; the models are {', '.join(map(repr, names))}."
        raise InvalidValue(sentence, argument=option, value=strange[0])
    return {name: values.get(name, values.get(places.get(name, name))) for name in names}


def layers_by_name(layers: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the choice of layers for each model, given for all of them or by their names."""
    return by_model("layers", layers, names) if isinstance(layers, Mapping) else dict.fromkeys(names, layers)


def functions_by_name(option: str, functions: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the function of each model, given for all of them, in their order or by their names."""
    if functions is None or callable(functions) or isinstance(functions, str):
        return dict.fromkeys(names, functions)
    if isinstance(functions, Mapping):
        return by_model(option, functions, names)
    if not isinstance(functions, Sequence) or len(functions) != len(names):
        got = len(functions) if isinstance(functions, Sequence) else repr(functions)
        raise InvalidValue(
            f"`{option}` must be one function or one for each of the {len(names)} models; got {got}.", argument=option
        )
    return dict(zip(names, functions, strict=True))


def parse_part(part: Any) -> tuple[int, int]:
    """Return a part, written as "3/16" or (3, 16), as two numbers."""
    try:
        which, count = map(int, part.split("/")) if isinstance(part, str) else map(operator.index, part)
    except (TypeError, ValueError):
        sentence = f"a part is written as '3/16', the third of sixteen; got {part!r}."
        raise InvalidValue(sentence, argument="part", value=part) from None
    if not 1 <= which <= count:
        sentence = f"parts are numbered from 1 to their count; got {which}/{count}."
        raise InvalidValue(sentence, argument="part", value=part)
    return which, count


def checked_pairs(which: Any) -> Any:
    """Return which pairs of layers are compared: "all", "corresponding", "band:K", or a list without repetitions."""
    if isinstance(which, str):
        if which not in ("all", "corresponding") and not re.fullmatch(r"band:\d+", which):
            sentence = f"`pairs` is 'all', 'corresponding', 'band:2' or a list of (layer, layer); got {which!r}."
            raise UnknownName(sentence, argument="pairs", value=which)
        return which
    pairs = list(which) if isinstance(which, Iterable) else [which]
    wrong = [pair for pair in pairs if not (isinstance(pair, (tuple, list)) and len(pair) == 2)]
    wrong += [pair for pair in pairs if not all(isinstance(layer, str) for layer in pair)] if not wrong else []
    if wrong or not pairs:
        got = repr(wrong[0]) if wrong else "an empty list"
        sentence = f"`pairs` must hold (layer, layer), as in [('conv1', 'conv2')]; got {got}."
        raise InvalidValue(sentence, argument="pairs", value=which)
    return list(dict.fromkeys((x, y) for x, y in pairs))


def _is_whole(value: Any, least: float = -MOST) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
