"""Layers: which modules of a model are compared, and by which names.

The default layers are found by one rule. A *container* is an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``
in which some type of child occurs at least twice. The outermost containers count; what lies inside their children
does not. The layers are

- the children of these containers, and
- the stem and the head: of every module that encloses a container, the children that hold parameters and neither are
  nor enclose a container.

A child that cannot be called, such as a plain ``nn.ModuleList`` of parts, stands for its own children. Where there is
no container, or all this finds fewer than two layers, the layers are the model's direct children; a model without
children is its own layer, named ``""``. A module registered under several names goes by the first. Names are in the
order of registration.

So a ResNet gives ``conv1, bn1, layer1.0, layer1.1, ..., fc``; a BERT gives ``embeddings, encoder.layer.0, ...,
pooler``; ``nn.Sequential(Linear, ReLU, Linear)`` gives ``0, 1, 2``.

Wrappers (``DataParallel``, ``DistributedDataParallel``, ``torch.compile``) are unwrapped, wherever they are: names
are those of the model inside. A ScriptModule, scripted or traced, and the module of an exported program are one layer:
what is inside them does not run as modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from netkin.errors import InvalidValue, UnknownName, did_you_mean
from netkin.identity.weight_hash import LAZY, SHARDED, offloaded_to, without_wrappers
from netkin.sources.names import by_name

IDLE = (nn.Identity, nn.modules.dropout._DropoutNd)  # what they take they give, as models run in evaluation mode
OF_CHANNELS = (
    nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.GroupNorm, nn.MaxPool1d,
    nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d, nn.MaxUnpool1d,
)  # fmt: skip
Spec = str | type[nn.Module] | Iterable[str | type[nn.Module]] | None


@by_name(models="model")
def layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that netkin compares by default.

    Example:
        >>> layers(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        ['0', '1', '2']
    """
    known = modules(model)
    root = known[""]
    names = _distinct(known, _default(root, "")) if _encloses(root) else []
    if len(names) < 2:
        names = _distinct(known, (name for key, child in children(root).items() for name in _runnable(child, key)))
    return names or [""]


def stages(model: nn.Module) -> dict[str, list[str]]:
    """Return the default layers inside containers, by the container; without containers all of them, under ``""``.

    Without containers, a module that only wraps another one, as with its loss function, is looked through.

    Example:
        >>> stages(nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.Sequential(nn.ReLU(), nn.ReLU())}))
        {'body': ['body.0', 'body.1']}
    """
    known, by_container = modules(model), dict[str, list[str]]()
    for name in layers(model):
        above = name.split(".")
        inside = [".".join(above[:end]) for end in range(len(above)) if _is_container(known[".".join(above[:end])])]
        if inside:
            by_container.setdefault(inside[-1], []).append(name)
    if by_container:
        return by_container
    learnt = [name for name in layers(model) if name and next(known[name].parameters(), None) is not None]
    if len(learnt) == 1 and children(known[learnt[0]]):
        return {"": [_joined(learnt[0], name) for names in stages(known[learnt[0]]).values() for name in names]}
    return {"": layers(model)}


def choose(model: nn.Module, spec: Spec = None) -> list[str]:
    """Return the names of the layers that `spec` requests: names, globs, module types, a list of those, or None.

    None gives the default layers. A type may also be named, as ``"Conv2d"``. In a glob, ``*`` and ``?`` stay between
    two dots, as in ``"layer*"`` for ``layer1`` to ``layer4``, and ``**`` crosses them, as in ``"layer1.**"``; a glob
    leaves out a layer that only passes on the output of another one that it matches. ``"relu#2"`` is the second call of
    `relu` in a forward, ``"relu"`` stands for all of its calls. A list of plain names keeps its order; all else comes
    in the order of registration.
    """
    if spec is None:
        return layers(model)
    known = modules(model)
    wanted = [spec] if isinstance(spec, (str, type)) else _listed(spec)
    chosen = list(dict.fromkeys(name for pattern in wanted for name in _matching(known, pattern)))
    if not all(isinstance(pattern, str) and split_call(pattern)[0] in known for pattern in wanted):
        order = {name: place for place, name in enumerate(known)}
        chosen.sort(key=lambda name: (order[split_call(name)[0]], split_call(name)[1] or 0))
    return [name for name in chosen if split_call(name)[1] is None or split_call(name)[0] not in chosen]


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module of the model inside its wrappers, by name, the model itself as ``""``."""
    return dict(_walk(unwrapped(model), ""))


def children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the direct children of `module` by name, each without its wrappers; what runs as a whole has none."""
    inside = {} if _runs_whole(module) else module._modules
    is_masked = is_parametrized(module)  # what computes a weight, as a mask, is no layer
    return {
        name: unwrapped(child)
        for name, child in inside.items()
        if child is not None and not (is_masked and name == "parametrizations")
    }


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that none of its children holds, also those from which weights are computed.

    A parametrized weight has them, as under ``parametrizations.weight.original``.
    """
    inside, named = children(module), module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name.partition(".")[0] not in inside}


def _runs_whole(module: nn.Module) -> str:
    """Return what a module is whose parts do not run as modules, or an empty text."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule"
    # by the child that checks its inputs
    return "the module of an exported program" if "_guards_fn" in module._modules else ""


