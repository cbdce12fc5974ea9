"""`class_sensitivity`: in which layers a class is represented, as the correlation of a layer with the class's logit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.comparing.compare import compare_runners
from netkin.comparing.subjects import Keep, ModelRunner, Runner
from netkin.errors import ShapeError, UnknownName, ValueFault, also_called, did_you_mean
from netkin.progress import ProgressOption, showing
from netkin.representations import rows_of
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import Forward, Transform, call, labels_of
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparison
from netkin.results.records import distinct
from netkin.sources.names import by_name


@also_called(measures="measure")
@by_name(models="model", data="data")
def class_sensitivity(
    model: nn.Module,
    data: Any,
    classes: int | str | Sequence[int | str] | None = None,
    measures: Any = "cca_mean",
    *,
    names: Sequence[str] | None = None,
    layers: Spec = None,
    examples: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    memory: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transform: Transform | None = None,
    forward: Forward | None = None,
    name: str = "layers",
    progress: ProgressOption = None,
) -> Comparison:
    """Return how closely every layer follows the logit of each class: a comparison of layers with classes.

    The logits are the model's own output, one column a class. `classes` are numbers of columns, or `names` of them; all
    of them if none are given. Where the batches carry labels, a class that is requested and occurs in none is refused.
    `measures` is one or several of those that `nk.compare` takes, as are the options. With `cca_mean`, the default, a
    value is the largest correlation that any weighted sum of the layer's units has with the logit.

    Conv layers are pooled by default. That is also what DFT-CCA gives: a logit is the same at every place, so it has
    the zero frequency alone, and there a map's spectrum is its channel means, up to a factor that does not affect CCA.

    Args:
        model: a classifier.
        data: a loader, an iterable of batches or one array of inputs.
        classes: which classes, by number or name; all of them by default.
        measures: one measure or several.
        names: the classes' names, in the order of the logits.
        layers: which layers (see `nk.layers`).
        examples: the number of examples after which the pass ends.
        shape: what one example is (see `nk.shapes`).
        memory: the most bytes that statistics may take.
        seed: seed of the sample of rows that some measures read.
        device: where the model runs.
        transform: a function of the inputs.
        forward: a function ``forward(model, batch)`` that runs the model.
        name: what the result calls the model.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = class_sensitivity(model, torch.randn(200, 4), names=["cat", "dog", "car"])
        >>> found.layers_b, round(found["2", "dog"], 6)
        (('cat', 'dog', 'car'), 1.0)
    """
    logits = Logits(classes, names, forward)
    rows = ModelRunner(name, model, layers, shape, logits.run, transform, device)
    with showing(progress):
        comparison = compare_runners(rows, logits, data, measures, examples=examples, memory=memory, seed=seed)
    logits.refuse_absent()
    tables = {name: replace(table, axes=("layer", "class")) for name, table in comparison.tables.items()}
    return replace(comparison, tables=tables)


class Logits(Runner):
    """The columns of a model's output, each a "layer"; `run` is the forward that lets it see them."""

    def __init__(self, classes: Any, names: Sequence[str] | None, forward: Forward | None):
        self.name, self.kind, self.shapes = "classes", "logits", {}
        self._asked, self._names, self._forward = _listed(classes), names, forward
        self._columns: dict[str, int] = {}
        self._seen: Counter[int] = Counter()
        self._output: Any = None
        self._keep: Keep = lambda layer, rows: rows

    @property
    def origin(self) -> dict[str, str]:
        return {"model": self.kind, "forward": getattr(self._forward, "__qualname__", "none")}

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Run the model as it would be, and keep what it gives until the batch is done."""
        self._output = call(model, batch, self._forward)
        return self._output

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        self._keep = keep
        yield

    def rows(self, batch: Any) -> dict[str, Any]:
        output, self._output = _matrix(main_tensor(self._output, "")), None
        self._columns = self._columns or _columns(self._asked, self._names, output.shape[1])
        self.shapes = dict.fromkeys(self._columns, "matrix")
        self._seen.update(_labels(batch))
        return {name: self._keep(name, output[:, [column]]) for name, column in self._columns.items()}

    def refuse_absent(self) -> None:
        """Refuse a class that was requested and that the labels, if there were any, never named."""
        absent = [name for name, column in self._columns.items() if self._asked and not self._seen[column]]
        if self._seen and absent:
            raise ValueFault(
                f"class {absent[0]!r} does not occur among the {self._seen.total():,} labels of the data; "
                "pass data that hold it, or leave it out."
            )


def _listed(classes: Any) -> list[Any]:
    """Return the classes requested; an empty list stands for all."""
    if classes is None:
        return []
    asked = list(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else [classes]
    if not asked:
        raise ValueFault("`classes` is empty; leave it out for all classes.")
    return asked


def _columns(asked: Sequence[Any], names: Sequence[str] | None, count: int) -> dict[str, int]:
    """Return the columns of the classes requested, by name."""
    if names is not None and len(names) != count:
        raise ShapeError(f"`names` has {len(names):,} names and the model {count:,} outputs; give one for each.")
    known = distinct(map(str, range(count) if names is None else names), "classes")
    return {known[column]: column for column in (_column(one, known) for one in asked or range(count))}


def _column(one: Any, known: Sequence[str]) -> int:
    if isinstance(one, str):
        if one not in known:
            some = f"{', '.join(known[:3])}{', ...' if len(known) > 3 else ''}"
            hint = did_you_mean(one, known) or f"; the model's outputs are {some}, or what `names=` calls them."
            raise UnknownName(f"no class named {one!r}{hint}")
        return known.index(one)
    if not isinstance(one, Integral):
        raise ValueFault(f"a class is the number of an output or its name; got {one!r}.")
    column = int(one)
    if not 0 <= column < len(known):
        raise UnknownName(f"no class {column}: the model has {len(known):,} outputs, 0 to {len(known) - 1:,}.")
    return column


def _matrix(output: Tensor) -> Tensor:
    if output.ndim not in (1, 2):
        raise ShapeError(
            f"the model's output has shape {tuple(output.shape)}, and class sensitivity needs one row of logits for "
            "each example; pass a `forward` that returns them."
        )
    return rows_of(output)[0]


def _labels(batch: Any) -> list[int]:
    """Return the labels that come with a batch, where they are whole numbers."""
    found = labels_of(batch)
    if not isinstance(found, (Tensor, np.ndarray)):
        return []
    labels = torch.as_tensor(found)
    return labels.tolist() if labels.ndim == 1 and not labels.is_floating_point() else []
