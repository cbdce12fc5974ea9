"""The digest of weights: a multilinear hash, which any device computes at the speed of its memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from netkin.errors import InvalidValue
from netkin.identity.data import AT_ONCE, GAMMA, mixed, words_of

LAZY = "is a lazy module without weights yet; run the model once on your own data first, which draws them."
SHARDED = (
    "is sharded over several processes (FSDP or tensor parallel), so that each holds a piece and the model runs only "
    "if all run at once; load the full weights in each process, as `get_model_state_dict` of "
    "`torch.distributed.checkpoint.state_dict` gives them with `full_state_dict=True`, or load the model once with "
    "`device_map`, which puts it on the devices of one process."
)
BLOCK = 2**13  # words that share one key; the coefficients of a block stay in the processor's cache
LANES = 2  # sums of 64 bits each
SHORT = 256  # tensors of less than a block that are read together
PIECES = 32  # on the host, beyond which threads share them


def weights_digest(weights: nn.Module | Mapping[str, Tensor], precision: torch.dtype | None = None) -> str:
    """Return a text of 32 hex digits that changes with any weight: names, shapes, precisions and all bits.

    Of a model, parameters and persistent buffers count, wherever they lie, also offloaded ones; a wrapper of torch
    (`DataParallel`, `DistributedDataParallel`, `torch.compile`) does not. Of a quantised weight its codes, scales and
    zero points count. With `precision` floating weights are rounded to it first, so that a model and its copy in that
    precision have the same digest.

    The hash is multilinear (Lemire & Kaser, "Strongly universal string hashing is fast", 2014): 32-bit words w give
    Σ k c w modulo 2⁶⁴, in two lanes, with odd constants c of the word's place in its block and k of the block, which
    also follows from the tensor's name, precision and shape. Both are odd, so that no single change is lost. A sum has
    no order: chunks, layouts and devices do not matter. It identifies weights and is no defence against forgery.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> half = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
        >>> weights_digest(half) == weights_digest(model)
        False
        >>> weights_digest(half, torch.bfloat16) == weights_digest(model, torch.bfloat16)
        True
    """
    heads: list[tuple[str, Any]] = []
    sums, rests = dict[Any, Tensor](), dict[Any, dict[Any, Tensor]]()  # of whole blocks; the words behind, by device
    read = set[Any]()
    for name, tensor, storage in _tensors(weights):
        kind = "complex " if tensor.is_complex() else ""
        shape, tensor = tuple(tensor.shape), torch.view_as_real(tensor.resolve_conj()) if kind else tensor
        dtype = tensor.dtype if precision is None or not tensor.is_floating_point() else precision
        heads.append((f"{name} {kind}{dtype} {shape}", storage))
        if storage in read:  # tied weights are read once, and count under each of their names
            continue
        read.add(storage)
        words = _words(tensor.to(dtype))
        whole = len(words) // BLOCK * BLOCK
        if whole:
            sums[storage, "blocks"] = _block_sums(words[:whole])
        if whole < len(words):  # a copy does not hold on to the whole of a large tensor
            rests.setdefault(words.device, {})[storage, "rest"] = words[whole:].clone() if whole else words
    for short in rests.values():
        keys = list(short)
        for start in range(0, len(keys), SHORT):
            sums |= _sums_of_rests({key: short[key] for key in keys[start : start + SHORT]})
    on_host, none = _on_host(sums), np.empty((0, LANES), np.uint64)
    total = np.zeros(LANES, np.uint64)
    for head, storage in heads:
        seeds = np.frombuffer(blake2b(head.encode(), digest_size=8 * LANES).digest(), np.uint64)
        blocks = np.concatenate([on_host.get((storage, part), none) for part in ("blocks", "rest")])
        places = np.arange(1, len(blocks) + 1, dtype=np.uint64)[:, None]
        multipliers = mixed(seeds + places * np.uint64(GAMMA)) | np.uint64(1)
        total += mixed(seeds) + (multipliers * blocks).sum(0, dtype=np.uint64)
    return "".join(f"{lane:016x}" for lane in mixed(total).tolist())


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside `DataParallel`, `DistributedDataParallel` and `torch.compile`."""
    while isinstance(model, (nn.DataParallel, DistributedDataParallel)) or "_orig_mod" in model._modules:
        model = model._modules["_orig_mod" if "_orig_mod" in model._modules else "module"]  # type: ignore[assignment]
    return model


