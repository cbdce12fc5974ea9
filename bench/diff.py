"""Does `nk.diff` find planted faults, and is it silent where only rounding differs?

`python bench/diff.py` plants the faults of `bench/diff_worlds.py`, one at a time, in small networks in several
precisions, and compares clean pairs. Counts go to `bench/diff.json` and to the table in `docs/diff.md`.

Criteria, fixed before the first run: a module stands out above 3 × its floor. Of the faults whose module lies at least
3 × above its floor (in an 8-bit network, 3 × above what it shows without the fault), 95 % are named, at the module or
one level above it; the others are below rounding. Of the clean pairs 2 % at most have a module that stands out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diff_worlds import (
    FAULTS,
    NETS,
    channels_last,
    data_of,
    int8,
    norms_in_float32,
    one_by_one,
    split_products,
    transposed_products,
)
from torch import nn

import netkin as nk
from netkin.results.diff import OUTLYING, THRESHOLD

HERE = Path(__file__).parent
RESULTS, GUIDE = HERE / "diff.json", HERE.parent / "docs" / "diff.md"
PRECISIONS = (
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32"),
    ("float32", "int8"), ("bfloat16", "int8"),
)  # fmt: skip
CLEAN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the same": lambda model: model,
    "split products": split_products,
    "example by example": one_by_one,
    "transposed products": transposed_products,
    "channels last": channels_last,
    "norms in float32": norms_in_float32,
}
ONLY = {"channels last": "convnet", "norms in float32": "mixtral"}


def in_precision(model: nn.Module, precision: str, of: str = "float32") -> nn.Module:
    """Return a model in a precision; an 8-bit one has the type `of` beside its packed weights."""
    return int8(model.to(getattr(torch, of))) if precision == "int8" else model.to(getattr(torch, precision))


def compared(a: nn.Module, b: nn.Module, net: str, padded: str = "") -> nk.results.Diff:
    return nk.diff(a, b, data_of(net, padded), progress=False)


def faults(nets: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what is said of each planted fault."""
    for net in nets:
        for of_a, of_b in PRECISIONS:
            clean = compared(in_precision(NETS[net](), of_a), in_precision(NETS[net](), of_b, of_a), net)
            for fault, (modules, plant) in FAULTS[net].items():
                a, b = NETS[net](), NETS[net]()
                plant(b)
                found = compared(in_precision(a, of_a), in_precision(b, of_b, of_a), net)
                at_fault = modules.split() or [""]  # two, where what belongs to them was exchanged
                above = max(_above(found, clean if of_b == "int8" else None, module) for module in at_fault)
                ranked = [name for name, z in found.ranking if z > OUTLYING][:1]
                named = found.first if found.first is not None or not found.by_design else (ranked or [None])[0]
                right = {near for module in at_fault for near in (module, caller_of(found, module))}
                yield {
                    "net": net, "precisions": f"{of_a}, {of_b}", "fault": fault, "module": modules, "named": named,
                    "above_floor": above, "right": named is not None and named.partition("#")[0] in right,
                }  # fmt: skip


def caller_of(found: nk.results.Diff, module: str) -> str | None:
    """Return the module that calls another."""
    return found.modules[module].caller


def _above(found: nk.results.Diff, clean: nk.results.Diff | None, module: str) -> float:
    """Return how far a module lies above its floor, or above what it shows without the fault."""
    own = found.modules[module].ratio or 0.0
    return own if clean is None else own / max(clean.modules[module].ratio or 0.0, 1.0)


def clean_pairs(nets: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what is said of pairs that only round differently."""
    for net in nets:
        for of_a, of_b in [*PRECISIONS[:4], ("float16", "float16"), ("float64", "float32"), ("float32", "float16")]:
            for change, changed in CLEAN.items():
                if change == "the same" and of_a == of_b:
                    continue
                if ONLY.get(change, net) != net:
                    continue
                for attention in ("eager", "sdpa") if net != "convnet" and change == "the same" else ("eager",):
                    a = in_precision(NETS[net](), of_a)
                    b = in_precision(changed(NETS[net](attention)), of_b)
                    yield clean_row(net, f"{of_a}, {of_b}", f"{change}, {attention}", compared(a, b, net))
        if net != "convnet":
            for precision in ("float32", "bfloat16"):
                for one, other in (("eager", "sdpa"), ("sdpa", "eager")):
                    for padded in ("", "left", "right") if net != "vit" else ("",):
                        a, b = (in_precision(NETS[net](attention), precision) for attention in (one, other))
                        found = compared(a, b, net, padded)
                        row = f"{one} against {other}" + f", padded {padded}" * bool(padded)
                        yield clean_row(net, f"{precision}, {precision}", row, found)


def clean_row(net: str, precisions: str, change: str, found: nk.results.Diff) -> dict[str, Any]:
    largest = max((one.ratio, name) for name, one in found.modules.items() if one.ratio is not None)
    return {
        "net": net, "precisions": precisions, "change": change, "largest": largest[0], "module": largest[1],
        "first": found.first,
    }  # fmt: skip


def counts(found: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a network's rows say: how many faults lie above the floor and are named, and how many alarms rose."""
    seen = [row for row in found if row["above_floor"] >= THRESHOLD]
    return {
        "faults": len(found),
        "above": len(seen),
        "named": sum(row["right"] for row in seen),
        "missed": [row for row in seen if not row["right"]],
        "clean": len(pairs),
        "alarms": [row for row in pairs if row["first"] is not None],
        "largest": max(row["largest"] for row in pairs),
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the record as a table for the guide."""
    head = [
        "| network | faults | above the floor | named | clean pairs | alarms | largest clean ratio |",
        "|---" * 7 + "|",
    ]
    keys = ("faults", "above", "named", "clean")
    rows = [
        [net, *(own[key] for key in keys), len(own["alarms"]), own["largest"]] for net, own in record["nets"].items()
    ]
    whole = ["all", *(sum(row[place] for row in rows) for place in range(1, 6)), max(row[6] for row in rows)]
    lines = [f"| {' | '.join(map(str, row[:6]))} | {row[6]:.2f} |" for row in [*rows, whole]]
    return "\n".join([*head, *lines])


def main() -> None:
    """Count, and write the record and the table in the guide."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", action="append", choices=[*NETS], help="by default all; others are left in the record")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    record = json.loads(given.out.read_text()) if given.out.exists() else {"nets": {}}
    record |= {"netkin": nk.__version__, "torch": torch.__version__}
    for net in given.net or NETS:
        record["nets"][net] = counts(list(faults([net])), list(clean_pairs([net])))
        print(net, record["nets"][net])
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    if given.out == RESULTS:
        before, mark, rest = GUIDE.read_text().partition("<!-- trials: made by bench/diff.py -->\n")
        GUIDE.write_text(before + mark + table(record) + "\n<!-- end" + rest.partition("<!-- end")[2])


if __name__ == "__main__":
    main()
