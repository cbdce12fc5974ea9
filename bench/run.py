"""Measure everything, each figure in a process of its own, and write `bench/results.json` and `docs/performance.md`.

`make bench` runs all; `make bench ARGS="cca svcca"` measures these again and keeps the other figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import probing as probe
from freezing import NETS, table
from tasks import TASKS

import training as teams

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results.json"
PEERS = ["torch-cka", "ckatorch", "pytorch-cka", "rsatoolbox"]
GPU = HERE / "gpu.json"
LANGUAGE = HERE / "language.json"
GRADIENTS = ("gradients", "sketched", "sketched_flatten")  # measured on a GPU too
UNSTEADY, PROCESSES = ("stitching",), 7  # a forward pass of these takes once or twice the time, process by process
GPU_NOTES = """\
Models and the forward passes beside them run as torch is set: with TF32 in convolutions. Statistics are never rounded
to TF32, but for wide mini-batch Gram matrices, whose rounding U-centring and the sums average away. Whole comparisons
agree with the CPU to the figure above with `exact_model=True`. Of the pass, kernels alone took 1.19 times those of the
forward passes: half of that is the mean over the places of every map. The rest is the launching of both, and the
beginning. Whether a batch was finite is sent to the host, which reads it a batch later; while it was asked for, the
host waited for each batch, as the table still counts, and the pass took 1.44 on the same day. Layers of up to 1,024
units are read on the host, whose threads share decompositions and products: on the GPU reading took 10.6 s for the two
nets and 5.2 s for random layers. It is limited by singular values of matrices so ill-conditioned that their eigenvalues
do not serve (untrained nets have many), and by the calls for 24 measures of 400 pairs. It does not grow with the data.
All of this depends on the host: with three hosts, the same GPU and equal forward passes, the pass took 1.37, 1.64 and
1.47 before, `cka_minibatch` 1.52, 2.5 and 1.60, and 100 steps of the training that a probe is compared with took from
0.70 to 0.98 s. The figure of 81,920 images is of the first host and of the former pass; features and gradients were
measured on the second, the slowest.
"""
ERRORS = [
    ("minibatch_error", "`cka_minibatch`: against the same estimator in float64", "≤ 1e-5"),
    ("cca", "`cca_mean` against QR in float64", "≤ 1e-8"),
    ("svcca", "`svcca` against SVD and QR in float64", "≤ 1e-8"),
]
GOALS = [
    ("cka_512", "`cka`, 10,000 × 512, against the three products", "≤ 1.15"),
    ("cka_2048", "`cka`, 10,000 × 2,048, against the three products", "≤ 1.15"),
    ("cka_wide", "`cka`, 1,000 × 65,536, against the two Gram products", "≤ 1.3"),
    (
        "minibatch",
        "`cka_minibatch`, `flatten`, 20 × 20 layers of two ResNet-18, against the two forward passes",
        "≤ 1.10",
    ),
    (
        "all_linear",
        "all linear measures at once, `pool`, the same nets, 10,000 images, against the forward passes",
        "≤ 1.35",
    ),
    (
        "reading",
        "reading all linear measures of 20 × 20 layers of width ≤ 512, against folding in 4,000 examples of them",
        "",
    ),
    ("cca", "`cca_mean`, 10,000 × 512, float64, against eigh on the Gram matrices", "≤ 1.0"),
    ("svcca", "`svcca`, 10,000 × 512, float64, against the same", "≤ 1.0"),
    (
        "compressed_linear",
        "a linear layer 2,048 → 2,048 compressed to 0.35 of its input (0.70 of its multiply-adds), against itself",
        "< 1.0",
    ),
    (
        "compressed_conv",
        "a 3 × 3 layer of 128 channels compressed to 0.35 of them (0.40 of its multiply-adds), against itself",
        "< 1.0",
    ),
    ("gradients", "features and gradients at ten layers of two ResNet-18, `pool`, against the forward passes", "≤ 3.5"),
    ("sketched", "the same summed into 512 buckets, by `nk.collect`, against the forward passes", "≤ 3.85"),
    ("sketched_flatten", "the same of flattened maps, up to 65,536 wide", ""),
    ("sketching", "50,000 × 512 numbers into 512 buckets, against one read of them", "≤ 2.2"),
    ("atom_conv", "fused `AtomConv2d`, 9 atoms, ResNet-18 sizes, batch 128, both ways, against `nn.Conv2d`", "≤ 1.15"),
    ("atom_pairs", "the 5 nearest of 10,000 networks × 20 layers × 81 numbers, against the product of all", "≤ 1.43"),
    ("sparsity_loss", "training steps of a ResNet-20 with the CKA sparsity loss, against those without", "≤ 1.03"),
    ("sparsity_loss_whole", "the same with the loss of all 128 examples at every batch", "≤ 1.25"),
    ("training_seeds", "8 seeds of ResNet-20 by `nk.train_many`, against one by one", "≤ 1.0"),
    ("training_clients", "120 clients of a small convnet by `nk.train_many`, against one by one", "≤ 1.0"),
    ("training_small", "24 smaller convnets, for images of 8 × 8, against one by one", "≤ 1.0"),
    (
        "stitching",
        "direct stitching of all 8 layers of two Tiny-10, 2,000 images, against the two forward passes, CPU time",
        "≤ 1.3",
    ),
    (
        "dft_resnet_cka",
        "`cka`, `dft`, the nine blocks of two ResNet-20, 10,000 images, float32, against the forward passes",
        "≤ 1.5",
    ),
    ("dft_resnet_cca", "`cca_mean`, `dft`, the same, transforms and products in float64, against the same", "≤ 1.5"),
    (
        "two_processes",
        "the gain of two processes for a comparison of two ResNet-20, 2,048 images, against that of forward passes",
        "≥ 0.9",
    ),
    (
        "ray_checkpoints",
        "all pairs of 100 small checkpoints by one worker of Ray, started before, against here",
        "≤ 1.15",
    ),
]


def main(asked: list[str]) -> None:
    """Measure what is asked for, or everything."""
    figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if unknown := {*asked} - {*TASKS, *PEERS}:
        sys.exit(f"no figure {', '.join(sorted(unknown))}; there are {', '.join([*TASKS, *PEERS])}.")
    for name in asked or [*TASKS, *PEERS]:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        figures[name], figures["machine"] = steadied(name) if name in UNSTEADY else measured(name), machine()
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    (ROOT / "docs" / "performance.md").write_text(page(figures))
    print(page(figures))


def steadied(name: str) -> dict[str, Any]:
    """Return the middle one of figures from several processes and the ends of all, where no process is like another."""
    found = sorted((measured(name) for _ in range(PROCESSES)), key=lambda figure: figure["ratio"])
    return found[len(found) // 2] | {"lowest": found[0]["ratio"], "highest": found[-1]["ratio"]}


def measured(name: str) -> dict[str, Any]:
    """Return one figure, from a fresh process."""
    python, script = (sys.executable, "tasks.py") if name in TASKS else (peer_python(), "peers.py")
    run = subprocess.run([python, str(HERE / script), name], stdout=subprocess.PIPE, text=True, check=True, cwd=HERE)
    return json.loads(run.stdout.splitlines()[-1])


def peer_python() -> str:
    """Return the Python of the peers' environment, which is made at the first call."""
    folder = ROOT / ".bench-venv"
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, "-e", str(ROOT), "matplotlib", *PEERS], check=True)
        done.touch()
    return str(python)


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "netkin": version("netkin"),
    }


