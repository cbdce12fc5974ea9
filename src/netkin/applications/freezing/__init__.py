"""Freeze training: the lower layers of a network are frozen one after the other while the upper ones go on learning.

Section 4.2 of Raghu et al. (2017), arXiv:1706.05806: networks converge from the bottom up, so what is below can be
frozen before the training ends, which saves "all computation needed for deriving gradients and updating in lower
layers". The schedules `"linear"` and fractions by name are the paper's; `"similarity"` is ours, which freezes a layer
when it has stopped changing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from netkin.applications.freezing.layer_groups import FirstStep, LayerGroups, inner_model
from netkin.applications.freezing.schedules import FreezePlan, Schedule, Settling, fractions, linear
from netkin.errors import InvalidValue, UnknownName, did_you_mean, require_at_least
from netkin.representations.inputs import Forward
from netkin.representations.layers import Spec, choose, modules, split_call
from netkin.representations.shapes import Shape
from netkin.sources.names import by_name

__all__ = ["FreezeTraining"]

FORMAT = 1
SCHEDULES = ("linear", "similarity")


class FreezeTraining:
    """Freezes groups of a model's layers during training, from the first on.

    `schedule` is ``"linear"`` (group i of L at the fraction i/L of all `steps`), a mapping of names to fractions, or
    ``"similarity"`` (each group once it stays similar to its own recent past on the examples of `probe`). `layers`
    names the groups in the order in which they run, a module each; the default are blocks, or layers with weights. What
    runs before a group and belongs to none is frozen with it. `groups` holds their names, `frozen` those that are
    frozen by now.

    Call `step` after each step of the optimizer. Frozen parameters need no gradient and have none, so optimizers
    leave them and their own state for them alone, also where weights are computed from them (masks, `weight_norm`,
    other parametrizations); frozen batch norms and spectral norms stay in evaluation mode, also after
    ``model.train()``; what other modules change in their buffers is put back after each forward pass; dropout is as
    it was. As nothing before the first live group needs a gradient, nothing is kept for one there. `close`, or
    leaving the `with`, gives the model back with every flag as it was found.

    Args:
        model: the model that is trained.
        schedule: "linear", "similarity", or a mapping from groups to fractions of all steps.
        steps: the number of steps of the whole training.
        layers: the groups, in the order in which they run.
        optimizer: that of the training, or several, to refuse one that moves parameters without gradients.
        probe: the examples on which groups are compared with their past.
        measures: the measure by which they are compared.
        threshold: the similarity to the past at which a group counts as unchanged.
        patience: how many consecutive probes must reach the threshold.
        past: with how many of the last probes each is compared.
        every: steps between two probes.
        examples: how many examples of `probe` are used.
        shape: what one example is (see `nk.shapes`).
        forward: a function ``forward(model, batch)`` that runs the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with FreezeTraining(model, "linear", steps=6) as freezing:
        ...     for step in range(6):
        ...         model(torch.ones(3, 4)).sum().backward()
        ...         optimizer.step()
        ...         for name in freezing.step():
        ...             print("after", freezing.done, "steps:", name)
        after 2 steps: 0
        after 4 steps: 2
    """

    @by_name(data="probe")
    def __init__(
        self,
        model: nn.Module,
        schedule: str | Mapping[str, float] = "linear",
        *,
        steps: int | None = None,
        layers: Spec = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        probe: Any = None,
        measures: Any = "cka",
        threshold: float = 0.99,
        patience: int = 3,
        past: int = 3,
        every: int | None = None,
        examples: int = 256,
        shape: Shape = None,
        forward: Forward | None = None,
    ):
        _require_unused_allowed(model)
        _require_gradient_steps(optimizer)
        self.model = inner_model(model)
        self.steps, self.done, self._frozen = steps, 0, 0
        by_name = isinstance(schedule, Mapping) and layers is None
        self._groups = LayerGroups(self.model, _as_registered(self.model, schedule) if by_name else layers)
        if not self._groups.names:
            raise InvalidValue("the model has no layers with weights, and nothing to freeze.")
        similarity = {
            "probe": probe, "measure": measures, "threshold": threshold, "patience": patience, "past": past,
            "every": every, "examples": examples, "shape": shape, "forward": forward,
        }  # fmt: skip
        options = {"threshold": threshold, "patience": patience, "past": past, "every": every}
        # by which a saved training knows it
        self.settings = {"schedule": schedule, "steps": steps, "layers": self._groups.names, **options}
        self._schedule = self._scheduled(schedule, similarity)
        self._require_own_parameters()
        self._held, self._closed = Frozen(), False
        self._first_step: FirstStep | None = None
        self._freeze(self._schedule.frozen(0, 0))  # which may run the model, and so crash: before there are hooks
        self._first_step = FirstStep(self._groups)

    @property
    def groups(self) -> list[str]:
        """The names of all groups, in the order in which they are frozen."""
        return list(self._groups.names)

    @property
    def frozen(self) -> list[str]:
        """The names of the groups that are frozen by now."""
        return self.groups[: self._frozen]

    @property
    def plan(self) -> dict[str, int | None]:
        """After how many steps each group is frozen; None means never, or by its similarity."""
        if not isinstance(self._schedule, FreezePlan):
            return dict.fromkeys(self.groups)
        return {name: self._schedule.when(number) for number, name in enumerate(self.groups)}

    @property
    def history(self) -> list[dict[str, Any]]:
        """With the similarity schedule, the values of each probe: the step, and by group the least similarity."""
        return list(self._schedule.history) if isinstance(self._schedule, Settling) else []

    def members(self, group: str) -> list[str]:
        """Return the names of the modules and single parameters that are frozen with `group`."""
        if group not in self.groups:
            raise UnknownName(f"no group named {group!r}{did_you_mean(group, self.groups) or '.'}")
        return self._groups.members(self.groups.index(group))

    def step(self) -> list[str]:
        """Count one step of the optimizer as done, and return the names of the groups that are frozen from now on."""
        return self.at(self.done + 1)

    def at(self, done: int) -> list[str]:
        """Report that `done` steps are done in all, and return the names of the groups that are frozen from now on."""
        if self._closed:
            raise InvalidValue("the model was given back; make a new `FreezeTraining` to go on.")
        if done < self.done:
            raise InvalidValue(f"{self.done} steps are done already; got {done}.", argument="steps")
        if self._first_step is not None and self._first_step.has_seen:
            self._finish_first_step(self._first_step)
        self.done = done
        before = self._frozen
        self._freeze(self._schedule.frozen(done, before))
        return self.groups[before : self._frozen]

    def after_step(self, model: nn.Module, step: int) -> None:
        """Be a hook of `nk.train`, which counts the steps."""
        self.at(step)

    def close(self) -> None:
        """Give the model back: gradients and modes as they were found, and no hooks."""
        self._closed = True
        self._stop_looking()
        self._held.unfreeze()

    def __enter__(self) -> FreezeTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        total = "" if self.steps is None else f" of {self.steps:,}"
        return (
            f"<FreezeTraining {self._schedule.kind}: {self._frozen} of {len(self.groups)} groups frozen "
            f"after {self.done:,}{total} steps>"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on, for a checkpoint: schedule, progress and what is frozen."""
        return {
            "format": FORMAT,
            "kind": self._schedule.kind,
            "units": self.groups,
            "order": list(self._groups.order),
            "steps": self.steps,
            "done": self.done,
            "frozen": self._frozen,
            "schedule": self._schedule.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: its schedule takes the place of the one given here."""
        self._require_state(state)
        self._closed = False
        self._groups.reorder(state["order"])
        self._schedule.load(state["schedule"])
        self.steps, self.done = state["steps"], state["done"]
        self._freeze_afresh(state["frozen"])
        if self.done:  # what runs before what was settled when the state was taken
            self._stop_looking()

    def _scheduled(self, schedule: Any, similarity: dict[str, Any]) -> Schedule:
        if not isinstance(schedule, (str, Mapping)):
            raise InvalidValue(
                f"a schedule is 'linear', 'similarity' or fractions by name; got a {type(schedule).__name__}.",
                argument="schedule",
            )
        if schedule == "similarity":
            return self._settling(similarity)
        if not isinstance(schedule, Mapping) and schedule != "linear":
            near = did_you_mean(schedule, SCHEDULES) or ";"
            raise UnknownName(
                f"no schedule {schedule!r}{near} give 'linear', 'similarity' or fractions by name.", argument="schedule"
            )
        self.steps = steps = _whole(self.steps)  # all those that the optimizer will take
        if isinstance(schedule, Mapping):
            return fractions(self.groups, schedule, steps)
        return linear(self.groups, steps)

    def _settling(self, options: dict[str, Any]) -> Settling:
        if options["probe"] is None:
            raise InvalidValue(
                "'similarity' needs `probe=`, some examples on which groups are compared with their past.",
                argument="probe",
            )
        if options["every"] is None or self.steps is not None:
            self.steps = _whole(self.steps)
            options["every"] = max(1, self.steps // 100) if options["every"] is None else options["every"]
        require_at_least(1, **{name: options[name] for name in ("every", "patience", "past", "examples")})
        return Settling(self.model, self.groups, **options)

    def _finish_first_step(self, first_step: FirstStep) -> None:
        """Let what the first training step has shown decide what goes with which group."""
        self._first_step = None
        first_step.finish()
        self._require_own_parameters()
        self._freeze_afresh(self._frozen)

    def _stop_looking(self) -> None:
        if self._first_step is not None:
            self._first_step.close()
            self._first_step = None

    def _freeze_afresh(self, count: int) -> None:
        self._held.unfreeze()
        self._frozen = 0
        self._freeze(count)

    def _freeze(self, count: int) -> None:
        for number in range(self._frozen, count):
            self._held.add(self._groups.parameters(number).values(), self._groups.norms(number))
            self._held.keep(self._groups.with_buffers(number))
        self._frozen = max(self._frozen, count)

    def _require_own_parameters(self) -> None:
        for owners in self._groups.owners().values():
            if len({self._schedule.when(owner) for owner in owners.values()}) > 1:
                first, second = list(owners)[:2]
                raise InvalidValue(
                    f"{first!r} and {second!r} are one parameter, and one of them would be frozen before the other; "
                    "untie them, or freeze neither."
                )

    def _require_state(self, state: Mapping[str, Any]) -> None:
        absent = [name for name in self.state_dict() if name not in state]
        if absent:
            raise InvalidValue(
                f"this is no state of `FreezeTraining`, as it has no {absent[0]!r}; pass its `state_dict()`."
            )
        if state["format"] != FORMAT:
            raise InvalidValue(f"the state has format {state['format']}, and this netkin reads format {FORMAT}.")
        if state["kind"] != self._schedule.kind:
            raise InvalidValue(f"the state is of a {state['kind']!r} schedule and this is {self._schedule.kind!r}.")
        if list(state["units"]) != self.groups:
            raise InvalidValue(
                f"the state is of the groups {list(state['units'])} and these are {self.groups}; name the same "
                "`layers`."
            )


class Frozen:
    """Parameters without gradients, norms that stay in evaluation mode, and buffers that are kept, until `unfreeze`.

    An optimizer passes over parameters without a gradient: it neither moves them nor updates what it keeps for them.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[nn.Parameter, bool]] = {}
        self._norms: dict[int, tuple[nn.Module, Any]] = {}
        self._kept: dict[int, _KeptBuffers] = {}

    def add(self, parameters: Iterable[nn.Parameter], norms: Iterable[nn.Module]) -> None:
        """Hold these too."""
        for parameter in parameters:
            self._parameters.setdefault(id(parameter), (parameter, parameter.requires_grad))
            parameter.requires_grad_(False)
            parameter.grad = None
        for norm in norms:
            if id(norm) not in self._norms:
                self._norms[id(norm)] = (norm, vars(norm).get("train"))
                _still(norm)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Put back what these modules change in buffers, after each time they run."""
        for module in modules:
            if id(module) not in self._kept:
                self._kept[id(module)] = _KeptBuffers(module)

    def unfreeze(self) -> None:
        """Give parameters their flags back, norms the mode that was requested last, and take the hooks off."""
        for parameter, flag in self._parameters.values():
            parameter.requires_grad_(flag)
        for norm, train in self._norms.values():
            _moving(norm, train)
        for kept in self._kept.values():
            kept.unfreeze()
        self._parameters.clear()
        self._norms.clear()
        self._kept.clear()


class _KeptBuffers:
    """Hooks of a module that put its buffers back, and those inside it, where it has changed them as it ran.

    Others may change them between two runs, as `load_state_dict` does: what holds is how each run found them.
    """

    def __init__(self, module: nn.Module):
        self.owners = [one for one in module.modules() if one._buffers]
        self.before: list[dict[str, _Buffer]] = [{} for _ in self.owners]
        self.handles = [
            module.register_forward_pre_hook(self.note, prepend=True),
            module.register_forward_hook(self.put_back, always_call=True),
        ]

    def note(self, module: nn.Module, inputs: Any) -> None:
        """Copy the buffers that are others than at the last run."""
        for owner, before in zip(self.owners, self.before, strict=True):
            for name, tensor in owner._buffers.items():
                if tensor is not None and not (name in before and before[name].holds(tensor)):
                    before[name] = _Buffer(tensor)

    @torch.no_grad()
    def put_back(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Put the buffers back that have changed since."""
        for owner, before in zip(self.owners, self.before, strict=True):
            for name, tensor in owner._buffers.items():
                if name in before and not (tensor is not None and before[name].holds(tensor)):
                    owner._buffers[name] = before[name].put_back()

    def unfreeze(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


class _Buffer:
    """A buffer, and a copy of what it holds."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version, self.copy = tensor, tensor._version, tensor.detach().clone()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is this buffer, unchanged since it was noted."""
        return tensor is self.tensor and tensor._version == self.version

    def put_back(self) -> Tensor:
        """Return the buffer with what it held."""
        if self.tensor._version != self.version:
            self.tensor.copy_(self.copy)
            self.version = self.tensor._version
        return self.tensor


class _ModeAsked:
    """The training mode that a held module would have."""

    def __init__(self, mode: bool):
        self.mode = mode


def _still(norm: nn.Module) -> None:
    # not a hook, which compiled code would not see; a partial, so that the model can still be copied and pickled
    vars(norm)["train"] = partial(_stay, norm, _ModeAsked(norm.training))
    norm.training = False


def _stay(norm: nn.Module, asked: _ModeAsked, mode: bool = True) -> nn.Module:
    """Stand in for ``norm.train(mode)``: note what was requested, and stay in evaluation mode."""
    asked.mode = mode
    norm.training = False
    return norm


def _moving(norm: nn.Module, train: Any) -> None:
    norm.training = vars(norm).pop("train").args[1].mode
    if train is not None:
        vars(norm)["train"] = train


def _as_registered(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the named layers in the order of registration: a mapping is written in any order."""
    order = list(modules(model))
    return sorted(choose(model, list(names)), key=lambda name: order.index(split_call(name)[0]))


def _whole(steps: int | None) -> int:
    require_at_least(1, steps=steps)
    assert steps is not None
    return int(steps)  # of NumPy, perhaps


def _require_unused_allowed(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel) and (model.static_graph or not model.find_unused_parameters):
        raise InvalidValue(
            "`DistributedDataParallel` waits for the gradients of all parameters it was made with; wrap the model with "
            "`find_unused_parameters=True`, or pass the model inside and wrap it again whenever `step()` returns names."
        )


def _require_gradient_steps(optimizer: Any) -> None:
    for one in [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or []):
        if isinstance(one, torch.optim.LBFGS):
            raise InvalidValue("`LBFGS` moves parameters without gradients, too; choose another optimizer.")
