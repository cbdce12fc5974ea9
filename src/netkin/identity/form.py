"""`Form`: what a model is beside its weights, attribute by attribute, so that a difference has a name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from netkin.errors import InvalidValue
from netkin.identity.texts import Unknown, callable_text, class_text, digest_of, qualified, text_of
from netkin.identity.weight_hash import without_wrappers

# the training flag, hooks, where parts are registered; what torch.compile and Lightning leave; and where accelerate
# has put the parts of a model, with the forward method that fetches their weights
OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_torch_compile", "_compile_kwargs", "_compiled_call_impl"})
OF_EVERY_MODULE |= {"_hf_hook", "_old_forward", "hf_device_map", "name_or_path"}
OF_PLACES = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})  # of a config: where it came from
MOVES = frozenset({"npu", "xpu", "mlu", "sdaa", "musa", "hpu"})  # methods that move a model elsewhere
LONGEST = 80  # characters of a value that is kept as it is
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")


@dataclass(frozen=True)
class Form:
    """What a model is beside its weights, as texts by name: its classes with their source, and plain attributes.

    Attributes:
        attributes: The text of each attribute by its name, as "conv1.out_channels"; "conv1.class" names its class and
            a digest of the source of its methods.
        state: Names of attributes that a forward pass changed, as a counter or a cache; they don't count.
        unknown: Names of what is neither plain nor an array, and of functions without a source; they count by kind.
    """

    attributes: Mapping[str, str]
    state: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """24 hex digits that change with any attribute that is not state."""
        return digest_of(str(sorted((name, text) for name, text in self.attributes.items() if name not in self.state)))

    def after(self, model: nn.Module) -> Form:
        """Return the form with those attributes as state that are not as they were, after the model has run."""
        now = form_of(model, version=self.attributes.get("version")).attributes
        changed = {name for name in {**self.attributes, **now} if self.attributes.get(name) != now.get(name)}
        return replace(self, state=tuple(sorted({*self.state, *changed})))

    def to_dict(self) -> dict[str, Any]:
        """Return the form as JSON can hold it; modules whose attributes are equal share them."""
        modules: dict[str, dict[str, str]] = {}
        for name, text in self.attributes.items():
            place, _, attribute = name.rpartition(".")
            modules.setdefault(place, {})[attribute] = text
        kinds = list({str(attributes): attributes for attributes in modules.values()}.values())
        places = {place: kinds.index(attributes) for place, attributes in modules.items()}
        return {"modules": places, "kinds": kinds, "state": list(self.state), "unknown": list(self.unknown)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Form:
        """Return the form that `to_dict` took apart."""
        attributes = {
            f"{place}.{name}" if place else name: text
            for place, kind in stored["modules"].items()
            for name, text in stored["kinds"][kind].items()
        }
        return cls(attributes, tuple(stored["state"]), tuple(stored["unknown"]))

    def to_json(self) -> str:
        """Return the form as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Form:
        """Return the form that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        parts = {"changed by a forward pass": self.state, "unknown": self.unknown}
        lists = (f"; {words}: {', '.join(names)}" for words, names in parts.items() if names)
        return f"digest {self.digest}{''.join(lists)}"


def form_of(model: nn.Module, version: str | None = None) -> Form:
    """Return what a model is beside its weights: the classes of its modules with their source, and plain attributes.

    Plain are numbers, texts, None, arrays, functions (see `function_digest`), and lists, tuples and mappings of them;
    of a `config` that has `to_dict()` each entry counts. Buffers that are not saved and forward hooks count as well. A
    wrapper of torch, the training flag and names of devices do not.

    Args:
        model: The model, before its first forward pass.
        version: Stands for the source of its classes: where that was changed and computes the same, give the same text.

    Example:
        >>> form_difference(form_of(nn.Dropout(0.1)), form_of(nn.Dropout(0.2)))
        "'p' (0.1, not 0.2)"
    """
    attributes, unknown = {} if version is None else {"version": version}, list[str]()
    configs, kinds = dict[int, str](), dict[type, tuple[str, list[str]]]()
    for path, module in without_wrappers(model).named_modules():
        if "_orig_mod" in module._modules:  # compiled; the module itself comes next
            continue
        place = f"{path}.".replace("_orig_mod.", "") if path else ""
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = class_text(kind, "", missing := list[str]()), missing  # often one for many modules
        attributes[f"{place}class"] = kinds[kind][0] if version is None else qualified(kind)
        unknown += [f"{place}{name}" for name in kinds[kind][1]]
        for name, value in _attributes(module):
            holes: list[str] = []
            text = configs.get(id(value), "")  # which often is one for all modules
            if name.endswith("config") and not text and (entries := _config_entries(value)) is not None:
                text = configs[id(value)] = digest_of(_text(entries, name, holes))
                attributes |= {
                    f"{place}{name}.{key}": _shorten(_text(entry, key, [])) for key, entry in entries.items()
                }
            attributes[f"{place}{name}"] = _shorten(text or _text(value, name, holes))
            unknown += [f"{place}{name}"] if holes else []
    return Form(attributes, unknown=tuple(dict.fromkeys(unknown)))


def form_difference(stored: Form, current: Form) -> str:
    """Return the first attribute that differs, with both values; empty if none does. State of either is ignored."""
    state = {*stored.state, *current.state}
    for name in {**stored.attributes, **current.attributes}:
        values = [form.attributes.get(name, "absent") for form in (stored, current)]
        if values[0] != values[1] and name not in state:
            return f"{name!r} ({values[0]}, not {values[1]})"
    return ""


# --- in the identity of a job: {"architecture": forms of models by name} ----------------------------------------------


def forms_by_name(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the forms of models as the identity of a job holds them."""
    return {name: form_of(model).to_dict() for name, model in models.items()}


