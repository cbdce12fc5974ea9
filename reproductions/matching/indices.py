"""What similarity indices say while a stitch is trained, and that they can be driven down.

Claims: matching/indices-and-training, matching/cca-invariance and matching/low-cka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

import netkin as nk
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, pairs, train_all
from reproductions.matching.stitches import (
    SETTINGS,
    cka_of_maps,
    fitting,
    judging,
    length,
    made,
    number,
    origin,
    task_loss,
)

LAYER = "Layer 3"
PAIRS = {"cpu": 5, "gpu": 5}
INDICES = {"loss": "cross-entropy", "cka": "CKA", "r2": "R²", "cca": "CCA", "svcca": "SVCCA"}
STILL = 0.01  # a change of CCA below this is rounding and the regularisation of small directions
NONE = 0.3  # a correlation within this of 0 is none
ITSELF = {"cpu": "resnet20w1", "gpu": "resnet20w3"}
PENALTY = 1.0
RATE, BATCH = {"cpu": 1e-2, "gpu": 3e-3}, {"cpu": 50, "gpu": 200}
EPOCHS = {"cpu": 4, "gpu": 20}
SEEN = 500  # test images on which the course is followed
UNRELATED = "correlation of SVCCA with the performance"
BY_T = "by the 95% interval of Student's t"


@claim(
    "matching/indices-and-training",
    figure="Fig. 4",
    sentence="CKA … is decreasing while the performance of the stitched model is increasing … SVCCA … on average it "
    "does not correlate with the task performance.",
    expected={"change of CKA": "falls", UNRELATED: "none on average"},
    control="the same training from a random map",
    criterion="Task loss training of Tiny-10 at Layer 3 from the least-squares map. Two parts: from the first to the "
    "last record the cross-entropy falls and so does CKA, and CKA changes by less than in a training from a random "
    f"map; and the correlation of SVCCA with the performance (minus the cross-entropy) over the records of a training "
    f"lies within {NONE} of 0. Pair by pair, {BY_T} over the pairs; in part if one of the two.",
    measures=["cka", "svcca"],
    training=length,
)
def indices_and_training(lab: Lab) -> Finding:
    """The record of the training, by step, from the least-squares map and from a random one."""
    ours, control = (_courses(lab, **start) for start in ({}, {"init": "random"}))
    measured, controls = (_changes(courses) for courses in (ours, control))
    falls = all_of(measured["change of cross-entropy"].below(0), measured["change of CKA"].below(0))
    apart = gains(_change(control, "cka"), _change(ours, "cka")).above(0)
    seen = f"Indices are taken place by place, on {SETTINGS[lab.scale].sample:,} of the images of the fit."
    return Finding(
        verdict(all_of(falls, apart), measured[UNRELATED].within(-NONE, NONE)),
        measured,
        controls,
        f"{seen} {origin(lab, 'tiny10')}",
        {f"Tiny-10, {LAYER}, while the stitch is trained": _lines(ours),
         f"Tiny-10, {LAYER}, from a random map": _lines(control)},
        range(len(ours)),
    )  # fmt: skip


@claim(
    "matching/cca-invariance",
    figure="Fig. 4",
    sentence="CCA is invariant to invertible linear transformations, hence it ignores our linear stitching "
    "transformation during the training … since we initialized the task loss training from the optimal least squares "
    "matching, the distances naturally must increase under any training process.",
    expected={"change of CCA": "0", "change of R²": "falls"},
    criterion=f"Holds if in task loss training of Tiny-10 at Layer 3 from the least-squares map CCA moves by less than "
    f"{STILL}, and R² falls, in every training; in part if one of the two.",
    measures=["cca_mean"],
    kind="identity",
    scales=("cpu",),
)
def cca_invariance(lab: Lab) -> Finding:
    """CCA and R² in the record of the training."""
    courses = _courses(lab)
    still = max(map(abs, _change(courses, "cca"))) < STILL
    measured = {
        f"change of {name}": Measured.over(_change(courses, key)) for key, name in (("cca", "CCA"), ("r2", "R²"))
    }
    return Finding(
        verdict(still, max(_change(courses, "r2")) < 0), measured, note=origin(lab, "tiny10"), seeds=range(len(courses))
    )


@claim(
    "matching/low-cka",
    figure="Fig. 5",
    sentence="We find that the CKA value drops by a large amount (achieving lower than 0.7), whereas the accuracy "
    "remains essentially unchanged.",
    expected={"CKA in the end": "below 0.7", "relative accuracy in the end": "about 1"},
    control="the same training without a penalty on CKA",
    criterion="A network stitched with itself at Layer 2.0, from the identity, with a penalty on the CKA of whole "
    "maps. Holds if in the end, on test images, that CKA is below 0.7 and below that of the same training without the "
    f"penalty, and the relative accuracy is above 0.98; network by network, {BY_T} over the networks.",
    measures=["cka"],
    training=lambda scale, networks: length(scale, networks, epochs=EPOCHS[scale]),
)
def low_cka(lab: Lab) -> Finding:
    """Training with the CKA of a batch added to the loss, an example being a whole map as in the authors' programs."""
    kind, seeds = ITSELF[lab.scale], range(PAIRS[lab.scale])
    train_all(lab, [f"{kind}/{seed}" for seed in seeds])
    tasks = [(f"{kind}/{seed}", penalty) for penalty in (PENALTY, 0.0) for seed in seeds]
    found = dict(zip(tasks, lab.over(with_itself, tasks, keep=True), strict=True))
    ours, control = ([found[f"{kind}/{seed}", penalty] for seed in seeds] for penalty in (PENALTY, 0.0))
    measured, controls = (
        {name: Measured.over(one["ends"][name] for one in some) for name in some[0]["ends"]} for some in (ours, control)
    )
    low = [[one["ends"]["CKA in the end"] for one in some] for some in (ours, control)]
    conditions = measured["CKA in the end"].below(0.7), gains(low[1], low[0]).above(0)
    curve: dict[str, list[float]] = {"epoch": ours[0]["course"]["epoch"]}
    for name in ("CKA", "relative accuracy"):
        curve[name] = [mean(values) for values in zip(*(one["course"][name] for one in ours), strict=True)]
    return Finding(
        verdict(all_of(*conditions, measured["relative accuracy in the end"].above(0.98))),
        measured,
        controls,
        f"The penalty is {PENALTY:g} times the CKA of batches of {BATCH[lab.scale]}. {origin(lab, kind)}",
        {"While CKA is penalised": curve},
        seeds,
    )


