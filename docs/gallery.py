"""Make what the gallery shows: pages of small studies on the bundled digits, and pictures of them.

``python docs/gallery.py`` writes the pages into `docs/pages`, in a minute on a CPU; they are not kept in git.
With ``--pictures`` it also draws `docs/figures`, which are kept: screenshots of the pages, which need Chromium and
playwright, and figures by matplotlib. ``--only NAME`` makes one study alone.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import netkin as nk
from netkin.errors import InflatedWarning
from netkin.training import trained_digits_net

FOLDER = Path(__file__).parent
PAGES, FIGURES, STORY = FOLDER / "pages", FOLDER / "figures", FOLDER / "diff-story.md"
SIZE, COLOURS = {"width": 1200, "height": 900}, 160
LAYERS = ["relu1", "relu2", "relu3", "relu4", "fc"]
FIGURE_NAMES = ("comparison", "series", "stitch")


# --- the studies ------------------------------------------------------------------------------------------------------


@cache
def network(seed: int) -> torch.nn.Module:
    """Return the digits network of a seed, trained."""
    return trained_digits_net(seed)


def data(part: str) -> Any:
    """Return a part of the digits, "train" or "test"."""
    return nk.load_data(f"digits:{part}")


def two_checkpoints() -> Any:
    """Compare two networks that differ in their seeds, with standard errors."""
    names, measures = ("seed 0", "seed 1"), ["cka", "procrustes_distance", "svcca_k(k=5)"]
    return nk.compare(network(0), network(1), data("test"), measures, layers=LAYERS, names=names, errors=True)


def many_models() -> Any:
    """Compare four seeds and an untrained network with each other."""
    models = {f"seed {seed}": network(seed) for seed in range(4)}
    return nk.compare_many(models | {"untrained": nk.load_model("netkin:digits", seed=9)}, data("test"), layers=LAYERS)


@cache
def training_run() -> Any:
    """Compare every probe of a training run with its end."""
    torch.manual_seed(0)
    model = nk.load_model("netkin:digits", seed=0)
    recorder = nk.DynamicsRecorder(model, data("test"), layers=LAYERS)
    for step, epochs in enumerate((0, 1, 1, 2, 4)):
        if epochs:
            nk.train(model, data("train"), epochs=epochs, batch=64, lr=0.02, seed=step, progress=False)
        recorder.probe(sum((0, 1, 1, 2, 4)[: step + 1]) * 23)
    return recorder.series("cka")


def stitches() -> Any:
    """Stitch the layers of two networks by three methods."""
    how = ["least_squares", "procrustes", "task_loss(epochs=1)"]
    names = ("seed 0", "seed 1")
    return nk.stitch_all(network(0), network(1), data("train"), data("test"), how, layers="relu*", names=names)


def which_model() -> Any:
    """Rank three networks for the digits: one trained on them, one on half of the classes, one untrained."""
    half = nk.load_model("netkin:digits", seed=3)
    some = [(images[labels < 5], labels[labels < 5]) for images, labels in data("train")]
    nk.train(half, some, epochs=2, lr=0.02, progress=False)
    models = {"all digits": network(0), "digits 0 to 4": half, "untrained": nk.load_model("netkin:digits", seed=9)}
    return nk.recommend(models, data("test"), scores=["knn", "logme"])


def users() -> Any:
    """Train ten clients together, every two of which have the same two digits, with coefficients of their own."""
    split = nk.split_by_classes("digits:train", clients=10, classes=2, test="digits:test", partition="groups")
    torch.manual_seed(0)
    convolutions = [nk.AtomConv2d(i, o, 3, stride=2, padding=1, atoms=4) for i, o in ((1, 8), (8, 16))]
    relu, head = torch.nn.ReLU(), [torch.nn.Flatten(), torch.nn.Linear(64, 10)]
    model = torch.nn.Sequential(convolutions[0], relu, convolutions[1], relu, *head)
    how = {"lr": 0.05, "batch": 8, "drop_last": True, "test": split.test, "test_every": 1}
    return nk.federate(model, split.train, "fedper", coefficients="evolving", rounds=6, **how)


def tasks_in_a_row() -> Any:
    """Learn five tasks of two digits in a row, in two ways."""
    tasks = nk.split_tasks("digits:train", "digits:test", tasks=5)
    recipe = {"epochs": 2, "batch": 32, "lr": 0.02, "progress": False}
    return [nk.learn_tasks("netkin:digits", tasks, way, **recipe).record for way in ("atoms", "finetune")]


def sparse_networks() -> Any:
    """Put a network beside one that lost nine of ten weights."""
    sparse = nk.load_model("netkin:digits", seed=0)
    nk.sparsify(sparse, 0.9, method="erk", seed=0)
    nk.train(sparse, data("train"), epochs=4, lr=0.05, progress=False)
    return nk.sparsity_study({"dense": network(0), "sparse": sparse}, data("test"))


def classes() -> Any:
    """Ask which layers of a network follow which classes."""
    return nk.class_sensitivity(network(0), data("test"), layers=LAYERS, name="seed 0")


def smaller_layers() -> Any:
    """Keep the directions that hold nine tenths of the variance of each layer's input."""
    layers = ["conv2", "conv3", "conv4"]
    return nk.compress(network(0), layers, variance=0.9, data=data("train"), test=data("test")).compression


