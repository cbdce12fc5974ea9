"""Federations of clients with few classes each: what ensembles of similar users gain, and how personal atoms compare.

Claims: subspaces/user-ensembles and subspaces/federated-accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import netkin as nk
from netkin.applications.federated import ClientSplit, Federation
from netkin.measures.registry import find
from netkin.representations.filters import atom_layers
from netkin.results import Comparison
from netkin.results.values import Values
from netkin.training import Recipe
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.subspaces.clients import images, images_a_class, network

MEMBERS = 3  # other users in an ensemble
CLOSE, COMPARABLE = 0.01, 0.03  # accuracy
Probed = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """Who the clients are, how they train together, and how heads are tuned for ensembles."""

    clients: int
    used: Mapping[str, int]  # classes that are dealt out, of each set
    share: float  # of the clients in a round
    rounds: Mapping[str, int]  # on each set
    recipe: Recipe  # of a round
    finetune: int  # epochs in which each client trains by itself at last
    public: int  # images for pretraining
    pretrain: int  # epochs of it
    tuning: Recipe
    probes: int  # images on which networks are compared
    seeds: int


_RECIPE = Recipe(epochs=5, batch=25, lr=0.01, momentum=0.9, drop_last=True)  # rate and momentum of section A.2
SETTINGS = {
    "cpu": Setting(
        12, {"cifar100": 15, "cifar10": 6}, 1 / 3, {"cifar100": 4, "cifar10": 3}, _RECIPE.but(epochs=2, batch=10), 2,
        500, 2, _RECIPE.but(epochs=8, batch=10), 200, 3,
    ),
    "gpu": Setting(
        100, {"cifar100": 100, "cifar10": 10}, 0.1, {"cifar100": 15, "cifar10": 12}, _RECIPE.but(clip=1.0), 5, 10_000,
        4, _RECIPE.but(epochs=20, clip=1.0), 1_000, 5,
    ),
}  # fmt: skip
CLASSES = {"cifar100": 5, "cifar10": 2}  # of a client


def length(scale: str, *sets: str) -> str:
    """Return how long clients train together on some sets of images."""
    own = SETTINGS[scale]
    rounds = " and ".join(f"{own.rounds[name]} rounds ({name})" for name in sets)
    return f"{rounds} of {own.recipe.epochs} epochs"


# where the shared coefficients come from under each base of Table 1
BASES = {
    "FedAvg": ("fedavg", "federated"),
    "Ditto": ("ditto", "federated"),
    "FedRep": ("fedrep", "federated"),
    "FedProx": ("fedprox", "federated"),
    "FedPer": ("fedper", "federated"),
    "Pretrain": ("pretrain", "pretrained"),
}
METHODS: dict[str, tuple[str, str | None]] = {
    "FedAvg": ("fedavg", None),
    "FedProx": ("fedprox", None),
    "FedPer": ("fedper", None),
    "FedRep": ("fedrep", None),
    "Local": ("local", None),
    "Ours": ("local", "evolving"),
}
FIXED = "random fixed coefficients"
SET_WORDS = {"cifar100": "CIFAR-100 (5 classes)", "cifar10": "CIFAR-10 (2 classes)"}

GAIN = "accuracy gained over the base by 3 users similar in "
OVER = "accuracy of the ensemble by atoms above that of "
TUNED, DRAWN, FAR = "the own network, its head tuned four times as long", "3 random users", "the 3 least similar users"
TIMES = {"atoms": "atoms", "cca_rms": "CCA", "cka": "CKA"}
SECONDS = "seconds for all pairs of users by "
SINCE = "accuracy of Ours minus the mean of the other five, "


def dealt(lab: Lab, name: str, seed: int) -> ClientSplit:
    """Return clients with a few classes of a set of images each, for training and tests."""
    setting, whole = SETTINGS[lab.scale], images(lab, name)
    parts = []
    for inputs, labels in (whole.train, whole.test):
        own = labels < setting.used[name]
        parts.append((inputs[own], labels[own]))
    return nk.split_by_classes(parts[0], setting.clients, CLASSES[name], test=parts[1], equal=True, seed=seed)


def federated(lab: Lab, begin: nn.Module, split: ClientSplit, name: str, how: tuple[str, str | None], seed: int) -> Any:
    """Return a federation of the clients by an algorithm and a source of coefficients."""
    setting, public = SETTINGS[lab.scale], None
    if how[0] == "pretrain":
        other = images(lab, "cifar10")
        public = other.train_images[: setting.public], other.train_labels[: setting.public]
    return nk.federate(
        begin, split.train, how[0], coefficients=how[1], test=split.test, rounds=setting.rounds[name],
        client_fraction=setting.share, recipe=setting.recipe, finetune=setting.finetune, public=public,
        pretrain_epochs=setting.pretrain, method="stacked", seed=seed, progress=False,
    )  # fmt: skip


# --- Table 1 ----------------------------------------------------------------------------------------------------------


@claim(
    "subspaces/user-ensembles",
    figure="Table 1",
    sentence="With ensemble, the accuracies of all FL methods can be improved. Note that the results of model ensemble "
    "selected by our filter subspace similarity are comparable with probing-based methods while consuming much fewer "
    "resources.",
    expected={f"{GAIN}atoms": 0.0235, f"{GAIN}CCA": 0.0216, f"{GAIN}CKA": 0.0222, f"{SECONDS}atoms": 0.016,
              f"{SECONDS}CCA": 1930.4, f"{SECONDS}CKA": 92.6},
    control=f"{TUNED}; {DRAWN}; {FAR}",
    criterion="Six federated bases, the shared coefficients from the base and atoms and head fine-tuned by each "
    "client; of each ensemble member the head is tuned on the client's data, and probabilities are averaged. Five "
    "parts, each of the mean over bases and clients: the ensemble by atoms is above the base for each base by itself; "
    f"it is above {TUNED}; above {DRAWN}; above {FAR}; and within {CLOSE} of those by CCA and by CKA. Seed by "
    "seed, by the 95% interval of Student's t.",
    measures=["atom_cosine", "cca_rms", "cka"],
    papers_training="100 rounds of 15 epochs; heads 100 epochs",
    training=lambda scale, _: f"{length(scale, 'cifar100')}; heads {SETTINGS[scale].tuning.epochs} epochs",
)  # fmt: skip
def user_ensembles(lab: Lab) -> Finding:
    """Gains of ensembles by three similarities, beside random users, dissimilar users and longer tuning."""
    seeds = lab.seeds(SETTINGS[lab.scale].seeds)
    tasks = [[base, seed] for base in BASES for seed in seeds]
    found = dict(zip(map(tuple, tasks), lab.over(joined, tasks, keep=True), strict=True))
    table = {base: {name: [found[base, seed]["accuracy"][name] for seed in seeds] for name in found[base, seeds[0]]
                    ["accuracy"]} for base in BASES}  # fmt: skip
    mean = {name: np.mean([table[base][name] for base in BASES], axis=0) for name in table["FedAvg"]}
    measured = {f"{GAIN}{TIMES[name]}": gains(mean[name], mean["base"]) for name in TIMES}
    seconds = {name: [one["seconds"][name] for one in found.values()] for name in TIMES}
    measured |= {f"{SECONDS}{TIMES[name]}": Measured.over(seconds[name], "s") for name in TIMES}
    against = {name: gains(mean["atoms"], mean[name]) for name in (TUNED, DRAWN, FAR)}
    measured |= {f"{OVER}{name}": one for name, one in against.items()}
    controls = {f"{GAIN}atoms": gains(mean[DRAWN], mean["base"])}
    controls |= {f"accuracy gained over the base by {name}": gains(mean[name], mean["base"]) for name in (FAR, TUNED)}
    parts = [
        all_of(*(gains(table[base]["atoms"], table[base]["base"]).above(0) for base in BASES)),
        *(one.above(0) for one in against.values()),
        all_of(*(gains(mean["atoms"], mean[name]).within(-CLOSE, CLOSE) for name in ("cca_rms", "cka"))),
    ]
    return Finding(verdict(*parts), measured, controls, _ensemble_note(lab), _ensemble_curves(table), seeds)


def joined(lab: Lab, task: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return the accuracies of a base and of ensembles of its users, and how long the users' similarities took."""
    base, seed = task
    setting, split = SETTINGS[lab.scale], dealt(lab, "cifar100", seed)
    begin = network(lab.scale, len(images(lab, "cifar100").classes), seed).to(lab.device)
    found = federated(lab, begin, split, "cifar100", BASES[base], seed)
    alike, seconds = similarities(lab, found, begin, seed)
    options = {"recipe": setting.tuning, "method": "stacked", "seed": seed, "progress": False}

    def accuracy(
        by: str, choose: str = "similar", members: int = MEMBERS, part: str = "together", **more: Any
    ) -> float:
        one = nk.similar_users_ensemble(
            found, begin, split.train, split.test, members=members, similarity=alike[by], choose=choose,
            **(options | more),
        )  # fmt: skip
        return float(np.mean(list(getattr(one, part).values())))

    longer = setting.tuning.but(epochs=(setting.tuning.epochs or 0) * (MEMBERS + 1))
    return {
        "accuracy": {"base": found.mean_accuracy}
        | {by: accuracy(by) for by in TIMES}
        | {DRAWN: accuracy("atoms", "random"), FAR: accuracy("atoms", "dissimilar")}
        | {TUNED: accuracy("atoms", members=0, part="alone", recipe=longer)},
        "seconds": seconds,
    }


