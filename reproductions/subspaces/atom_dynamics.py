"""Atoms in training: which layers settle first, and in which layers two tasks from one start part.

Claims: subspaces/bottom-up and subspaces/two-tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
from torch import Tensor, nn

from netkin.results.series import kendall
from netkin.training import Recipe, accuracy
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.recipes import length_words
from reproductions.subspaces.families import Atoms, cosines, wandered
from reproductions.subspaces.nets import WORDS, atoms_of, copies, recipe, start, tasks, train_all

NET = "vgg11"
SEEDS = {"cpu": 3, "gpu": 5}
TRAINING: dict[str, dict[str, Any]] = {
    "cpu": {"epochs": 12, "batch": 50, "lr": 0.05},
    "gpu": {"epochs": 20, "batch": 256, "lr": 0.1},
}
MARK, MARKS = 0.99, (0.99, 0.999)
SHOWN = (0, 3, 7)  # the layers of Fig. 4d to f, counted from 0
LEARNED, WALK = "trained", "random walk"
TAU = f"τ of depth and the epoch of reaching {MARK}"
FIRST = f"first layer at {MARK}, share of the epochs"
LAST = f"last layer at {MARK}, share of the epochs"
LATER = f"last minus first layer at {MARK}, share of the epochs"
Series = Sequence[Atoms]  # the atoms of one network at several times


@claim(
    "subspaces/bottom-up",
    figure="Fig. 4",
    sentence="We mark the epoch when the parameters of each layer reaches 0.99 similarity with the their states in the "
    "last epoch. The first layer reaches 0.99 similarity at epoch 36 which is earlier than final layers. … VGG11 shows "
    "a similar behavior.",
    expected={TAU: "above 0", LATER: "above 0", FIRST: "36 of 150: 0.24"},
    control="atoms that walk at random from the same start, in each layer as far from epoch to epoch as in training",
    criterion=f"{WORDS[NET]} on CIFAR-10, of which atoms and the head alone are trained. A layer is settled from the "
    f"epoch on after which its atom similarity to its state after the last epoch stays at {MARK} or above. Two parts: "
    "the first layer is settled before the last one, and by a larger share of the epochs than in the random walk; and "
    "Kendall's τ of a layer's depth and its epoch is above 0 and above that of the random walk. By the 95% interval of "
    "Student's t over the starts.",
    measures=["atom_cosine"],
    papers_training="AlexNet 150 epochs, VGG11 20 epochs",
    training=lambda scale, _: length_words(Recipe(**TRAINING[scale])),
)  # fmt: skip
def bottom_up(lab: Lab) -> Finding:
    """Every epoch against every other, by layer, in training and in random walks."""
    lab.images_of("cifar10")
    recipe(lab, NET)
    seeds = lab.seeds(SEEDS[lab.scale])
    found = [one for some in lab.over(followed, _in_turn(lab, seeds), keep=True) for one in some]
    runs = {way: [np.array(one[way]) for one in found] for way in (LEARNED, WALK)}  # layers × epochs × epochs
    numbers = {way: [_settling(own) for own in some] for way, some in runs.items()}
    measured, controls = (
        {name: Measured.over(one[name] for one in some) for name in some[0]} for some in numbers.values()
    )
    parts = [
        all_of(measured[name].above(0), gains(*([one[name] for one in some] for some in numbers.values())).above(0))
        for name in (LATER, TAU)
    ]
    measured["test accuracy"] = Measured.over(one["accuracy"] for one in found)
    own = TRAINING[lab.scale]
    note = (
        f"{own['epochs']} epochs of batches of {own['batch']}, the rate falling as a cosine from {own['lr']:g}; the "
        "paper trains AlexNet on CIFAR-100 for 150 epochs and VGG11 on ImageNet for 20. A layer that is settled only "
        "after the last epoch has the share 1."
    )
    return Finding(verdict(*parts), measured, controls, note, _settling_curves(runs), tuple(seeds))


def _in_turn(lab: Lab, seeds: Sequence[int]) -> list[list[int]]:
    """Return which starts are trained together: all on a GPU, else each by itself, so that a run can go on from it."""
    return [list(seeds)] if lab.device.type == "cuda" else [[seed] for seed in seeds]


def followed(lab: Lab, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the similarities of all epochs of networks and of walks, layers × epochs × epochs; fit for JSON."""
    data, own = lab.images_of("cifar10"), TRAINING[lab.scale]
    each = len(data.train_labels) // own["batch"]
    steps = [epoch * each for epoch in range(own["epochs"] + 1)]
    models = [start(lab, NET, seed) for seed in seeds]
    runs = watched(lab, NET, models, [data.train] * len(models), steps, list(seeds), steps=None, **own)
    found = []
    for seed, model, run in zip(seeds, models, runs, strict=True):
        ways = {LEARNED: run, WALK: wandered(run, seed)}
        tables: dict[str, Any] = {way: between_times(states) for way, states in ways.items()}
        found.append(tables | {"accuracy": accuracy(model, data.test, precision="auto")})
    return found