@cache
def five_versions() -> dict[str, Any]:
    """Run the code of the guide to five versions of a model, and return its names."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", STORY.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(code, names)
    return names


STUDIES: dict[str, Callable[[], Any]] = {
    "two-checkpoints": two_checkpoints,
    "many-models": many_models,
    "training-run": training_run,
    "stitches": stitches,
    "which-model": which_model,
    "users": users,
    "tasks": tasks_in_a_row,
    "sparse-networks": sparse_networks,
    "classes": classes,
    "smaller-layers": smaller_layers,
    "diff-bfloat16": lambda: five_versions()["control"],
    "diff-int8": lambda: five_versions()["int8"],
    "diff-int4": lambda: five_versions()["mistake"],
    "diff-port": lambda: five_versions()["port"],
    "diff-lora": lambda: five_versions()["lora"],
}


# --- pages and pictures -----------------------------------------------------------------------------------------------


def write_page(name: str) -> Any:
    """Make a study, write its page and return what the study found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)  # the page shows it
        found = STUDIES[name]()
    PAGES.mkdir(exist_ok=True)
    nk.report(found, PAGES / f"{name}.html", overwrite=True)
    return found


def write_story() -> None:
    """Write into the guide to five versions of a model what its results say."""
    said = re.compile(r"(<!-- print\((\w+)\) -->\n```text\n).*?^```", flags=re.MULTILINE | re.DOTALL)
    STORY.write_text(said.sub(lambda found: f"{found[1]}{five_versions()[found[2]]}\n```", STORY.read_text()))


def draw_figures() -> None:
    """Draw the figures of the gallery by matplotlib, as `plot` gives them."""
    stitch = nk.stitch(network(0), "relu3", network(1), "relu3", data("train"))
    names = ("seed 0", "seed 1")
    comparison = nk.compare(network(0), network(1), data("test"), ["cka", "svcca_k(k=5)"], layers=LAYERS, names=names)
    for name, result in zip(FIGURE_NAMES, (comparison, training_run(), stitch), strict=True):
        drawn = FIGURES / f"figure-{name}.png"
        result.plot(path=drawn, overwrite=True)
        shrink(drawn.read_bytes(), drawn, width=1000)


def take_screenshots(names: list[str]) -> None:
    """Take a picture of the first screen of each page, light and dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            for name in names:
                page.goto((PAGES / f"{name}.html").as_uri())
                page.wait_for_timeout(300)
                shrink(page.screenshot(), FIGURES / f"{name}-{scheme}.png")
        browser.close()


def shrink(picture: bytes, path: Path, width: int | None = None) -> None:
    """Write a picture with a palette of few colours, which takes a third of the room, at most `width` pixels wide."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    if width and image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="Draw docs/figures too.")
    parser.add_argument("--only", choices=STUDIES, action="append", help="Make this study alone; can be repeated.")
    options = parser.parse_args()
    chosen = options.only or list(STUDIES)
    for name in chosen:
        write_page(name)
    if options.pictures:
        FIGURES.mkdir(exist_ok=True)
        take_screenshots(chosen)
        if any(name.startswith("diff-") for name in chosen):
            write_story()
        if not options.only:
            draw_figures()