def _compare_forms(held: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> str:
    """Return in which attribute the form of a model differs that both have."""
    differences = []
    for name, form in (held or {}).items():
        if current and name in current:
            difference = form_difference(Form.from_dict(form), Form.from_dict(current[name]))
            differences += [f"{difference} of {name!r}"] if difference else []
    return " and ".join(differences)


COMPARE = {"architecture": _compare_forms}  # for jobs


@contextmanager
def state_noted(job: Any, models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Note in a job, at the end of the `with`, what running has changed in models, so that they can continue it."""
    try:
        yield
    finally:
        for name, form in job.state.identity.get("architecture", {}).items():
            if name in models:
                job.note_state("architecture", name, Form.from_dict(form).after(models[name]).state)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are neither its parts nor its weights nor devices, and its hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        yield from (("name", module.original_name), ("code", getattr(module, "code", "")))
        return
    for name, value in vars(module).items():
        is_weights = isinstance(value, list) and any(isinstance(part, nn.Parameter) for part in value)
        is_device = isinstance(value, (str, torch.device)) and _DEVICE.fullmatch(str(value))
        # accelerate has replaced these, so that weights are fetched, and a model that it has spread is not moved
        is_fetching = (name == "forward" and "_old_forward" in vars(module)) or (
            "hf_device_map" in vars(module) and callable(value) and (name in MOVES or hasattr(nn.Module, name))
        )
        if not (name in OF_EVERY_MODULE or is_weights or is_device or is_fetching):
            yield name, value
    yield from ((name, module._buffers[name]) for name in sorted(module._non_persistent_buffers_set))
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield "extra_state", module.get_extra_state()
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        # those of netkin are there while it runs the model
        hooks = [hook for hook in getattr(module, name).values() if not _module_of(hook).startswith("netkin.")]
        yield from ((f"{name}.{number}", hook) for number, hook in enumerate(hooks))


def _module_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__module__", None) or type(function).__module__


def _config_entries(value: Any) -> dict[str, Any] | None:
    """Return the entries of a configuration as of Hugging Face, but for where it came from; None for other values."""
    if isinstance(value, (type, nn.Module)) or not callable(getattr(value, "to_dict", None)):
        return None
    return {str(key): entry for key, entry in dict(value.to_dict()).items() if key not in OF_PLACES}


def _text(value: Any, name: str, unknown: list[str]) -> str:
    """Return the text of an attribute, of its kind alone if it is neither plain nor an array nor a function."""
    try:
        if callable(value) and not isinstance(value, nn.Module):
            return callable_text(value, name, unknown)
        return text_of(value, name, unknown, deep=False)
    except (Unknown, InvalidValue):  # also of an array without values, as on the meta device
        unknown.append(name)
        return qualified(type(value))


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:40]}… {digest_of(text)}"
