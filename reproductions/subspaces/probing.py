"""What probing data do to CCA and CKA, and whether atoms tell what networks learnt or only where they started.

Claims: subspaces/probing-data, subspaces/across-data-sets and subspaces/orthogonal-probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import netkin as nk
from netkin import training
from netkin.representations.filters import AtomConv2d, atom_layers, freeze_except
from netkin.sources.architectures import seeded
from netkin.training import Recipe
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.recipes import length_words
from reproductions.subspaces.families import (
    FRESH,
    MEASURES,
    PROBES,
    REDRAWN,
    SHUFFLED,
    START,
    TRAINING,
    Atoms,
    Family,
    families,
    in_words,
    redrawn,
    wandered,
)

BY_T = "Each by the 95% interval of Student's t over the starts."
ATOMS = "atom similarity of two networks of CIFAR-100"
DROPS = {m: f"{words} with CIFAR-100 minus other probes" for m, words in MEASURES.items()}
OTHERS = {
    "svhn": "one of CIFAR-100 and one of SVHN",
    SHUFFLED: "one of CIFAR-100 and one of its images with shuffled labels",
    START: "one of CIFAR-100 and the start",
    REDRAWN: "two of CIFAR-100 from atoms of two draws",
}


@claim(
    "subspaces/probing-data",
    figure="Fig. 3b",
    sentence="with CIFAR-100 probing data, the CCA similarity between models yields a value over 0.8. However, when "
    "the probing data are derived from the other datasets …, the CCA similarity drops to 0.59. A similar inconsistency "
    "in values is observed with the CKA similarity … In contrast, the average of our proposed filter subspace "
    "similarity between models is 0.91, which aligns well with our expectation of high similarity.",
    expected={
        DROPS["cca_rms"]: "0.8 minus 0.59",
        DROPS["cka"]: "above 0",
        ATOMS: 0.91,
        "CCA with CIFAR-100": "over 0.8",
        "CCA with other probes": 0.59,
    },
    control="for the probes two untrained networks, for the atoms a network of CIFAR-100 and one of its images with "
    "shuffled labels, from the same start",
    criterion="Two networks that learn CIFAR-100 from one start in two orders of its images; CCA as in Eq. 1 and "
    "linear CKA of the outputs of all convolutions, places as rows, and the plain mean over the layers. The other "
    f"probes are {', '.join(list(PROBES.values())[1:])}. Three parts: CCA with CIFAR-100 is above its mean over the "
    "other probes, and by more than for two untrained networks; CKA likewise; and atoms tell what was learnt: the two "
    "are more similar than one of them is to a network of SVHN, to one of shuffled labels, and to the start itself. "
    + BY_T,
    measures=["cca_rms", "cka", "atom_cosine"],
    training=lambda scale, _: length_words(Recipe(**TRAINING[scale])),
)
def probing_data(lab: Lab) -> Finding:
    """Pairs of networks on five probes, and the similarities of their atoms."""
    found = families(lab)
    measured, controls, parts = {}, {}, []
    for measure, name in DROPS.items():
        ours, theirs = (_drops(found, measure, pair, "cifar100") for pair in ("CIFAR-100", "untrained"))
        measured[name], controls[name] = Measured.over(ours), Measured.over(theirs)
        controls[f"{MEASURES[measure]} with SVHN minus other probes, two networks of SVHN"] = Measured.over(
            _drops(found, measure, "SVHN", "svhn")
        )
        parts.append(all_of(measured[name].above(0), gains(ours, theirs).above(0)))
    atoms = [one.similarity("cifar100", "cifar100") for one in found]
    others = {kind: [one.similarity("cifar100", kind) for one in found] for kind in OTHERS}
    measured[ATOMS], controls[ATOMS] = Measured.over(atoms), Measured.over(others[SHUFFLED])
    parts.append(all_of(*(gains(atoms, others[kind]).above(0) for kind in ("svhn", SHUFFLED, START))))
    measured |= _probe_values(found)
    controls |= {f"atom similarity of {words}": Measured.over(others[kind]) for kind, words in OTHERS.items()}
    return Finding(
        verdict(*parts), measured, controls, in_words(lab, found), _probe_curves(found) | _layer_curve(found, OTHERS),
        lab.seeds(len(found)),
    )  # fmt: skip


def value(one: Family, measure: str, pair: str, probe: str) -> float:
    """Return the similarity of a pair of networks on a probe, the mean over the layers."""
    return mean(one.probed[probe][pair][measure])


def _drops(found: Sequence[Family], measure: str, pair: str, own: str) -> list[float]:
    """Return by how much the similarity on the pair's own data is above the mean over the other probes."""
    rest = [probe for probe in PROBES if probe != own]
    return [value(one, measure, pair, own) - mean(value(one, measure, pair, probe) for probe in rest) for one in found]


