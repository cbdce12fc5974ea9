"""Data sets by name: `NAME[,option=value]:PLACE`, or `package.module:function`; and lists of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, uint8
from torch.utils.data import DataLoader, Dataset

from netkin.errors import InvalidValue, SourceError, UnknownName, did_you_mean, require_utf8
from netkin.sources.architectures import CharLSTM
from netkin.sources.batches import Batches, Borrowed, Data, LoadedExamples, OwnBatches, as_they_are
from netkin.sources.examples import class_folders, digits, image_folder, npz
from netkin.sources.models import is_huggingface_name, load_processor, preprocessing, split_huggingface
from netkin.sources.names import (
    call_named,
    find_function,
    read_json,
    refusing_unreadable,
    split_options,
    typed_options,
)
from netkin.sources.published_images import cifar10, cifar100, mnist, svhn
from netkin.sources.tokenized import is_by_text, is_texts, text, tokenizer_name

__all__ = ["CATALOGUE", "Batches", "Borrowed", "DataSource", "load_data"]


@dataclass(frozen=True)
class DataSource:
    """One kind of data: what it is, where its files are expected, and how it is written on the command line."""

    name: str
    what: str
    where: str
    example: str
    load: Callable[..., LoadedExamples] | None = None
    needs_place: bool = True
    options: str = ""
    has_images: bool = False


def _parts(name: str, what: str, where: str, load: Callable[..., LoadedExamples], options: str) -> list[DataSource]:
    """Return the sources for the test and the training part of an image set."""
    return [
        DataSource(
            name + ending,
            f"{what}, {word} images",
            where,
            f"{name}{ending}:data",
            partial(load, _part=part),
            options=f"normalise={name} (default){options}; processor=DIR of a Hugging Face model",
            has_images=True,
        )
        for ending, part, word in (("", "test", "test"), ("-train", "train", "training"))
    ]


_NORMALISE = "normalise=none (default), imagenet, cifar10, cifar100 or svhn"
CATALOGUE: list[DataSource] = [
    DataSource(
        "digits",
        "1,797 digits of 1 × 8 × 8, ink from 0 to 1; digits:train and digits:test are its parts",
        "comes with netkin",
        "digits:test",
        digits,
        needs_place=False,
    ),
    *_parts(
        "cifar10",
        "CIFAR-10, 3 × 32 × 32 in 10 classes",
        "DIR, DIR/cifar-10-batches-bin or DIR/cifar-10-batches-py: the binary or the Python version",
        cifar10,
        ", imagenet, none or that of another set",
    ),
    *_parts(
        "cifar100",
        "CIFAR-100, 3 × 32 × 32 in 100 classes",
        "DIR, DIR/cifar-100-binary or DIR/cifar-100-python: the binary or the Python version",
        cifar100,
        ", imagenet, none or that of another set; labels=fine or coarse",
    ),
    *_parts(
        "svhn",
        "SVHN, cropped 3 × 32 × 32 digits",
        "DIR or DIR/svhn: test_32x32.mat and train_32x32.mat",
        svhn,
        ", imagenet, none or that of another set",
    ),
    *_parts(
        "mnist",
        "MNIST, 1 × 28 × 28 digits",
        "DIR, DIR/mnist or DIR/MNIST/raw: the four idx files, gzipped or not",
        mnist,
        " or none",
    ),
    DataSource(
        "images",
        "image files in sorted order, 3 × height × width from 0 to 1, with folders as classes (needs netkin[images])",
        "DIR: images, or one folder of images for each class",
        "images,size=64,normalise=imagenet:photos",
        image_folder,
        options=f"size=PIXELS (the shorter side, then the centre); {_NORMALISE}; processor=DIR of a Hugging Face model",
        has_images=True,
    ),
    DataSource(
        "npz",
        "arrays: x, images, inputs or data (or the only one), and y or labels; bytes are divided by 255",
        "FILE, written by numpy.savez",
        "npz:examples.npz",
        npz,
        options=f"channels=first or last; {_NORMALISE}",
    ),
    DataSource(
        "text",
        "tokens for hf:DIR, of lines, rows of a table or packed; characters for netkin:char_lstm (parquet and arrow "
        "need netkin[arrow])",
        "FILE: text in UTF-8, .jsonl, .csv, .tsv, .parquet or .arrow; DIR of `save_to_disk`, of parquet, arrow or .txt",
        "text,each=line:input.txt",
        text,
        options="each=window (default for text), line, paragraph, document or row (default for tables); column=NAME of "
        "a table; length=TOKENS at most (512); window=CHARACTERS or tokens (64); tokenizer=DIR of a Hugging Face model",
    ),
    DataSource(
        "package.module:function",
        "what a function of yours returns: batches, a Dataset, a DataLoader or a tensor",
        "the current directory, or an installed package",
        "my_data:validation",
    ),
]
NAMED = {source.name: source for source in CATALOGUE if source.load}


def load_data(spec: str | Sequence[Any], batch_size: int = 128, *, models: Sequence[Any] = (), **options: Any) -> Data:
    """Return the data that `spec` names, as batches that can be walked through again and again.

    `spec` is `KIND:PLACE`; `CATALOGUE` and `netkin list data` list the kinds and where each is looked for.
    `NAME=KIND:PLACE` is the same with your own name, which results show for the data. Options follow the kind or are
    given as keywords: `cifar10,normalise=imagenet:DIR` is `load_data("cifar10:DIR", normalise="imagenet")`. Images are
    ``(x / 255 - mean) / std``, by default with the set's own statistics. `package.module:function` is called without
    arguments and returns an iterable of batches, a Dataset, a DataLoader or a tensor; it may lie in the current
    directory.

    A list of texts, or of chats as lists of messages, stands for itself and takes the options of `text`; there
    `tokenizer` may also be a tokenizer of transformers.

    `models` are the models that will be fed, by name or live. For `hf:DIR` text is split by the tokenizer in that
    folder, and images pass through its image processor unless `normalise` is given: so `text:FILE` means
    `text,tokenizer=DIR:FILE`, and `images:PHOTOS` means `images,processor=DIR:PHOTOS`. For a live Hugging Face model
    text is split by the tokenizer in the folder from which it was loaded. Where tokenizers of models differ and each
    text is an example, each model gets the texts as its own tokenizer splits them.

    Example:
        >>> images, labels = next(iter(load_data("digits:test", batch_size=32)))
        >>> images.shape
        torch.Size([32, 1, 8, 8])
    """
    if not isinstance(spec, str):
        if not is_texts(spec):
            raise InvalidValue(f"data are a name, or a list of texts or of chats; got {type(spec).__name__}.")
        return _named(NAMED["text"], "texts", spec, options, batch_size, models)
    named = re.fullmatch(r"([^=:,@/\\]+)=(.+)", spec)
    if named:
        require_utf8([named[1]])
        data = _loaded(named[2], batch_size, models, options)
        if isinstance(data, OwnBatches):
            return OwnBatches(tuple(replace(batches, name=named[1].strip()) for batches in data.of))
        return replace(data, name=named[1].strip())
    require_utf8([spec], "; name the data, as in `NAME=KIND:PLACE`")
    return _loaded(spec, batch_size, models, options)


def _loaded(spec: str, batch_size: int, models: Sequence[Any], options: dict[str, Any]) -> Data:
    if batch_size < 1:
        raise InvalidValue(
            f"a batch must hold at least one example; got batch_size={batch_size}.", argument="batch_size"
        )
    head, colon, place = spec.partition(":")
    name = head.partition(",")[0]
    if name in NAMED:
        chosen = split_options(head)[1] | options
        return _named(NAMED[name], spec, place, chosen, batch_size, models)
    if not colon or not place or "," in head:
        near = did_you_mean(name, NAMED)
        if Path(spec).is_dir():
            near = f"; it is a folder: did you mean 'images:{spec}'?"
        raise UnknownName(f"no data set named {name!r}{near or '.'} Data is {KINDS}.")
    if options:
        raise InvalidValue(f"{spec!r} is a function and takes no options; got {', '.join(options)}.")
    return _from_function(spec, batch_size)


def _example_name(source: DataSource) -> str:
    place = source.where.replace(",", "").split()[0].rstrip(":")
    return f"`{source.name}:{place}`" if source.load and source.needs_place else f"`{source.name}`"


KINDS = f"{', '.join(_example_name(source) for source in CATALOGUE[:-1])} or {_example_name(CATALOGUE[-1])}"


def _named(
    source: DataSource, spec: str, place: Any, options: Mapping[str, Any], batch_size: int, models: Sequence[Any]
) -> Batches | OwnBatches:
    assert source.load is not None
    given = [model for model in models if model is not None]
    if source.name == "text" and "tokenizer" not in options and is_by_text(place, options) and _split_apart(given):
        own = (_named(source, spec, place, options, batch_size, [model]) for model in given)
        return OwnBatches(tuple(batches for batches in own if isinstance(batches, Batches)))
    options = {**options, **_preprocessing_option(source, options, models)}
    if source.needs_place and not place:
        raise SourceError(f"{spec!r} does not say where the data are; write {_example_name(source)[1:-1]!r}.")
    processor = {"processor": options["processor"]} if source.has_images and "processor" in options else {}
    others = {option: value for option, value in options.items() if option not in processor}
    chosen = typed_options(source.load, others, source.name, skip=1)
    limits = {"_limits": _limits(models)} if source.name == "text" else {}
    with refusing_unreadable(str(place)):
        stored, labels, prepare = source.load(place, **chosen, **limits)
        if processor:
            prepare = _processing(stored, processor["processor"], spec)
    words = chosen | processor | ({"tokenizer": tokenizer_name(chosen["tokenizer"])} if "tokenizer" in chosen else {})
    head = ",".join([source.name, *(f"{option}={value}" for option, value in words.items())])
    place = place if isinstance(place, str) else f"a list of {len(place):,}"
    by_character = source.name == "text" and not chosen.get("tokenizer")
    name = f"{head}:{place}" if place else head
    folders = class_folders(Path(place).expanduser()) if source.name == "images" and labels is not None else []
    classes = tuple(folder.name for folder in folders)
    return Batches(name, stored, labels, batch_size, prepare, by_character, classes)


def require_no_characters(data: Any, models: Sequence[Any]) -> None:
    """Refuse to feed characters to Hugging Face models, which take tokens."""
    named = next((model for model in models if is_huggingface_name(model)), None)
    if named is not None and isinstance(data, Batches) and data.are_characters:
        raise SourceError(
            f"{data.name!r} holds characters, and {named!r} takes tokens; give the data by name, or load them with "
            f"`models=[{named!r}]`."
        )


def is_to_load(data: Any, models: Iterable[Any]) -> bool:
    """Return whether data are yet to be loaded: a name, or texts for a Hugging Face model, which has a tokenizer.

    Other models are fed texts as they are, for a `forward` that knows what to do with them.
    """
    if isinstance(data, str):
        return True
    return is_texts(data) and any(is_huggingface_name(model) or _is_huggingface(model) for model in models)


def _preprocessing_option(source: DataSource, options: Mapping[str, Any], models: Sequence[Any]) -> dict[str, str]:
    """Return the tokenizer or image processor that Hugging Face models expect, as an option, if none is given."""
    option = "tokenizer" if source.name == "text" else "processor" if source.has_images else ""
    if not option or option in options or "normalise" in options:
        return {}
    folders = [split_huggingface(model)[0] for model in models if is_huggingface_name(model)]
    if option == "tokenizer":  # images for live models are prepared by whoever loaded them
        folders += [_folder_of(model) for model in models if _is_huggingface(model)]
    if not folders:
        return {}
    by_character = next((model for model in models if option == "tokenizer" and _reads_characters(model)), None)
    if by_character is not None:
        name = repr(by_character) if isinstance(by_character, str) else type(by_character).__name__
        raise SourceError(
            f"the model in {folders[0]!r} reads text as tokens and {name} as characters, so that they see no common "
            "examples to be compared on; compare models that read the same units, or feed the tokens to both with "
            f"`text,tokenizer={folders[0]}:FILE`."
        )
    kinds = [preprocessing(folder, "text" if option == "tokenizer" else "images") for folder in folders]
    other = next((folder for folder, kind in zip(folders, kinds, strict=True) if kind != kinds[0]), None)
    if other is not None:
        by_text = ", or compare them text by text, as with `each=line`" * (option == "tokenizer")
        raise SourceError(
            f"{folders[0]!r} and {other!r} have different {option}s, so their models do not take the same inputs; "
            f"choose one with `{option}=DIR` after {source.name!r}{by_text}."
        )
    return {option: folders[0]}


def _split_apart(models: Sequence[Any]) -> bool:
    """Return whether models are all of Hugging Face, and have different tokenizers."""
    if len(models) < 2 or not all(is_huggingface_name(model) or _is_huggingface(model) for model in models):
        return False
    folders = [split_huggingface(model)[0] if isinstance(model, str) else _folder_of(model) for model in models]
    first, *others = (preprocessing(folder, "text") for folder in folders)
    return any(other != first for other in others)


def _limits(models: Sequence[Any]) -> dict[str, Any]:
    """Return how many tokens of a text, and which ids, all of these Hugging Face models take."""
    limits: dict[str, Any] = {}
    for model in models:
        if is_huggingface_name(model):
            folder = split_huggingface(model)[0]
            config = read_json(Path(folder).expanduser() / "config.json", "configuration of a model")
            rows, name = None, repr(folder)
        elif _is_huggingface(model):
            config, rows, name = model.config.to_dict(), _embedding_of(model), f"the {type(model).__name__}"
        else:
            continue
        config = config.get("text_config") or config
        tokens = config.get("max_position_embeddings") or config.get("n_positions")
        ids = getattr(rows, "num_embeddings", None) or config.get("vocab_size")
        if isinstance(tokens, int) and tokens > 0:
            limits["tokens"] = min(tokens, limits.get("tokens", tokens))
        if isinstance(ids, int) and ids < limits.get("ids", ids + 1):
            limits |= {"ids": ids, "ids of": name}
    return limits


def _embedding_of(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # of one without
        return None


def _reads_characters(model: Any) -> bool:
    """Return whether a model, by name or live, is the network of characters."""
    return model.startswith("netkin:char_lstm") if isinstance(model, str) else isinstance(model, CharLSTM)


def _is_huggingface(model: Any) -> bool:
    """Return whether an object is a live model of transformers, which is not imported for that."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(model).__mro__
    )


