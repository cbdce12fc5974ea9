"""The table of a compression: each layer's size before and after, and the accuracy of the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from netkin import __version__
from netkin.errors import require_listed
from netkin.results.packing import LongForm, Result
from netkin.results.quantity import ACCURACY, Quantity
from netkin.results.records import now, optional
from netkin.results.text import aligned


@dataclass(frozen=True)
class CompressedLayer:
    """One layer: how many directions of its input were kept, and what that saved.

    Multiply-adds are those of one example. `variance` is the share of the input's variance that the directions hold.
    `accuracy` is that of the network with this layer and those before it in the table compressed; None without labels.
    """

    layer: str
    kind: str
    width: int
    kept: int
    parameters_before: int
    parameters_after: int
    multiply_adds_before: int
    multiply_adds_after: int
    variance: float
    accuracy: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TakenApart:
    """A module that became two: how wide they are in between, and which of them has a bias."""

    layer: str
    between: int
    first_bias: bool
    second_bias: bool


@dataclass(frozen=True)
class Compression:
    """How a network was compressed: a frozen table with a row for each layer, and how it came to be.

    `replaced` lists all modules that were taken apart, by this compression and by those before it.
    """

    kind: ClassVar[str] = "compressed"
    plot, to_csv, _repr_html_ = Result.plot, Result.to_csv, Result._repr_html_

    layers: tuple[CompressedLayer, ...]
    against: str
    projection: str
    order: str
    examples: int
    parameters_before: int
    parameters_after: int
    accuracy_before: float | None
    accuracy_after: float | None
    replaced: tuple[TakenApart, ...]
    data: str = ""  # what the examples were taken from
    model: str = ""  # the name of the network; files of earlier versions have none
    version: str = __version__
    created: str = field(default_factory=now)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> CompressedLayer:
        """Return the row of a layer."""
        names = [row.layer for row in self.layers]
        require_listed("layer", layer, names)
        return self.layers[names.index(layer)]

    def __iter__(self) -> Iterator[CompressedLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return "\n".join([self._heading(), *aligned([_HEAD, *self.cells()]), self._whole(), *self.notes])

    @property
    def quantity(self) -> Quantity:
        """What the accuracies are."""
        return replace(ACCURACY, convention="on the labels of the test data")

    @property
    def conclusion(self) -> str:
        """What was saved and what it cost, in a sentence."""
        return f"{self._heading()}: {self._whole().partition(': ')[2]}."

    def cells(self) -> list[list[str]]:
        """Return the rows of the table as text: layer, width, parameters, multiply-adds, variance and accuracy."""
        return [_cells(row) for row in self.layers]

    def to_pandas(self) -> Any:
        """Return the table as a data frame, a row for each layer."""
        pandas = optional("pandas")
        columns, rows = self.long_form()
        return pandas.DataFrame(list(rows), columns=columns).set_index("layer")

    def long_form(self) -> LongForm:
        """Return a row for each layer."""
        rows = ((asdict(row) | {"notes": " ".join(row.notes)}).values() for row in self.layers)
        return [column.name for column in fields(CompressedLayer)], map(tuple, rows)

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: what the accuracies are."""
        return {"quantity": self.quantity}

    @property
    def what(self) -> str:
        """How many layers of which network were compressed, as text."""
        return f"{len(self)} layer{'s' if len(self) != 1 else ''}{f' of {self.model}' if self.model else ''}"

    def _heading(self) -> str:
        projection = self.projection.replace("_", " ")
        return f"{self.what} compressed against {self.against} ({projection}, {self.order}, {self.examples:,} examples)"

    def _whole(self) -> str:
        left = self.parameters_after / max(self.parameters_before, 1)
        size = f"{self.parameters_before:,} → {self.parameters_after:,} parameters ({left:.0%})"
        if self.accuracy_before is None or self.accuracy_after is None:
            return f"whole network: {size}"
        return f"whole network: {size}, accuracy {self.accuracy_before:.4f} → {self.accuracy_after:.4f}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the numbers, each sentence after the layers that it is about."""
        said = dict.fromkeys(note for row in self.layers for note in row.notes)
        left_out = [f"left out: {self.provenance['left out']}"] if "left out" in self.provenance else []
        sentences = (f"{', '.join(row.layer for row in self.layers if note in row.notes)}: {note}" for note in said)
        return (*sentences, *left_out, *filter(None, [self.provenance.get("overlap")]))


_HEAD = ["layer", "width", "parameters", "multiply-adds", "variance", "accuracy"]


def _cells(row: CompressedLayer) -> list[str]:
    return [
        row.layer,
        f"{row.width:,} → {row.kept:,}",
        f"{row.parameters_before:,} → {row.parameters_after:,}",
        f"{row.multiply_adds_before:,} → {row.multiply_adds_after:,}",
        f"{row.variance:.3f}",
        "–" if row.accuracy is None else f"{row.accuracy:.4f}",
    ]
