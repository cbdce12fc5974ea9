"""Inputs: how data become batches, and how a batch is given to a model.

By default a tensor is passed as it is, of a tuple or list the first element, and a mapping as keywords without its
labels (`labels`, `label`, `targets`, `target`, `y`). A Hugging Face encoder-decoder that makes its decoder's inputs
from `labels` gets these. A function ``forward(model, batch)`` runs a model any other way.
Batches are moved to the model's device, floating inputs to its precision. Every model gets tensors of its own, so that
one that writes into its input changes neither the caller's data nor what the next model is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset

from netkin.arrays import plain_array, require_unmasked
from netkin.errors import ForwardError, InvalidValue, NetkinError, ShapeError
from netkin.identity.data import LABELS
from netkin.progress import ProgressOption, reporting
from netkin.representations.hooks import copied, copied_leaf, leaves, mapped, one_forward, parts, rebuilt
from netkin.representations.layers import unwrapped
from netkin.settings import tf32_in

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}  # the keywords of transformers

Forward = Callable[[nn.Module, Any], Any]
Transform = Callable[[Any], Any]


def feed(model: nn.Module, batch: Any, forward: Forward | None = None, transform: Transform | None = None) -> Any:
    """Return what `model` gives for `batch`, transformed first and moved to where the model is."""
    return call(model, prepare_batch(model, batch, transform), forward)


def call(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Return what `model` gives for a batch that is in its place already.

    The model inside `DataParallel`, `DistributedDataParallel` and `torch.compile` is run, without the wrapper. All that
    `forward` does with the model counts as one forward.
    """
    return run_unwrapped(unwrapped(model), batch, forward)


def run_unwrapped(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Return what `call` does, for a model that is known to have no wrapper: a batch walks through fewer files."""
    if forward is not None:
        with one_forward(model):
            return forward(model, batch)
    return outputs_of(model, inputs_of(batch))


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """Return what `model` gives for its inputs; a mapping is given as keywords, without labels, that must fit.

    What a model raises that may be due to its inputs is refused with their form; all else is left as it is.
    """
    keywords = _keywords(model, inputs) if isinstance(inputs, Mapping) else None
    try:
        return model(inputs) if keywords is None else model(**keywords)
    except (NetkinError, torch.OutOfMemoryError):
        raise
    except Exception as fault:
        if reason := _misfit(model, fault, inputs, keywords):
            raise ForwardError(reason) from fault
        raise


def _keywords(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with which a model is called: all but the labels, with what its decoder reads of these."""
    keywords = {key: value for key, value in inputs.items() if key not in LABELS}
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)  # of encoder-decoders of transformers
    if callable(shifted) and "labels" in inputs and not keywords.keys() & DECODER_INPUTS:
        keywords["decoder_input_ids"] = shifted(inputs["labels"])
    return keywords


def _misfit(model: nn.Module, fault: Exception, inputs: Any, keywords: dict[str, Any] | None) -> str:
    """Return as a sentence why a model does not take its inputs, if they may be why it raised `fault`."""
    name, values = type(model).__name__, [leaf for _, leaf in leaves(inputs if keywords is None else keywords)]
    arrays, texts = [leaf for leaf in values if _is_array(leaf)], [leaf for leaf in values if isinstance(leaf, str)]
    if texts and not arrays:
        return (
            f"a batch holds text ({texts[0][:30]!r}), and {name} takes numbers; make tokens of it, in the data or in a "
            "function given as `transform`, or run the model on text in one given as `forward`."
        )
    if reason := _unbound(model, inputs, keywords):
        return reason
    if not isinstance(fault, (RuntimeError, ValueError, AssertionError)):
        return ""
    form = f"type {type(inputs).__name__}"
    if arrays:
        form = f"type {str(arrays[0].dtype).removeprefix('torch.')} and shape {tuple(arrays[0].shape)}"
    first = str(fault).strip().partition("\n")[0].rstrip(".")
    said = f"{type(fault).__name__}: {first}"
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and not (keywords or {}).keys() & DECODER_INPUTS:
        return (
            f"{name} is an encoder with a decoder, which needs inputs of its own: give batches with 'input_ids' and "
            f"'decoder_input_ids', or run a part of it in a function given as `forward`. ({said})"
        )
    return (
        f"{name} could not be run on inputs of {form} ({said}); give "
        "values of the size and type that it takes, in the data or by a function given as `transform` (`transforms` "
        "for several models)."
    )