def watched(
    lab: Lab,
    name: str,
    models: Sequence[nn.Module],
    data: Sequence[tuple[Tensor, Tensor]],
    callback_steps: Sequence[int],
    seeds: Sequence[int],
    **changes: Any,
) -> list[list[dict[str, Tensor]]]:
    """Train networks and return the atoms of each after some steps.

    Args:
        lab: The laboratory.
        name: The architecture.
        models: The networks, which are trained in place.
        data: Images and labels for each.
        callback_steps: After which steps; 0 is before the first.
        seeds: Of the order of the examples, one for each.
        **changes: Settings of the recipe that are other than in the laboratory.
    """
    kept: list[dict[int, dict[str, Tensor]]] = [{} for _ in models]

    def callback(number: int, model: nn.Module, step: int) -> None:
        kept[number][step] = atoms_of(model)

    train_all(lab, name, models, data, seeds=seeds, callback=callback, callback_steps=callback_steps, **changes)
    return [[own[step] for step in callback_steps] for own in kept]


def between_times(states: Series) -> list[list[list[float]]]:
    """Return the atom similarities of all times with each other, layers × times × times."""
    found = cosines({str(time): own for time, own in enumerate(states)})
    return [found.tables[f"atom_cosine of {layer}"].values.tolist() for layer in states[0]]


def settled(own: np.ndarray, mark: float) -> float:
    """Return the share of the time after which a layer's similarity to its last state stays at `mark` or above.

    `own` is the table of its times with each other.
    """
    below = np.flatnonzero(own[:, -1] < mark)
    return float((below[-1] + 1) / (len(own) - 1)) if len(below) else 0.0


def _settling(run: np.ndarray) -> dict[str, float]:
    """Return when the layers of a run are settled, and in which order."""
    found: dict[str, float] = {}
    for mark in MARKS:
        shares = [settled(own, mark) for own in run]
        found |= {
            TAU.replace(str(MARK), str(mark)): kendall(shares),
            LATER.replace(str(MARK), str(mark)): shares[-1] - shares[0],
            FIRST.replace(str(MARK), str(mark)): shares[0],
            LAST.replace(str(MARK), str(mark)): shares[-1],
        }
    return found


def _settling_curves(runs: Mapping[str, Sequence[np.ndarray]]) -> dict[str, dict[str, list[Any]]]:
    """Return the epoch of each layer, the similarity to the last epoch, and the maps of Fig. 4."""
    depth, times = runs[LEARNED][0].shape[:2]
    curve: dict[str, list[Any]] = {"layer": list(range(1, depth + 1))}
    for way, mark in product(runs, MARKS):
        shares = [[settled(run[k], mark) for run in runs[way]] for k in range(depth)]
        curve |= line(f"{way}, {mark}", shares)
    curves = {"Share of the epochs after which a layer is settled": curve}
    for way, some in runs.items():
        own: dict[str, list[Any]] = {"epoch": list(range(times))}
        own |= {f"layer {k + 1}": np.mean([run[k, :, -1] for run in some], 0).tolist() for k in range(depth)}
        curves[f"Atom similarity to the last epoch, {way}"] = own
    for k in (k for k in SHOWN if k < depth):
        table = np.mean([run[k] for run in runs[LEARNED]], 0)
        own = {"epoch": list(range(times))} | {f"epoch {t}": row.tolist() for t, row in enumerate(table)}
        curves[f"Layer {k + 1}: atom similarity of all epochs"] = own
    return curves


