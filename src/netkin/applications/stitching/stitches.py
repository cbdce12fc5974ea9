"""`Stitch`: two models joined, and how that came to be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from netkin import __version__
from netkin.applications.stitching.evaluating import Evaluation, evaluated
from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.matching import LinearMap
from netkin.applications.stitching.transformations import Transformation
from netkin.errors import NoValue
from netkin.results.records import now


@dataclass(frozen=True)
class Stitch:
    """A stitch of two models: the transformation, the network it makes, and how it came to be.

    `method` is how the transformation was found, from so many `examples`. `network` is an ordinary module that holds
    both models themselves, not copies. Of a training on the task loss `history` has a record every so many steps, and
    `training` says how it ended.
    """

    network: Stitched
    method: str
    examples: int
    names: tuple[str, str] = ("a", "b")
    seed: int = 0
    evaluation: Evaluation | None = None
    history: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    training: Mapping[str, Any] | None = field(default=None, repr=False)
    version: str = __version__
    created: str = field(default_factory=now)

    @property
    def transformation(self) -> Transformation:
        """The map from the first model's layer to the second's, an ordinary module."""
        return self.network.transformation

    @property
    def layers(self) -> tuple[str, str]:
        """The layer of the first model and that of the second."""
        return self.network.layer_a, self.network.layer_b

    @property
    def resize(self) -> str | None:
        """How maps were brought to the other size; None where that was not needed."""
        return self.transformation.meeting.resize

    @property
    def how(self) -> str:
        """How the models were cut, and what is wasted, in words."""
        return self.network.how

    @property
    def map(self) -> LinearMap:
        """The map of channels: `weight` p × q, `bias` of length q."""
        return self.transformation.as_map()

    @property
    def relative_accuracy(self) -> float:
        """The accuracy of the stitched network on the `test` data, as a share of the second model's."""
        value = None if self.evaluation is None else self.evaluation.relative_accuracy
        if value is None:
            raise NoValue("there is no relative accuracy without labelled test data; pass `test=` or call `evaluate`.")
        return value

    def evaluate(self, data: Any, *, examples: int | None = None) -> Evaluation:
        """Return what the stitched network can do on `data`: batches ``(inputs, labels)``, or inputs alone."""
        return evaluated(self.network, data, examples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the transformation and how it came to be to one file; the models are not in it."""
        import_module("netkin.applications.stitching.saving").save_stitch(self, path)

    def plot(self, path: str | os.PathLike[str] | None = None, ax: Any = None) -> Any:
        """Return a figure of the matrix, or draw it into `ax`; write it where a `path` is given."""
        title = f"{self.method}: {' → '.join(self._ends)}"
        matrices = import_module("netkin.reporting.matrices")
        return matrices.plot_matrix(self.map.weight.cpu().numpy(), self._ends, title, path, ax)

    @property
    def _ends(self) -> tuple[str, str]:
        ends = zip(self.names, self.layers, strict=True)
        first, second = (f"{name}/{layer}" if layer else name for name, layer in ends)
        return first, second

    def __str__(self) -> str:
        meeting = self.transformation.meeting
        heading = f"{' → '.join(self._ends)} by {self.method}, from {self.examples:,} examples"
        judged = "" if self.evaluation is None else str(self.evaluation)
        return "\n".join(filter(None, [heading, f"{meeting.a} → {meeting.b}", self.how, judged]))