def _probe_values(found: Sequence[Family]) -> dict[str, Measured]:
    rest = [probe for probe in PROBES if probe != "cifar100"]
    measured: dict[str, Measured] = {}
    for measure, words in MEASURES.items():
        many = [mean(value(one, measure, "CIFAR-100", probe) for probe in rest) for one in found]
        measured[f"{words} with CIFAR-100"] = Measured.over(
            value(one, measure, "CIFAR-100", "cifar100") for one in found
        )
        measured[f"{words} with other probes"] = Measured.over(many)
    return measured


def _probe_curves(found: Sequence[Family]) -> dict[str, dict[str, list[Any]]]:
    """Return the similarity of each pair by probe, and of the two networks of CIFAR-100 by layer and probe."""
    curves: dict[str, dict[str, list[Any]]] = {}
    for measure, words in MEASURES.items():
        curve: dict[str, list[Any]] = {"probe": list(PROBES.values())}
        for pair in found[0].probed["cifar100"]:
            curve |= line(pair, [[value(one, measure, pair, probe) for one in found] for probe in PROBES])
        curves[f"{words} of two networks by probe"] = curve
        layered: dict[str, list[Any]] = {"layer": list(found[0].atoms[START])}
        for probe, name in PROBES.items():
            by_layer = [one.probed[probe]["CIFAR-100"][measure] for one in found]
            layered |= line(name, zip(*by_layer, strict=True))
        curves[f"{words} of two networks of CIFAR-100 by layer"] = layered
    return curves


def _layer_curve(found: Sequence[Family], others: dict[str, str]) -> dict[str, dict[str, list[Any]]]:
    curve: dict[str, list[Any]] = {"layer": list(found[0].atoms[START])}
    for kind, words in {"cifar100": "two of CIFAR-100", **others}.items():
        curve |= line(words, zip(*(one.by_layer("cifar100", kind) for one in found), strict=True))
    return {"Atom similarity by layer": curve}


# --- networks of several sets -----------------------------------------------------------------------------------------

NATURAL = ("cifar10", "cifar100")
ACROSS = "CIFAR-10 with CIFAR-100"
UNTRAINED = "trained with untrained ones of another draw"
TO_START = "trained with the start"
ABOVE_FRESH = f"{ACROSS} minus {UNTRAINED}"
ABOVE_START = f"{ACROSS} minus {TO_START}"
ABOVE_SVHN = f"{ACROSS} minus both with SVHN"
ABOVE_SHUFFLED = f"{ACROSS} minus both with shuffled labels"


@claim(
    "subspaces/across-data-sets",
    figure="Fig. 10a",
    sentence="pairs of models that are both trained on CIFAR-10 and CIFAR-100 have high atom-based similarities. "
    "Models learned on two datasets respectively still show high similarity. In contrast, similarities between trained "
    "and untrained models are significantly lower.",
    expected={ABOVE_FRESH: "above 0", ABOVE_START: "above 0", ACROSS: "high", UNTRAINED: "significantly lower"},
    control="atoms that went from the start at random, in each layer as far as those of the trained networks",
    criterion="Atom similarity, the mean over layers, of networks that learn CIFAR-10 and CIFAR-100 from one start. "
    "Four parts: the similarity across the two sets is above that of these networks to an untrained one with the same "
    "coefficients and atoms of another draw; it is above their similarity to the untrained start; each of the two by "
    "more than after random walks of the same lengths; it is above that of both kinds to networks of SVHN; and to "
    "networks of CIFAR-100 with shuffled labels, all from the same start. " + BY_T,
    measures=["atom_cosine"],
    training=lambda scale, _: length_words(Recipe(**TRAINING[scale])),
)
def across_data_sets(lab: Lab) -> Finding:
    """Networks of four kinds from each start, and walks of the same lengths."""
    found = families(lab)
    ours = [_contrasts(one) for one in found]
    theirs = [_contrasts(_walks(one, seed)) for seed, one in enumerate(found)]
    names = (ABOVE_FRESH, ABOVE_START, ABOVE_SVHN, ABOVE_SHUFFLED)
    measured, controls = (
        {name: Measured.over(one[name] for one in some) for name in some[0]} for some in (ours, theirs)
    )
    beyond = {name: gains([one[name] for one in ours], [one[name] for one in theirs]) for name in names}
    parts = [all_of(measured[name].above(0), beyond[name].above(0)) for name in names[:2]]
    parts += [measured[name].above(0) for name in names[2:]]
    return Finding(verdict(*parts), measured, controls, in_words(lab, found), _set_curve(found), lab.seeds(len(found)))


