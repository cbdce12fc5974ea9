"""Many networks at once: stacked where they are small, each in a CUDA graph where they fill a GPU, or one by one."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import InvalidValue, NetkinError, ShapeError, outside, require_listed
from netkin.identity import form_difference, form_of
from netkin.progress import ProgressOption, about, reporting, showing
from netkin.representations.inputs import device_of, dtype_of
from netkin.settings import evaluating, model_lock, random_states_kept, seed_all, without_vmap_warnings
from netkin.training.example_order import arrays_in, each_warned_once, placed
from netkin.training.loop import Loss, default_loss, loss_and_accuracy, require_trainable, train
from netkin.training.recipe import Recipe, Record, recipe_of
from netkin.training.teams import Store, Student, Team

Callback = Callable[[int, nn.Module, int], Any]
METHODS = {"one by one": "one by one", "stacked": "stacked into one", "graphs": "as CUDA graphs"}
# operations of a network's forward pass of a batch, and its weights: above, stacking gains nothing
STACKED_BELOW = {"cpu": (1e7, 1e5), "cuda": (2e9, 1e7)}
TICKS = 64  # steps that are prepared at a time where epochs are shorter and nothing is tested


def train_many(
    models: Sequence[nn.Module],
    data: Any = None,
    recipe: Recipe | None = None,
    *,
    data_of_each: Sequence[Any] | None = None,
    test: Any = None,
    seeds: Sequence[int] | None = None,
    loss: Loss | None = None,
    hooks: Callable[[int], Sequence[Any]] | None = None,
    callback: Callback | None = None,
    callback_steps: Collection[int] = (),
    method: str = "auto",
    progress: ProgressOption = None,
    **settings: Any,
) -> list[list[Record]]:
    """Train several networks, at once where that is faster, and return for each what `train` would have returned.

    Each gets the examples in the order that `train` gives it for its seed, so that the numbers are those of training
    one by one up to rounding. `seconds` are each network's share of the time.

    Args:
        models: The networks, all on one device.
        data: What all of them are trained on, as in `train`.
        recipe: How they are trained; its settings can also be given by name.
        data_of_each: Data for each network in place of `data`.
        test: Data on which loss and accuracy are taken after each epoch.
        seeds: One for each network; 0, 1, 2, ... if not given.
        loss: A function of ``(outputs, labels)``; by default the cross entropy of class numbers.
        hooks: A function of a network's number that returns its hooks; networks with hooks are trained one by one.
        callback: A function of ``(number, model, step)`` that may read a network, but not change it, on its way.
        callback_steps: After which steps it is called; 0 is before the first.
        method: "stacked" joins small networks of one form into one by `torch.func.vmap`, on a GPU in a CUDA graph;
            "graphs" gives each a CUDA graph and a stream of its own; "one by one" is `train`; "auto" chooses.
        progress: None shows a bar, False nothing; or a function of ``(done, total, what)``.
        **settings: Settings of the recipe.

    Example:
        >>> inputs, models = torch.linspace(-1, 1, 64)[:, None], [nn.Linear(1, 1) for _ in range(3)]
        >>> settings = {"epochs": 99, "lr": 0.1, "loss": nn.functional.mse_loss}
        >>> histories = train_many(models, data_of_each=[(inputs, slope * inputs) for slope in (1, 2, 3)], **settings)
        >>> [round(model.weight.item(), 1) for model in models]
        [1.0, 2.0, 3.0]
    """
    if "save" in settings:
        raise InvalidValue("`train_many` saves nothing; to resume, train each network by `nk.train(..., save=FILE)`.")
    if isinstance(seeds, int):
        raise InvalidValue(
            f"`seeds` must hold one for each network, as `range({seeds})`; got {seeds}.", argument="seeds"
        )
    chosen, work = recipe_of(recipe, settings), list(models)
    data_of_each = _data_for(work, data, data_of_each)
    seeds = list(range(len(work)) if seeds is None else seeds)
    _require_counts(work, data_of_each, seeds)
    call = Trainings(work, data_of_each, chosen, test, seeds, loss, hooks, callback, frozenset(callback_steps))
    with showing(progress):
        return call.run(method)


class Trainings:
    """One call of `train_many`: which ways are open, and the way taken; stacked networks can be trained `again`."""

    def __init__(
        self, models: list[nn.Module], data: Sequence[Any], recipe: Recipe, test: Any, seeds: list[int],
        loss: Loss | None = None, hooks: Callable[[int], Sequence[Any]] | None = None, callback: Callback | None = None,
        callback_steps: frozenset[int] = frozenset(),
    ):  # fmt: skip
        self.models, self.data, self.recipe, self.test, self.seeds = models, data, recipe, test, seeds
        self.loss, self.hooks, self.device = loss, hooks, device_of(models[0])
        self.callback, self.callback_steps = callback, callback_steps if callback else frozenset[int]()
        found = {id(one): arrays_in(one) for one in data}  # shared data are shared still
        self.arrays = [found[id(one)] for one in data]
        self.stacked: Team | None = None

    def run(self, method: str) -> list[list[Record]]:
        """Train in the requested way, or the fastest that works."""
        if method == "auto":
            return self._first_that_works()
        require_method(method)
        reason = self.reason_against(method)
        if reason:
            raise UnfitMethod(
                f"these networks can't be trained {METHODS[method]}: {reason}; method='auto' takes another.",
                argument="method",
            )
        try:
            return self._by(method)
        except _Unfit as fault:
            raise UnfitMethod(
                f"these networks can't be trained {METHODS[method]}: {fault}", argument="method"
            ) from fault

    def again(
        self, states: Sequence[Mapping[str, Tensor]], data: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
    ) -> tuple[list[dict[str, Tensor]], list[bool], list[list[Record]]] | None:
        """Train as many networks of the same form from other weights, on other data, as the first ones were.

        Return their weights and buffers, whether these are finite, and the histories; None where the first were not
        stacked, or the data do not fit. The networks themselves are left alone.
        """
        if self.stacked is None:
            return None
        team, given = self.stacked, zip(data, seeds, strict=True)
        students = [Student(team.model, arrays, self.recipe, seed) for arrays, seed in given]
        with model_lock(), evaluating(team.model), without_vmap_warnings():
            team.model.train()
            if not team.restart(students, states):
                return None
            self._take_steps([team], students, team.ticks)
        return *team.states(), [student.history for student in students]

    def _first_that_works(self) -> list[list[Record]]:
        for method in self._best():
            try:
                return self._by(method)
            except _Unfit as fault:
                warnings.warn(
                    f"training the networks {METHODS[method]} failed, which takes longer now: {fault}",
                    stacklevel=outside(),
                )
        return self._one_by_one()

    def _best(self) -> list[str]:
        """Return the ways faster than one by one, by the size of the work; what costs least to find out comes first."""
        if len(self.models) < 2 or self._reason_against_all():
            return []
        most = STACKED_BELOW.get(self.device.type, (0, 0))
        recurrent = any(isinstance(module, nn.RNNBase) for module in self.models[0].modules())
        small = not recurrent and sum(weight.numel() for weight in self.models[0].parameters()) < most[1]
        small = small and self._trials(1)[0][0] < most[0] and not self._unlike()
        return ["stacked"] * small + ["graphs"] * (not self.reason_against("graphs"))

    def reason_against(self, method: str) -> str:
        """Return why a way is closed, as a part of a sentence; empty if it is open."""
        if method == "one by one":
            return ""
        if method == "graphs" and self.device.type != "cuda":
            return f"CUDA graphs need a GPU, and they lie on {self.device}"
        return self._reason_against_all() or (self._unlike() if method == "stacked" else "")

    def _reason_against_all(self) -> str:
        """Return why the networks can only be trained one by one; empty if other ways are open."""
        if self.hooks is not None:
            return "hooks need each step of a network by itself"
        if any(_has_hooks(model) for model in self.models):
            return "hooks that are registered on a model need each of its steps by itself"
        if any(not isinstance(one, tuple) or len(one) != 2 for one in self.arrays):
            return "their data must be arrays `(inputs, labels)`"
        if not isinstance(self.recipe.optimizer, str) or self.recipe.precision == "fp16":
            return "an optimizer of torch itself and loss scaling decide each step by themselves"
        return ""

    def _unlike(self) -> str:
        """Return in what networks or their data differ so that they can't be stacked; empty if in nothing."""
        tensors = [[*model.named_parameters(), *model.named_buffers()] for model in self.models]
        forms = {tuple((name, part.shape, part.dtype, part.requires_grad) for name, part in own) for own in tensors}
        first = form_of(self.models[0])
        if len(forms) > 1 or any(form_difference(first, form_of(model)) for model in self.models[1:]):
            return "they are not of one form"
        if len({tuple((part.shape[1:], part.dtype) for part in one) for one in self.arrays}) > 1:
            return "their examples are not of one shape"
        counts = {len(one[0]) for one in self.arrays}
        whole = self.recipe.drop_last or self.recipe.order == "drawn"
        if len(counts) > 1 and not whole:
            return (
                f"their data have {min(counts):,} to {max(counts):,} examples; drop_last=True makes their batches alike"
            )
        return ""

    def _trials(self, count: int | None = None) -> list[tuple[int, str]]:
        """Of each form among the first networks, the operations for a batch and what it changes beside its buffers."""
        models = self.models[:count]
        forms = {str(model): (model, arrays) for model, arrays in zip(models, self.arrays, strict=False)}
        with model_lock(), random_states_kept(*models), torch.no_grad():
            return [_try_forward(model, arrays[0][: self.recipe.batch]) for model, arrays in forms.values()]

    def _one_by_one(self) -> list[list[Record]]:
        found = []
        with each_warned_once():
            for number, (model, data, seed) in enumerate(zip(self.models, self.data, self.seeds, strict=True)):
                hooks = [*(self.hooks(number) if self.hooks else ()), partial(self._look_at, number)]
                self._look_at(number, model, 0)
                with about(f"network {number + 1} of {len(self.models)}") if len(self.models) > 1 else nullcontext():
                    history = train(model, data, self.recipe, test=self.test, seed=seed, loss=self.loss, hooks=hooks)
                found.append(history)
        return found

    def _look_at(self, number: int, model: nn.Module, step: int) -> None:
        if self.callback is not None and step in self.callback_steps:
            self.callback(number, model, step)

    def _by(self, method: str) -> list[list[Record]]:
        return self._one_by_one() if method == "one by one" else self._at_once(method)

    def _at_once(self, method: str) -> list[list[Record]]:
        with ExitStack() as stack:
            for context in (model_lock(), evaluating(*self.models), random_states_kept(*self.models, data=[self.test])):
                stack.enter_context(context)
            if method == "stacked":
                stack.enter_context(without_vmap_warnings())
            for model in self.models:
                model.train()
            seed_all(self.device, self.seeds[0], 0)
            return self._train_teams(method)

    def _train_teams(self, method: str) -> list[list[Record]]:
        given = zip(self.models, self.arrays, self.seeds, strict=True)
        students = [Student(model, arrays, self.recipe, seed) for model, arrays, seed in given]
        longest = max(student.order.per_epoch for student in students)
        ticks = min(max(longest, TICKS if self.test is None else 1), max(student.total for student in students))
        teams = self._prepared(students, method, ticks)
        for number, model in enumerate(self.models):
            self._look_at(number, model, 0)
        try:
            self._take_steps(teams, students, ticks)
        finally:  # as far as they came, also where the work is ended
            for team in teams:
                team.give_back()
        for student in students:
            student.model.zero_grad(set_to_none=True)
        self.stacked = teams[0] if method == "stacked" else None
        return [student.history for student in students]

    def _take_steps(self, teams: list[Team], students: list[Student], ticks: int) -> None:
        with reporting(sum(student.total for student in students), "training", "steps") as report:
            while any(student.step < student.total for student in students):
                report.update(self._segment(teams, students, ticks))

    def _teams(self, students: list[Student], method: str, ticks: int) -> list[Team]:
        loss = self.loss or default_loss(self.recipe)
        if method == "stacked":
            return [Team(students, Store(students), self.recipe, loss, ticks)]
        keys = [(id(student.order.arrays), dtype_of(student.model)) for student in students]
        stores = {key: Store([student]) for key, student in dict(zip(keys, students, strict=True)).items()}
        return [Team([one], stores[key], self.recipe, loss, ticks) for key, one in zip(keys, students, strict=True)]

    def _prepared(self, students: list[Student], method: str, ticks: int) -> list[Team]:
        """Try the step of each team out, and record it where there is a GPU."""
        try:
            teams = self._teams(students, method, ticks)
            for changed in filter(None, (changed for _, changed in self._trials())):
                raise _Unfit(f"the forward pass changes {changed!r} of the model, which is no buffer written into.")
            for team in teams:
                team.rehearse()
        except NetkinError:
            raise
        except Exception as fault:
            raise _Unfit(_words(fault)) from fault
        try:
            for team in teams if self.device.type == "cuda" else []:
                team.capture()
        except Exception as fault:
            if method == "graphs":
                raise _Unfit(_words(fault)) from fault
            told = f"the stacked networks are trained without a CUDA graph: {_words(fault)}"
            warnings.warn(told, stacklevel=outside())
        return teams

    def _segment(self, teams: list[Team], students: list[Student], ticks: int) -> int:
        """Take some steps of all teams, and return how many steps of networks that were."""
        active = [student for student in students if student.step < student.total]
        if self.test is not None:
            ticks = min(student.until_epoch_ends for student in active)
        ahead = [at - student.step for student in active for at in self.callback_steps if at > student.step]
        ticks = min([ticks, *ahead])
        before, started = sum(student.step for student in students), time.perf_counter()
        for team in teams:
            with team.own_stream:
                team.load(ticks)
        for tick in range(max(len(team.sizes) for team in teams)):
            for team in teams:
                if tick < len(team.sizes):
                    with team.own_stream:
                        team.run_tick(tick)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        losses = [team.losses.to("cpu", copy=True) for team in teams]  # the next segment writes over them
        seconds = (time.perf_counter() - started) / len(active)
        self._take_down(teams, losses, seconds, ticks)
        return sum(student.step for student in students) - before

    def _take_down(self, teams: list[Team], losses: list[Tensor], seconds: float, ticks: int) -> None:
        """Record the losses, and test and show the networks whose time it is."""
        for team, table in zip(teams, losses, strict=True):
            moved = [student for student in team.students if student.step < student.total]
            ended = [
                student
                for student, own in zip(team.students, table.T, strict=True)
                if student in moved and student.record(own[: min(ticks, student.total - student.step)], seconds)
            ]
            seen = [student for student in moved if student.step in self.callback_steps]
            if seen or (ended and self.test is not None):
                team.give_back()
            for student in ended if self.test is not None else []:
                self._judge(student)
            for student in seen:
                self._look_at(self.models.index(student.model), student.model, student.step)

    def _judge(self, student: Student) -> None:
        record = student.history[-1]
        seconds = record.pop("seconds")
        loss, dtype = self.loss or default_loss(self.recipe), self.recipe.dtype(self.device)
        record |= loss_and_accuracy(student.model, self.test, loss, dtype, by_classes=self.loss is None)
        record["seconds"] = seconds


