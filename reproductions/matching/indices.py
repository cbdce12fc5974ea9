"""Claims 3 and 4: what similarity indices say while a stitch is trained, and that they can be driven down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.applications.stitching import Stitch
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, origin, ring, train_all
from reproductions.matching.stitches import cka_of_maps, fitting, judging, made, task_loss
from reproductions.matching.sweeps import PAIRS

LAYER = "Layer 3"
INDICES = {"loss": "cross-entropy", "cka": "CKA", "r2": "R²", "cca": "CCA", "svcca": "SVCCA"}
STILL = 0.01  # a change of CCA below this is rounding and the regularisation of small directions
ITSELF = {"cpu": "resnet20", "gpu": "resnet20w3"}
PENALTY = 1.0
RATE, BATCH = {"cpu": 1e-2, "gpu": 3e-3}, {"cpu": 50, "gpu": 200}
EPOCHS = {"cpu": 4, "gpu": 30}
ALONE = {"cpu": 1, "gpu": 3}  # networks that are stitched with themselves
SEEN = 500  # test images on which the course is followed


@claim(
    "matching/indices-and-training",
    figure="Fig. 4",
    sentence="as the training proceeds with decreasing cross-entropy, the R² values also decrease … CKA … is "
    "decreasing while the performance of the stitched model is increasing … CCA is invariant to invertible linear "
    "transformations … SVCCA … on average it does not correlate with the task performance.",
    expected={
        "change of CKA": "falls or stays",
        "change of R²": "falls",
        "change of CCA": "0",
        "change of SVCCA": "none on average",
    },
    criterion=f"Task loss training of Tiny-10 at Layer 3 from the least-squares map. Holds if from the first to the "
    f"last record, in the mean over pairs, the cross-entropy falls and CKA does not rise, R² falls, CCA moves by less "
    f"than {STILL}, and SVCCA does not rise by more than two standard errors; in part if some of these four.",
)
def indices_and_training(lab: Lab) -> Finding:
    """The record of the training, by step, in the mean over pairs."""
    layer = layers(lab, "tiny10")[LAYER]
    stitches = made(lab, [task_loss(pair, layer) for pair in ring(lab, "tiny10", PAIRS[lab.scale]["tiny10"])])
    courses = [stitch.history for stitch in stitches.values()]
    changes = {key: [course[-1][key] - course[0][key] for course in courses] for key in (*INDICES, "accuracy")}
    measured = {f"change of {name}": Measured.over(changes[key]) for key, name in INDICES.items()}
    measured["change of accuracy"] = Measured.over(changes["accuracy"])
    measured |= {f"{name} before training": Measured.over(c[0][key] for c in courses) for key, name in INDICES.items()}
    found = {key: mean(values) for key, values in changes.items()}
    conditions = (
        found["loss"] < 0 and found["cka"] <= 0,
        found["r2"] < 0,
        abs(found["cca"]) < STILL,
        found["svcca"] <= 2 * _error(changes["svcca"]),
    )
    note = f"CKA and R² are taken place by place, on images that the stitch is trained on. {origin(lab, 'tiny10')}"
    return Finding(verdict(*conditions), measured, note, _courses(courses), range(len(courses)))


@claim(
    "matching/low-cka",
    figure="Fig. 5",
    sentence="We find that the CKA value drops by a large amount (achieving lower than 0.7), whereas the accuracy "
    "remains essentially unchanged.",
    expected={"CKA in the end": "below 0.7", "relative accuracy in the end": "about 1"},
    criterion="A network stitched with itself at Layer 2.0, from the identity, with a penalty on the CKA of whole "
    "maps. Holds if in the end, on test images, that CKA is below 0.7 and the relative accuracy at least 0.98; in "
    "part if one of the two.",
)
def low_cka(lab: Lab) -> Finding:
    """Training with the CKA of a batch added to the loss, an example being a whole map as in the authors' programs."""
    kind, seeds = ITSELF[lab.scale], range(ALONE[lab.scale])
    train_all(lab, [f"{kind}/{seed}" for seed in seeds])
    ends, courses = zip(*lab.over(_with_itself, [f"{kind}/{seed}" for seed in seeds]), strict=True)
    measured = {name: Measured.over(end[name] for end in ends) for name in ends[0]}
    curve: dict[str, list[float]] = {"epoch": courses[0]["epoch"]}
    for name in ("CKA", "relative accuracy"):
        curve[name] = [mean(values) for values in zip(*(course[name] for course in courses), strict=True)]
    note = f"The penalty is {PENALTY:g} times the CKA of batches of {BATCH[lab.scale]}. {origin(lab, kind)}"
    found = verdict(
        measured["CKA in the end"].value < 0.7,
        measured["relative accuracy in the end"].value >= 0.98,
    )
    return Finding(found, measured, note, {"While CKA is penalised": curve}, seeds)


