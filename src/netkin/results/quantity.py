"""What a number is: its name, bounds, direction and unit, what it means and what it cannot see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from netkin.results.records import FrozenRecord, freeze

Parameter = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Quantity(FrozenRecord):
    """What a number is. Measures, transfer scores, scores of stitches and accuracies are quantities; tables carry them.

    `kind` is "similarity" or "distance" by the direction, or "score" for scores of models and stitches; `unit` is empty
    for shares and correlations. `convention` distinguishes the number from others of its name. `means` and
    `cannot_see` are sentences for readers: what a value means, and what it does not detect. `error` says how its
    standard error is found where that is not the jackknife over chunks of examples, or why it has none, and
    `debiased_as` which quantity is the same without the bias of small samples.

    Example:
        >>> Quantity(id="svcca(variance=0.9)", higher_is_closer=True, bounds=(0, 1)).kind
        'similarity'
    """

    id: str
    name: str = ""  # the id without parameters, if none is given
    parameters: Mapping[str, Parameter] = field(default_factory=dict, hash=False)
    kind: str = ""
    higher_is_closer: bool = True
    bounds: tuple[float, float] = (-math.inf, math.inf)
    symmetric: bool = False
    unit: str = ""
    convention: str = ""
    reference: str = ""
    means: str = ""
    cannot_see: str = ""
    error: str = ""
    debiased_as: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze(self, name=self.name or self.id.partition("(")[0])
        freeze(self, kind=self.kind or ("similarity" if self.higher_is_closer else "distance"))

    @property
    def is_score(self) -> bool:
        """Whether it scores models or stitches, and is no similarity of layers."""
        return self.kind == "score"


ACCURACY = Quantity(
    id="accuracy",
    kind="score",
    bounds=(0, 1),
    means="The share of examples that a network predicts right.",
    cannot_see="How sure the predictions are, and which classes are confused.",
)