def similarities(
    lab: Lab, found: Federation, like: nn.Module, seed: int
) -> tuple[dict[str, Comparison], dict[str, float]]:
    """Return the similarities of all users by atoms, CCA and CKA, and the seconds that each took."""
    probed = images(lab, "cifar100").train_images
    rows = torch.randperm(len(probed), generator=torch.Generator().manual_seed(seed))[: SETTINGS[lab.scale].probes]
    probes, alike, seconds = probed[rows.to(probed.device)], dict[str, Comparison](), dict[str, float]()
    for name in TIMES:
        started = perf_counter()
        if name == "atoms":
            alike[name] = nk.user_similarity(found)
        else:
            values = by_features(found, like, probes, MEASURES[name]).cpu().numpy()
            alike[name] = _of_all_pairs(found.clients, values, name, len(probes))
        seconds[name] = perf_counter() - started
    return alike, seconds


def _of_all_pairs(names: Sequence[str], values: np.ndarray, measure: str, examples: int) -> Comparison:
    sides, quantity = tuple(names), find(measure).quantity
    table = Values(quantity=quantity, layers_a=sides, layers_b=sides, values=values, statistic="Moments")
    nothing: dict[str, Any] = {key: {} for key in ("shapes_a", "shapes_b", "widths_a", "widths_b")}
    return Comparison(
        a="clients", b="clients", layers_a=sides, layers_b=sides, tables={measure: table}, data="CIFAR-100",
        examples=examples, seed=0, version=nk.__version__, **nothing,
    )  # fmt: skip


