"""The networks of the claims: masked at random, trained with a term for the similarity of layers or in a control.

A network is a `Case`. Cases that differ in their arm alone share masks, start and batches, so that they are compared in
pairs by seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from netkin.applications.sparsity import CKASparsityLoss, epsilon_sparsity, sparsify
from netkin.errors import EmptyLayerWarning, InvalidValue, NetkinError
from netkin.measures.kernels import batch_gram, gram_cosines
from netkin.representations import inference_mode_of, recording
from netkin.representations.layers import stages
from netkin.sources.architectures import seeded
from netkin.training import Hook, accuracy, train
from reproductions.claims import Measured, gains
from reproductions.laboratory import Images, Lab

SEEDS = {"cpu": 3, "gpu": 5}  # of what is compared with β = 0 on test images
HELD_OUT = {"cpu": 1_000, "gpu": 5_000}  # training images on which strengths are chosen, the last ones
PROBES = {"cpu": 200, "gpu": 1_000}  # test images, or held-out ones, on which layers are compared
SEARCH = 1_000  # the seed of networks that choose a strength, which no claim reports
STRENGTHS = {  # as many trials for each: β of Table 2; of a mean over pairs β is larger; weight decay
    "stage": (1e-4, 8e-4, 2e-3, 1e-2),
    "augmented": (1e-3, 8e-3, 2e-2, 1e-1),
    "cca": (1e-4, 8e-4, 2e-3, 1e-2),
    "decay": (1e-4, 1e-3, 2e-3, 5e-3),
}
ABSOLUTE, RELATIVE = 1e-2, 0.1  # ε as a size, and in units of a layer's r.m.s.
WORDS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
BY_T = "by the 95% interval of Student's t"
Found = dict[str, Any]  # what was measured of a network, fit for JSON


class Case(NamedTuple):
    """A network to be trained: all that its numbers depend on beside scale, recipe and data.

    The arms are "base" (β = 0, with the term taken all the same), "stage", "augmented" and "cca" (the variants of
    `CKASparsityLoss`), "random" (the term on samples in random order) and "decay" (β = 0, `strength` being the weight
    decay).
    """

    net: str = "resnet20-sparse"
    of: str = "cifar10"
    sparsity: float = 0.95
    arm: str = "base"
    strength: float = 0.0
    seed: int = 0
    samples: int | None = 8
    every: int = 5
    held_out: bool = False  # judged on images that are held out from its training, not on test images


class Choice(NamedTuple):
    """A strength that was chosen on held-out training images, and what each cost and gave there."""

    strength: float
    accuracies: dict[float, float]
    seconds: float

    @property
    def words(self) -> str:
        """How it was chosen."""
        listed = ", ".join(f"{one:g}: {100 * value:.1f}" for one, value in self.accuracies.items())
        return f"{self.strength:g} ({listed})"


_KNOWN: WeakKeyDictionary[Lab, dict[tuple[str, Any], Found]] = WeakKeyDictionary()


def once(lab: Lab, work: Callable[[Lab, Any], Found], tasks: Iterable[Any]) -> dict[Any, Found]:
    """Return ``work(lab, task)`` by task; what another claim has asked for is not done again."""
    tasks, known = list(dict.fromkeys(tasks)), _KNOWN.setdefault(lab, {})
    missing = [task for task in tasks if (work.__name__, task) not in known]
    made = zip(missing, lab.over(work, missing, keep=True), strict=True)
    known.update({(work.__name__, task): found for task, found in made})
    return {task: known[work.__name__, task] for task in tasks}


def measured(lab: Lab, cases: Iterable[Case]) -> dict[Case, Found]:
    """Return what was found of each network; those that another claim has asked for are not trained again."""
    cases = list(dict.fromkeys(cases))
    for case in cases:  # so that the record names them
        lab.recipe(case.net), lab.images_of(case.of)
    return once(lab, trained, cases)


def measured_whole(lab: Lab, cases: Iterable[Case]) -> dict[Case, Found]:
    """Return what was found of each network, where more than accuracies is asked for: none may have failed."""
    found = measured(lab, cases)
    failed = [case for case in found if found[case]["failed"]]
    if failed:
        one = failed[0]
        raise InvalidValue(
            f"{len(failed)} of {len(found)} networks have weights that are no numbers, so that the similarity of their "
            f"layers does not exist; the first is {one.net}, {one.arm} of strength {one.strength:g}, seed {one.seed}: "
            f"{found[one]['failed']}. Lower `lr` in its recipe, or leave that strength out."
        )
    return found


def chosen(lab: Lab, wanted: Mapping[str, tuple[Case, str]]) -> dict[str, Choice]:
    """Return by name the strength of an arm that was best on held-out training images, in networks of no other use."""
    trials = {
        name: [case._replace(arm=arm, strength=one, seed=SEARCH, held_out=True) for one in STRENGTHS[arm]]
        for name, (case, arm) in wanted.items()
    }
    found = measured(lab, [trial for own in trials.values() for trial in own])
    return {name: _best([(trial.strength, found[trial]) for trial in own]) for name, own in trials.items()}


def _best(tried: Sequence[tuple[float, Found]]) -> Choice:
    accuracies = {strength: own["accuracy"] for strength, own in tried}
    return Choice(max(accuracies, key=accuracies.__getitem__), accuracies, sum(own["seconds"] for _, own in tried))


def over_seeds(case: Case, count: int) -> list[Case]:
    """Return a case with each of the seeds 0, 1, 2, ..."""
    return [case._replace(seed=seed) for seed in range(count)]


def trained(lab: Lab, case: Case) -> Found:
    """Train a network and return its accuracy, similarities and sparsities, fit for JSON.

    One whose weights are no numbers any more has failed: its accuracy is that of chance, and the rest is missing.
    """
    case = Case(*case)
    images, model = pictures(lab, case.of), fresh(lab, case)
    data, test = parts(images, HELD_OUT[lab.scale] if case.held_out else 0)
    recipe = lab.recipe(case.net).recipe
    recipe = recipe.but(weight_decay=case.strength) if case.arm == "decay" else recipe
    with term(model, case) as hook:
        try:
            history = train(model, data, recipe, seed=case.seed, hooks=[hook], progress=False)
        except (NetkinError, torch.linalg.LinAlgError) as fault:
            finite = all(torch.isfinite(weight).all() for weight in model.parameters())
            if finite and isinstance(fault, NetkinError):
                raise
            return {"accuracy": 1 / len(images.classes), "seconds": 0.0, "failed": str(fault)}
    found = {
        "accuracy": accuracy(model, test, precision="auto"),
        "loss": history[-1]["loss"],
        "seconds": sum(record["seconds"] for record in history),
        "failed": "",
    }
    return found | looked_at(model, test[0][: PROBES[lab.scale]])


def looked_at(model: nn.Module, probes: Tensor) -> Found:
    """Return how similar the layers of a network are on some images, and what shares of the weights left are small."""
    return {
        "similarity": interlayer(model, probes),
        "small": epsilon_sparsity(model, ABSOLUTE, of_left=True),
        "relatively small": epsilon_sparsity(model, RELATIVE, relative=True, of_left=True),
    }


def interlayer(model: nn.Module, images: Tensor) -> float:
    """Return the mean `cka_debiased` of two different layers of a stage, the mean over the stages."""
    groups = stage_layers(model)
    with (
        inference_mode_of(model),
        recording(model, [name for stage in groups for name in stage], reduce=_gram) as grams,
    ):
        model(images)
        tables = [gram_cosines(torch.stack([grams[name] for name in stage]), debiased=True) for stage in groups]
    means = [(one.sum() - one.diagonal().sum()) / (len(one) * (len(one) - 1)) for one in tables]
    return torch.stack(means).mean().item()


def _gram(name: str, output: Tensor) -> Tensor:
    return batch_gram(output.flatten(1).double())


def stage_layers(model: nn.Module) -> list[list[str]]:
    """Return the layers of each stage that has two or more."""
    return [names for names in stages(model).values() if len(names) > 1]


def fresh(lab: Lab, case: Case) -> nn.Module:
    """Return a network before training, with as many outputs as its set has classes, masked at random by ERK."""
    model, classes = seeded(lab.recipe(case.net).build, case.seed), len(lab.images_of(case.of).classes)
    if classes != 10:
        width = model.get_submodule("fc").in_features
        model.fc = seeded(lambda: nn.Linear(width, classes), case.seed)  # type: ignore[arg-type]
    model = lab.placed(model)
    if case.sparsity:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmptyLayerWarning)
            sparsify(model, case.sparsity, method="erk", seed=case.seed)
    return model


def pictures(lab: Lab, of: str) -> Images:
    """Return a set of images; at cpu scale with half the pixels a side."""
    found = lab.images_of(of)
    if lab.scale == "gpu":
        return found
    smaller = [nn.functional.avg_pool2d(one, 2) for one in (found.train_images, found.test_images)]
    return replace(found, train_images=smaller[0], test_images=smaller[1])


def parts(images: Images, held_out: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what a network is trained on and what it is judged by: test images, or training images held out."""
    if not held_out:
        return images.train, images.test
    inputs, labels = images.train
    return (inputs[:-held_out], labels[:-held_out]), (inputs[-held_out:], labels[-held_out:])