def _unbound(model: nn.Module, inputs: Any, keywords: dict[str, Any] | None) -> str:
    """Return as a sentence why the signature of the model's `forward` does not take these inputs, or nothing."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # no signature available
        return ""
    try:
        signature.bind(*([inputs] if keywords is None else []), **(keywords or {}))
    except TypeError as fault:
        if keywords is not None:
            return (
                f"a batch has the keys {', '.join(map(repr, keywords)) or 'of labels alone'}, which do not fit "
                f"{type(model).__name__}: {fault}; choose the inputs in a function given as `transform` (`transforms` "
                "for several models) or `forward`."
            )
        needs = [name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty]
        return (
            f"{type(model).__name__} takes {', '.join(map(repr, needs)) or 'no inputs'}, and is given one input, the "
            "first element of a batch; give batches that are mappings with these keys, or a function such as "
            "`lambda model, batch: model(*batch)` as `forward`."
        )
    return ""


def prepare_batch(model: nn.Module, batch: Any, transform: Transform | None = None) -> Any:
    """Return `batch` with its inputs transformed, and its tensors on the model's device and in its precision.

    All tensors and arrays are copies, those that `transform` gets too: both it and the model may work in place. What
    `transform` gets is the tensor itself, a tuple's first element, or the whole mapping.
    """
    return to_model(model, transformed(batch, transform))


def transformed(batch: Any, transform: Transform | None) -> Any:
    """Return `batch` with its inputs transformed, from copies of its tensors; without a `transform` as it is."""
    if transform is None:
        return batch
    batch = copied(batch)
    is_tuple = isinstance(batch, (tuple, list)) and len(batch)
    return rebuilt(batch, {0: transform(batch[0])}) if is_tuple else transform(batch)


def to_model(model: nn.Module, batch: Any, home: tuple[torch.device, torch.dtype | None] | None = None) -> Any:
    """Return copies of a batch's tensors and arrays, on the model's device and in its precision; `home` if known."""
    device, dtype = home or (device_of(model), dtype_of(model))
    if isinstance(batch, Tensor):
        return _moved(batch, device, dtype)
    return mapped(lambda leaf: _moved(leaf, device, dtype), batch)


def inputs_of(batch: Any) -> Any:
    """Return the part of a batch that is fed to a model: a tuple's or list's first element, otherwise the batch."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def labels_of(batch: Any) -> Any:
    """Return the labels in a batch: a tuple's or list's second element, a mapping's under a usual name; else None."""
    if isinstance(batch, (tuple, list)):
        return plain_array(batch[1]) if len(batch) > 1 else None
    if isinstance(batch, Mapping):
        return next((plain_array(batch[name]) for name in sorted(LABELS) if name in batch), None)
    return None


def attention_mask(batch: Any) -> Any:
    """Return the batch's `attention_mask`, or None where it has none."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return plain_array(inputs.get("attention_mask")) if isinstance(inputs, Mapping) else None


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter or buffer is; the CPU for a model without any.

    Of weights that accelerate has offloaded it is where they are brought when their layer runs.
    """
    devices = dict.fromkeys(tensor.device for tensor in _tensors_of(model))
    there = next((device for device in devices if device.type != "meta"), None)
    if devices and there is None:
        hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
        runs = (getattr(hook, "execution_device", None) for hook in hooks)
        there = next((device for device in runs if device is not None), next(iter(devices)))
    return torch.device(there or "cpu")


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the precision of the model's first floating parameter or buffer; None for a model without any."""
    return next((tensor.dtype for tensor in _tensors_of(model) if tensor.dtype in FLOATING), None)


