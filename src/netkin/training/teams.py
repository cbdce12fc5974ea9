"""Teams: networks that take their steps together, stacked into one by `torch.func.vmap`, or one in a CUDA graph.

A step is a function of tensors that stay where they are: tables with the rows, moves and rates of many steps, a counter
that picks from them, weights, buffers and the optimizer's memory, all changed in place. So one recording of it as a
CUDA graph serves all steps, and the host only starts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from netkin.representations.inputs import device_of, dtype_of, outputs_of
from netkin.settings import called_with
from netkin.training.example_order import Arrays, BatchIndices, augmented, with_margin
from netkin.training.loop import Loss, autocasting, epoch_record
from netkin.training.recipe import Recipe, Record

EPS, BETAS = 1e-8, (0.9, 0.999)  # torch's defaults of Adam
WARM_UP = 3  # steps before a recording, in which libraries choose their algorithms


class Student:
    """One of several networks: the order of its batches, its rates, and its records."""

    def __init__(self, model: nn.Module, arrays: Any, recipe: Recipe, seed: int):
        self.model, self.recipe, self.seed = model, recipe, seed
        self.order = Arrays(arrays, recipe, seed)
        self.order.place = torch.device("cpu")  # picks of many steps go to the device together
        self.total = recipe.steps or (recipe.epochs or 0) * self.order.per_epoch
        self.step, self.seconds, self.history = 0, 0.0, list[Record]()
        self._losses = list[Tensor]()
        self._batches: Iterator[BatchIndices] = iter(())
        self._rates = recipe.rates([recipe.lr], recipe.epochs or recipe.steps or 0)

    @property
    def until_epoch_ends(self) -> int:
        """How many steps are left of this epoch."""
        return min(self.order.per_epoch - self.step % self.order.per_epoch, self.total - self.step)

    def take(self, count: int) -> list[tuple[BatchIndices, float]]:
        """Return what the next steps are made of, `count` of them or those that are left, each with its rate."""
        found: list[tuple[BatchIndices, float]] = []
        for step in range(self.step, min(self.step + count, self.total)):
            epoch, place = divmod(step, self.order.per_epoch)
            if place == 0:
                self._batches = self.order.batches()
            (rate,) = self._rates[step if self.recipe.epochs is None else epoch]
            found.append((next(self._batches), rate))
        return found

    def record(self, losses: Tensor, seconds: float) -> bool:
        """Take down the losses of steps that are done, and return whether an epoch ended with the last of them."""
        for part in losses:
            self._losses.append(part)
            self.seconds += seconds / len(losses)
            self.step += 1
            if self.step % self.order.per_epoch == 0 or self.step == self.total:
                self._finish_epoch()
        return not self._losses

    def _finish_epoch(self) -> None:
        record = epoch_record(len(self.history) + 1, self.step, self._losses, self.recipe)
        self.history.append(record | {"seconds": self.seconds})
        self._losses, self.seconds = [], 0.0


class Team:
    """Networks of one form, stacked along a new first axis, or a single one as it is.

    `load` prepares the next steps of all of them and `run_tick` takes one; `capture` records the step as a CUDA graph
    first; `give_back` writes weights and buffers into the networks; `restart` lets others begin by the same recording.
    """

    def __init__(self, students: Sequence[Student], store: Store, recipe: Recipe, loss: Loss, ticks: int):
        self.students, self.recipe, self.loss = list(students), recipe, loss
        self.model, self.single = students[0].model, len(students) == 1
        self.device, self.store = device_of(self.model), store
        self.stream: Any = None
        self.graphs: dict[int, Any] = {}
        weights = [dict(student.model.named_parameters()) for student in students]
        buffers = [dict(student.model.named_buffers()) for student in students]
        trained = [name for name, weight in weights[0].items() if weight.requires_grad]
        self.weights = {name: self._joined([own[name] for own in weights], True) for name in trained}
        fixed = [{name: own[name] for name in own if name not in trained} for own in weights]
        everything = [own | rest for own, rest in zip(fixed, buffers, strict=True)]
        self.others = {name: self._joined([own[name] for own in everything], False) for name in everything[0]}
        self.memory = _memory(recipe, list(self.weights.values()), len(students))
        self._prepare_tables(ticks)

    def _joined(self, parts: list[Tensor], trained: bool) -> Tensor:
        if self.single:
            return parts[0]
        return torch.stack([part.detach() for part in parts]).requires_grad_(trained)

    def _prepare_tables(self, ticks: int) -> None:
        count, size, device, self.ticks = len(self.students), self.recipe.batch, self.device, ticks
        self.tick = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.zeros(ticks, count, size, dtype=torch.int64, device=device)
        self.moves = torch.zeros(ticks, 2, count, size, dtype=torch.int64, device=device) if self.recipe.shift else None
        self.flips = torch.zeros(ticks, count, size, dtype=torch.bool, device=device) if self.recipe.flip else None
        self.rates = torch.zeros(ticks, count, dtype=torch.float64, device=device)
        self.active = torch.ones(ticks, count, dtype=torch.bool, device=device)
        self.losses = torch.zeros(ticks, count, dtype=dtype_of(self.model) or torch.float32, device=device)
        self.sizes: list[int] = []
        self.ragged = _are_ragged(self.students)

    @property
    def batch_sizes(self) -> list[int]:
        """The sizes that batches have: that of the recipe, and where the last of an epoch is smaller, that."""
        size, order = self.recipe.batch, self.students[0].order
        if self.recipe.drop_last or self.recipe.order == "drawn":
            return [size]
        whole, rest = divmod(order.count, size)
        return [size] * bool(whole) + [rest] * bool(rest)

    def load(self, ticks: int) -> None:
        """Fill the tables with the next steps of all networks; one that has none left is not active."""
        taken = [student.take(ticks) for student in self.students]
        longest = max(len(part) for part in taken)
        self.sizes = [max(len(part[k][0].rows) for part in taken if k < len(part)) for k in range(longest)]
        for name in ("rows", "moves", "flips"):
            if getattr(self, name) is not None:
                self._fill(name, taken)
        self._fill_rates(taken)
        self.tick.zero_()

    def _fill(self, name: str, taken: list[list[tuple[BatchIndices, float]]]) -> None:
        """Write the rows, moves or flips of all picks to their table, by one copy to its device."""
        table = getattr(self, name)
        found = torch.zeros((len(self.sizes), *table.shape[1:]), dtype=table.dtype)
        for number, own in enumerate(taken):
            tick = 0
            for size, alike in groupby([indices for indices, _ in own], lambda indices: len(indices.rows)):
                joined = torch.stack([getattr(indices, name) for indices in alike])
                found[tick : tick + len(joined), ..., number, :size] = joined
                tick += len(joined)
        table[: len(found)] = found.to(self.device)

    def _fill_rates(self, taken: list[list[tuple[BatchIndices, float]]]) -> None:
        found = [[own[tick][1] if tick < len(own) else -1.0 for own in taken] for tick in range(len(self.sizes))]
        rates = torch.tensor(found, dtype=torch.float64).reshape(len(found), len(taken)).to(self.device)
        self.rates[: len(rates)], self.active[: len(rates)] = rates, rates >= 0

    def run_tick(self, tick: int) -> None:
        """Take one step of all networks, by its graph where there is one."""
        size = self.sizes[tick]
        if size in self.graphs:
            self.graphs[size].replay()
        else:
            self.step(size)

    def step(self, size: int) -> None:
        """Take the step that the counter points at, with batches of `size`."""
        rows = self._row(self.rows)[:, :size] + self.store.starts
        indices = BatchIndices(rows.flatten(), *self._augmentation(size))
        inputs, labels = self.store.batch(indices)
        shape = () if self.single else (len(self.students), size)
        inputs, labels = (part if self.single else part.unflatten(0, shape) for part in (inputs, labels))
        before = [part.detach().clone() for part in self._state] if self.ragged else []
        with autocasting(self.device, self.recipe.dtype(self.device)), torch.enable_grad():
            losses = self._losses_of(inputs, labels)
        weights = list(self.weights.values())
        found = torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        used = [number for number, gradient in enumerate(found) if gradient is not None]
        rate = self._row(self.rates)
        with torch.no_grad():
            gradients = _clipped([found[number] for number in used], self.recipe.clip, self.single)
            _update(self.recipe, [weights[number] for number in used], gradients, self.memory, used, rate, self.single)
            self._undo_idle(before)
            self.losses.index_copy_(0, self.tick, losses.detach().reshape(1, -1).to(self.losses.dtype))
            self.tick.add_(1)

    def _losses_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.single:
            return self.loss(outputs_of(self.model, inputs), labels)

        def loss_of(weights: Mapping[str, Tensor], others: Mapping[str, Tensor], one: Tensor, truth: Tensor) -> Tensor:
            return self.loss(called_with(self.model, {**weights, **others}, one), truth)

        return torch.vmap(loss_of)(self.weights, self.others, inputs, labels)

    def _row(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.tick)[0]

    def _augmentation(self, size: int) -> tuple[Tensor | None, Tensor | None]:
        moves = None if self.moves is None else self._row(self.moves)[..., :size].flatten(1)
        return moves, None if self.flips is None else self._row(self.flips)[:, :size].flatten()

    @property
    def _state(self) -> list[Tensor]:
        return [*self.weights.values(), *self.others.values(), *self.memory]

    def _undo_idle(self, before: list[Tensor]) -> None:
        """Undo the step for networks that have no steps left."""
        active = self._row(self.active) if before else None
        for part, old in zip(self._state, before, strict=False):
            part.copy_(torch.where(_along(active, part), part, old))  # type: ignore[arg-type]

    def rehearse(self) -> None:
        """Run the step once with batches of each size, on a separate stream on a GPU, and restore everything."""
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.own_stream:
            self._rehearse(WARM_UP if on_gpu else 1)
        if self.stream is not None:
            self.stream.synchronize()

    def _rehearse(self, steps: int) -> None:
        first = [student.order.state for student in self.students]
        kept = [part.detach().clone() for part in self._state]
        try:
            self.load(1)
            for size in self.batch_sizes * steps:
                self.tick.zero_()
                self.step(size)
        finally:
            with torch.no_grad():
                for part, old in zip(self._state, kept, strict=True):
                    part.copy_(old)
            for student, state in zip(self.students, first, strict=True):
                student.order.load(state)

    @property
    def own_stream(self) -> Any:
        """A context in which work runs on the team's own stream, where it has one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def capture(self) -> None:
        """Record the step as a CUDA graph for each size of batch; none is kept if that fails."""
        found, generator = {}, torch.cuda.default_generators[self.tick.device.index]
        spare = generator.clone_state()
        try:
            for size in self.batch_sizes:
                found[size] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(found[size], stream=self.stream):
                    self.step(size)
        except Exception:
            generator.graphsafe_set_state(spare)  # else torch takes it for still recording, and draws no more
            raise
        self.graphs = found

    def restart(self, students: Sequence[Student], states: Sequence[Mapping[str, Tensor]]) -> bool:
        """Let as many others of the same form begin from given weights; False where their data do not fit in."""
        if (_are_ragged(students) and not self.ragged) or len(students) != len(self.students):
            return False
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), self.own_stream:
            if not self.store.refill(students):
                return False
            for name, joined in (*self.weights.items(), *self.others.items()):
                torch.stack([state[name] for state in states], out=joined.detach())
            torch._foreach_zero_(self.memory)
            self.students = list(students)
        return True

    @torch.no_grad()
    def states(self) -> tuple[list[dict[str, Tensor]], list[bool]]:
        """Return copies of all weights and buffers of each network, and whether they are finite."""
        joined = {name: one.clone() for name, one in (*self.weights.items(), *self.others.items())}
        parts = {name: one.unbind() for name, one in joined.items()}
        fine = [one.isfinite().flatten(1).all(1) for one in joined.values() if one.is_floating_point()]
        found = [{name: own[number] for name, own in parts.items()} for number in range(len(self.students))]
        return found, torch.stack(fine).all(0).tolist()

    def give_back(self) -> None:
        """Write weights and buffers into the networks; a single one has them already."""
        if self.single:
            return
        with torch.no_grad():
            for number, student in enumerate(self.students):
                for name, own in [*student.model.named_parameters(), *student.model.named_buffers()]:
                    joined = self.weights.get(name, self.others.get(name))
                    assert joined is not None
                    own.copy_(joined[number])


