"""What is read of a network and kept, so that all claims share it: sketched kernels, norms, Task2Vec; no weights.

The authors' code taps the input, the first convolution, the stem (after its ReLU), the eight residual blocks and the
pooled output: twelve places of a ResNet-18, of which the paper's figures number ten. Here block 1 is the stem, 2 to 9
are the residual blocks, and 10 is the pooled output. As in that code a map is flattened.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import netkin as nk
from netkin.representations.gradients import Taps, Target
from netkin.representations.hooks import inference_mode_of
from netkin.representations.layer_recorder import Recorder
from netkin.sources.architectures import BasicBlock, Bottleneck
from netkin.statistics.sketches import LayerSketches, SketchSettings
from reproductions.commit import commit
from reproductions.gradients.nets import KINDS, NEEDS, SEEDS, SETS, apart, images, recipe, trained
from reproductions.laboratory import Lab, keep_weights
from reproductions.running import tell

BUCKETS = {"cpu": 128, "gpu": 512}
BATCH = {"cpu": 200, "gpu": 512}
NORMED = {"cpu": 400, "gpu": 1024}  # test images whose exact kernels give the norms
SEEN = {"cpu": 50, "gpu": 64}  # test images of Task2Vec
POOLED = "pooled"
QUANTITIES = ("norm", "cka factor", "nbs factor")  # ‖μ‖, ‖K‖/N², √Tr K/N
BOTH = ("features", "gradients")
Fed = dict[str, dict[str, Tensor]]  # rows of features ("activations") and of gradients, by layer
Kept = Mapping[str, Tensor]  # what is kept of a network


def read_all(lab: Lab, wanted: list[str]) -> list[Kept]:
    """Return what is kept of each network; those not in the cache are trained and read."""
    missing = [name for name in wanted if not place(lab, name).exists()]
    for group in dict.fromkeys(name.rpartition("/")[0] for name in missing):
        some, started = [name for name in missing if name.rpartition("/")[0] == group], time.perf_counter()
        for name, model, accuracy in trained(lab, some):
            begun = time.perf_counter()
            kept = read(lab, name, model) | {"accuracy": torch.tensor([accuracy])}
            keep_weights(place(lab, name), kept)
            tell(f"  {name}: accuracy {accuracy:.3f}, read in {time.perf_counter() - begun:.1f} s")
        tell(f"  {group}: {len(some)} networks trained and read in {time.perf_counter() - started:.0f} s")
    return [{key: one.to(lab.device) for key, one in load_file(place(lab, name)).items()} for name in wanted]


def accuracies(lab: Lab, wanted: list[str]) -> list[float]:
    """Return the test accuracies of networks that were read."""
    found = []
    for name in wanted:
        with safe_open(place(lab, name), "pt") as file:
            found.append(float(file.get_tensor("accuracy")))
    return found


def place(lab: Lab, name: str) -> Path:
    """Return the file of what is kept of a network, by its training, its data and the code."""
    facts = [name, lab.scale, lab.recipe(KINDS[apart(name)[0]].recipe).words, recipe(lab, name).words]
    facts += [*(lab.images_of(one).words for one in SETS), nk.__version__, commit()]
    mark = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return lab.cache / f"gradients-{name.replace('/', '-')}-{mark}.safetensors"


def read(lab: Lab, name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return what the claims need of a network of this kind."""
    kind, _, _ = apart(name)
    found: dict[str, Tensor] = {}
    if kind in ("trained", "untrained", "deep"):
        found["norms"] = torch.stack([norms(lab, model, f"{kind}/{target}/0") for target in SETS])
    if kind in ("trained", "untrained", "shuffled", "cut"):
        found |= sketched(lab, name, model)
    if kind == "trained":
        found |= sketched_in_training(lab, name, model)
        inputs = images(lab, name).test_images
        seen = list(inputs[: SEEN[lab.scale]].split(32))
        found["task2vec"] = torch.from_numpy(nk.task2vec(model, seen, samples=1, progress=False).values)
        norm = nk.fisher_rao_norm(model, list(inputs.split(BATCH[lab.scale])), progress=False)
        found["fisher-rao"] = torch.tensor([norm])
    return found


def blocks(model: nn.Module) -> list[str]:
    """Return the names of the stem's output and of the residual blocks."""
    inner = [name for name, module in model.named_modules() if isinstance(module, BasicBlock | Bottleneck)]
    return ["relu", *inner]


def rows(lab: Lab, model: nn.Module, inputs: Tensor) -> Iterator[Fed]:
    """Yield the flattened features and gradients of all blocks and of the pooled output, batch by batch."""
    target, names = Target(), blocks(model)
    recorder = Recorder(model, names, shape="flatten", taps=Taps(model, [target]))
    with inference_mode_of(model):
        for batch in inputs.split(BATCH[lab.scale]):
            recorded = recorder(batch)
            features, gradients = recorded.rows, recorded.gradients[target]
            channels = model.get_submodule("fc").in_features
            places = [one[names[-1]].unflatten(1, (channels, -1)) for one in (features, gradients)]
            # the pooled feature is a mean over places, and its gradient therefore a sum
            pooled = places[0].mean(2), places[1].sum(2)
            yield {"activations": features | {POOLED: pooled[0]}, "gradients": gradients | {POOLED: pooled[1]}}


