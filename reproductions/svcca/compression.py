"""The top layers of a convnet can be compressed one after the other and hardly lose accuracy.

Claims: svcca/compression and svcca/compression-by-directions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.applications.compression import Compression
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab

BELOW = "pool2"
LAYERS = ["fc1", "fc2", "out"]  # what they are fed: the paper's pool1, bn3 and bn4
SHARE = 0.35  # of all parameters of these layers
EXAMPLES = 20_000  # training images that directions are found on, at most
NETS = {"cpu": 3, "gpu": 5}
HARDLY = 0.01
LOGITS, OTHER, ITSELF, UNTRAINED = WAYS = (
    "the logits", "another initialisation", "itself (variance alone)", "a network before training",
)  # fmt: skip
LOST = f"test accuracy lost at {SHARE} of the parameters, against {LOGITS}"
LOST_BY_DIRECTIONS = f"test accuracy lost at k/n = {SHARE}, against {LOGITS}"
SENTENCE = (
    "we can consecutively compress top layers with SVCCA by a significant amount (in one case reducing each layer to "
    "0.35 original size) and hardly affect performance … The latter [activations against logits] provides better "
    "results."
)
FIVE = "The paper names five layers; three of them feed weights, whose inputs are compressed here."
Tables = Mapping[str, list[Compression]]  # by way, one for each network


@dataclass(frozen=True)
class Top:
    """What a network does after its last pool, and what that is fed: the layers below stay as they are."""

    net: nn.Module
    train: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, lab: Lab, model: nn.Module) -> Top:
        names = [name for name, _ in model.named_children()]
        rest = list(model.named_children())[names.index(BELOW) + 1 :]
        net = nn.Sequential(OrderedDict([("flatten", nn.Flatten()), *rest])).eval()
        return cls(net, *(_features(lab, model, part) for part in ("train", "test")))


@claim(
    "svcca/compression",
    figure="Fig. App. 5",
    sentence=SENTENCE,
    expected={LOST: "hardly any"},
    control="as many directions that agree with a network before training",
    criterion=f"Two parts, with the inputs of the three top layers at the same share of their width, such that these "
    f"layers together have {SHARE} of their parameters. Compressed against the logits the test accuracy falls by less "
    f"than {HARDLY}, and by less than against a network before training. And it falls by less than against another "
    "initialisation. Network by network, by the 95% interval of Student's t over the networks; in part if one of the "
    "two.",
    measures=["svcca"],
)
def compression(lab: Lab) -> Finding:
    """Test accuracy with the top layers compressed from the top, without any training after that."""
    seeds, tops, fresh = networks(lab)
    share = share_of_width(tops[0].net)
    tables = _tables(tops, fresh, share)
    literal = [_table(tops, fresh, place, LOGITS, SHARE) for place in range(len(tops))]
    lost = {way: [_lost(table) for table in found] for way, found in tables.items()}
    measured = {
        f"test accuracy lost at {SHARE} of the parameters, against {way}": Measured.over(lost[way]) for way in WAYS[:-1]
    }
    measured |= {
        "test accuracy": Measured.over(_known(table.accuracy_before) for table in tables[LOGITS]),
        "share of the width at which the parameters are 0.35": Measured(share),
        "share of the parameters": Measured.over(_parameters(table) for table in tables[LOGITS]),
        f"test accuracy lost at {SHARE} of the width": Measured.over(_lost(table) for table in literal),
        f"share of the parameters at {SHARE} of the width": Measured.over(_parameters(table) for table in literal),
    }
    hardly = all_of(measured[LOST].below(HARDLY), gains(lost[UNTRAINED], lost[LOGITS]).above(0))
    return Finding(
        verdict(hardly, gains(lost[OTHER], lost[LOGITS]).above(0)),
        measured,
        {LOST: Measured.over(lost[UNTRAINED])},
        note=f"{FIVE} A layer of n "
        f"inputs and m outputs has nm weights, and k(n + m) after, so that at k = {SHARE} n most layers grow: the "
        "paper speaks of the layers' size, and what is counted here are parameters.",
        curves={"Test accuracy, compressed one after the other": _one_by_one(tables)},
        seeds=tuple(seeds),
    )


@claim(
    "svcca/compression-by-directions",
    figure="Fig. App. 5",
    sentence=SENTENCE,
    expected={LOST_BY_DIRECTIONS: "hardly any"},
    control="as many directions that agree with a network before training",
    criterion=f"As the paper counts a layer's size, by the factor k/n of Section 4.4: each of the three top layers is "
    f"fed k = {SHARE} n directions of its n inputs. Two parts. Compressed against the logits the test accuracy falls "
    f"by less than {HARDLY}, and by less than against a network before training. And it falls by less than against "
    "another initialisation. Network by network, by the 95% interval of Student's t over the networks; in part if one "
    "of the two.",
    measures=["svcca"],
)
def compression_by_directions(lab: Lab) -> Finding:
    """Test accuracy with 0.35 of the directions of each top layer's inputs, without any training after that."""
    seeds, tops, fresh = networks(lab)
    tables = _tables(tops, fresh, SHARE)
    lost = {way: [_lost(table) for table in found] for way, found in tables.items()}
    measured = {f"test accuracy lost at k/n = {SHARE}, against {way}": Measured.over(lost[way]) for way in WAYS[:-1]}
    measured |= {
        "test accuracy": Measured.over(_known(table.accuracy_before) for table in tables[LOGITS]),
        "share of the parameters": Measured.over(_parameters(table) for table in tables[LOGITS]),
    }
    less = gains(lost[UNTRAINED], lost[LOGITS])
    return Finding(
        verdict(
            all_of(measured[LOST_BY_DIRECTIONS].below(HARDLY), less.above(0)),
            gains(lost[OTHER], lost[LOGITS]).above(0),
        ),
        measured | {f"{LOST_BY_DIRECTIONS}, less than against a network before training": less},
        {LOST_BY_DIRECTIONS: Measured.over(lost[UNTRAINED])},
        note=f"{FIVE} At this share a layer of n inputs and m outputs has k(n + m) weights after, nm before, so that "
        "its parameters grow where m is small; svcca/compression counts those.",
        curves={"Test accuracy, compressed one after the other": _one_by_one(tables)},
        seeds=tuple(seeds),
    )