def page(figures: dict[str, Any]) -> str:
    """Return the page that shows the figures."""
    where = figures["machine"]
    head = (
        "# Performance\n\nMade by `make bench`; every figure is a ratio of times taken in turn in one process.\n"
        f"Measured {where['date']} on {where['cores']} cores ({where['processor']}), Python {where['python']}, "
        f"torch {where['torch']}, netkin {where['netkin']}.\n"
    )
    parts = [goals(figures), accuracy(figures), peers(figures), freezing(figures), probing(figures)]
    parts += [on_gpu(), language_models(), projected(), sampled_tokens()]
    return "\n".join([head, *(line for part in parts if part for line in [*part, ""])]).rstrip() + "\n"


def goals(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {work}{threads(figures[name])}{spread(figures[name])} | {figures[name]['ratio']:.2f} | {goal} |"
        for name, work, goal in GOALS
        if name in figures
    ]
    return ["| work | ratio | goal |", "|---|---|---|", *rows, "", *limits(figures.get("stitching"))]


def limits(stitching: dict[str, Any] | None) -> list[str]:
    """Return what keeps direct stitching from its goal, if it misses it."""
    if stitching is None or stitching["ratio"] <= 1.3:
        return []
    return [
        "Direct stitching misses its goal: its products are a sixth of the multiply-adds of both passes, and matrices",
        "of 16 to 64 columns are multiplied at two thirds of the rate of convolutions. They take 0.25 to 0.35 of the",
        "passes, as the first model's activations leave the cache before the second model runs; trying out the layers,",
        "which does not grow with the data, 0.06, copies and sums 0.1, and the maps 0.03.",
        "Summing into buckets misses its goal: a sparse product by columns adds each row to sums that lie apart in",
        "memory, and what is read beside it is one sum from end to end.",
        "Mini-batch CKA took 1.13 to 1.17 in several runs; the Gram matrices of all layers take the rest.",
    ]