def model_precision(*models: nn.Module, exact: bool = False) -> str:
    """Return the precision in which the models run now, as text for the provenance of a result.

    Such as ``"float32, exact"``, ``"float32, TF32 in convolutions and recurrent layers"`` or ``"bfloat16"``. `exact` is
    that of `inference_mode_of`.
    """
    rounded = tf32_in() if not exact and any(device_of(model).type == "cuda" for model in models) else ()
    dtypes = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(map(dtype_of, models)) if dtype is not None]
    lowered = [kind for kind in {device_of(model).type for model in models} if torch.is_autocast_enabled(kind)]
    cast = [f"autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}" for kind in lowered]
    return ", ".join([" and ".join(precision_in_words(dtype, rounded) for dtype in dtypes) or "no weights", *cast])


def precision_in_words(dtype: str, rounded: Sequence[str]) -> str:
    """Return a precision and where its products are rounded to TF32: in "products", "convolutions", ...

    Example:
        >>> precision_in_words("float32", ("products", "convolutions"))
        'float32, TF32 in products and convolutions'
    """
    if dtype != "float32":
        return dtype
    *most, last = rounded or ("",)
    return f"float32, TF32 in {', '.join(most)}{' and ' * bool(most)}{last}" if last else "float32, exact"


def require_finite_inputs(batch: Any, transform: Transform | None, number: int) -> None:
    """Refuse the batch of this number if its inputs hold NaN or Inf where a model gets them, after the transform."""
    broken = _non_finite(inputs_of(transformed(batch, transform)))
    if not broken:
        return
    made = "what `transform` makes of " if transform and not _non_finite(inputs_of(batch)) else ""
    count, of, first = broken
    raise InvalidValue(
        f"{made}the inputs in batch {number} hold {count:,} NaN or Inf among {of:,} values, the first in its example "
        f"{first}; mend the data or leave such examples out."
    )


def _non_finite(inputs: Any) -> tuple[int, int, int] | None:
    """Return how many values of the first array with NaN or Inf have them, of how many, and the first such example."""
    for _, leaf in leaves(inputs):
        values = torch.as_tensor(plain_array(leaf)) if _is_array(leaf) else torch.empty(0)
        if values.is_floating_point() and values.layout == torch.strided and not values.is_nested and values.ndim:
            broken = ~torch.isfinite(values)
            if count := int(broken.sum()):
                return count, values.numel(), int(broken.nonzero()[0, 0])
    return None


def batches_of(data: Any, examples: int | None = None, batch_size: int = 128) -> Iterator[Any]:
    """Yield the batches of `data`, up to `examples` examples; the last batch is cut to fit.

    `data` is a loader or any other iterable of batches, a data set, or all the inputs in one array, tensor or mapping,
    which are split into batches of `batch_size`. Batches without examples are passed over.
    """
    if examples is not None and examples < 1:
        raise InvalidValue(f"`examples` must be at least 1; got {examples}.", argument="examples")
    batches = (batch for batch in _iterated(data, batch_size) if length_if_known(batch) != 0)
    gave_some = False
    for batch in batches if examples is None else _limited(batches, examples):
        if batch is None:
            raise InvalidValue(
                "the data gave None instead of a batch; a batch is a tensor, or inputs with their labels."
            )
        gave_some = True
        yield batch
    if not gave_some and isinstance(data, Iterator):
        raise InvalidValue("the data gave no batches; an iterator can be read only once, so pass a loader or a list.")
    if not gave_some:
        held = f" (shape {tuple(data.shape)})" if _is_array(data) else ""
        raise InvalidValue(f"the data gave no batches: they hold no examples{held}; give at least one.")


def reported_batches(data: Any, examples: int | None, what: str, progress: ProgressOption = None) -> Iterator[Any]:
    """Yield the batches of the data, up to `examples` examples, and report how many examples were given."""
    with reporting(examples_in(data, examples), what, "examples", progress) as report:
        for batch in batches_of(data, examples):
            yield batch
            report.update(length_if_known(batch) or 0)