def _tensors(weights: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield the name, the dense values and the place in memory of each tensor."""
    model = without_wrappers(weights) if isinstance(weights, nn.Module) else None
    state: Mapping[str, Any] = weights if model is None else model.state_dict()  # type: ignore[assignment]
    for name, tensor in (part for entry in state.items() for part in _dense_parts(*entry)):
        storage: Any = object()
        if is_lazy(tensor):
            raise InvalidValue(f"layer {name.rpartition('.')[0]!r} {LAZY}")
        if tensor.is_meta and model is not None:
            tensor = offloaded_weight(model, name, tensor)
        elif tensor.layout == torch.strided and not tensor.is_nested and tensor.numel():
            is_view = tensor.is_conj(), tensor.is_neg(), tensor.is_quantized
            storage = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), is_view
        if tensor.is_meta:
            raise InvalidValue(f"weight {name!r} lies on the meta device and holds no values; load the weights first.")
        name = name.replace("_orig_mod.", "")
        if tensor.is_nested:
            yield from ((f"{name}[{place}]", part.detach(), object()) for place, part in enumerate(tensor.unbind()))
        else:
            yield name, tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense(), storage


def _dense_parts(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of an entry of a state dict: those that a quantised weight, or a tuple, is made of."""
    if isinstance(value, (tuple, list)):  # weight and bias of a quantised layer of torch
        for place, part in enumerate(value):
            yield from _dense_parts(f"{name}[{place}]", part)
    elif isinstance(value, Tensor):  # what else a module adds by `get_extra_state` belongs to its form
        if type(value).__name__ == "DTensor":
            raise InvalidValue(f"weight {name!r} {SHARDED}")
        if hasattr(value, "__tensor_flatten__") and not value.is_nested:  # a tensor that is made of others
            for inner in value.__tensor_flatten__()[0]:
                yield from _dense_parts(f"{name}.{inner}", getattr(value, inner))
        else:
            yield name, value


def weight_values(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return the values of a weight, wherever they lie; where it is made of codes and scales, what these stand for."""
    tensor = offloaded_weight(model, name, tensor)
    is_quantised = type(tensor).dequantize is not Tensor.dequantize
    return tensor.dequantize() if is_quantised else tensor


def offloaded_weight(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a weight from where a hook of accelerate keeps it while its layer does not run; else as it is."""
    for rest, kept in offloaded_to(model, name) if tensor.is_meta else ():
        try:
            return kept[rest]
        except KeyError:  # this hook keeps others
            continue
    return tensor


def offloaded_to(model: nn.Module, name: str) -> list[tuple[str, Any]]:
    """Return the maps in which hooks of accelerate may keep a weight, each with the name of the weight there."""
    module: nn.Module | None = model
    found, path = list[tuple[str, Any]](), name.split(".")
    for depth, part in enumerate(path):
        hook = getattr(module, "_hf_hook", None)
        maps = (getattr(keeper, "weights_map", None) for keeper in (hook, *getattr(hook, "hooks", ())))
        found += [(".".join(path[depth:]), kept) for kept in maps if kept is not None]
        module = None if module is None else module._modules.get(part)
    return found


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as 32-bit words, filled up with zeros."""
    values = tensor.resolve_neg().contiguous().reshape(-1)
    if len(values) * values.element_size() % 4 == 0 and values.storage_offset() * values.element_size() % 4 == 0:
        return values.view(torch.int32)
    return words_of(values.view(torch.uint8)[None])[0]


def _block_sums(words: Tensor) -> Tensor:
    """Return Σ c w of each block of words, by lane, computed in pieces where they lie."""
    device, table = words.device, _table(words.device)
    pieces = words.reshape(-1, BLOCK).split(max(1, AT_ONCE.get(device.type, 2**24) // BLOCK))

    def summed(blocks: Tensor) -> Tensor:
        return torch.stack([(blocks * lane).sum(1) for lane in table], 1)

    if device.type == "cpu" and len(pieces) > PIECES:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return torch.cat(list(pool.map(summed, pieces)))
    return torch.cat([summed(piece) for piece in pieces])


def _sums_of_rests(rests: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Return Σ c w of the words of each of several tensors on one device, less than a block each, 1 × lanes.

    Most tensors of a network are that short, and each alone would take a GPU as long as all of them together.
    """
    lengths = torch.tensor([len(rest) for rest in rests.values()])
    words, ends = torch.cat(list(rests.values())), lengths.cumsum(0)
    starts, lengths, ends = (part.to(words.device) for part in (ends - lengths, lengths, ends))
    places = torch.arange(len(words), device=words.device)
    places = places - torch.repeat_interleave(starts, lengths, output_size=len(words))
    # sums up to each end wrap around as all do, so that their differences are the sums of each tensor
    sums = [(words * lane[places]).cumsum(0)[ends - 1].diff(prepend=ends.new_zeros(1)) for lane in _table(words.device)]
    return dict(zip(rests, torch.stack(sums, 1).split(1), strict=True))


@functools.lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """Return the odd coefficients of a block's words, by lane."""
    places = np.arange(1, LANES * BLOCK + 1, dtype=np.uint64)
    odd = mixed(places * np.uint64(GAMMA)) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64).reshape(LANES, BLOCK)).to(device)


def _on_host(sums: Mapping[Any, Tensor]) -> dict[Any, np.ndarray]:
    """Return sums as words of 64 bits in the host's memory: one wait for each device."""
    arrays: dict[Any, np.ndarray] = {}
    for device in {tensor.device for tensor in sums.values()}:
        here = {storage: tensor for storage, tensor in sums.items() if tensor.device == device}
        values = torch.cat(list(here.values())).cpu().numpy().view(np.uint64)
        ends = np.cumsum([len(tensor) for tensor in here.values()])
        arrays |= dict(zip(here, np.split(values, ends[:-1]), strict=True))
    return arrays
