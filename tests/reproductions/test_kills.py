"""Claims that are killed at random moments and go on: the record is that of a claim that was never killed."""

import multiprocessing
import os
import random
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from netkin.sources.architectures import seeded
from netkin.training import Recipe, train
from processes import ended, started
from reproductions import claims, laboratory, running
from reproductions.claims import Finding, Measured, all_of, verdict
from reproductions.running import measured, working

KILLS = int(os.environ.get("NETKIN_KILLS", "4"))  # NETKIN_KILLS=50 kills fifty times


def measure_a_claim(folder, begun):
    """Measure a claim that trains six networks in two ways, and write down its record without times."""
    claims.papers = running.papers = lambda: {"toys": "Toy (2020), Toys."}
    recipe = Recipe(epochs=5, batch=32, lr=0.01, shift=2)
    laboratory.RECIPES["cpu"] = dict.fromkeys(["net", "own"], laboratory.Network(small_net, recipe))

    @claims.claim("toys/killed", figure="Fig. 1", sentence="s", expected={"x": 1}, criterion="c", control="none")
    def killed(lab):
        found = lab.over(right_answers, range(3), keep=True)
        own = lab.over(own_accuracy, (3, 4), keep=True)
        controls = {"x": Measured(lab.trained("net", 0).accuracy), "drawn": Measured(torch.rand(()).item())}
        measured = {"x": Measured.over(found), "y": Measured.over(own)}
        return Finding(verdict(all_of(measured["x"].above(0), measured["y"].below(0.5))), measured, controls)

    begun.send(True)
    statement, lab = claims._STATEMENTS["toys/killed"], laboratory.Lab("cpu", cache=folder / "cache")
    with working(statement, lab):
        found = measured(statement, lab)
        assert (len(found.data), list(found.settings), len(found.parts)) == (2, ["net", "own"], 2)
        (folder / "found").write_text(replace(found, seconds=0, created="").to_json())


def small_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def own_accuracy(lab, seed):
    lab.recipe("own")  # noted also where the result was kept by a killed run
    model = seeded(small_net, seed)
    train(model, lab.images().train, Recipe(epochs=2, batch=32, lr=0.01), progress=False)
    return lab.accuracy(model.eval())


def right_answers(lab, seed):
    return lab.accuracy(lab.trained("net", seed).model)


@pytest.mark.slow
def test_a_claim_that_is_killed_at_random_moments_ends_at_the_same_numbers(tmp_path):
    def begin(place):
        (tmp_path / place).mkdir(exist_ok=True)
        told, begun = multiprocessing.Pipe(duplex=False)
        process = started(measure_a_claim, tmp_path / place, begun)
        assert told.recv()
        return process

    process, start = begin("whole"), time.perf_counter()
    assert ended(process) == 0
    took, draw, kills, rounds = time.perf_counter() - start, random.Random(0), 0, 0
    while kills < KILLS:
        rounds += 1
        while kills < KILLS and ended(begin(str(rounds)), draw.uniform(0, took)) != 0:
            kills += 1
        assert ended(begin(str(rounds))) == 0
        assert (tmp_path / str(rounds) / "found").read_text() == (tmp_path / "whole" / "found").read_text()
