"""Does `nk.diff` name the block of a planted fault from recorded states alone, and is it silent where there is none?

`python bench/diff_recorded.py` plants those faults of `bench/diff_worlds.py` that lie in a block of a Llama or a GPT-2,
one at a time, runs each network once, and writes the states at the boundaries of its blocks as vLLM does. The network
itself is then gone. Counts go to `bench/diff_recorded.json` and to the table in `docs/diff.md`.

Criteria, fixed before the first run of this script: a block stands out above 3 × its floor. Of the faults whose block
does, all are named, and no other block is; the others are below rounding. Of the clean recordings none has a block that
stands out: other attention, split products, padding at either side, float32, bfloat16 and float16.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diff_worlds import FAULTS, NETS, data_of, one_by_one, split_products, transposed_products
from safetensors.torch import save_file
from torch import nn

import netkin as nk
from netkin.applications.diff.patching import blocks_among

HERE = Path(__file__).parent
RESULTS, GUIDE = HERE / "diff_recorded.json", HERE.parent / "docs" / "diff.md"
CLEAN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the same": lambda model: model,
    "split products": split_products,
    "example by example": one_by_one,
    "transposed products": transposed_products,
}
MARKS = ("<!-- recorded trials: made by bench/diff_recorded.py -->", "<!-- end of recorded trials -->")


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """Return a model with its weights in a precision; frequencies of rotary embeddings stay as engines have them."""
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, precision))
    return model


def blocks_of(model: nn.Module) -> list[str]:
    return blocks_among([name for name, _ in model.named_modules()])


def record(model: nn.Module, net: str, padded: str, folder: Path) -> Path:
    """Write the states before the first block and after each, a file for each sequence."""
    states: list[Any] = []
    blocks = [model.get_submodule(name) for name in blocks_of(model)]

    def first(module: nn.Module, args: Any, kwargs: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, torch.Tensor) else output[0])

    handles = [blocks[0].register_forward_pre_hook(first, with_kwargs=True)]
    handles += [block.register_forward_hook(after) for block in blocks]
    (batch,) = data_of(net, padded)
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    for place, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        kept = torch.stack([state[place][mask] for state in states], 1)
        save_file({"hidden_states": kept, "token_ids": ids[mask].clone()}, folder / f"{place}.safetensors")
    return folder


def found_in(model: nn.Module, net: str, padded: str = "") -> nk.results.Diff:
    with tempfile.TemporaryDirectory() as folder:
        return nk.diff(NETS[net](), str(record(model, net, padded, Path(folder))), data_of(net, padded), progress=False)


def faults(net: str) -> Iterator[dict[str, Any]]:
    for precision in ("float32", "bfloat16", "float16"):
        for fault, (modules, plant) in FAULTS[net].items():
            blocks = {found[0] for name in modules.split() if (found := re.match(r".*\.\d+", name))}
            if len(blocks) != 1 or "all layers" in fault:
                continue
            model = NETS[net]()
            plant(model)
            found = found_in(in_precision(model, precision), net)
            (block,) = blocks
            yield {"net": net, "precision": precision, "fault": fault, "block": block, "named": found.first,
                   "standing_out": list(found.standing_out), "ratio": found[block].ratio}  # fmt: skip


def clean(net: str) -> Iterator[dict[str, Any]]:
    for precision in ("float32", "bfloat16", "float16"):
        for change, changed in CLEAN.items():
            for attention in ("eager", "sdpa"):
                for padded in ("", "left", "right"):
                    found = found_in(in_precision(changed(NETS[net](attention)), precision), net, padded)
                    largest = max(one.ratio for one in found.modules.values())
                    yield {"net": net, "precision": precision, "change": change, "attention": attention,
                           "padded": padded, "named": found.first, "largest": largest}  # fmt: skip


def main() -> None:
    nets: dict[str, Any] = {}
    for net in ("llama", "gpt2", "trained"):
        planted, recordings = list(faults(net)), list(clean(net))
        above = [row for row in planted if row["standing_out"]]
        nets[net] = {
            "faults": len(planted),
            "above": len(above),
            "named": sum(row["standing_out"] == [row["block"]] for row in above),
            "missed": [row for row in above if row["standing_out"] != [row["block"]]],
            "clean": len(recordings),
            "alarms": [row for row in recordings if row["named"] is not None],
            "largest": max(row["largest"] for row in recordings),
        }
        print(net, json.dumps(nets[net]))
    RESULTS.write_text(
        json.dumps({"torch": torch.__version__, "netkin": nk.__version__, "nets": nets}, indent=1) + "\n"
    )
    head = (
        "network",
        "faults in a block",
        "above the floor",
        "named",
        "clean recordings",
        "alarms",
        "largest clean ratio",
    )
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    rows += [
        f"| {net} | {one['faults']} | {one['above']} | {one['named']} | {one['clean']} | {len(one['alarms'])} | "
        f"{one['largest']:.2f} |"
        for net, one in nets.items()
    ]
    guide = GUIDE.read_text(encoding="utf-8")
    start, end = (guide.index(mark) for mark in MARKS)
    GUIDE.write_text(guide[: start + len(MARKS[0])] + "\n" + "\n".join(rows) + "\n" + guide[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