def networks(lab: Lab) -> tuple[range, list[Top], list[Top]]:
    """Return the seeds, and the tops of the networks, trained and before training."""
    seeds = lab.seeds(NETS[lab.scale])
    runs = lab.trained_all(("convnet", seed) for seed in seeds)
    return seeds, [Top.of(lab, run.model) for run in runs], [Top.of(lab, lab.settled(run.untrained())) for run in runs]


def _tables(tops: list[Top], fresh: list[Top], share: float) -> Tables:
    """Compress every network to a share of its layers' inputs, in all ways."""
    return {way: [_table(tops, fresh, place, way, share) for place in range(len(tops))] for way in WAYS}


def share_of_width(net: nn.Module) -> float:
    """Return the share of each layer's inputs at which all layers together have 0.35 of their weights."""
    sizes = [tuple(net.get_submodule(name).weight.shape) for name in LAYERS]  # type: ignore[arg-type]
    return SHARE * sum(m * n for m, n in sizes) / sum(n * (n + m) for m, n in sizes)


def _table(tops: list[Top], fresh: list[Top], place: int, way: str, share: float) -> Compression:
    """Compress one network; the other initialisation is the next one, fed what its own layers below give."""
    top, others = tops[place], {OTHER: tops, UNTRAINED: fresh}.get(way, tops)
    other = others[(place + 1) % len(others)]
    against: Any = {LOGITS: "logits", ITSELF: top.net}.get(way, other.net)
    pairs = zip(top.train, other.train, strict=True)
    data = [(features, labels, beside) for (features, labels), (beside, _) in pairs]
    small: Any = nk.compress(
        top.net,
        LAYERS,
        k={name: max(1, round(share * top.net.get_submodule(name).in_features)) for name in LAYERS},  # type: ignore[arg-type, operator]
        data=data,
        test=top.test,
        against=against,
        order="from_the_top",
        forward=lambda net, batch: net(batch[2] if net is other.net else batch[0]),
    )
    return small.compression


def _parameters(table: Compression) -> float:
    return sum(row.parameters_after for row in table) / sum(row.parameters_before for row in table)


@torch.no_grad()
def _features(lab: Lab, model: nn.Module, part: str) -> list[tuple[Tensor, Tensor]]:
    images = lab.images()
    whole, labels = getattr(images, f"{part}_images")[:EXAMPLES], getattr(images, f"{part}_labels")[:EXAMPLES]
    parts = zip(whole.split(500), labels.split(500), strict=True)
    return [(nk.run_until(model, BELOW, inputs), truth) for inputs, truth in parts]


def _lost(table: Compression) -> float:
    assert table.accuracy_before is not None
    assert table.accuracy_after is not None
    return table.accuracy_before - table.accuracy_after


def _one_by_one(tables: Tables) -> dict[str, list[Any]]:
    order = [row.layer for row in tables[LOGITS][0]]
    before = mean(_known(table.accuracy_before) for table in tables[LOGITS])
    lines = {
        f"against {way}": [before, *(mean(_known(table[layer].accuracy) for table in found) for layer in order)]
        for way, found in tables.items()
    }
    return {"layers compressed": [float(number) for number in range(len(order) + 1)], **lines}


def _known(value: float | None) -> float:
    assert value is not None
    return value