# --- two tasks from one start -----------------------------------------------------------------------------------------

TASK_NETS = ("alexnet", "vgg11")
PAIRS = {"cpu": 3, "gpu": 5}  # of tasks, each with a start of its own
TASK_TRAINING: dict[str, dict[str, Any]] = {"cpu": {"steps": 200, "batch": 50}, "gpu": {"steps": 600, "batch": 100}}
TASK_RATES = {"alexnet": 0.03, "vgg11": 0.05}
TIMES = 10  # at which atoms are compared
TWO, ONE, APART = "two tasks", "one task twice", "a task and the start"
LEAST = "first layers below the others, in means over all layers"
MOST = "middle layers above the last, in means over all layers"
MIDDLE = "middle layers above the first, in means over all layers"


@claim(
    "subspaces/two-tasks",
    figure="Figs. 13, 14",
    sentence="we examine the similarity between the two participated models shared the same initialization trained "
    "only with atoms on two different tasks. … The difference is less on the first few layers, but more on the middle "
    "layers. It reflects the middle layer is more critical than other layers",
    expected={f"{WORDS[net]}: {name}": "above 0" for net in TASK_NETS for name in (LEAST, MOST, MIDDLE)},
    control="one task twice from the same start, in two orders of its images",
    criterion="Two of ten tasks of ten classes of CIFAR-100, learnt from one start by atoms and linear layers. A "
    "layer's difference is 1 minus the atom similarity of the two networks, in units of the mean over all layers. The "
    "first layers are the first quarter (AlexNet 1, VGG11 1 and 2), the last ones the last quarter, the middle layers "
    "those between. Two parts for each architecture: the mean of the first layers is below that of all others, and by "
    "more than in the control; the mean of the middle layers is above that of the first and above that of the last, "
    "and each by more than in the control. By the 95% interval of Student's t over pairs of tasks, each with a start "
    "of its own.",
    measures=["atom_cosine"],
    training=lambda scale, _: length_words(Recipe(**TASK_TRAINING[scale])),
)  # fmt: skip
def two_tasks(lab: Lab) -> Finding:
    """Networks of two tasks, and of one task twice, at ten times of their training."""
    lab.images_of("cifar100")
    seeds, parts = lab.seeds(PAIRS[lab.scale]), []
    measured, controls, curves = dict[str, Measured](), dict[str, Measured](), dict[str, dict[str, list[Any]]]()
    notes = []
    for net in TASK_NETS:
        recipe(lab, net)
        turns = [[net, *some] for some in _in_turn(lab, seeds)]
        found = [one for some in lab.over(parted, turns, keep=True) for one in some]
        tables = {way: [np.array(one[way]) for one in found] for way in (TWO, ONE, WALK, APART)}  # times × layers
        numbers = {way: [_contrasts(own[-1]) for own in some] for way, some in tables.items()}
        for name in numbers[TWO][0]:
            key = f"{WORDS[net]}: {name}"
            measured[key], controls[key] = (Measured.over(one[name] for one in numbers[way]) for way in (TWO, ONE))
            for way in (WALK, APART):
                controls[f"{key}, {way}"] = Measured.over(one[name] for one in numbers[way])
        beyond = {name: gains(*([one[name] for one in numbers[way]] for way in (TWO, ONE))).above(0)
                  for name in (LEAST, MOST, MIDDLE)}  # fmt: skip
        holds = {name: all_of(measured[f"{WORDS[net]}: {name}"].above(0), own) for name, own in beyond.items()}
        parts += [holds[LEAST], all_of(holds[MOST], holds[MIDDLE])]
        curves |= _task_curves(net, tables)
        right = mean(right for one in found for right in one["accuracies"])
        notes.append(f"{WORDS[net]} {100 * right:.0f}%")
    own = TASK_TRAINING[lab.scale]
    note = (
        f"{own['steps']} steps of batches of {own['batch']}; test accuracy on ten classes: {', '.join(notes)}. "
        "“random walk” stands for two networks that went from the start at random, in each layer as far as the trained "
        "ones. The paper does not say which tasks it took, and trained VGG11 on ImageNet."
    )
    return Finding(verdict(*parts), measured, controls, note, curves, tuple(seeds))


