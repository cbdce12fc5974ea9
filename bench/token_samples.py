"""Samples of tokens against all of them: how far values of a small language model scatter, and whether they are biased.

`NETKIN_DATA=DIR python bench/token_samples.py` trains two small language models on the texts of Shakespeare
(DIR/shakespeare/input.txt), records their blocks over 65,536 tokens, and compares those of one depth from samples of
1,024, 4,096 and 16,384 tokens, of 20 seeds each. The control is the exact value of all tokens.

The criterion, fixed before the first run, for measures that are said to have no bias (`cka_debiased`,
`cka_debiased_by_sequence`): the mean over the seeds lies within 4 of its standard errors from the exact value; and for
all linear measures: from 1,024 to 16,384 tokens the distance from the exact value (root mean square) falls to less than
a half.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import netkin as nk

RECORD = Path(__file__).with_name("token_samples.json")
TOKENS, SEEDS, LENGTH, SEQUENCES, STEPS = (1024, 4096, 16_384), 20, 64, 1024, 400
MEASURES = ("cka", "cka_debiased", "nbs", "procrustes_distance", "svcca", "cca_mean")
ACROSS = "cka_debiased_by_sequence"  # whose products of all pairs of tokens are taken of 4,096 at most
LAYERS = ("transformer.h.0", "transformer.h.3")
UNBIASED = ("cka_debiased", ACROSS)


def text() -> Tensor:
    """Return the text as bytes."""
    path = Path(os.environ["NETKIN_DATA"]) / "shakespeare" / "input.txt"
    return torch.tensor(list(path.read_bytes()))


def trained(seed: int, codes: Tensor) -> nn.Module:
    """Return a language model of four blocks of width 64, trained for a minute."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        starts = torch.randint(0, len(codes) // 2, (16,))
        ids = torch.stack([codes[start : start + LENGTH] for start in starts.tolist()])
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
    print(f"seed {seed}: loss {float(loss.detach()):.2f}", file=sys.stderr)
    return model.eval()


def across_exactly(X: np.ndarray, Y: np.ndarray) -> float:
    """Return debiased HSIC across sequences of as many tokens each, from sums over features alone."""
    m, length = X.shape[:2]
    X, Y = X - X.mean((0, 1)), Y - Y.mean((0, 1))
    C, s, t = np.einsum("gip,giq->gpq", X, Y), X.sum(1), Y.sum(1)
    S, T = s @ s.T, t @ t.T
    own = np.einsum("gp,gpq,gq->g", s, C, t)
    first = (C.sum(0) ** 2).sum() - (C**2).sum()
    # over h and f that differ from g and from each other
    rest = np.einsum("gp,gpq,gq->", s.sum(0) - s, C, t.sum(0) - t) - (C.sum(0) * (s.T @ t)).sum() + own.sum()
    np.fill_diagonal(S, 0)
    np.fill_diagonal(T, 0)
    third = S.sum() * T.sum() - 4 * (S.sum(1) * T.sum(1)).sum() + 2 * (S * T).sum()
    quadruples = m * (m - 1) * (m - 2) * (m - 3)
    return (length**2 * (m - 2) * (m - 3) * first - 2 * length * (m - 3) * rest + third) / quadruples


def compared(sides: list[dict[str, Any]], measures: Any, **options: Any) -> dict[str, np.ndarray]:
    """Return the values of layers of the same depth, by measure."""
    found = nk.compare(*sides, measures=measures, shape="tokens", pairs="corresponding", progress=False, **options)
    return {measure: np.diagonal(table.values) for measure, table in found.tables.items()}


def main() -> None:
    """Measure, write the record and print the table."""
    torch.set_num_threads(1)
    codes = text()
    starts = torch.randint(
        len(codes) // 2, len(codes) - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(9)
    )
    ids = torch.stack([codes[start : start + LENGTH] for start in starts.tolist()])
    sides = []
    for seed in (0, 1):
        model, rows = trained(seed, codes), {}
        for layer in LAYERS:  # n × tokens × features, as they came
            flat = nk.activations(model, layer, [{"input_ids": part} for part in ids.split(128)], shape="flatten")[
                layer
            ]
            rows[layer] = flat.reshape(SEQUENCES, LENGTH, -1)
        sides.append(rows)
    exact = compared(sides, MEASURES)
    hsic = {}
    for layer in LAYERS:
        X, Y = (side[layer].double().numpy() for side in sides)
        hsic[layer] = across_exactly(X, Y) / np.sqrt(across_exactly(X, X) * across_exactly(Y, Y))
    exact[ACROSS] = np.array([hsic[layer] for layer in LAYERS])
    record: dict[str, Any] = {
        "date": date.today().isoformat(), "netkin": nk.__version__, "torch": torch.__version__, "seeds": SEEDS,
        "tokens": SEQUENCES * LENGTH, "sequences": SEQUENCES, "layers": list(LAYERS),
        "exact": {measure: values.tolist() for measure, values in exact.items()}, "samples": {},
    }  # fmt: skip
    for count in TOKENS:
        draws: dict[str, list[np.ndarray]] = {}
        for seed in range(SEEDS):
            found = compared(sides, MEASURES, tokens=count, seed=seed)
            found |= compared(sides, ACROSS, tokens=count, seed=seed) if count <= 4096 else {}
            for measure, values in found.items():
                draws.setdefault(measure, []).append(values)
        rows = {}
        for measure, several in draws.items():
            off = np.array(several) - exact[measure]
            rows[measure] = {
                "bias": off.mean(0).tolist(), "spread": off.std(0, ddof=1).tolist(),
                "distance": np.sqrt((off**2).mean(0)).tolist(),
            }  # fmt: skip
        record["samples"][str(count)] = rows
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(count, {measure: row["bias"] for measure, row in rows.items()}, file=sys.stderr, flush=True)
    print(table(record))
    print("outside the criterion:", ", ".join(outside(record)) or "none")


def outside(record: dict[str, Any]) -> list[str]:
    """Return what does not meet the criterion."""
    samples, failures = record["samples"], []
    for measure in UNBIASED:
        for count, rows in samples.items():
            if measure not in rows:
                continue
            for layer, bias, spread in zip(LAYERS, rows[measure]["bias"], rows[measure]["spread"], strict=True):
                if abs(bias) > 4 * spread / record["seeds"] ** 0.5:
                    failures.append(f"{measure} at {count} tokens of {layer}")
    least, most = str(TOKENS[0]), str(TOKENS[-1])
    for measure in MEASURES:
        pairs = zip(LAYERS, samples[least][measure]["distance"], samples[most][measure]["distance"], strict=True)
        failures += [f"{measure} of {layer} does not come nearer" for layer, few, many in pairs if many > few / 2]
    return failures


def table(record: dict[str, Any]) -> str:
    """Return the record as a table: of each measure the exact value, and bias ± spread of each size of samples."""
    sizes = " | ".join(f"{int(count):,} tokens" for count in record["samples"])
    lines = [f"| measure | block | all {record['tokens']:,} tokens | {sizes} |", "|---|---|---|" + "---|" * len(TOKENS)]
    for measure, exact in record["exact"].items():
        for place, layer in enumerate(record["layers"]):
            cells = []
            for rows in record["samples"].values():
                row = rows.get(measure)
                cells.append(f"{row['bias'][place]:+.4f} ± {row['spread'][place]:.4f}" if row else "")
            lines.append(f"| `{measure}` | {layer.rpartition('.')[2]} | {exact[place]:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(RECORD.read_text()))) if "--table" in sys.argv else main()