def threads(figure: dict[str, Any]) -> str:
    """Return a remark where a figure was not taken on all cores."""
    return f" ({figure['threads']} thread)" if "threads" in figure else ""


def spread(figure: dict[str, Any]) -> str:
    """Return the ends of a figure that was taken in several processes."""
    if "lowest" not in figure:
        return ""
    times = f"{figure['repeats']} repetitions" if "repeats" in figure else f"{PROCESSES} processes"
    return f"; in {times} {figure['lowest']:.2f} to {figure['highest']:.2f}"


def accuracy(figures: dict[str, Any]) -> list[str]:
    """Return what was measured beside time: errors and memory."""
    lines = ["| beside time | measured | goal |", "|---|---|---|"]
    for name in ("cka_512", "cka_2048", "cka_wide"):
        if name in figures:
            errors = [f"{figures[name][f'error_at_offset_{offset}']:.0e}" for offset in (0, 10, 1000)]
            lines.append(f"| `{name}`: float32 against float64 at offset 0, 10, 1,000 | {', '.join(errors)} | ≤ 2e-6 |")
    for name, what, goal in ERRORS:
        if name in figures:
            lines.append(f"| {what} | {figures[name]['error']:.0e} | {goal} |")
    if "dft_cca" in figures:
        lines += spectra(figures["dft_cca"])
    if "sparsity_listing" in figures:
        lines += penalty(figures["sparsity_listing"])
    if "thousand_checkpoints" in figures:
        lines += many_checkpoints(figures["thousand_checkpoints"])
    if "minibatch_memory" in figures:
        memory = over_forward(figures, "minibatch_memory")
        lines.append(f"| `cka_minibatch`: peak memory over that of the forward passes | {memory} | ≤ 1.2 |")
    return lines


def spectra(figure: dict[str, Any]) -> list[str]:
    """Return how DFT-CCA stands beside CCA of the same maps, flattened."""
    what = "DFT-CCA of 32 × 16 × 16 maps (8,192 features) of 18,432 examples closed under translation, against CCA"
    times = f"{figure['ratio']:.0f} ({figure['seconds']:.1f} s and {figure['flattened_seconds']:.0f} s)"
    sizes = f"{figure['memory']:.1%} ({figure['megabytes']:.0f} MB and {figure['flattened_megabytes']:,.0f} MB)"
    return [
        f"| {what} of flattened maps: times faster{threads(figure)} | {times} | ≥ 100 |",
        f"| memory that it takes of the other's | {sizes} | < 2% |",
        f"| difference of the two values | {figure['error']:.0e} | ≤ 1e-8 |",
    ]


def many_checkpoints(figure: dict[str, Any]) -> list[str]:
    """Return what all pairs of many checkpoints took, beside what the plan said."""
    what = f"all pairs of {figure['checkpoints']:,} checkpoints of a small net, {figure['pairs']:,} comparisons"
    sizes = f"{figure['peak_bytes'] / 1e9:.2f} GB and {figure['planned_bytes'] / 1e9:.2f} GB"
    return [
        f"| {what}: peak memory over that of the plan | {figure['ratio']:.2f} ({sizes}) | ≤ 1.0 |",
        f"| CPU time of the same | {figure['cpu_seconds'] / 60:.0f} minutes | |",
    ]