def whole_remark(model: nn.Module, name: str) -> str:
    """Return a warning that a model which runs as a whole is compared as one layer; empty if it has layers."""
    what = _runs_whole(unwrapped(model))
    advice = {"a ScriptModule": "compare the network from which it was scripted or traced"}.get(
        what, "`torch.export.unflatten` makes a network with layers of an exported program"
    )
    return what and f"{name!r} is {what}, whose layers can't be seen: it is compared as one layer; {advice}."


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DataParallel`, `DistributedDataParallel` and `torch.compile`."""
    if not isinstance(model, nn.Module):
        raise InvalidValue(
            f"a model must be a `torch.nn.Module`; got {type(model).__name__}."
            + " `nk.load_model` makes a model of a text." * isinstance(model, str)
            + " `torch.export.unflatten` makes a module of it." * isinstance(model, torch.export.ExportedProgram)
        )
    return without_wrappers(model)


def require_weights(*models: nn.Module) -> None:
    """Refuse models with weights that have no values here: lazy ones, which running would draw, and sharded ones."""
    for model in models:
        model = unwrapped(model)
        require_whole_model(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(tensor):
                raise InvalidValue(f"{layer_label(name.rpartition('.')[0])} {LAZY}")
            if tensor.is_meta and not offloaded_to(model, name):
                raise InvalidValue(
                    "a model on the 'meta' device computes no numbers; load its weights and choose a real device."
                )


def require_whole_model(model: nn.Module, name: str = "the model") -> None:
    """Refuse a model of which each process holds a piece: it runs only if all of them run it at once."""
    tensors = {type(parameter).__name__ for parameter in model.parameters()}
    wrappers = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "DTensor" in tensors or wrappers & {"FullyShardedDataParallel", "FSDPModule"}:
        raise InvalidValue(f"{name} {SHARDED}")


def require_copyable(model: nn.Module) -> None:
    """Refuse a model of which work needs a copy with weights: a lazy one, or one of an exported program."""
    require_weights(model)
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "InterpreterModule" in kinds:  # a class of torch that takes long to import
        raise InvalidValue(
            "torch can't copy a network that was made of an exported program, so it can't be trained or decomposed "
            "here; give the model that was exported."
        )


def split_call(name: str) -> tuple[str, int | None]:
    """Return a layer's name and which of its calls is meant, or None for all of them.

    Example:
        >>> split_call("block.relu#2"), split_call("block.relu")
        (('block.relu', 2), ('block.relu', None))
    """
    stem, mark, call = name.rpartition("#")
    return (stem, int(call)) if mark and call.isdecimal() and int(call) else (name, None)


def layer_label(name: str) -> str:
    """Return the text for the layer `name` in a sentence."""
    return f"layer {name!r}" if name else "the model's own output"


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for key, child in children(module).items():
        yield from _walk(child, _joined(name, key))


def _default(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the layers in `module`, which is a container or encloses one."""
    for key, child in children(module).items():
        full_name = _joined(name, key)
        if _is_container(module):
            yield from _runnable(child, full_name)
        elif _encloses(child):
            yield from _default(child, full_name)
        elif next(child.parameters(), None) is not None:
            yield from _runnable(child, full_name)


def _encloses(module: nn.Module) -> bool:
    return any(_is_container(inner) for _, inner in _walk(module, ""))


def _is_container(module: nn.Module) -> bool:
    if not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    return (
        max(Counter(type_before_parametrizations(child) for child in children(module).values()).values(), default=0) > 1
    )


def _runnable(module: nn.Module, name: str) -> Iterator[str]:
    """Yield `name`, or the names of its children where `module` has no forward of its own."""
    if getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module):
        yield name
        return
    for key, child in children(module).items():
        yield from _runnable(child, _joined(name, key))


def _distinct(known: dict[str, nn.Module], names: Iterable[str]) -> list[str]:
    """Return `names` without those of modules that an earlier name stands for already."""
    first = {id(module): name for name, module in reversed(known.items())}
    return list(dict.fromkeys(first[id(known[name])] for name in names))


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _listed(spec: Any) -> list[Any]:
    wanted = list(spec) if isinstance(spec, Iterable) and not isinstance(spec, nn.Module) else [spec]
    if not wanted:
        raise InvalidValue(
            "no layers are asked for: the list is empty; leave `layers` out for the default ones.", argument="layers"
        )
    return wanted


def _matching(known: dict[str, nn.Module], pattern: Any) -> list[str]:
    if not isinstance(pattern, (str, type)):
        raise InvalidValue(
            f"a layer is chosen by name, glob or module type; got {type(pattern).__name__}. Data go after `data=`.",
            argument="layers",
        )
    if isinstance(pattern, str) and split_call(pattern)[0] in known:
        return [pattern]
    names = _distinct(known, [name for name in known if name or len(known) == 1])
    if isinstance(pattern, type):
        return _of_type(known, names, pattern)
    # the name of a type, for those who can't pass the type itself: the command line
    of_type = [name for name in names if _type_name(known[name]) == pattern.rpartition(".")[2]]
    if not of_type and _runs_whole(known[""]):
        raise UnknownName(
            f"no layer named {pattern!r}: {_runs_whole(known[''])} runs as a whole, and only its own output, '', can "
            "be recorded; pass the model it was made of, or `torch.export.unflatten(torch.export.export(model, ...))`."
        )
    return of_type or _globbed(known, names, pattern)


def _globbed(known: dict[str, nn.Module], names: list[str], glob: str) -> list[str]:
    stem, call = split_call(glob)
    matching = matching_names(names, stem)
    if not matching:
        raise UnknownName(f"no layer named {glob!r}{hint_for(names, stem)}", argument="layers")
    matching = [name for name in matching if _source(known, name) not in matching]
    return [name if call is None else f"{name}#{call}" for name in matching]


def matching_names(names: Iterable[str], glob: str) -> list[str]:
    """Return the names that a glob stands for; ``*`` and ``?`` do not cross dots, ``**`` does.

    Example:
        >>> names = ["layer1", "layer1.0", "layer1.0.conv", "fc"]
        >>> matching_names(names, "layer*"), matching_names(names, "**.conv"), matching_names(names, "layer1.**")
        (['layer1'], ['layer1.0.conv'], ['layer1.0', 'layer1.0.conv'])
    """
    parts = re.split(r"(\*\*\.|\*\*|\*|\?|\[[^\]]+\])", glob)
    rules = {"**.": r"(?:.*\.)?", "**": ".*", "*": "[^.]*", "?": "[^.]"}
    rules |= {part: "[^" + part[2:] if part[1] == "!" else part for part in parts if part.startswith("[") and part[1:]}
    pattern = re.compile("".join(rules.get(part) or re.escape(part) for part in parts), re.DOTALL)
    return [name for name in names if pattern.fullmatch(name)]


def hint_for(names: list[str], glob: str) -> str:
    """Return how a refusal of a glob goes on: what comes close, and where all names are."""
    deeper = [name for name in names if fnmatchcase(name, glob)] if "**" not in glob else []
    if deeper:
        crossing = re.sub(r"\*+", "**", glob)
        return f" at that level; {crossing!r}, which crosses dots, matches {len(deeper)}, such as {deeper[0]!r}."
    return f"{did_you_mean(glob, names) or ';'} `nk.layers(model)` lists them."


def _source(known: dict[str, nn.Module], name: str) -> str | None:
    """Return the layer whose output a plain `nn.Sequential` passes on, or a part of one that computes nothing."""
    module, (above, _, key) = known[name], name.rpartition(".")
    if _is_chain(module):
        return next((_source(known, part) or part for part in _working(module, name)), None)
    if isinstance(module, IDLE) and _is_chain(known[above]):
        before = list(children(known[above])).index(key)
        return next((_source(known, part) or part for part in _working(known[above], above, before)), None)
    return None


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def gives_lines(known: Mapping[str, nn.Module], name: str) -> bool:
    """Return whether three dimensions of a module's output are n × c × length; `known` are all modules of the model.

    So they are where the module's type says so: a convolution, pooling or normalisation of channels (`Conv1d`,
    `MaxPool1d`, `BatchNorm1d`, `GroupNorm`, ...), an ``nn.Sequential`` that ends in one, or an activation or dropout
    that follows one inside an ``nn.Sequential``.
    """
    module = known[name]
    if isinstance(module, OF_CHANNELS):
        return True
    if _is_chain(module) and len(children(module)):
        return gives_lines(known, _joined(name, list(children(module))[-1]))
    is_activation = type(module).__module__ == nn.ReLU.__module__ and not isinstance(module, nn.MultiheadAttention)
    before = _before(known, name) if is_activation or isinstance(module, IDLE) else None
    return before is not None and gives_lines(known, before)


def _before(known: Mapping[str, nn.Module], name: str) -> str | None:
    """Return the module whose output a module takes, where it can be found from the enclosing `nn.Sequential`s."""
    above, _, key = name.rpartition(".")
    if not name or not _is_chain(known[above]):
        return None
    keys = list(children(known[above]))
    return _joined(above, keys[keys.index(key) - 1]) if key != keys[0] else _before(known, above)


def _working(chain: nn.Module, name: str, stop: int | None = None) -> list[str]:
    """Return the parts of a chain that compute something, up to the one at `stop`, the last one first."""
    parts = list(children(chain).items())[:stop]
    return [_joined(name, key) for key, part in reversed(parts) if not isinstance(part, IDLE)]


def _of_type(known: dict[str, nn.Module], names: list[str], kind: type) -> list[str]:
    names = [name for name in names if isinstance(known[name], kind)]
    if not names:
        types = sorted({_type_name(module) for name, module in known.items() if name}) or ["no modules inside"]
        raise UnknownName(
            f"no layer of type {kind.__name__!r}; the model has {', '.join(types)}. "
            "`nk.layers(model)` lists the default layers.",
            argument="layers",
        )
    return names


def _type_name(module: nn.Module) -> str:
    return type_before_parametrizations(module).__name__  # a masked layer's own class is made for it alone
