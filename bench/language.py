"""Two language models of 6.7 billion parameters: what comparing them takes beside their forward passes.

`python bench/language.py OUT.json [LAYERS WIDTH SEQUENCES]` runs on a GPU with 40 GB, or small on a CPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import netkin as nk
from netkin.identity import weights_digest

LENGTH, BATCH, VOCABULARY = 512, 8, 32_000
SHAPES = ("mean", "last", "tokens")  # tokens are sampled where moments of all pairs do not fit


def llama(seed: int, layers: int, width: int, device: str) -> nn.Module:
    """Return a network in the shape of Llama with random weights in bfloat16; 32 layers of 4,096 are 6.7 billion."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11008 // 4096, num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 1), num_key_value_heads=max(width // 128, 1), use_cache=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def token_batches(sequences: int, device: str) -> list[dict[str, Tensor]]:
    """Return batches of random tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (sequences, LENGTH), generator=draw).to(device)
    return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in tokens.split(BATCH)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long work takes until the device has done it, and what it gives."""
    _wait()
    start = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def forward_both(models: list[nn.Module], batches: list[dict[str, Tensor]]) -> None:
    """Run the blocks of both models, whose outputs are compared, and the head, as `model(**batch)` does."""
    for batch in batches:
        for model in models:
            model(**batch)


def main(out: Path, layers: int = 32, width: int = 4096, sequences: int = 512) -> None:
    """Measure the comparison in each shape and the digests, and write them down after each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [llama(seed, layers, width, device) for seed in (0, 1)]
    batches = token_batches(sequences, device)
    parameters = sum(weight.numel() for weight in models[0].parameters())
    figures: dict[str, Any] = {
        "date": date.today().isoformat(), "torch": torch.__version__, "netkin": nk.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device, "parameters": parameters,
        "layers": layers, "width": width, "sequences": sequences, "length": LENGTH,
    }  # fmt: skip
    forward_both(models, batches[:2])
    figures["forward_seconds"] = min(timed(lambda: forward_both(models, batches))[0] for _ in range(2))
    weights_digest(models[0])
    figures["digest_seconds"] = timed(lambda: [weights_digest(model) for model in models])[0]

    def compared(shape: str, count: int) -> nk.Comparison:
        return nk.compare(*models, batches[:count], "cka", layers="model.layers.*", shape=shape, progress=False)

    compared("mean", 2)
    for shape in SHAPES:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds, result = timed(lambda shape=shape: compared(shape, len(batches)))  # type: ignore[misc]
        figures[shape] = {
            "seconds": seconds,
            "ratio": seconds / figures["forward_seconds"],
            "pairs": result.to_numpy().size,
        }
        if device == "cuda":
            figures[shape]["gigabytes_above_the_models"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        out.write_text(json.dumps(figures, indent=2) + "\n")
        print(json.dumps({shape: figures[shape]}), flush=True)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