class UnfitMethod(InvalidValue):
    """Networks can't be trained in the way that was requested."""


def require_method(method: str) -> None:
    """Refuse an unknown method of training."""
    require_listed("method of training", method, ("auto", *METHODS), "method")


class _Unfit(Exception):
    """Networks that can't be trained at once, which shows only when they run."""


def _has_hooks(model: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in model.modules() for kind in kinds)


def _try_forward(model: nn.Module, inputs: Tensor) -> tuple[int, str]:
    """Return the operations of a forward pass, and the name of something that it changes other than in place.

    No stack and no graph would see that. A copy of the model is tried. The products of layers with weights are counted;
    torch's own counter would import a compiler, which takes longer than many a training.
    """
    model, total = copy.deepcopy(model).train(), 0

    def count(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal total
        if isinstance(output, Tensor) and not isinstance(module, (nn.Embedding, nn.ModuleList)):
            weight: Any = None if "weight" in module._parameters else getattr(module, "weight", None)  # as with a mask
            own = module.parameters(recurse=False) if weight is None else [weight]
            total += sum(2 * output.numel() * matrix[0].numel() for matrix in own if matrix.ndim > 1)

    form, buffers = form_of(model), dict(model.named_buffers())
    for module in model.modules():
        module.register_forward_hook(count)
    model(placed(inputs, device_of(model), dtype_of(model)))
    now = dict(model.named_buffers())
    changed = [name for name in form.after(model).state if name not in now]
    changed += [name for name, buffer in now.items() if buffers.get(name) is not buffer]  # in place they may change
    return total, next(iter(changed), "")


def _words(fault: Exception) -> str:
    said = str(fault).strip().splitlines()
    return said[0] if isinstance(fault, _Unfit) and said else f"{type(fault).__name__}: {' '.join(said[:1])}"


def _data_for(models: list[nn.Module], data: Any, data_of_each: Sequence[Any] | None) -> Sequence[Any]:
    if (data is None) == (data_of_each is None):
        raise InvalidValue(
            "give either `data`, for all networks, or `data_of_each`, a list with data for each.", argument="data"
        )
    return [data] * len(models) if data_of_each is None else data_of_each


def _require_counts(models: list[nn.Module], data: Sequence[Any], seeds: list[int]) -> None:
    if not models:
        raise InvalidValue("there are no networks to train; give a list of one or more.", argument="models")
    for model in models:
        require_trainable(model)
    for name, given in (("data_of_each", data), ("seeds", seeds)):
        if len(given) != len(models):
            raise ShapeError(
                f"`{name}` must hold one for each of the {len(models)} networks; got {len(given)}.", argument=name
            )
    owners = [id(weight) for model in models for weight in {id(w): w for w in model.parameters()}.values()]
    if len(set(owners)) < len(owners):
        raise InvalidValue("two of the networks share weights; train copies, by `copy.deepcopy`.", argument="models")
    if len({device_of(model) for model in models}) > 1:
        raise InvalidValue("the networks lie on several devices; train those of one device at a time.")