def _contrasts(one: Family) -> dict[str, float]:
    """Return the similarities of a family that Fig. 10a shows, those of the controls, and how far they are apart."""
    both = {kind: mean(one.similarity(own, kind) for own in NATURAL) for kind in ("svhn", SHUFFLED, START, FRESH)}
    across = one.similarity(*NATURAL)
    return {
        ABOVE_FRESH: across - both[FRESH], ABOVE_START: across - both[START], ABOVE_SVHN: across - both["svhn"],
        ABOVE_SHUFFLED: across - both[SHUFFLED], ACROSS: across, UNTRAINED: both[FRESH], TO_START: both[START],
        "two networks of CIFAR-10": one.similarity("cifar10", "cifar10"),
        "two networks of CIFAR-100": one.similarity("cifar100", "cifar100"),
        "both with SVHN": both["svhn"], "both with shuffled labels": both[SHUFFLED],
        "two networks of SVHN": one.similarity("svhn", "svhn"),
        "two networks of shuffled labels": one.similarity(SHUFFLED, SHUFFLED),
        "two of CIFAR-100 from atoms of two draws": one.similarity("cifar100", REDRAWN),
    }  # fmt: skip


def _walks(one: Family, seed: int) -> Family:
    """Return the family in which each network went as far from its start at random; untrained ones stay."""
    begin = dict.fromkeys(one.atoms, one.atoms[START])
    begin |= dict.fromkeys(one.members(REDRAWN), one.atoms[FRESH])
    walks: dict[str, Atoms] = {}
    for number, (name, atoms) in enumerate(one.atoms.items()):
        still = name in (START, FRESH)
        walks[name] = atoms if still else wandered([begin[name], atoms], 100 * seed + number)[-1]
    return Family(walks, {}, {})


def _set_curve(found: Sequence[Family]) -> dict[str, dict[str, list[Any]]]:
    curve: dict[str, list[Any]] = {"layer": list(found[0].atoms[START])}
    kinds = {ACROSS: NATURAL, "CIFAR-10 with SVHN": ("cifar10", "svhn"), TO_START: ("cifar10", START),
             "CIFAR-10 with shuffled labels of CIFAR-100": ("cifar10", SHUFFLED),
             "CIFAR-10 with an untrained one of another draw": ("cifar10", FRESH)}  # fmt: skip
    for words, pair in kinds.items():
        curve |= line(words, zip(*(one.by_layer(*pair) for one in found), strict=True))
    walks = [_walks(one, seed).by_layer(*NATURAL) for seed, one in enumerate(found)]
    return {"Atom similarity by layer": curve | line("random walks", zip(*walks, strict=True))}


# --- the regression of Fig. 10b ---------------------------------------------------------------------------------------

COUNT = 1_000  # examples that a network is trained on, and of each probe
CHANNELS = 16
FITTING = Recipe(steps=200, batch=100, lr=0.05)
TRIALS = 5
OWN, ORTHOGONAL = "the training data", "orthogonal probes"
SIMILAR = "atom similarity"
BLIND = "share of networks whose features do not vary with orthogonal probes, weights of x begun at 0"


@claim(
    "subspaces/orthogonal-probes",
    figure="Fig. 10b",
    sentence="the filter subspace similarity of F₁ and F₂ is 1 and the probing-based similarity is also 1 with the "
    "same {(x_i = 0, y_i)} as the probing data. However, if we choose {(x'_i = y_i, y'_i = 0)} as the probing data, "
    "then the probing-based similarities directly become 0 as the data are now orthogonal to model parameters.",
    expected={f"CCA with {ORTHOGONAL}": 0, f"CKA with {ORTHOGONAL}": 0, SIMILAR: 1, f"CCA with {OWN}": 1,
              f"CKA with {OWN}": 1},
    control="two networks that should be unlike: from atoms of two draws, with the same coefficients, the one learns z "
    "and the other −z",
    criterion="z = y + ε with y and ε from N(0.5, 0.1) and x = 0, 1,000 examples of its own for each of two networks; "
    "a convolution of 16 channels over the two numbers (x, y), 2 atoms and fixed coefficients, and a fixed linear "
    "output, with a ReLU between them and without; atoms alone are trained, by the squared error. CCA as in Eq. 1 and "
    "linear CKA of the 16 features before the output. Three parts, each for both kinds of network: the two are alike "
    "by their atoms, above 0.99 and above the control; with the training data as probes they are alike by CCA and CKA, "
    "above 0.99 and by more than 0.01 above the control; and with orthogonal probes CCA and CKA are below 0.5. By the "
    "95% interval of Student's t over five starts.",
    measures=["cca_rms", "cka", "atom_cosine"],
    scales=["cpu"],
    training=lambda *_: length_words(FITTING),
)  # fmt: skip
def orthogonal_probes(lab: Lab) -> Finding:
    """Two networks of the same regression, on their own data and on data that they have never seen vary."""
    found = {(relu, way): [fitted(seed, relu, way) for seed in lab.seeds(TRIALS)]
             for relu, way in product((False, True), ("alike", "unlike"))}  # fmt: skip
    measured, controls = dict[str, Measured](), dict[str, Measured]()
    parts: dict[str, list[bool | None]] = {SIMILAR: [], OWN: [], ORTHOGONAL: []}
    for relu, words in ((False, ""), (True, ", with a ReLU")):
        ours, theirs = (_numbers(found[relu, way]) for way in ("alike", "unlike"))
        measured |= {f"{name}{words}": one for name, one in ours.items()}
        controls |= {f"{name}{words}": one for name, one in theirs.items()}
        parts[SIMILAR] += [ours[SIMILAR].above(0.99), ours[SIMILAR].minus(theirs[SIMILAR]).above(0)]
        for name in (f"{one} with {OWN}" for one in MEASURES.values()):
            parts[OWN] += [ours[name].above(0.99), ours[name].minus(theirs[name]).above(0.01)]
        parts[ORTHOGONAL] += [ours[f"{one} with {ORTHOGONAL}"].below(0.5) for one in MEASURES.values()]
    measured[BLIND] = Measured.over(float(not varies(seed)) for seed in lab.seeds(TRIALS))
    return Finding(
        verdict(*(all_of(*some) for some in parts.values())), measured, controls, REGRESSION, seeds=lab.seeds(TRIALS)
    )