def _with_itself(lab: Lab, name: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Stitch a network with itself and drive the CKA down; return what it is worth in the end, and the course."""
    model, layer = network(lab, name), layers(lab, name.partition("/")[0])["Layer 2.0"]
    stitch = nk.stitch(model, layer, model, layer, fitting(lab), "identity")
    course = driven_down(lab, stitch)
    judged = stitch.evaluate(judging(lab))
    ends = {
        "CKA in the end": cka_of_maps(lab, stitch, SEEN),
        "relative accuracy in the end": float(judged.relative_accuracy or 0),
        "CKA place by place in the end": float(judged.cka or 0),
        "agreement with the network itself in the end": judged.agreement,
    }
    return ends, course


def driven_down(lab: Lab, stitch: Stitch) -> dict[str, list[float]]:
    """Train a stitch of a network with itself, so that its own activations are what comes in; return a record."""
    inputs = torch.cat([batch for batch, _ in fitting(lab)])
    with torch.no_grad():
        heads = torch.cat([stitch.network.begin(part) for part in inputs.split(500)])
        answers = torch.cat([stitch.network.b(part).softmax(1) for part in inputs.split(500)])
    optimizer = torch.optim.Adam(stitch.transformation.parameters(), RATE[lab.scale])
    generator = torch.Generator().manual_seed(0)
    course: dict[str, list[float]] = {"epoch": [0], "CKA": [1.0], "relative accuracy": [1.0]}
    for epoch in range(1, EPOCHS[lab.scale] + 1):
        for rows in torch.randperm(len(heads), generator=generator).to(heads.device).split(BATCH[lab.scale]):
            transformed = stitch.transformation(heads[rows])
            task = cross_entropy(stitch.network.finish(transformed.clone(), inputs[rows]), answers[rows])
            optimizer.zero_grad()
            (task + PENALTY * map_cka(transformed, heads[rows])).backward()
            optimizer.step()
        shown = stitch.evaluate(judging(lab, count=SEEN)).relative_accuracy or 0.0
        for name, value in (("epoch", epoch), ("CKA", cka_of_maps(lab, stitch, SEEN)), ("relative accuracy", shown)):
            course[name].append(value)
    return course


def map_cka(X: Tensor, Y: Tensor) -> Tensor:
    """Return the CKA of a batch of maps, differentiable, from the n × n Gram matrices."""
    grams = []
    for maps in (X, Y):
        rows = maps.flatten(1) - maps.flatten(1).mean(0)
        grams.append(rows @ rows.T)
    return (grams[0] * grams[1]).sum() / (grams[0].norm() * grams[1].norm())


def _courses(courses: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    steps = [one["step"] for one in courses[0]]
    records = list(zip(*courses, strict=True))
    curve: dict[str, list[Any]] = {"step": steps}
    for key, name in INDICES.items():
        points = [Measured.over(one[key] for one in record) for record in records]
        curve |= {name: [one.value for one in points], f"{name} ±": [one.error or 0.0 for one in points]}
    return {f"Tiny-10, {LAYER}, while the stitch is trained": curve}


def _error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
