"""Claims 9 and 11: networks trained on other data sets, without batch norm, or by another optimizer."""

from __future__ import annotations

from statistics import mean

from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, ordered, origin, train_all
from reproductions.matching.stitches import judged, task_loss

OTHERS = {"cpu": {"tiny10-svhn": "SVHN"}, "gpu": {"tiny10-cifar100": "CIFAR-100", "tiny10-svhn": "SVHN"}}
SEEDS = {"cpu": 1, "gpu": 2}
AMONG = {"cpu": (2, 4, 6), "gpu": (1, 2, 3, 4, 5, 6, 7, 8)}
WAYS = {
    "tiny10-sgd": "batch norm, SGD",
    "tiny10-adam": "batch norm, Adam",
    "tiny10-plain-sgd": "no batch norm, SGD",
    "tiny10-plain-adam": "no batch norm, Adam",
}
EVERYWHERE = {"cpu": (3, 6), "gpu": (1, 3, 5, 7)}
ONE_WAY = {"cpu": 1, "gpu": 2}  # of the two ordered pairs
ENOUGH = 0.80


@claim(
    "matching/other-data",
    figure="App. C.2",
    sentence="accuracy drop during stitching can be surprisingly low even when we stitch networks trained on "
    "different datasets",
    expected={"relative accuracy at the best half of the layers": "a small loss"},
    criterion=f"The head of a Tiny-10 trained on one data set, the tail of one trained on another, stitched by task "
    f"loss on the second one's data. Holds if in every direction the relative accuracy, in the mean over pairs and "
    f"the better half of the layers, is at least {ENOUGH}; in part if in some.",
)
def other_data(lab: Lab) -> Finding:
    """Relative accuracy of stitches between networks of CIFAR-10 and of another data set, both ways."""
    others, seeds = OTHERS[lab.scale], range(SEEDS[lab.scale])
    train_all(lab, [f"{kind}/{seed}" for kind in (*others, "tiny10") for seed in seeds])
    ways = {f"{name} → CIFAR-10": (kind, "tiny10") for kind, name in others.items()}
    if lab.scale == "gpu":
        ways |= {f"CIFAR-10 → {name}": ("tiny10", kind) for kind, name in others.items()}
    names = [f"Layer {number}" for number in AMONG[lab.scale]]
    wanted = {
        (way, layer): [task_loss((f"{a}/{seed}", f"{b}/{seed}"), layers(lab, b)[layer]) for seed in seeds]
        for way, (a, b) in ways.items() for layer in names
    }  # fmt: skip
    found = judged(lab, [one for ones in wanted.values() for one in ones])
    shares = {key: [float(found[one].relative_accuracy or 0) for one in ones] for key, ones in wanted.items()}
    best = {way: sorted((shares[way, layer] for layer in names), key=mean)[len(names) // 2 :] for way in ways}
    measured = {
        "relative accuracy at the best half of the layers": Measured.over(mean(map(mean, best[w])) for w in ways)
    }
    measured |= {
        f"{way}: relative accuracy at the best half of the layers": Measured.over(
            v for values in best[way] for v in values
        )
        for way in ways
    }
    measured |= {
        f"{way}: test accuracy of the second network": Measured.over(
            float(found[wanted[way, names[0]][seed]].accuracy_b or 0) for seed in seeds
        )
        for way in ways
    }
    curves = {"Relative accuracy by layer": {"layer": names} | {
        way: [mean(shares[way, layer]) for layer in names] for way in ways
    }}  # fmt: skip
    note = f"The paper stitches networks of ImageNet and CelebA. {origin(lab, 'tiny10', *others)}"
    return Finding(verdict(*(mean(map(mean, best[way])) >= ENOUGH for way in ways)), measured, note, curves, seeds)


@claim(
    "matching/ways-of-training",
    figure="Sec. 5.1",
    sentence="We have experimented with networks with batch normalization and without batch normalization, and "
    "networks trained with different optimizers (SGD, Adam). Still, we did not encounter any cases where there were "
    "unmatchable instances.",
    expected={f"{words}: relative accuracy of the worst layer": "matchable" for words in WAYS.values()},
    criterion=f"Holds if for each of the four ways of training Tiny-10, task loss stitches of two networks keep a "
    f"relative accuracy of at least {ENOUGH}, in the mean over pairs, at every layer tried; in part if for some.",
)
def ways_of_training(lab: Lab) -> Finding:
    """Relative accuracy of stitches between networks with and without batch norm, trained by SGD and by Adam."""
    train_all(lab, [f"{kind}/{seed}" for kind in WAYS for seed in range(2)])
    names = [f"Layer {number}" for number in EVERYWHERE[lab.scale]]
    wanted = {
        (kind, layer): [task_loss(p, layers(lab, kind)[layer]) for p in ordered(lab, kind, 2)[: ONE_WAY[lab.scale]]]
        for kind in WAYS for layer in names
    }  # fmt: skip
    found = judged(lab, [one for ones in wanted.values() for one in ones])
    shares = {key: [float(found[one].relative_accuracy or 0) for one in ones] for key, ones in wanted.items()}
    worst = {kind: min((shares[kind, layer] for layer in names), key=mean) for kind in WAYS}
    measured = {f"{w}: relative accuracy of the worst layer": Measured.over(worst[kind]) for kind, w in WAYS.items()}
    measured |= {
        f"{w}: test accuracy of the networks": Measured.over(
            lab.accuracy(network(lab, f"{kind}/{s}")) for s in range(2)
        )
        for kind, w in WAYS.items()
    }
    curves = {"Relative accuracy by layer": {"layer": names} | {
        words: [mean(shares[kind, layer]) for layer in names] for kind, words in WAYS.items()
    }}  # fmt: skip
    passed = [mean(values) >= ENOUGH for values in worst.values()]
    return Finding(verdict(*passed), measured, origin(lab, *WAYS), curves, range(2))