@torch.no_grad()
def by_features(found: Federation, like: nn.Module, probes: Tensor, measure: Probed) -> Tensor:
    """Return a measure of all pairs of users in the mean over the convolutions, pooled, each network run once."""
    layers = [name for name, _ in atom_layers(like)]
    read = {"data": probes, "device": probes.device, "progress": False}
    maps = [nk.activations(found.model(name, like), layers, **read) for name in found.clients]
    stacked = [torch.stack([own[name] for own in maps]).double() for name in layers]  # users × examples × channels
    return torch.stack([measure(one - one.mean(1, keepdim=True)) for one in stacked]).mean(0)


def cka_of_all(X: Tensor) -> Tensor:
    """Return ‖XᵤᵀXᵥ‖² / (‖XᵤᵀXᵤ‖ ‖XᵥᵀXᵥ‖) of all pairs of centred matrices."""
    cross = _squares(X)
    own = cross.diagonal().sqrt()
    return cross / torch.outer(own, own)


def cca_of_all(X: Tensor) -> Tensor:
    """Return √(‖QᵤᵀQᵥ‖² / min(rank)) of all pairs, Q orthonormal bases of centred matrices: Eq. 1."""
    values, vectors = torch.linalg.eigh(X.mT @ X)
    kept = values > 1e-10 * values[:, -1:]
    scale = torch.where(kept, values, torch.ones_like(values)).rsqrt() * kept
    rank = kept.sum(1)
    return (_squares(X @ vectors * scale[:, None]) / torch.minimum(rank[:, None], rank)).sqrt()


def _squares(X: Tensor) -> Tensor:
    """Return ‖XᵤᵀXᵥ‖² of all pairs."""
    n, width = X.shape[1:]
    beside = X.permute(1, 0, 2).reshape(n, -1)
    return torch.stack([(one.mT @ beside).reshape(width, -1, width).square().sum((0, 2)) for one in X])


MEASURES: dict[str, Probed] = {"cca_rms": cca_of_all, "cka": cka_of_all}


def _setting_words(lab: Lab, name: str) -> str:
    setting = SETTINGS[lab.scale]
    return (
        f"{setting.clients} clients, a share of {setting.share:g} in each of {setting.rounds[name]} rounds of "
        f"{setting.recipe.epochs} epochs, then {setting.finetune} by each client itself; the paper has 100 clients, "
        "100 rounds of 15 epochs and 500 training images a class of CIFAR-100, where we take "
        f"{images_a_class(lab, 'cifar100', 'cifar10')}, so that differences are compared and not accuracies"
    )