def term(model: nn.Module, case: Case) -> CKASparsityLoss | ShuffledTargets:
    """Return the hook of an arm; the model is free of it after a `with`."""
    if case.arm == "random":
        return ShuffledTargets(model, case.strength, case.samples, case.every, case.seed)
    variant = case.arm if case.arm in ("stage", "augmented", "cca") else "stage"
    beta = case.strength if variant == case.arm else 0.0
    return CKASparsityLoss(model, beta=beta, samples=case.samples, every=case.every, variant=variant)


class ShuffledTargets(Hook):
    """The control: β times the CKA of the layers of a stage with each of them for the samples in a random order.

    It has as many terms as the paper's, of layers with the same spectra, at the same cost; but what it lowers says
    nothing of how similar these layers are. The model carries hooks until the end of a `with`.
    """

    def __init__(self, model: nn.Module, beta: float, samples: int | None, every: int, seed: int):
        self.beta, self.samples, self.every = beta, samples, every
        self.settings = [beta, samples, every, seed]
        self.stages, self._grams = stage_layers(model), dict[str, Tensor]()
        self._draw, self._due = torch.Generator().manual_seed(seed), False
        names = [name for stage in self.stages for name in stage]
        self._handles = [model.get_submodule(name).register_forward_hook(partial(self._take, name)) for name in names]

    def __enter__(self) -> ShuffledTargets:
        return self

    def __exit__(self, *fault: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Take the first step into account."""
        self._due = True

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor | None:
        """Return the term where it is due."""
        if not self._due:
            return None
        values = [self._similarity(torch.stack([self._grams[name] for name in stage])) for stage in self.stages]
        return self.beta * torch.stack(values).sum()

    def after_step(self, model: nn.Module, step: int) -> None:
        """Tell whether the next step has the term."""
        self._due, self._grams = step % self.every == 0, {}

    def _take(self, name: str, module: nn.Module, given: Any, output: Tensor) -> None:
        if self._due and torch.is_grad_enabled():
            self._grams[name] = batch_gram(output[: self.samples].flatten(1))

    def _similarity(self, grams: Tensor) -> Tensor:
        """Return the sum of the CKA of all pairs of a layer and a layer whose samples are in another order."""
        count = len(grams)
        order = torch.randperm(grams.shape[1], generator=self._draw).to(grams.device)
        table = gram_cosines(torch.cat([grams, grams[:, order][:, :, order]]))
        return table[:count, count:].sum()


# --- what claims read off ---------------------------------------------------------------------------------------------


def values(found: Mapping[Case, Found], cases: Iterable[Case], what: str = "accuracy") -> list[float]:
    """Return a number of each network, accuracies and shares in percent."""
    factor = 1 if what in ("similarity", "seconds") else 100
    return [factor * found[case][what] for case in cases]


def mean_of(found: Mapping[Case, Found], cases: Iterable[Case], what: str = "accuracy") -> Measured:
    """Return the mean of a number over networks."""
    return Measured.over(values(found, cases, what))


def gain(found: Mapping[Case, Found], ours: Sequence[Case], others: Sequence[Case], what: str = "accuracy") -> Measured:
    """Return by how much networks are above others, in pairs: of one seed each, in points for accuracies and shares."""
    if [case.seed for case in ours] != [case.seed for case in others]:
        raise InvalidValue("networks are compared in pairs of one seed; their seeds differ.")
    return gains(values(found, ours, what), values(found, others, what))


def noise_words(differences: Mapping[str, Measured]) -> str:
    """Return in words which differences exceed the noise, and which are undecided."""
    beyond = [f"{name} ({one.value:+.3g})" for name, one in differences.items() if one.above(0) is not None]
    within = [name for name, one in differences.items() if one.above(0) is None]
    told = f"Beyond the noise: {'; '.join(beyond) or 'none'}."
    return f"{told} Undecided: {'; '.join(within)}." if within else told


def setting_words(lab: Lab, net: str) -> str:
    """Return how networks are trained, in words."""
    smaller = " on images of 16 × 16 pixels" if lab.scale == "cpu" else ""
    return f"Trained{smaller} by {lab.recipe(net).recipe.words}."