class Store:
    """The examples of all networks in one place: inputs, with a margin where they are moved, and labels."""

    def __init__(self, students: Sequence[Student]):
        model, self.recipe = students[0].model, students[0].recipe
        self.device, self.dtype = device_of(model), dtype_of(model)
        self.parts, starts = _laid_out(students)
        self.starts = starts.to(self.device)
        self.inputs, self.labels = self._joined(self.parts)

    def _joined(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        joined = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]
        inputs, labels = (part.to(self.device, self.dtype if part.is_floating_point() else None) for part in joined)
        return with_margin(inputs, self.recipe.shift), labels

    def refill(self, students: Sequence[Student]) -> bool:
        """Hold the examples of others in the same memory; False where there is no room for them."""
        parts, starts = _laid_out(students)
        if [list(map(id, one)) for one in parts] != [list(map(id, one)) for one in self.parts]:
            inputs, labels = self._joined(parts)
            if len(self.parts) < 2 or len(labels) > len(self.labels):  # a single part is the caller's own memory
                return False
            self.inputs[: len(inputs)], self.labels[: len(labels)], self.parts = inputs, labels, parts
        self.starts.copy_(starts)
        return True

    def batch(self, indices: BatchIndices) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of the picked examples."""
        return augmented(self.inputs, indices, self.recipe), self.labels[indices.rows]


def _laid_out(students: Sequence[Student]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the data of networks, each once, and where each network's own begin, as a column."""
    places, parts, end = dict[tuple[int, ...], int](), list[tuple[Tensor, Tensor]](), 0
    keys = [tuple(map(id, student.order.arrays)) for student in students]
    for key, student in zip(keys, students, strict=True):
        if key not in places:
            places[key], end = end, end + student.order.count
            parts.append(student.order.arrays)
    return parts, torch.tensor([places[key] for key in keys])[:, None]


