"""Claims of a made-up paper, in a registry of their own, and a laboratory that hands out nothing real."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reproductions import claims, running
from reproductions.claims import Finding, Measured, claim
from reproductions.keeping import note_images, note_recipe, note_result


class FakeLab:
    """As the laboratory, with six images."""

    def __init__(self, scale="cpu"):
        self.scale, self.device = scale, torch.device("cpu")

    @note_result(note_images)
    def images(self):
        return SimpleNamespace(words="toys, 4 training and 2 test images", digests={"toys, 4 training images": "ab12"})

    def text(self):
        return None

    def trained(self):
        return self.images()

    def recipe(self, name):
        network = SimpleNamespace(words="epochs=3")
        note_recipe(name, network)
        return network


@pytest.fixture
def lab():
    return FakeLab()


@pytest.fixture(scope="session")
def with_few_images():
    """Return a function that leaves a laboratory the first training and test images only."""

    def cut(lab, train, test):
        whole, counts = lab.images(), {"train": train, "test": test}
        parts = {f"{part}_{of}": count for part, count in counts.items() for of in ("images", "labels")}
        few = {name: getattr(whole, name)[:count] for name, count in parts.items()}
        lab.__dict__["_images"] = replace(whole, **few)
        return lab

    return cut


@pytest.fixture
def registry(monkeypatch):
    """An empty registry with one paper, "toys", whose claims are those made with `made`."""
    found = {}
    monkeypatch.setattr(claims, "_STATEMENTS", found)
    monkeypatch.setattr(claims, "papers", lambda: {"toys": "Toy (2020), Toys."})
    monkeypatch.setattr(running, "papers", claims.papers)
    monkeypatch.setattr(claims, "import_module", lambda name: SimpleNamespace(__path__=[]))
    return found


@pytest.fixture
def made(registry):
    """Make a claim: `made("toys/halving", figure="Fig. 2", measure=lambda lab: ...)`."""

    def make(id="toys/halving", measure=None, **changes):
        facts = {"figure": "Fig. 1", "sentence": "sizes halve", "expected": {"size": 0.5}, "criterion": "size < 0.6"}
        facts["control"] = "" if changes.get("kind") == "identity" else "copies of copies"
        number, control = {"size": Measured(0.5, 0.01, 3)}, {"size": Measured(0.25, 0.01, 3)}
        claim(id, **(facts | changes))(measure or (lambda lab: Finding("holds", number, control, seeds=lab_seeds)))
        return registry[id]

    lab_seeds = (0, 1, 2)
    return make
