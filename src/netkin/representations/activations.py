"""Activations: layer outputs over data, as matrices with one row per example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import require_finite
from netkin.errors import ForwardError, InvalidValue, NetkinError, ShapeError
from netkin.progress import ProgressOption, reported
from netkin.representations.hooks import (
    Repeats,
    apart,
    copied,
    inference_mode_of,
    keeping,
    main_tensor,
    unrecordable,
    watching,
)
from netkin.representations.inputs import (
    Forward,
    Transform,
    attention_mask,
    batches_of,
    device_of,
    dtype_of,
    length_if_known,
    repeated,
    require_finite_inputs,
    run_unwrapped,
    to_model,
    transformed,
)
from netkin.representations.layers import Spec, choose, layer_label, named_outright, refuse_lazy, split_call, unwrapped
from netkin.representations.shapes import (
    Shape,
    TokenMask,
    UnclearAxis,
    adjoint_rows,
    axes_of_length,
    example_axis,
    is_custom,
    is_plain,
    refuse_strange_layers,
    rows_of,
    shape_for,
    shape_name,
    token_mask,
    without_examples,
)
from netkin.settings import exact_products, model_lock, random_states, random_states_kept
from netkin.sources.names import by_name


@by_name(models="model", data="data")
def activations(
    model: nn.Module,
    layers: Spec = None,
    data: Any = None,
    *,
    shape: Shape | Mapping[str, Shape] = None,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    device: torch.device | str | None = None,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> dict[str, Tensor]:
    """Return what the chosen layers give for all of `data`, one matrix per layer, on the CPU or on `device`.

    `data` is a loader, any iterable of batches, or one array of inputs. A default layer that does not run, that
    gives no floating tensor (but None, a number, or nothing), or whose output does not hold the examples (a table of
    positions) is left out; one chosen by name is refused. `Reader.left_out` holds the reasons.

    Args:
        model: the model, which is left as it was.
        layers: names, globs, module types or a list of those; None for the default layers.
        data: a loader, an iterable of batches, or one array of inputs.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        examples: how many examples to read; None for all.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        device: where the matrices are put; None for the CPU.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32, as torch does in convolutions
            unless set otherwise.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> {name: tuple(rows.shape) for name, rows in activations(model, ["0", "2"], torch.ones(5, 4)).items()}
        {'0': (5, 8), '2': (5, 2)}
    """
    kept: dict[str, list[Tensor]] = {}
    refuse_strange_layers(shape, model)
    read = Reader(model, layers, shape=shape, forward=forward, transform=transform)
    with inference_mode_of(model, exact=exact_model):
        for batch in reported(batches_of(data, examples), "reading", "batches", progress):
            for name, rows in read(batch).items():
                kept.setdefault(name, []).append(rows.to(device or "cpu"))
    return {name: joined(name, batches) for name, batches in kept.items()}


class Reader:
    """Runs a model batch by batch and returns each layer's rows, made on the model's device while it runs.

    It looks only while it runs the model itself, so that two readers may share one model. `layers` are the chosen
    layers, `shapes` holds what one example is for each one that has run, `batches` counts the batches read. Of the
    latest rows `spaces` holds the size of the map whose places they are, and `valid` which tokens they are, examples ×
    tokens, where a mask leaves some out. `left_out` holds, for each default layer that gives no rows, the reason as a
    sentence without its full stop; `repeats` notices those that a glob stands for and that give what another one gave.

    `axes` says which axis of a layer's output counts the examples, or None; `learning_passes` counts the extra runs, of
    few examples, that it took to learn this. A reader that is given the `axes` of another one for the model needs none.

    With `taps` the model builds a graph, and `gradients` holds for each of their targets the gradients of the latest
    batch at the layers' outputs, in rows like those of the layers.

    Args:
        model: the model, in the mode in which it is to run.
        layers: which layers, as `choose` reads it; None for the default ones.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        forward: runs the model on a batch; None to call it with the batch's inputs.
        transform: changes the inputs before they are given to this model.
        keep: what to keep of (layer, rows) while the model runs; None for the rows. In the first batch it may be called
            for a layer, and again once the axes are learnt; what it returned last is kept.
        axes: the axes of the examples, as far as another reader has learnt them.
        taps: where and of what gradients are taken, `gradients.Taps`; None for none.
        as_run: whether layers come in the order of running, rather than in that of `layers`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Spec = None,
        *,
        shape: Shape | Mapping[str, Shape] = None,
        forward: Forward | None = None,
        transform: Transform | None = None,
        keep: Callable[[str, Tensor], Any] | None = None,
        axes: Mapping[str, int | None] | None = None,
        taps: Any = None,
        as_run: bool = False,
    ):
        self._root = unwrapped(model)
        refuse_lazy(self._root)
        for one in shape.values() if isinstance(shape, Mapping) else [shape]:
            shape_name(one)
        self.model, self.shape, self.forward, self.transform = model, shape, forward, transform
        layers = layers if layers is None or isinstance(layers, (str, type)) else list(layers)
        self.layers, self.by_default, self._keep = choose(model, layers), layers is None, keep
        self.repeats = Repeats(() if layers is None else set(self.layers) - set(named_outright(layers)))
        self._taps, self.gradients = taps, {}  # type: Any, dict[Any, dict[str, Tensor]]
        self.keeps_output, self.output = False, None  # type: bool, Any  # of the whole model, for the latest batch
        self.shapes: dict[str, str] = {}
        self.spaces: dict[str, tuple[int, ...]] = {}
        self.valid: dict[str, Tensor] = {}
        self.resolutions: dict[str, float] = {}  # the rounding units of the outputs, before halves are raised
        self.batches = self.learning_passes = 0
        self._given_axes = dict(axes or {})
        self.axes = dict(self._given_axes)
        self._few_axes: dict[str, list[int]] | None = None  # those as long as the batch of the extra pass
        self._may_stop = False
        self._mask: TokenMask | None = None
        self._outputs: dict[str, Any] | None = None  # of the forward that this reader runs
        self._few = 0  # examples of the extra pass, while it runs
        self._is_open = False
        self._length: int | None = None
        self._names: list[str] = []
        self.left_out: dict[str, str] = {}
        self._home: Any = None  # the model's device and precision, while the hooks are on it
        self._sorted: list[str] = []
        self._chosen: dict[str, tuple[Shape, bool]] = {}  # the shape of each layer, and whether it is the caller's own
        self.ran: list[str] = []  # what gave rows for the latest batch, in the order of running
        self.as_run = as_run

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return the rows of each layer that ran, by name, for one batch; or what `keep` made of them."""
        given, batch = batch, batch if self.transform is None else transformed(batch, self.transform)
        mask = attention_mask(batch)  # as it came: on the CPU its tokens are counted without waiting for a GPU
        self._mask = None if mask is None else token_mask(copied(mask))
        batch = to_model(self.model, batch, self._home)
        self._length = length_if_known(batch)
        with nullcontext() if self._is_open else self.open():
            begins = self.batches == 0 and not self._given_axes and self._length is not None
            outputs = self._run_first(batch) if begins else self._run(batch)
        ran = [name for name, value in outputs.items() if value is not None]
        if not self.batches or ran != self.ran:  # else all is as in the batch before
            self.ran, self._sorted = ran, self._ordered(ran)
            self._note_idle({*outputs, *self.left_out, *self.repeats.found})
            self._refuse_other_calls(self._sorted)
        rows = {name: outputs[name] for name in (self.ran if self.as_run else self._sorted)}
        if self._keep is None:
            try:
                self._refuse_non_finite(rows)
                for own in self.gradients.values():
                    self._refuse_non_finite(own, "the gradient at ")
            except InvalidValue:
                require_finite_inputs(given, self.transform, self.batches)
                raise
        self.batches += 1
        return rows

    @contextmanager
    def open(self) -> Iterator[None]:
        """Leave the hooks on the model while the `with` lasts, rather than put them on and off with each batch."""
        with model_lock(), watching(self.model, self.layers, self._react):
            self._is_open, self._home = True, (device_of(self.model), dtype_of(self.model))
            try:
                yield
            finally:
                self._is_open, self._home = False, None

    def _react(self, name: str, output: Any) -> Any:
        """Keep what a layer gave, while this reader runs the model, and not another caller."""
        if self._outputs is None:
            return None
        if self._few:
            held = [] if unrecordable(output) else axes_of_length(main_tensor(output, name), self._few)
            self._outputs[name] = held
            return None
        if self.repeats.names and self.repeats(name, output, learning=self.batches == 0):
            return None
        output = output if self._taps is None else self._taps.take(name, output)
        is_dense = isinstance(output, Tensor) and output.layout == torch.strided and not output.is_nested
        if is_dense and output.is_floating_point():  # nearly always
            self._outputs[name] = apart(self._reduced(name, output), output)
        elif (fault := unrecordable(output)) and self._may_leave_out(name):
            self.left_out.setdefault(name, f"{layer_label(name)} {fault}")
        else:
            keeping(self._outputs, self._reduced)(name, output)
        return None if self._taps is None else output

    def _run(self, batch: Any) -> dict[str, Any]:
        """Run the model on a batch and return what is kept of each layer, None or nothing for one that is left out."""
        outputs = self._outputs = {}
        taps = None if self._few else self._taps
        try:
            with nullcontext() if taps is None else taps.open():
                batch = batch if taps is None else taps.without_inference(batch)
                output = run_unwrapped(self._root, batch, self.forward)
                self.output = output if self.keeps_output else None
                if taps is not None:
                    self._keep_gradients(taps, output, batch)
        finally:
            self._outputs = None
        return outputs

    def _keep_gradients(self, taps: Any, output: Any, batch: Any) -> None:
        """Keep the rows of the gradients at the layers of the latest forward."""
        mask = None if self._mask is None else self._mask.tokens
        self.gradients = {
            target: {name: self._gradient_rows(name, one) for name, one in own.items() if name in self.shapes}
            for target, own in taps.pull(output, batch, self.axes, mask).items()
        }

    def _gradient_rows(self, name: str, gradient: Tensor) -> Tensor:
        axis = self.axes.get(name) or 0
        return adjoint_rows(gradient.movedim(axis, 0) if axis else gradient, self.shapes[name], self._mask)

    def _run_first(self, batch: Any) -> dict[str, Any]:
        """Run the model on the first batch, and before that on a few examples if the axes are unclear without."""
        assert self._length is not None
        self._forget()
        if not is_plain(self.model, batch, self._length):
            self._learn_axes(batch)
            return self._run(batch)
        spare, put_back, self._may_stop = copied(batch), random_states(self.model), True
        try:
            return self._run(batch)
        except UnclearAxis:
            put_back()
            self.learning_passes += 1
        finally:
            self._may_stop = False
        self._forget()
        self._learn_axes(spare)
        return self._run(spare)

    def _forget(self) -> None:
        """Forget what was recorded, as if nothing had run."""
        self.axes, self.left_out, self._few_axes = {}, {}, None
        self.repeats.forget()

    def _learn_axes(self, batch: Any) -> None:
        """Run another number of examples than the batch has, and note which axes have that length."""
        self._few = 3 if self._length == 2 else 2
        try:
            with random_states_kept(self.model):
                self._few_axes = self._run(repeated(batch, self._few))
        except Exception:  # a program of fixed size; whatever else is wrong comes up again with the whole batch
            return
        finally:
            self._few = 0
        self.learning_passes += 1

    def _reduced(self, name: str, output: Tensor) -> Any:
        """Return a layer's rows or what is kept of them, or None for a layer left out."""
        if name in self.left_out:
            return None
        output = output if self._taps is None else output.detach()
        if name not in self._chosen:
            shape = shape_for(name, self.shape)
            self._chosen[name] = (shape, is_custom(shape))
        shape, custom = self._chosen[name]
        if not custom and self._length is not None:  # a function of the caller's own may know better
            plain = self.axes.get(name) == 0 and output.shape[:1] == (self._length,)  # nearly always
            axis = 0 if plain else self._axis_of(name, output)
            if axis is None:
                return self._leave_out(name, output)
            output = output.movedim(axis, 0) if axis else output
        # the model itself runs in the precision that its user has set; netkin's shapes take no products
        with exact_products() if custom else nullcontext():
            try:
                rows, self.shapes[name] = rows_of(output, shape, self._mask)
            except NetkinError as fault:
                raise type(fault)(f"{layer_label(name)}: {fault}") from fault
            if name not in self.resolutions:
                self.resolutions[name] = _resolution(output, self.shapes[name], rows)
            self.spaces[name] = tuple(output.shape[2:]) if self.shapes[name] == "positions" else ()
            if self.shapes[name] == "tokens" and self._mask is not None:
                self.valid[name] = self._mask.tokens
            return rows if self._keep is None else self._keep(name, rows)

    def _axis_of(self, name: str, output: Tensor) -> int | None:
        """Return the axis of `output` that counts the examples, or None; stops the forward where that is unclear."""
        assert self._length is not None
        here = axes_of_length(output, self._length)
        if name not in self.axes:
            if self._may_stop and here not in ([], [0]):
                raise UnclearAxis
            self.axes[name] = example_axis(here, None if self._few_axes is None else self._few_axes.get(name))
        return self.axes[name] if self.axes[name] in here else None

    def _leave_out(self, name: str, output: Tensor) -> None:
        """Note why a layer without an axis of the examples gives no rows, or refuse one that is requested."""
        assert self._length is not None
        fact = f"{layer_label(name)} {without_examples(output, self._length, self._few_axes is not None)}"
        if not self._may_leave_out(name):
            raise ShapeError(f"{fact}; pass a function as `shape` that makes rows of it, or choose another layer.")
        self.left_out[name] = fact

    def _may_leave_out(self, name: str) -> bool:
        return self.by_default and (self.batches == 0 or name in self.left_out)

    def _ordered(self, ran: Iterable[str]) -> list[str]:
        """Return the names of what ran, in the order of the chosen layers and of their calls."""
        places = {name: place for place, name in enumerate(self.layers)}
        calls = {name: split_call(name) for name in ran}
        return sorted(calls, key=lambda name: (places.get(name, places.get(calls[name][0], 0)), calls[name][1] or 0))

    def _note_idle(self, ran: Iterable[str]) -> None:
        """Note which default layers did not run in the first batch."""
        stems = {split_call(name)[0] for name in ran}
        for name in self.layers if self.by_default and self.batches == 0 else []:
            if name not in stems:
                self.left_out[name] = f"{layer_label(name)} did not run in batch 0"

    def _refuse_other_calls(self, names: list[str]) -> None:
        absent = [] if self.by_default else [name for name in self.layers if name not in {*names, *self.repeats.found}]
        if absent:
            raise ForwardError(
                f"{layer_label(absent[0])} did not run in batch {self.batches}; choose layers that always run."
            )
        if not names:
            raise ForwardError(
                f"none of the model's {len(self.layers)} default layers gives rows in batch {self.batches}: "
                f"{next(iter(self.left_out.values()), 'none ran')}; name layers that do."
            )
        self._names = self._names or names
        changed = sorted(set(self._names) ^ set(names))
        if changed:
            raise ForwardError(
                f"{layer_label(changed[0])} ran in one of the batches 0 and {self.batches} but not in both; "
                "choose layers, or calls such as 'relu#2', that run in every batch."
            )

    def _refuse_non_finite(self, rows: dict[str, Tensor], what: str = "") -> None:
        # one number from the device for all layers; which layer it was is looked up only when something is wrong
        sums = [matrix.detach().sum().float() for matrix in rows.values()]
        if sums and not torch.isfinite(torch.stack([total.to(sums[0].device) for total in sums])).all():
            for name, matrix in rows.items():
                require_finite(matrix, f"{what}{layer_label(name)} in batch {self.batches}")


def _resolution(output: Tensor, shape: str, rows: Tensor) -> float:
    """Return the rounding unit of rows made of `output`: halves are raised, and means round less than single values."""
    averaged = output.shape[2:].numel() if shape == "pool" else output.shape[1] if shape == "mean" else 1
    return max(torch.finfo(output.dtype).eps / averaged**0.5, torch.finfo(rows.dtype).eps)


def joined(name: str, batches: list[Tensor]) -> Tensor:
    """Return the rows of all batches of a layer, one after the other."""
    widths = sorted({batch.shape[1:].numel() for batch in batches})
    if len({batch.shape[1:] for batch in batches}) > 1:
        raise ShapeError(
            f"{layer_label(name)} has {widths[0]} features in one batch and {widths[-1]} in another; pad all batches "
            "to one length, or choose a shape such as 'mean' or 'pool'."
        )
    return torch.cat(batches)