def _are_ragged(students: Sequence[Student]) -> bool:
    """Return whether some networks take other numbers of steps than others."""
    return len({(student.total, student.order.per_epoch) for student in students}) > 1


def _memory(recipe: Recipe, weights: list[Tensor], count: int) -> list[Tensor]:
    """Return what an optimizer remembers: one or two tensors for each weight, and Adam's count of steps."""
    if recipe.optimizer == "sgd":
        return [torch.zeros_like(weight, requires_grad=False) for weight in weights if recipe.momentum]
    twice = [torch.zeros_like(weight, requires_grad=False) for _ in range(2) for weight in weights]
    return [*twice, torch.zeros(count, dtype=torch.float64, device=weights[0].device)]


def _update(
    recipe: Recipe, weights: list[Tensor], gradients: list[Tensor], memory: list[Tensor], used: list[int],
    rate: Tensor, single: bool,
) -> None:  # fmt: skip
    """Change weights in place as torch's optimizers do, each network of a stack at its own rate."""
    if recipe.weight_decay and recipe.optimizer == "adamw":
        torch._foreach_copy_(weights, _scaled(weights, 1 - rate * recipe.weight_decay, single))
    elif recipe.weight_decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=recipe.weight_decay))
    if recipe.optimizer == "sgd":
        steps = _scaled(_sgd_steps(recipe, gradients, memory, used), rate, single)
    else:
        steps = _adam_steps(gradients, memory, used, rate, single)
    torch._foreach_sub_(weights, steps)


