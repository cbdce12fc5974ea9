"""`Experiment`: the models, data, seed, device and progress that every application needs, each option declared once.

An application adds its idea: what it asks of the models, and how it reads the answer. It knows no application.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn

from netkin.comparing.sides import on_device
from netkin.comparing.spec import declarations, option
from netkin.errors import InvalidValue, UnknownName, require_at_least
from netkin.progress import ProgressOption
from netkin.representations.layers import refuse_lazy
from netkin.results.records import distinct
from netkin.settings import random_states_kept
from netkin.sources import load_data, load_model
from netkin.sources.batches import sample


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Models and data, and how a call runs them.

    Args:
        models: models, or their names as `nk.load_model` takes them, by the names that results call them.
        data: a loader, an iterable of batches, or the name of data as `nk.load_data` takes it.
    """

    models: Mapping[str, nn.Module | str]
    data: Any = None
    examples: int | None = option(
        None, "how many examples to read: of data by name a sample drawn by `seed`, else the first."
    )
    seed: int = option(0, "seed for all that is drawn at random.")
    device: torch.device | str | None = option(None, "where the models run; by default where they are.")
    progress: ProgressOption = option(
        None, "None for a bar in a terminal, False for nothing, or a function of (done, total, what)."
    )

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidValue("`models` holds no model; give at least one.", argument="models")
        if self.examples is not None:
            require_at_least(1, examples=self.examples)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidValue(f"`seed` is a whole number; got {self.seed!r}.", argument="seed", value=self.seed)

    @contextmanager
    def lending(self, *models: nn.Module) -> Iterator[None]:
        """Lend models to the experiment's device while the `with` lasts.

        Afterwards they are where they were, and random generators and loaders draw as if nothing had been drawn.
        """
        with ExitStack() as stack:
            for model in dict.fromkeys(models):
                stack.enter_context(on_device(model, self.device))
            stack.enter_context(random_states_kept(*models, data=[self.data]))
            yield

    def load_model(self, name: str) -> nn.Module:
        """Return a model, which is loaded here if it was given by name; each without weights gets random ones."""
        model = self.models[name]
        if isinstance(model, str):
            model = load_model(model, seed=list(self.models).index(name))
        refuse_lazy(model)
        return model

    def load_data(self, name: str) -> Any:
        """Return the data for a model; data by name are processed as the model's own folder says."""
        if not isinstance(self.data, str):
            return self.data
        return sample(load_data(self.data, models=[self.models[name]]), self.examples, seed=self.seed)

    def of_each(self, argument: str, value: Any) -> dict[str, Any]:
        """Return an argument for each model, which is given once for all or in a mapping from their names."""
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.models, value)
        for name in value:
            if name not in self.models:
                sentence = f"`{argument}` names {name!r}, which is none of the models {', '.join(self.models)}."
                raise UnknownName(sentence, argument=argument, value=name)
        return {name: value.get(name) for name in self.models}


class ExperimentOptions(TypedDict, total=False):
    """The keywords of `Experiment`, for type checkers; a test holds it equal to them."""

    examples: int | None
    seed: int
    device: torch.device | str | None
    progress: ProgressOption


DECLARED = declarations(Experiment)


def named_models(models: Any) -> dict[str, nn.Module | str]:
    """Return models by their names: from a mapping, or from a list of names as `nk.load_model` takes them."""
    if isinstance(models, Mapping):
        return dict(models)
    if isinstance(models, (str, nn.Module)):
        kind = type(models).__name__
        sentence = f"`models` are several; got one {kind}. Give a mapping or a list of names."
        raise InvalidValue(sentence, argument="models")
    names = list(models)
    for name in names:
        if not isinstance(name, str):
            kind = type(name).__name__
            sentence = f"a list of `models` holds names; got a {kind}. Give models as a mapping of their names."
            raise InvalidValue(sentence, argument="models")
    return dict(zip(distinct(names, "models"), names, strict=True))