def with_itself(lab: Lab, task: tuple[str, float]) -> dict[str, dict[str, Any]]:
    """Stitch a network with itself, with a penalty on CKA; return what it is worth in the end, and the course."""
    name, penalty = task
    model, layer = network(lab, name), layers(lab, name.partition("/")[0])["Layer 2.0"]
    stitch = nk.stitch(
        model, layer, model, layer, fitting(lab), "task_loss", judging(lab),
        init="identity", cka_penalty=penalty, cka_of="examples", epochs=EPOCHS[lab.scale], batch=BATCH[lab.scale],
        lr=RATE[lab.scale], memory=SETTINGS[lab.scale].options["memory"],
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
    return {"ends": ends, "course": course}


def _courses(lab: Lab, **options: Any) -> list[Sequence[Mapping[str, Any]]]:
    """Return the records of the trainings, by pair."""
    couples = pairs(lab, "tiny10", PAIRS[lab.scale])
    layer = layers(lab, "tiny10")[LAYER]
    return [one.history for one in made(lab, [task_loss(pair, layer, **options) for pair in couples]).values()]


def _change(courses: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[float]:
    return [course[-1][key] - course[0][key] for course in courses]


def _changes(courses: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Measured]:
    keys = {"cka": "CKA", "loss": "cross-entropy", "svcca": "SVCCA", "accuracy": "accuracy"}
    found = {f"change of {name}": Measured.over(_change(courses, key)) for key, name in keys.items()}
    for key in ("svcca", "cka", "r2"):
        name = f"correlation of {INDICES[key]} with the performance"
        found[name] = Measured.over(correlation(one, key) for one in courses)
    return found | {f"{name} before training": Measured.over(c[0][k] for c in courses) for k, name in INDICES.items()}


def _lines(courses: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[Any]]:
    records = list(zip(*courses, strict=True))
    curve: dict[str, list[Any]] = {"step": [one["step"] for one in courses[0]]}
    for key, name in INDICES.items():
        curve |= line(name, [[one[key] for one in record] for record in records])
    return curve


def correlation(course: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the correlation of an index with minus the cross-entropy; 0 for one that stands still."""
    losses, index = ([record[name] for record in course] for name in ("loss", key))
    return -float(np.corrcoef(losses, index)[0, 1]) if np.std(index) > 0 else 0.0