def _sgd_steps(recipe: Recipe, gradients: list[Tensor], memory: list[Tensor], used: list[int]) -> list[Tensor]:
    if not recipe.momentum:
        return gradients
    moving = [memory[number] for number in used]
    torch._foreach_mul_(moving, recipe.momentum)
    torch._foreach_add_(moving, gradients)
    return list(torch._foreach_add(gradients, moving, alpha=recipe.momentum)) if recipe.nesterov else moving


def _adam_steps(
    gradients: list[Tensor], memory: list[Tensor], used: list[int], rate: Tensor, single: bool
) -> list[Tensor]:
    every, count = len(memory) // 2, memory[-1]
    means, squares = [memory[number] for number in used], [memory[every + number] for number in used]
    count.add_(1)
    torch._foreach_lerp_(means, gradients, 1 - BETAS[0])
    torch._foreach_mul_(squares, BETAS[1])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - BETAS[1])
    roots = _scaled(list(torch._foreach_sqrt(squares)), (1 - BETAS[1] ** count).rsqrt(), single)
    torch._foreach_add_(roots, EPS)
    return _scaled(list(torch._foreach_div(means, roots)), rate / (1 - BETAS[0] ** count), single)


def _clipped(gradients: list[Tensor], limit: float | None, single: bool) -> list[Tensor]:
    """Return gradients whose norm over all weights, of each network by itself, is at most `limit`."""
    if limit is None:
        return gradients
    squares = [one.reshape(1 if single else len(one), -1).square().sum(1) for one in gradients]
    norm = torch.stack(squares).sum(0).sqrt()
    return _scaled(gradients, (limit / (norm + 1e-6)).clamp(max=1), single)


def _scaled(tensors: list[Tensor], values: Tensor, single: bool) -> list[Tensor]:
    """Return tensors times a value for each network, in their own precision."""
    if single and len({one.dtype for one in tensors}) == 1:
        return list(torch._foreach_mul(tensors, values.reshape(()).to(tensors[0].dtype)))  # few kernels for all
    return [one * (values.reshape(()) if single else _along(values, one)).to(one.dtype) for one in tensors]


def _along(values: Tensor, tensor: Tensor) -> Tensor:
    """Return a value for each network of a stack, shaped to broadcast with a stacked tensor."""
    return values.reshape(-1, *[1] * (tensor.ndim - 1))