def _ensemble_note(lab: Lab) -> str:
    setting = SETTINGS[lab.scale]
    return (
        f"{_setting_words(lab, 'cifar100')}. Heads are tuned for {setting.tuning.epochs} epochs, in the paper for 100. "
        f"CCA and CKA read the pooled outputs of the convolutions on {setting.probes} images of CIFAR-100; each "
        "network is run once and all pairs come from one product, which is why they take far less time than the "
        "paper's. The networks of Pretrain come from CIFAR-10."
    )


def _ensemble_curves(table: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, list[Any]]]:
    names = ["base", *TIMES, DRAWN, FAR, TUNED]
    lines: dict[str, list[Any]] = {"base": list(table)}
    for name in names:
        words = {"base": "alone", **{by: f"with users similar in {one}" for by, one in TIMES.items()}}.get(name, name)
        lines |= line(words, [table[base][name] for base in table])
    return {"Accuracy of each base and its ensembles": lines}


# --- Table 3 ----------------------------------------------------------------------------------------------------------


@claim(
    "subspaces/federated-accuracy",
    figure="Table 3",
    sentence="As shown in Table 3, our method achieves comparable performance among different methods.",
    expected={f"{SINCE}{SET_WORDS['cifar100']}": 0.0127, f"{SINCE}{SET_WORDS['cifar10']}": -0.0159,
              f"Ours minus FedAvg, {SET_WORDS['cifar100']}": -0.0136,
              f"Ours minus Local, {SET_WORDS['cifar100']}": -0.0018,
              f"Ours minus FedAvg, {SET_WORDS['cifar10']}": -0.03,
              f"Ours minus Local, {SET_WORDS['cifar10']}": -0.0687},
    control="the same with coefficients that stay random and fixed, so that nothing is learnt together",
    criterion="Two parts, one for each set. Comparable is a mean accuracy of all clients within "
    f"{COMPARABLE} of the mean of FedAvg, FedProx, FedPer, FedRep and Local, or above it, and above the control's. All "
    "methods train the same network, and each client fine-tunes it at last. Seed by seed, by the 95% interval of "
    "Student's t.",
    papers_training="100 rounds of 15 epochs",
    training=lambda scale, _: length(scale, *CLASSES),
)  # fmt: skip
def federated_accuracy(lab: Lab) -> Finding:
    """Accuracies of personal atoms with evolving coefficients beside other federated methods."""
    seeds = lab.seeds(SETTINGS[lab.scale].seeds)
    tasks = [[name, method, seed] for name in CLASSES for method in (*METHODS, FIXED) for seed in seeds]
    found = dict(zip(map(tuple, tasks), lab.over(accuracy_of, tasks, keep=True), strict=True))
    table = {name: {method: np.array([found[name, method, seed] for seed in seeds]) for method in (*METHODS, FIXED)}
             for name in CLASSES}  # fmt: skip
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    for name, own in table.items():
        others = np.mean([own[method] for method in METHODS if method != "Ours"], axis=0)
        key = f"{SINCE}{SET_WORDS[name]}"
        measured[key], controls[key] = gains(own["Ours"], others), gains(own[FIXED], others)
        measured |= {
            f"Ours minus {one}, {SET_WORDS[name]}": gains(own["Ours"], own[one]) for one in ("FedAvg", "Local")
        }
        parts.append(all_of(measured[key].above(-COMPARABLE), gains(own["Ours"], own[FIXED]).above(0)))
    measured = dict(sorted(measured.items(), key=lambda one: not one[0].startswith(SINCE)))
    curve: dict[str, list[Any]] = {"method": [*METHODS, FIXED]}
    for name, own in table.items():
        curve |= line(SET_WORDS[name], list(own.values()))
    note = f"CIFAR-100: {_setting_words(lab, 'cifar100')}. CIFAR-10: {SETTINGS[lab.scale].rounds['cifar10']} rounds."
    return Finding(verdict(*parts), measured, controls, note, {"Mean accuracy of the clients": curve}, seeds)


def accuracy_of(lab: Lab, task: Sequence[Any]) -> float:
    """Return the mean accuracy of all clients under a method."""
    name, method, seed = task
    begin = network(lab.scale, len(images(lab, name).classes), seed).to(lab.device)
    how = ("local", "fixed") if method == FIXED else METHODS[method]
    return float(federated(lab, begin, dealt(lab, name, seed), name, how, seed).mean_accuracy)
