"""The top layers of a convnet can be compressed one after the other and hardly lose accuracy.

Claim: svcca/compression.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.applications.compression import Compression
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

BELOW = "pool2"
LAYERS = ["fc1", "fc2", "out"]  # what they are fed: the paper's pool1, bn3 and bn4
SHARE = 0.35
SHARES = (0.02, 0.1)  # also tried, with the first network
DROP = 0.01  # of the training accuracy, in the search for the fewest directions
EXAMPLES = 20_000  # training images that directions are found on, at most
NETS = {"cpu": 2, "gpu": 3}
LOGITS, OTHER, ITSELF = WAYS = ("logits", "another initialisation", "variance alone")


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
    sentence="we can consecutively compress top layers with SVCCA by a significant amount (in one case reducing each "
    "layer to 0.35 original size) and hardly affect performance … The latter [activations against logits] provides "
    "better results.",
    expected={"test accuracy lost with all layers at 0.35, against the logits": "hardly any"},
    criterion="Holds if the mean test accuracy with the inputs of all three top layers at 0.35 of their width, against "
    "the logits, is lower by less than 0.01, and the loss is at most 0.002 above that against another initialisation; "
    "in part if one of the two.",
)
def compression(lab: Lab) -> Finding:
    """Test accuracy with the top layers compressed from the top, without any training after that."""
    count = NETS[lab.scale]
    tops = [Top.of(lab, run.model) for run in lab.trained_all(("convnet", seed) for seed in lab.seeds(count))]
    tables = {way: [_table(tops, place, way, SHARE) for place in range(count)] for way in WAYS}
    fewest = [_fewest(top) for top in tops]
    lost = {way: [_lost(table) for table in found] for way, found in tables.items()}
    means = {way: sum(values) / count for way, values in lost.items()}
    return Finding(
        verdict(means[LOGITS] < 0.01, means[LOGITS] <= means[OTHER] + 0.002),
        _measured(tables, lost, fewest),
        note="The paper names five layers; three of them feed weights, whose inputs are compressed here. A layer of n "
        "inputs and m outputs has nm weights, and k(n + m) after: at 0.35 n the square fc2 keeps 0.70 of them, and the "
        "others grow, as they have fewer outputs. The fewest directions that a search finds are fewer, and save. "
        "Variance alone means principal components.",
        curves={
            "Test accuracy, compressed one after the other": _one_by_one(tables),
            "Test accuracy by the share of directions kept (first network)": _by_share(tops, tables),
        },
        seeds=tuple(range(count)),
    )


def _table(tops: list[Top], place: int, way: str, share: float) -> Compression:
    """Compress one network; the other initialisation is the next one, fed what its own layers below give."""
    top, other = tops[place], tops[(place + 1) % len(tops)]
    against = {LOGITS: "logits", OTHER: other.net, ITSELF: top.net}[way]
    pairs = zip(top.train, other.train, strict=True)
    data = [(features, labels, beside) for (features, labels), (beside, _) in pairs]
    small: Any = nk.compress(
        top.net,
        LAYERS,
        k=share,
        data=data,
        test=top.test,
        against=against,
        order="from_the_top",
        forward=lambda net, batch: net(batch[2] if net is other.net else batch[0]),
    )
    return small.compression


def _fewest(top: Top) -> dict[str, float]:
    """Search the fewest directions by right answers on training images, and count those on test images."""
    small: Any = nk.compress(top.net, LAYERS, accuracy_drop=DROP, data=top.train, order="from_the_top")
    table: Compression = small.compression
    kept = {f"directions kept of {row.layer}": float(row.kept) for row in table}
    share = sum(row.parameters_after for row in table) / sum(row.parameters_before for row in table)
    return kept | {"parameters": share, "lost": _accuracy(top.net, top.test) - _accuracy(small, top.test)}


@torch.no_grad()
def _features(lab: Lab, model: nn.Module, part: str) -> list[tuple[Tensor, Tensor]]:
    images = lab.images()
    whole, labels = getattr(images, f"{part}_images")[:EXAMPLES], getattr(images, f"{part}_labels")[:EXAMPLES]
    parts = zip(whole.split(500), labels.split(500), strict=True)
    return [(nk.run_until(model, BELOW, inputs), truth) for inputs, truth in parts]


@torch.no_grad()
def _accuracy(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    right = torch.cat([net(features).argmax(1) == labels for features, labels in data])
    return right.double().mean().item()


def _lost(table: Compression) -> float:
    assert table.accuracy_before is not None
    assert table.accuracy_after is not None
    return table.accuracy_before - table.accuracy_after


def _measured(
    tables: Mapping[str, list[Compression]], lost: Mapping[str, list[float]], fewest: list[dict[str, float]]
) -> dict[str, Measured]:
    measured = {"test accuracy": Measured.over(_known(table.accuracy_before) for table in tables[LOGITS])}
    for way, values in lost.items():
        measured[f"test accuracy lost with all layers at {SHARE}, against {_the(way)}"] = Measured.over(values)
    for layer in LAYERS:
        row = tables[LOGITS][0][layer]
        name = f"{layer}: share of its {row.parameters_before:,} parameters at {SHARE} of its {row.width:,} inputs"
        measured[name] = Measured(row.parameters_after / row.parameters_before)
    names = {"parameters": "share of these layers' parameters", "lost": "test accuracy lost"}
    for key in fewest[0]:
        found = Measured.over(one[key] for one in fewest)
        measured[f"fewest directions at a loss of {DROP} on training images: {names.get(key, key)}"] = found
    return measured


def _one_by_one(tables: Mapping[str, list[Compression]]) -> dict[str, list[Any]]:
    order = [row.layer for row in tables[LOGITS][0]]
    before = _mean(_known(table.accuracy_before) for table in tables[LOGITS])
    lines = {
        f"against {_the(way)}": [before, *(_mean(_known(table[layer].accuracy) for table in found) for layer in order)]
        for way, found in tables.items()
    }
    return {"layers compressed": [float(number) for number in range(len(order) + 1)], **lines}


def _by_share(tops: list[Top], tables: Mapping[str, list[Compression]]) -> dict[str, list[Any]]:
    lines = {}
    for way in (LOGITS, OTHER):
        found = [*(_table(tops, 0, way, share) for share in SHARES), tables[way][0]]
        lines[f"against {_the(way)}"] = [_known(table.accuracy_after) for table in found]
    return {"share of the width": [*SHARES, SHARE], **lines}


def _the(way: str) -> str:
    return "the logits" if way == LOGITS else "itself (variance alone)" if way == ITSELF else way


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
