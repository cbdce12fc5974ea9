"""The laboratory: data, networks and trained runs that the claims of all papers share.

At cpu scale everything is small enough for minutes on a CPU; at gpu scale all images are read, and networks trained for
less time than in the papers: `docs/reproducing.md` compares them. Trained runs are kept in `reproductions/.cache`, so
that claims which look at the same networks share them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from netkin import files, training
from netkin.errors import SourceError, UnknownName, did_you_mean
from netkin.jobs import beside
from netkin.progress import about, reporting
from netkin.sources import load_data
from netkin.sources.architectures import seeded
from netkin.training import Record
from reproductions.image_sets import SETS, SIZES, Images, cifar10, enlarged_digits, named_set
from reproductions.keeping import (
    Notes,
    cache_with_notes,
    current_job,
    join,
    note_images,
    note_recipe,
    note_result,
    note_text,
    note_weights,
    noting,
    part_name,
    random_seed,
)
from reproductions.recipes import RECIPES, WINDOW, Keeping, Network, Run, architecture_digest, recipe_words

__all__ = [
    "RECIPES", "Images", "Lab", "Network", "Run", "architecture_digest", "cache_with_notes", "keep_weights",
    "note_images", "note_result", "note_weights", "recipe_words",
]  # fmt: skip
HERE = Path(__file__).parent
LONGEST = 60  # characters of a task in messages of progress
TOGETHER = 10  # processes that share a GPU


class Lab:
    """What a claim works with.

    `data` is a folder with CIFAR-10 and tiny Shakespeare, `NETKIN_DATA` if not given; `checkpoints` one with networks
    that the authors of a paper trained, `NETKIN_CHECKPOINTS` if not given.
    """

    def __init__(
        self,
        scale: str = "cpu",
        *,
        device: str | torch.device | None = None,
        data: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
    ):
        if scale not in RECIPES:
            raise UnknownName(f"no scale {scale!r}; there are {' and '.join(RECIPES)}.")
        self.scale = scale
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() and scale == "gpu" else "cpu"))
        place = data or os.environ.get("NETKIN_DATA")
        self.data = Path(place) if place else None
        self.cache = Path(cache or HERE / ".cache")
        files = checkpoints or os.environ.get("NETKIN_CHECKPOINTS")
        self.checkpoints = Path(files) if files else None
        self.done = self.total = 0  # tasks of the claim being measured, as far as they are known

    def seeds(self, count: int) -> range:
        """Return the seeds of `count` repetitions."""
        return range(count)

    @cached_property
    def _images(self) -> Images:
        if self.data is None:
            if self.scale == "gpu":
                raise SourceError("the gpu scale needs CIFAR-10; pass --data DIR or set NETKIN_DATA.")
            return enlarged_digits(self.device)
        return cifar10(self.data, self.device, *SIZES[self.scale])

    @note_result(note_images)
    def images(self) -> Images:
        """Return CIFAR-10, 5,000 and 2,000 of it at cpu scale; without the files the bundled digits, enlarged."""
        return self._images

    @note_result(note_images)
    def images_of(self, name: str) -> Images:
        """Return a named set of images, "cifar10", "cifar100", "svhn" or "mnist", and its parts as large as `images()`.

        All are 3 × 32 × 32 and normalised as CIFAR-10 is, so that a network meets every set on one scale of pixels.
        """
        if name not in SETS:
            raise UnknownName(f"no set {name!r} in the laboratory{did_you_mean(name, SETS) or '.'}")
        if self.data is None:
            raise SourceError(f"this claim reads {SETS[name][0]}; pass --data DIR or set NETKIN_DATA.")
        if name not in self._sets:
            self._sets[name] = (
                self.images() if name == "cifar10" else named_set(name, self.data, self.device, *SIZES[self.scale])
            )
        return self._sets[name]

    @cached_property
    def _sets(self) -> dict[str, Images]:
        return {}

    def probe(self, count: int) -> Tensor:
        """Return the first `count` test images."""
        return self.images().test_images[:count]

    @note_result(note_text)
    def text(self) -> Path:
        """Return the path of tiny Shakespeare."""
        place = None if self.data is None else self.data / "shakespeare" / "input.txt"
        if place is None or not place.exists():
            raise SourceError(
                "this claim reads tiny Shakespeare, `shakespeare/input.txt` in the data folder; pass --data DIR."
            )
        return place

    @note_result(note_weights)
    def checkpoint(self, name: str) -> Path:
        """Return the path of a file of weights that the authors of a paper published."""
        place = None if self.checkpoints is None else self.checkpoints / name
        if place is None or not place.exists():
            raise SourceError(
                f"this claim reads the paper's own network {name!r}; pass --checkpoints DIR or set NETKIN_CHECKPOINTS."
            )
        return place

    def pieces(self) -> tuple[Tensor, Tensor]:
        """Return tiny Shakespeare in pieces, each with the characters that follow its own."""
        self.text()  # noted for every claim that reads it
        return self._pieces

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor]:
        batches = load_data(f"text,window={WINDOW[self.scale]}:{self.text()}", batch_size=4096)
        inputs, labels = (torch.cat(part).to(self.device) for part in zip(*batches, strict=True))
        return inputs, labels

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the last `count` pieces of the text; the last 2,000 are not trained on, of a short text a fifth."""
        inputs, labels = self.pieces()
        count = min(count, self._text_kept)
        return inputs[-count:], labels[-count:]

    @property
    def _text_kept(self) -> int:
        return min(2_000, len(self.pieces()[0]) // 5)

    def accuracy(self, model: nn.Module, split: str = "test") -> float:
        """Return the share of images of a part, "test" or "train", that `model` gets right."""
        return training.accuracy(model, getattr(self.images(), split), precision="auto")

    def recipe(self, name: str) -> Network:
        """Return how the network `name` is built and trained at this scale."""
        known = RECIPES[self.scale]
        if name not in known:
            raise UnknownName(f"no network {name!r} in the laboratory{did_you_mean(name, known) or '.'}")
        note_recipe(name, known[name])
        return known[name]

    def fresh(self, name: str, seed: int) -> nn.Module:
        """Return the network `name` before training, on the laboratory's device."""
        return self.placed(seeded(self.recipe(name).build, seed))

    def placed(self, model: nn.Module) -> nn.Module:
        """Return a network on the laboratory's device; on a GPU its maps have their channels last."""
        model.to(self.device)
        if self.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    @torch.no_grad()
    def settled(self, model: nn.Module) -> nn.Module:
        """Return a network that was not trained, its batch norms with the statistics of some training images.

        They are taken in float64, so that every process finds the same ones in float32, bit for bit: files of stitches
        go by them.
        """
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over the batches
        place = self.device if self.device.type == "cuda" else "cpu"  # others may have no float64
        model.to(place).double().train()
        for images in self.images().train_images[:1024].to(place).double().split(256):
            model(images)
        return model.eval().float().to(self.device)

    def total_steps(self, name: str, epochs: int | None = None) -> int:
        """Return the number of updates of a training of the network `name`."""
        recipe = self.recipe(name).recipe
        if recipe.steps is not None:
            return recipe.steps
        return (epochs or recipe.epochs or 0) * (len(self.images().train_images) // recipe.batch)

    def train(self, model: nn.Module, name: str, seed: int, **options: Any) -> list[Record]:
        """Train `model` by the recipe of `name`; `options` of `netkin.training.train` and of recipes override it."""
        network = self.recipe(name)
        if network.data == "text":
            data, test = tuple(part[: -self._text_kept] for part in self.pieces()), self.held_out(200)
        else:
            data, test = self.images().train, self.images().test
        return training.train(model, data, network.recipe, test=test, seed=seed, **options)

    def over(self, work: Callable[[Lab, Any], Any], tasks: Iterable[Any], keep: bool = False) -> list[Any]:
        """Return ``work(lab, task)`` of each task, in their order: one after the other, on a GPU several at a time.

        Small networks leave a GPU waiting for launches, so that several processes train nearly as many runs in the
        time of one. `work` must then be a function at the top level of a module, and what it returns must be picklable.
        With `keep` each result, which must be fit for JSON, is kept at once, and read when the claim goes on.
        """
        tasks, job = list(tasks), current_job() if keep else None
        if not tasks:
            return []
        names = [part_name(work, task) for task in tasks] if job else []
        done = {place: part.values for place, name in enumerate(names) if job and (part := job.find(name))}
        left = {place: task for place, task in enumerate(tasks) if place not in done}
        with self._counting(work.__name__, len(tasks), len(done)) as count:
            for place, result, notes in self._spread(work, left):
                done[place] = {"result": result, "notes": asdict(notes)}
                if job:
                    job.keep(names[place], done[place])
                count()
        for values in done.values():  # also of parts that a killed run had finished
            join(Notes(**values["notes"]))
        return [done[place]["result"] for place in range(len(tasks))]

    @contextmanager
    def _counting(self, what: str, total: int, done: int) -> Iterator[Callable[[], None]]:
        """Give a function to be called after each task, which tells the claim's job and whoever watches."""
        with reporting(total, what.strip("_").replace("_", " "), "tasks", done=done) as report:

            def count(more: int = 1) -> None:
                self.done += more
                report.update(more)
                if (job := current_job()) and self.total:
                    job.advance(self.done, self.total, "tasks")

            self.total, self.done = self.total + total, self.done + done
            count(0)
            yield count

    def _spread(self, work: Callable[[Lab, Any], Any], tasks: Mapping[int, Any]) -> Iterator[tuple[int, Any, Notes]]:
        """Yield the place of each task, its result and what it read, as soon as it is there."""
        if self.device.type != "cuda" or len(tasks) < 2:
            for place, task in tasks.items():
                words = " ".join(map(str, task)) if isinstance(task, (list, tuple)) else str(task)
                with about(words[:LONGEST]):
                    done = _noted_work(work, self, task)
                yield place, *done
            return
        places = {self._workers.submit(_apart, work, self._setting, task): place for place, task in tasks.items()}
        try:
            yield from ((places[done], *done.result()) for done in as_completed(places))
        except BrokenProcessPool:
            del self._workers  # the next claim gets new ones
            raise
        finally:
            for task in places:
                task.cancel()

    @cached_property
    def _workers(self) -> ProcessPoolExecutor:
        """Processes that share the GPU, from claim to claim."""
        return ProcessPoolExecutor(TOGETHER, torch.multiprocessing.get_context("spawn"))

    @property
    def identity(self) -> dict[str, str]:
        """What all numbers of this laboratory depend on beside the claim: its recipes, its data and its device."""
        words = json.dumps({name: network.words for name, network in RECIPES[self.scale].items()})
        recipes = hashlib.sha256(words.encode()).hexdigest()[:12]
        return {"recipes": recipes, "data": str(self.data), "device": self.device.type}

    @property
    def _setting(self) -> dict[str, Any]:
        names = ("scale", "data", "cache", "checkpoints")
        return {name: getattr(self, name) for name in names} | {"device": str(self.device)}

    def trained_all(self, names_and_seeds: Iterable[tuple[str, int]]) -> list[Run]:
        """Return several runs; those not in the cache are trained, on a GPU several at a time."""
        wanted = list(names_and_seeds)
        missing = [(name, seed) for name, seed in wanted if not self._place(name, seed).exists()]
        self.over(_train, missing)
        return [self.trained(name, seed) for name, seed in wanted]

    def trained(self, name: str, seed: int = 0) -> Run:
        """Return a run of the network `name`, from the cache if it was trained before with the same settings."""
        path = self._place(name, seed)
        if not path.exists():
            self._train_and_keep(path, name, seed)
        return self._read(path, name)

    def _place(self, name: str, seed: int) -> Path:
        network = self.recipe(name)
        data = self.images().words if network.data == "images" else str(self.text().stat().st_size)
        mark = hashlib.sha256(json.dumps([network.words, data]).encode()).hexdigest()[:10]
        return self.cache / f"{name}-{self.scale}-{seed}-{mark}.safetensors"

    def _train_and_keep(self, path: Path, name: str, seed: int) -> None:
        """Train a network and keep its states; on a CPU it goes on where it was interrupted."""
        model, keeping = self.fresh(name, seed), Keeping(self.total_steps(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".training")
        saved = unfinished if self.device.type == "cpu" else None  # on a GPU writing would take longer than training
        with about(name):
            history = self.train(model, name, seed, hooks=[keeping], save=saved)
        states = {f"{step}/{key}": value for step, kept in keeping.kept.items() for key, value in kept.items()}
        keep_weights(path, states, history=json.dumps(history))
        unfinished.unlink(missing_ok=True)
        shutil.rmtree(beside(unfinished), ignore_errors=True)  # the job, whose work is kept now

    def _read(self, path: Path, name: str) -> Run:
        with safe_open(path, "pt") as file:
            history = json.loads(file.metadata()["history"])
        checkpoints: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(path).items():
            step, _, rest = key.partition("/")
            checkpoints.setdefault(int(step), {})[rest] = value
        checkpoints = dict(sorted(checkpoints.items()))
        build = self.recipe(name).build
        model = seeded(build)  # which takes no random numbers
        model.load_state_dict(checkpoints[max(checkpoints)])
        return Run(model.eval().to(self.device), checkpoints, history, build)


def keep_weights(path: Path, weights: Mapping[str, Tensor], **words: str) -> None:
    """Write named weights to a file that appears whole or not at all, in a folder that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    files.write_bytes(path, save(tensors, words), overwrite=True)


def _apart(work: Callable[[Lab, Any], Any], setting: Mapping[str, Any], task: Any) -> tuple[Any, Notes]:
    """Do one task in a process of its own, which keeps its laboratory from task to task."""
    return _noted_work(work, _lab(tuple(setting.items())), task)


def _noted_work(work: Callable[[Lab, Any], Any], lab: Lab, task: Any) -> tuple[Any, Notes]:
    with random_seed(task_seed(work, task), lab.device), noting() as notes:
        return work(lab, task), notes


def task_seed(work: Callable[[Lab, Any], Any], task: Any) -> int:
    """Return torch's seed for a task, by its name alone: others may have been done by a run that was killed."""
    return int.from_bytes(hashlib.sha256(f"{work.__name__} {task}".encode()).digest()[:4], "big")


@cache
def _lab(setting: tuple[tuple[str, Any], ...]) -> Lab:
    return Lab(**dict(setting))


def _train(lab: Lab, name_and_seed: tuple[str, int]) -> None:
    lab.trained(*name_and_seed)