def penalty(figure: dict[str, Any]) -> list[str]:
    """Return how the CKA sparsity loss stands beside the double loop that its paper prints."""
    what = "the CKA sparsity loss of the nine blocks of a ResNet-20, 128 examples, with gradients"
    return [
        f"| {what}: times faster than the paper's listing | {figure['ratio']:.0f} | ≥ 10 |",
        f"| difference of the two values | {figure['error']:.0e} | ≤ 1e-5 |",
    ]


def over_forward(figures: dict[str, Any], name: str) -> str:
    """Return a peak of memory over that of the forward passes alone."""
    return f"{figures[name]['peak_megabytes'] / figures['forward_memory']['peak_megabytes']:.2f}"


def peers(figures: dict[str, Any]) -> list[str]:
    """Return the other packages' figures for the same work."""
    lines = ["| package | version | work | ratio of time | of memory | error |", "|---|---|---|---|---|---|"]
    for name in PEERS:
        if name not in figures:
            continue
        figure, matrices = figures[name], name == "rsatoolbox"
        if "failed" in figure:
            lines.append(f"| {name} | {figure['version']} | the same | stops: {figure['failed']} | | |")
            continue
        work = "linear CKA, 1,000 × 512" if matrices else "whole-model mini-batch CKA, two batches of 128"
        beside = "| | |" if matrices else f"| {over_forward(figures, name)} | {figure['error']:.0e} |"
        lines.append(f"| {name} | {figure['version']} | {work} | {figure['ratio']:.1f} {beside}")
    return lines


def freezing(figures: dict[str, Any]) -> list[str]:
    """Return what freeze training saves."""
    found = {name: figures[f"freezing_{name}"] for name in NETS if f"freezing_{name}" in figures}
    head = (
        "A training step with lower groups of layers frozen, over the same step with none frozen (`nk.FreezeTraining`):"
    )
    return [head, "", *table(found)] if found else []


def probing(figures: dict[str, Any]) -> list[str]:
    """Return what a look at a model costs while it is trained."""
    found = {shape: figures[f"probing_{shape}"] for shape in probe.SHAPES if f"probing_{shape}" in figures}
    if not found:
        return []
    one = next(iter(found.values()))
    head = (
        f"A probe of `nk.DynamicsRecorder`, which logs `svcca` with the previous one, beside the training of a "
        f"ResNet-20: timed against {one['steps']} steps of {one['batch']} images, and counted for the whole epoch:"
    )
    return [head, "", *probe.table(found)]


def on_gpu() -> list[str]:
    """Return the figures of `bench/gpu.py`, where they were brought back."""
    if not GPU.exists():
        return []
    figures = json.loads(GPU.read_text())
    apart = max(figures["devices_agree"].values())
    pool, minibatch = figures["pool"], figures["minibatch"]["ratio"]
    frozen = ["", "Freeze training there:", "", *table(figures["freezing"])] if "freezing" in figures else []
    probed = ["", "A probe of a recorder there:", "", *probe.table(figures["probing"])] if "probing" in figures else []
    told = "Networks trained at once there (`bench/training.py`), time of a step of one network:"
    trained = ["", told, "", *teams.table(figures["training"])] if "training" in figures else []
    if (again := "training on another host") in figures:
        trained += ["", "The same on another H200, with another host:", "", *teams.table(figures[again])]
    pulled = [
        f"| {work} | {figures[name]['ratio']:.2f} | {goal} |"
        for name, work, goal in GOALS
        if name in figures and name in GRADIENTS
    ]
    return [
        "## On a GPU",
        "",
        f"Made by `bench/gpu.py` on {figures['date']}: {figures['device']}, torch {figures['torch']}, two ResNet-18, "
        f"{figures['images']:,} images in batches of {figures['batch']}, float32.",
        "",
        "| work | measured | goal |",
        "|---|---|---|",
        f"| `cka_minibatch`, `flatten`, against the two forward passes | {minibatch:.2f} | |",
        f"| its error against the same estimator in float64 | {figures['minibatch_error']:.0e} | ≤ 1e-5 |",
        f"| the pass for all linear measures, `pool`, against the forward passes | {pool['ratio']:.2f} | ≤ 1.20 |",
        f"| the same over 81,920 images | {figures['pool of 81,920 images']['ratio']:.2f} | ≤ 1.20 |",
        f"| reading {pool['measures']} measures of 400 pairs from it | {pool['reading_seconds']:.1f} s | ≤ 4 s |",
        f"| the same of 400 pairs of random layers, 16 to 512 wide | {figures['reading']['seconds']:.1f} s | ≤ 4 s |",
        f"| waits of the host for the device in ten batches | {figures['synchronisations_in_ten_batches']} | 0 |",
        f"| every measure of two matrices, GPU against CPU | {apart:.0e} | ≤ 1e-5 |",
        f"| whole comparisons of the two nets, GPU against CPU | {figures['models_agree']:.0e} | ≤ 1e-5 |",
        *pulled,
        "",
        GPU_NOTES,
        *frozen,
        *probed,
        *trained,
    ]