REGRESSION = (
    "As x is 0 in training, no gradient reaches the weights of x: they stay those of the start, the same in both "
    "networks, and with orthogonal probes the two outputs are the same. Where these weights are 0, as “orthogonal to "
    "model parameters” asks, the outputs do not vary, and neither CCA nor CKA has a value. The probes are one number "
    "each: all that is linear in it is a multiple of it, so that CCA and CKA are 1 of any two networks."
)


def fitted(seed: int, relu: bool, way: str) -> dict[str, float]:
    """Return the similarities of two trained networks, of one start and target or of two."""
    models = [_network(seed, relu) for _ in range(2)]
    if way == "unlike":
        models[1] = redrawn(models[1], seed)
    for k, model in enumerate(models):
        inputs, targets = _examples(2 * seed + k, COUNT)
        sign = -1 if k and way == "unlike" else 1
        training.train(model.double(), (inputs, sign * targets), FITTING, loss=mse_loss, seed=k, progress=False)
    y = _examples(-1 - seed, COUNT)[0]
    found = {SIMILAR: nk.atom_similarity([one.eval() for one in models], progress=False)["0", "1"]}
    for probe, inputs in ((OWN, y), (ORTHOGONAL, y.flip(-1))):
        one = nk.compare(*models, data=inputs, measures=list(MEASURES), layers=["1"], shape="flatten", progress=False)
        found |= {f"{words} with {probe}": float(one.tables[measure]["1", "1"]) for measure, words in MEASURES.items()}
    return found


def varies(seed: int) -> bool:
    """Tell whether features vary with orthogonal probes where the weights of x were 0 at the start."""
    model = _network(seed, relu=False).double()
    ((_, layer),) = atom_layers(model)
    with torch.no_grad():
        layer.atoms[..., 0] = 0
    training.train(model, _examples(seed, COUNT), FITTING, loss=mse_loss, seed=0, progress=False)
    with torch.no_grad():
        features = layer(_examples(-1 - seed, COUNT)[0].flip(-1))
    return bool(features.var(0).any())


def _network(seed: int, relu: bool) -> nn.Module:
    """Return a network of two numbers whose atoms alone learn."""
    between: Callable[[], nn.Module] = nn.ReLU if relu else nn.Identity
    layers = (
        lambda: AtomConv2d(1, CHANNELS, (1, 2), atoms=2, bias=False), between, nn.Flatten,
        lambda: nn.Linear(CHANNELS, 1, bias=False),
    )  # fmt: skip
    return freeze_except(seeded(lambda: nn.Sequential(*(make() for make in layers)), seed), "atoms")


def _examples(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs (0, y) as images of two pixels, and z = y + ε."""
    draw = torch.Generator().manual_seed(10_000 + seed)
    y, noise = (0.5 + 0.1 * torch.randn(count, generator=draw, dtype=torch.float64) for _ in range(2))
    return torch.stack([torch.zeros_like(y), y], 1).reshape(count, 1, 1, 2), (y + noise)[:, None]


def _numbers(found: Sequence[dict[str, float]]) -> dict[str, Measured]:
    return {name: Measured.over(one[name] for one in found) for name in found[0]}
