"""What similarity indices say while a stitch is trained, and that they can be driven down.

Claims: matching/indices-and-training and matching/low-cka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

import netkin as nk
from reproductions.claims import Finding, Measured, claim, line, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, ring, train_all
from reproductions.matching.stitches import SETTINGS, cka_of_maps, fitting, judging, made, number, origin, task_loss
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
        "correlation of SVCCA with the performance": "none on average",
    },
    criterion=f"Task loss training of Tiny-10 at Layer 3 from the least-squares map. Holds if from the first to the "
    f"last record, in the mean over pairs, the cross-entropy falls and CKA does not rise, R² falls, and CCA moves by "
    f"less than {STILL}; and if the correlation of SVCCA with the performance (minus the cross-entropy) over the "
    f"records of a training is, in the mean over pairs, within two standard errors of 0. In part if some of these "
    f"four.",
)
def indices_and_training(lab: Lab) -> Finding:
    """The record of the training, by step, in the mean over pairs."""
    layer = layers(lab, "tiny10")[LAYER]
    stitches = made(lab, [task_loss(pair, layer) for pair in ring(lab, "tiny10", PAIRS[lab.scale]["tiny10"])])
    courses = [stitch.history for stitch in stitches.values()]
    changes = {key: [course[-1][key] - course[0][key] for course in courses] for key in (*INDICES, "accuracy")}
    measured = {f"change of {name}": Measured.over(changes[key]) for key, name in INDICES.items()}
    measured["change of accuracy"] = Measured.over(changes["accuracy"])
    alike = {key: Measured.over(correlation(one, key) for one in courses) for key in ("cka", "r2", "svcca")}
    measured |= {f"correlation of {INDICES[key]} with the performance": one for key, one in alike.items()}
    measured |= {f"{name} before training": Measured.over(c[0][key] for c in courses) for key, name in INDICES.items()}
    found = {key: mean(values) for key, values in changes.items()}
    conditions = (
        found["loss"] < 0 and found["cka"] <= 0,
        found["r2"] < 0,
        abs(found["cca"]) < STILL,
        abs(alike["svcca"].value) <= 2 * (alike["svcca"].error or 0),
    )
    seen = f"Indices are taken place by place, on {SETTINGS[lab.scale].sample:,} of the images of the fit."
    note = f"{seen} {origin(lab, 'tiny10')}"
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
    stitch = nk.stitch(
        model, layer, model, layer, fitting(lab), "task_loss", judging(lab),
        init="identity", cka_penalty=PENALTY, cka_of="examples", epochs=EPOCHS[lab.scale], batch=BATCH[lab.scale],
        rate=RATE[lab.scale], memory=SETTINGS[lab.scale].options["memory"],
        validation=judging(lab, count=SEEN), sample=SEEN,
    )  # fmt: skip
    ends = {
        "CKA in the end": cka_of_maps(lab, stitch, SEEN),
        "relative accuracy in the end": stitch.relative_accuracy,
        "CKA place by place in the end": number(stitch, "cka"),
        "agreement with the network itself in the end": number(stitch, "agreement"),
    }
    own = stitch.history[0]["accuracy"]  # with the identity it is the network itself
    course = {
        "epoch": [record["epoch"] for record in stitch.history],
        "CKA": [record["cka_of_examples"] for record in stitch.history],
        "relative accuracy": [record["accuracy"] / own for record in stitch.history],
    }
    return ends, course


def _courses(courses: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    steps = [one["step"] for one in courses[0]]
    records = list(zip(*courses, strict=True))
    curve: dict[str, list[Any]] = {"step": steps}
    for key, name in INDICES.items():
        curve |= line(name, [[one[key] for one in record] for record in records])
    return {f"Tiny-10, {LAYER}, while the stitch is trained": curve}


def correlation(course: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the correlation of an index with minus the cross-entropy; 0 for one that stands still."""
    losses, index = ([record[name] for record in course] for name in ("loss", key))
    return -float(np.corrcoef(losses, index)[0, 1]) if np.std(index) > 0 else 0.0