def _folder_of(model: Any) -> str:
    """Return the folder from which a live Hugging Face model was loaded, or refuse one without a folder here."""
    folder = str(getattr(model, "name_or_path", ""))
    if not folder or not Path(folder).is_dir():
        raise SourceError(
            f"{type(model).__name__} is a Hugging Face model that was not loaded from a folder, so its tokenizer is "
            "not known; name a folder that holds it: `text,tokenizer=DIR:FILE`."
        )
    return folder


def _processing(stored: Tensor, folder: str, spec: str) -> Callable[[Tensor], Tensor]:
    if stored.dtype != uint8 or stored.ndim != 4:
        raise SourceError(f"{spec!r} gives no images of bytes, which an image processor needs; leave `processor` out.")
    return load_processor(folder)


def _from_function(spec: str, batch_size: int) -> Batches | Borrowed:
    function = find_function(spec, known=NAMED)
    data = call_named(function, spec)
    if isinstance(data, Tensor) and data.ndim:
        return Batches(spec, data, None, batch_size, as_they_are)
    if isinstance(data, Dataset):
        return Borrowed(spec, DataLoader(data, batch_size=batch_size))
    # a tuple may be one batch or several
    if isinstance(data, (tuple, str, bytes, Mapping, Tensor)) or not hasattr(data, "__iter__"):
        raise SourceError(
            f"{spec!r} must return an iterable of batches, such as a list, a Dataset, a DataLoader or a tensor; it "
            f"returned an object of type {type(data).__name__}."
        )
    return Borrowed(spec, data, again=partial(call_named, function, spec) if isinstance(data, Iterator) else None)