def batch_length(batch: Any) -> int:
    """Return the number of examples in a batch: the length of the first tensor or array in it."""
    length = length_if_known(batch)
    if length is None:
        raise ShapeError(
            f"a batch of type {type(batch).__name__} holds no tensor or array, so its examples cannot be counted; "
            "leave `examples` out, or give batches of tensors."
        )
    return length


def length_if_known(batch: Any) -> int | None:
    """Return the number of examples in a batch, or None where there is no tensor or array to count by."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(first, Tensor) and first.ndim:  # nearly always
        return first.shape[0]
    return next((leaf.shape[0] for _, leaf in leaves(batch) if _is_array(leaf) and leaf.ndim), None)


def examples_in(data: Any, examples: int | None = None) -> int | None:
    """Return how many examples `data` will give, up to `examples`, if that is known."""
    known: int | None = None
    if isinstance(data, (Tensor, np.ndarray, Mapping)):
        known = length_if_known(data)
    elif isinstance(getattr(data, "examples", None), int):
        known = data.examples
    elif isinstance(data, (list, tuple)):
        lengths = [length_if_known(batch) for batch in data]
        known = None if None in lengths else sum(length or 0 for length in lengths)
    else:
        counted: Any = data if isinstance(data, Dataset) else getattr(data, "sampler", getattr(data, "dataset", None))
        known = len(counted) if hasattr(counted, "__len__") else None
        if known is not None and getattr(data, "drop_last", False) and data.batch_size:
            known -= known % data.batch_size
    return min(known, examples) if known is not None and examples else known or examples


def reshuffles(data: Any) -> bool:
    """Return whether a loader shuffles by no generator of its own, so that no other loader has the same order."""
    sampler = sampler_of(data)
    return isinstance(sampler, RandomSampler) and sampler.generator is None


def sampler_of(data: Any) -> Any:
    """Return what tells a loader which example comes next; None where there is no such thing."""
    loader = loader_of(data)
    batched = getattr(loader, "batch_size", 0) is None  # by a sampler of batches, which may hold one of examples
    return getattr(loader.batch_sampler, "sampler", None) if batched else getattr(loader, "sampler", None)


def part_of(data: Any, start: int, stop: int) -> Any:
    """Return the examples `start` to `stop` of data that give them in the same order each time.

    Arrays, data sets and loaders that don't shuffle are indexed; of any other iterable the batches before are read and
    passed over.
    """
    if _is_array(data) or isinstance(data, Mapping):
        return examples_at(data, batch_length(data), slice(start, stop))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return Subset(data, range(start, stop))
    if isinstance(loader_of(data), DataLoader):
        return _loader_part(loader_of(data), start, stop)
    if callable(getattr(data, "part", None)):  # data of netkin's own
        return data.part(start, stop)
    if isinstance(data, Iterator):
        raise InvalidValue("a stream can be read only once, so it can't be split into parts; pass a loader or a list.")
    return (
        list(_batches_between(_iterated(data, 128), start, stop))
        if isinstance(data, (list, tuple))
        else _Range(data, start, stop)
    )


def loader_of(data: Any) -> Any:
    """Return the loader inside data that have a name, as `nk.load_data` gives them; others as they are."""
    return getattr(data, "batches", data)


class _Range:
    """A range of the examples of an iterable, read again each time."""

    def __init__(self, data: Any, start: int, stop: int):
        self._data, self._start, self._stop = data, start, stop

    def __iter__(self) -> Iterator[Any]:
        return _batches_between(_iterated(self._data, 128), self._start, self._stop)


def _batches_between(batches: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
    seen = 0
    for batch in batches:
        length = batch_length(batch)
        first, last = max(start - seen, 0), min(stop - seen, length)
        if first < last:
            yield batch if (first, last) == (0, length) else examples_at(batch, length, slice(first, last))
        seen += length
        if seen >= stop:
            return


def _loader_part(loader: DataLoader, start: int, stop: int) -> DataLoader:
    plain = loader.batch_size is not None and isinstance(sampler_of(loader), SequentialSampler)
    if not plain or isinstance(loader.dataset, IterableDataset):
        raise InvalidValue(
            "a loader that shuffles, or samples in a way of its own, can't be split into parts: nothing tells which "
            "examples a part holds. Pass the data set, or a loader with shuffle=False."
        )
    return DataLoader(
        Subset(loader.dataset, range(start, stop)), batch_size=loader.batch_size, num_workers=loader.num_workers,
        collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
    )  # fmt: skip


def take(batch: Any, count: int) -> Any:
    """Return the first `count` examples of a batch: the tensors, arrays and plain lists in it that are as long as it.

    Example:
        >>> images, labels = take((torch.ones(5, 3), torch.ones(5)), 2)
        >>> len(images), len(labels)
        (2, 2)
    """
    return examples_at(batch, batch_length(batch), slice(0, count))


def pick(batch: Any, places: list[int]) -> Any:
    """Return the examples of a batch at these places, in this order."""
    return examples_at(batch, batch_length(batch), places)


def repeated(batch: Any, count: int) -> Any:
    """Return copies of the first `count` examples of a batch, which starts from the first again where it has fewer."""
    length = batch_length(batch)
    return copied(examples_at(batch, length, [place % length for place in range(count)]))


def _limited(batches: Iterable[Any], examples: int) -> Iterator[Any]:
    for batch in batches:
        length = batch_length(batch)
        yield batch if length <= examples else take(batch, examples)
        examples -= length
        # left here, before the next batch is asked for: a reader of a stream takes no more than it needs
        if examples <= 0:
            return


def examples_at(batch: Any, length: int, places: slice | list[int] | Tensor) -> Any:
    """Return the examples at `places` of all tensors, arrays and plain lists in a batch that have `length` of them."""
    if _is_array(batch):
        if not batch.ndim or len(batch) != length:
            return batch
        if isinstance(batch, Tensor) and batch.layout != torch.strided:
            return batch.index_select(0, torch.arange(length)[places].to(batch.device))
        if isinstance(places, Tensor):
            return batch[places.to(batch.device)] if isinstance(batch, Tensor) else batch[places.cpu().numpy()]
        return batch[places]
    inside = parts(batch)
    if isinstance(batch, list) and len(batch) == length and not any(_is_array(part) for part in batch):
        return batch[places] if isinstance(places, slice) else [batch[int(place)] for place in places]
    return rebuilt(batch, {key: examples_at(part, length, places) for key, part in inside.items()}) if inside else batch


def _iterated(data: Any, batch_size: int) -> Iterable[Any]:
    if _is_array(data) or isinstance(data, Mapping):
        length = batch_length(data)
        return (examples_at(data, length, slice(start, start + batch_size)) for start in range(0, length, batch_size))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch_size)
    if isinstance(data, tuple) and any(_is_array(part) for part in data):
        raise InvalidValue(
            "`data` is a tuple of arrays, which may be one batch or several; pass a list of batches such as "
            "`[(inputs, labels)]`, or the inputs alone.",
            argument="data",
        )
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        hint = " `nk.load_data` makes data of a text." if isinstance(data, str) else ""
        kind = type(data).__name__
        raise InvalidValue(
            f"`data` must be an iterable of batches, or one array of inputs; got {kind}.{hint}", argument="data"
        )
    return data


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, np.ma.MaskedArray):
        require_unmasked(leaf, "data")
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":  # numbers, and no texts
        leaf = torch.from_numpy(plain_array(leaf).copy())
    if not isinstance(leaf, Tensor):
        return copied_leaf(leaf)
    there = leaf.to(device, dtype if leaf.is_floating_point() else None, non_blocking=True)
    return leaf.clone() if there is leaf else there


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))