def parted(lab: Lab, task: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the differences of networks of two tasks, and in the controls, times × layers, of each start."""
    net, *seeds = task
    own, every = TASK_TRAINING[lab.scale], tasks(lab)
    callback_steps = [round(k * own["steps"] / TIMES) for k in range(TIMES + 1)]
    sets = [every[2 * seed + k] for seed in seeds for k in (0, 1, 0)]  # a task, another, and the first again
    models = [model for seed in seeds for model in copies(start(lab, net, seed), 3)]
    orders = [10 * seed + k for seed in seeds for k in range(3)]
    runs = watched(lab, net, models, [one.train for one in sets], callback_steps, orders, lr=TASK_RATES[net], **own)
    found = []
    for k, seed in enumerate(seeds):
        first, other, again = runs[3 * k : 3 * k + 3]
        walks = [[run[0], *(wandered([run[0], state], 100 * seed + number)[-1] for state in run[1:])]
                 for number, run in enumerate((first, other))]  # fmt: skip
        still = [first[0]] * len(first)
        ways = {TWO: (first, other), ONE: (first, again), WALK: walks, APART: (first, still)}
        tables: dict[str, Any] = {way: differences(*pair) for way, pair in ways.items()}
        trained = zip(models[3 * k : 3 * k + 3], sets[3 * k : 3 * k + 3], strict=True)
        found.append(tables | {"accuracies": [accuracy(one, data.test, precision="auto") for one, data in trained]})
    return found


def differences(first: Series, second: Series) -> list[list[float]]:
    """Return 1 minus the atom similarity of two networks at each time, times × layers."""
    found = [cosines({"a": a, "b": b}) for a, b in zip(first, second, strict=True)]
    return [[1 - float(one.tables[f"atom_cosine of {layer}"]["a", "b"]) for layer in first[0]] for one in found]


def _contrasts(own: np.ndarray) -> dict[str, float]:
    """Return how the groups of layers differ, in units of the mean over all layers, and that mean."""
    quarter, whole = len(own) // 4, float(own.mean())
    first, middle, last = (float(part.mean()) for part in np.split(own, [quarter, len(own) - quarter]))
    rest = float(own[quarter:].mean())
    return {LEAST: (rest - first) / whole, MOST: (middle - last) / whole, MIDDLE: (middle - first) / whole,
            "mean difference": whole}  # fmt: skip


def _task_curves(net: str, tables: Mapping[str, Sequence[np.ndarray]]) -> dict[str, dict[str, list[Any]]]:
    """Return the differences at the end by layer, and those of two tasks in time."""
    times, depth = tables[TWO][0].shape
    curve: dict[str, list[Any]] = {"layer": list(range(1, depth + 1))}
    for way, some in tables.items():
        curve |= line(way, np.array([own[-1] for own in some]).T)
    course: dict[str, list[Any]] = {"share of the training": [k / (times - 1) for k in range(times)]}
    for k in range(depth):
        course |= {f"layer {k + 1}": np.mean([own[:, k] for own in tables[TWO]], 0).tolist()}
    return {f"{WORDS[net]}: difference by layer": curve, f"{WORDS[net]}: difference of two tasks in training": course}
