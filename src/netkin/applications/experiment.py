"""`Experiment`: models, data, seed, device, a place to save and progress, declared once for all applications.

An application takes those options that it needs (`takes_options(without=..., declared=DECLARED)`) and adds its idea:
what it asks of the models, and how it reads the answer. It runs borrowed models while they are lent (`lending`), and
keeps what is finished in a job (`job`). This module knows no application.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import nn

from netkin.comparing.plan import Plan
from netkin.comparing.sides import on_device
from netkin.comparing.spec import declarations, option, run_option
from netkin.errors import InvalidValue, require_at_least
from netkin.identity import COMPARE, forms_by_name, state_noted, weights_digest
from netkin.jobs import Identity, Job, require_output
from netkin.progress import ProgressOption, showing
from netkin.representations.inputs import Forward, Transform
from netkin.representations.layers import require_weights
from netkin.settings import random_states_kept
from netkin.sources import load_data, load_model
from netkin.sources.batches import OwnBatches, sample
from netkin.sources.datasets import is_to_load
from netkin.training.work_plan import Work, WorkPlan


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Models and data, how a call runs them, and where it keeps what is finished.

    A result that may not be written is refused when the experiment is made, before any work.

    Args:
        models: models, or their names as `nk.load_model` takes them, by the names that results call them.
        data: a loader, an iterable of batches, or the name of data as `nk.load_data` takes it.

    Example:
        >>> experiment = Experiment(models={"model": (model := nn.Linear(2, 2))}, data=[torch.ones(3, 2)])
        >>> with experiment.lending(model), experiment.job("example", lambda: experiment.identity) as job:
        ...     part = job.part("sum", lambda: {"sum": float(sum(batch.sum() for batch in experiment.data))})
        >>> part.values
        {'sum': 6.0}
    """

    models: Mapping[str, nn.Module | str]
    data: Any = None
    test: Any = option(None, "test data, in the same form as `data`.")
    examples: int | None = option(
        None, "how many examples to read: of data by name a sample drawn by `seed`, else the first."
    )
    transform: Transform | None = option(None, "a function of the inputs.")
    forward: Forward | None = option(None, "a function ``forward(model, batch)`` that runs a model.")
    seed: int = option(0, "seed for all that is drawn at random.")
    device: torch.device | str | None = run_option("device")
    save: str | os.PathLike[str] | None = run_option("save")
    overwrite: bool = run_option("overwrite")
    partial: bool = run_option("partial")
    progress: ProgressOption = run_option("progress")

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidValue("`models` holds no model; give at least one.", argument="models")
        if self.examples is not None:
            require_at_least(1, examples=self.examples)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidValue(f"`seed` is a whole number; got {self.seed!r}.", argument="seed", value=self.seed)
        require_output(self.save, overwrite=self.overwrite)

    @property
    def given_models(self) -> dict[str, nn.Module]:
        """The models that were given as such, not by name."""
        return {name: model for name, model in self.models.items() if isinstance(model, nn.Module)}

    @property
    def identity(self) -> dict[str, Any]:
        """What finished parts depend on of the models: their weights, and what else decides what they compute."""
        return {"weights": self.weights, "architecture": forms_by_name(self.given_models)}

    @cached_property
    def weights(self) -> dict[str, str]:
        """The digests of the weights of the models that were given as such, taken once."""
        return {name: weights_digest(model) for name, model in self.given_models.items()}

    @contextmanager
    def lending(self, *models: nn.Module, data: tuple[Any, ...] = ()) -> Iterator[None]:
        """Lend models to the experiment's device while the `with` lasts.

        Afterwards they are where they were, and random generators draw as if nothing had been drawn; so do loaders, of
        the experiment and those in `data`. The experiment's progress is that of all calls inside.
        """
        lent = dict.fromkeys(models)
        with ExitStack() as stack:
            stack.enter_context(showing(self.progress))
            for model in lent:
                stack.enter_context(on_device(model, self.device))
            stack.enter_context(random_states_kept(*lent, data=[self.data, self.test, *data]))
            yield

    @contextmanager
    def job(self, kind: str, identity: Callable[[], Identity], call: str = "") -> Iterator[Job]:
        """Open the job that keeps finished parts beside the place to save; without a place they stay in memory.

        Args:
            kind: the kind of work in one word.
            identity: returns what all parts depend on, as named fields; it is called only where there is a place. What
                running changes in models that are named in its field "architecture" is noted there.
            call: the call or the command that does the work.
        """
        fields = {} if self.save is None else identity()
        job = Job.beside(self.save, kind, fields, call=call, overwrite=self.overwrite, compare=COMPARE)
        with job, state_noted(job, self.given_models):
            yield job

    def load_model(self, name: str) -> nn.Module:
        """Return a model, which is loaded here if it was given by name; each without weights gets random ones."""
        model = self.models[name]
        if isinstance(model, str):
            model = load_model(model, seed=list(self.models).index(name))
        require_weights(model)
        return model

    def load_data(self, name: str) -> Any:
        """Return the data for a model; data by name are processed as the model's own folder says."""
        if not is_to_load(self.data, [self.models[name]]):
            return self.data
        return sample(load_data(self.data, models=[self.models[name]]), self.examples, seed=self.seed)

    def load_common_data(self) -> Any:
        """Return the data that all models are fed."""
        models = list(self.models.values())
        data = load_data(self.data, models=models) if is_to_load(self.data, models) else self.data
        if isinstance(data, OwnBatches):
            raise InvalidValue(
                "the models have different tokenizers, so that a text is other tokens to each; choose one by "
                "`text,tokenizer=DIR:FILE`, or give tokens.",
                argument="data",
            )
        return sample(data, self.examples, seed=self.seed) if data is not self.data else data


class ExperimentOptions(TypedDict, total=False):
    """The keywords of `Experiment`, for type checkers; a test holds it equal to them."""

    test: Any
    examples: int | None
    transform: Transform | None
    forward: Forward | None
    seed: int
    device: torch.device | str | None
    save: str | os.PathLike[str] | None
    overwrite: bool
    partial: bool
    progress: ProgressOption


DECLARED = declarations(Experiment)


def plan_of_pass(what: str, plan: Plan) -> WorkPlan:
    """Return the plan of one pass of a comparison, in the words of all applications."""
    return WorkPlan((Work(what, plan.examples),), {"statistics": plan.bytes}, refused=plan.refused)
