"""Does the ranking of `nk.diff` name one mistake in a quantised or fine-tuned model, and none where there is none?

`python bench/diff_rankings.py` quantises and fine-tunes the language model `outliers` of `bench/diff_worlds.py`, leaves
one layer at fewer bits, scales one LoRA by 5, or moves one block 4 × as far, and writes counts to
`bench/diff_rankings.json`.

Criterion, fixed before the first run of this script: of the mistakes 75 % are named, at the module, one inside it or
the one around it, and nothing is named in models without one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diff_worlds import data_of, outliers, text_of_python, windows
from torch import Tensor, nn

import netkin as nk

RESULTS = Path(__file__).parent / "diff_rankings.json"
BLOCKS = range(4)
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
ALL = (*ATTENTION, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
GRIDS = {"8 bits by rows": (8, None, 4), "4 bits in groups of 32": (4, 32, 2), "4 bits by rows": (4, None, 2)}


def texts() -> dict[str, Tensor]:
    """Return texts to learn, made of the one that the model knows."""
    codes = text_of_python()
    text = bytes(codes.tolist())
    small, turned = bytes(range(97, 123)), bytes([*range(98, 123), 97])
    words = b" ".join(word[::-1] for word in text.split(b" "))
    made = {"capitals": text.upper(), "backwards": text[::-1], "underscores": text.replace(b" ", b"_"),
            "letters turned": text.translate(bytes.maketrans(small, turned)), "words backwards": words}  # fmt: skip
    return {name: torch.tensor(list(own)) for name, own in made.items()}


class LoRA(nn.Module):
    """A linear layer with a matrix of low rank beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer, self.up = layer, nn.Parameter(torch.zeros(layer.out_features, rank))
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def fitted(model: nn.Module, codes: Tensor, steps: int, lr: float) -> nn.Module:
    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=lr)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = windows(codes, 16, drawn)
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return model.eval()


def learnt(model: nn.Module, codes: Tensor, layers: tuple[str, ...]) -> dict[str, Tensor]:
    """Return what weights change by: all of them, or where there are layers, theirs by LoRA."""
    torch.manual_seed(3)
    other = copy.deepcopy(model).requires_grad_(not layers)
    names = [f"model.layers.{block}.{layer}" for block in BLOCKS for layer in layers]
    for name in names:
        above, _, key = name.rpartition(".")
        setattr(other.get_submodule(above), key, LoRA(other.get_submodule(name)))
    fitted(other, codes, 40 if layers else 30, 5e-3 if layers else 1e-3)
    if not layers:
        before = dict(model.named_parameters())
        return {name: (weight - before[name]).detach() for name, weight in other.named_parameters()}
    tuned = {name: other.get_submodule(name) for name in names}
    return {f"{name}.weight": (one.up @ one.down).detach() for name, one in tuned.items()}


@torch.no_grad()
def moved(model: nn.Module, changes: Mapping[str, Tensor], wrong: str = "", factor: float = 1.0) -> nn.Module:
    other = copy.deepcopy(model)
    weights = dict(other.named_parameters())
    for name, change in changes.items():
        weights[name] += (factor if wrong and name.startswith(f"{wrong}.") else 1.0) * change
    return other


@torch.no_grad()
def rounded(model: nn.Module, bits: int, group: int | None, wrong: str = "", fewer: int = 2) -> nn.Module:
    other = copy.deepcopy(model)
    for name, layer in other.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            rows = layer.weight.reshape(-1, group or layer.in_features)
            scale = rows.abs().amax(1, keepdim=True) / (2 ** ((fewer if name == wrong else bits) - 1) - 1)
            rows.copy_((rows / scale).round() * scale)
    return other


def cases(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield models, each with its kind and the module with a mistake, or none."""
    for kind, (bits, group, fewer) in GRIDS.items():
        yield kind, "", rounded(model, bits, group)
        for place, layer in enumerate(ALL):
            wrong = f"model.layers.{place % len(BLOCKS)}.{layer}"
            yield kind, wrong, rounded(model, bits, group, wrong, fewer)
    for name, codes in texts().items():
        for layers in (ATTENTION, ALL):
            changes = learnt(model, codes, layers)
            kind = f"LoRA of {len(layers)} layers, {name}"
            yield kind, "", moved(model, changes)
            for block, layer in ((1, layers[1]), (2, layers[0]), (3, layers[-1])):
                wrong = f"model.layers.{block}.{layer}"
                yield kind, wrong, moved(model, changes, wrong, 5.0)
        changes = learnt(model, codes, ())
        yield f"all weights, {name}", "", moved(model, changes)
        for block in (0, 2):
            wrong = f"model.layers.{block}"
            yield f"all weights, {name}", wrong, moved(model, changes, wrong, 4.0)


def main() -> None:
    """Count, and write the record."""
    model, counts, rows = outliers(), dict[str, dict[str, int]](), []
    for kind, wrong, other in cases(model):
        found = nk.diff(model, other, data_of("outliers"), progress=False)
        named = found.first or next(iter(found.outlying), "")
        own = counts.setdefault(
            kind.split(" ")[0] if "LoRA" in kind or "all" in kind else "bits",
            {"mistakes": 0, "named": 0, "others": 0, "without": 0, "alarms": 0},
        )
        is_right = bool(wrong and named) and (f"{named}.".startswith(f"{wrong}.") or named == wrong.rpartition(".")[0])
        own["mistakes" if wrong else "without"] += 1
        own["named" if is_right else "others" if wrong else "alarms"] += bool(named)
        rows.append({"kind": kind, "mistake": wrong, "named": named, "z": round(found.ranking[0][1], 2)})
        print(rows[-1], flush=True)
    record: dict[str, Any] = {"counts": counts, "rows": rows, "netkin": nk.__version__, "torch": torch.__version__}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