def sketched(lab: Lab, name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return sketched kernels of a network on its own test images: label/kernel, blocks × M × M.

    "first" and "second" are of the two halves of the images, with a seed of the network's own, so that no two networks
    share any chance. Of trained networks there are also sketches of all images with seeds that all share: "whole",
    with more kernels, and "other".
    """
    kind, _, seed = apart(name)
    names, more = [*blocks(model), POOLED], kind == "trained"
    parts = {"first": BOTH, "second": BOTH} | ({"whole": (*BOTH, "product", "psi"), "other": BOTH} if more else {})
    seeds = {"first": 100 + seed, "second": 100 + seed, "whole": 0, "other": 1}
    made = {label: sketches(lab, names, own, seeds[label]) for label, own in parts.items()}
    for start, fed in enumerate(rows(lab, model, images(lab, name).test_images)):
        numbers = numbers_of(name, "test", start * BATCH[lab.scale], len(fed["gradients"][POOLED]))
        for half, label in enumerate(("first", "second")):
            made[label].update(_every_second(fed, half), numbers[half::2])
        for label in ("whole", "other") if more else ():
            made[label].update(fed, numbers)
    read = parts | ({"whole": (*parts["whole"], "sum", "transport")} if more else {})
    return {f"{label}/{kernel}": _kernels(made[label], kernel) for label, own in read.items() for kernel in own}


def sketched_in_training(lab: Lab, name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return sketched kernels of a network on its own training images, of which sets have different numbers."""
    made = sketches(lab, [*blocks(model), POOLED], BOTH, 0)
    for start, fed in enumerate(rows(lab, model, images(lab, name).train_images)):
        numbers = numbers_of(name, "train", start * BATCH[lab.scale], len(fed["gradients"][POOLED]))
        made.update(fed, numbers)
    return {f"train/{kernel}": _kernels(made, kernel) for kernel in BOTH}


def numbers_of(name: str, part: str, start: int, count: int) -> np.ndarray:
    """Return numbers for some examples of a set, from which their buckets follow; no two sets share any."""
    kind, given, _ = apart(name)
    family = 4 * SETS.index(given) + 2 * (part == "train") + (kind == "cut") + 1
    return (family << 32) + start + np.arange(count)


def sketches(lab: Lab, names: list[str], parts: tuple[str, ...], seed: int) -> LayerSketches:
    """Return empty sketches of some layers."""
    return LayerSketches(names, SketchSettings(BUCKETS[lab.scale], 1, seed, parts))


def _every_second(fed: Fed, half: int) -> Fed:
    return {feed: {name: one[half::2].contiguous() for name, one in own.items()} for feed, own in fed.items()}


def _kernels(sketches: LayerSketches, kernel: str) -> Tensor:
    """Return the kernel matrices of all blocks, in double precision, on one scale each."""
    found = [sketches.side(name).kernel(kernel) for name in sketches.names]
    return torch.stack([one / one.diagonal().mean() for one in found]).double()


def norms(lab: Lab, model: nn.Module, name: str) -> Tensor:
    """Return the quantities of Fig. 4 by block, from the exact kernel of some test images of a set."""
    inputs = images(lab, name).test_images[: NORMED[lab.scale]]
    batches = list(rows(lab, model, inputs))
    found = []
    for block in batches[0]["gradients"]:
        f, g = (torch.cat([one[feed][block] for one in batches]) for feed in ("activations", "gradients"))
        found.append(quantities(f, g))
    return torch.stack(found)


def quantities(features: Tensor, gradients: Tensor) -> Tensor:
    """Return ‖μ‖, ‖K‖/N² and √Tr K/N of the exact kernel K = K_f ∘ K_g."""
    n = len(features)
    kernel = ((features @ features.mT) * (gradients @ gradients.mT)).double()
    return torch.stack([kernel.mean().clamp(min=0).sqrt(), kernel.norm() / n**2, kernel.trace().sqrt() / n])


def networks_in_words(lab: Lab, wanted: Mapping[str, Sequence[str]]) -> str:
    """Say which networks these are, and how well they do."""
    words = []
    for kind, some in wanted.items():
        found = np.array(accuracies(lab, list(some)))
        means = [f"{100 * one.mean():.0f}%" for one in found.reshape(len(SETS), -1)]
        words.append(f"{kind} {', '.join(means)}")
    steps = lab.recipe("resnet18").recipe.steps
    return (
        f"ResNet-18s, {SEEDS[lab.scale]} for each set, trained for {steps} steps; block 1 is the stem, 2 to 9 are the "
        f"residual blocks and 10 the pooled output, flattened. Test accuracy on CIFAR-10, CIFAR-100 and SVHN: "
        f"{'; '.join(words)}. {NEEDS}"
    )