def language_models() -> list[str]:
    """Return the figures of `bench/language.py`, where they were brought back."""
    if not LANGUAGE.exists():
        return []
    figures = json.loads(LANGUAGE.read_text())
    compared = [(shape, figures[shape]) for shape in ("mean", "last", "tokens") if shape in figures]
    rows = [
        f"| `{shape}` | {row['pairs']:,} | {row['seconds']:.2f} s | {row['ratio']:.3f} | "
        f"{row['gigabytes_above_the_models']:.2f} GB |"
        for shape, row in compared
    ]
    return [
        "## Two language models",
        "",
        f"Made by `bench/language.py` on {figures['date']}: {figures['device']}, torch {figures['torch']}, two "
        f"networks in the shape of Llama with {figures['parameters'] / 1e9:.2f} billion parameters each (bfloat16, "
        f"random weights), {figures['sequences']} sequences of {figures['length']} tokens, `cka` of all pairs of "
        f"`model.layers.*`. The forward passes took {figures['forward_seconds']:.2f} s, the digests of both models "
        f"{figures['digest_seconds']:.2f} s. Goal: ≤ 1.25.",
        "",
        "| shape | pairs | whole comparison | against the forward passes | memory above the models |",
        "|---|---|---|---|---|",
        *rows,
    ]


def projected() -> list[str]:
    """Return what larger language models would take, by the formulas of the plan."""
    import projection

    return [
        "## Larger language models, projected",
        "",
        "Projections, and no measurements: by `bench/projection.py`, for all blocks and the embedding of two models in "
        "bfloat16, 512 sequences of 512 tokens, `cka`. Memory is that of the statistics, above the models, as "
        "`netkin compare --plan` says it; the second number is the multiply-adds of their products, as a share of "
        "those of both models' forward passes. Where moments would not fit, tokens are sampled.",
        "",
        projection.table(),
    ]


def sampled_tokens() -> list[str]:
    """Return how samples of tokens scatter, and how often intervals by sequences hold what they are to hold."""
    import token_errors
    import token_samples

    if not (token_samples.RECORD.exists() and token_errors.RECORD.exists()):
        return []
    samples, errors = (json.loads(bench.RECORD.read_text()) for bench in (token_samples, token_errors))
    return [
        "## Samples of tokens",
        "",
        f"Made by `bench/token_samples.py` on {samples['date']}: blocks of two small language models of width 64, "
        f"trained on the same text from two seeds; {samples['sequences']:,} sequences. The value of all tokens, and "
        f"the mean difference of samples from it ± their standard deviation, over {samples['seeds']} seeds.",
        "",
        token_samples.table(samples),
        "",
        f"Made by `bench/token_errors.py` on {errors['date']}: how often the 95 % interval of a standard error by "
        f"sequences, of 20 chunks, holds the mean of the measure over {errors['trials']:,} data sets of the same size "
        f"({errors['trials'] // 4:,} where tokens are sampled). Each token of the AR(1) worlds is 0.8 of the one "
        f"before and the rest new. Goal: 93 to 97 %; outside by more than chance: {token_errors.outside(errors)}. "
        "Errors of unrelated layers are about √2 times the spread of their values, as leaving out chunks finds where a "
        "value depends on pairs of examples alone.",
        "",
        token_errors.table(errors),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
