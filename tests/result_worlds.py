"""Small results of applications to look at: federations, rankings, tasks learnt in a row, compressions, sparsity."""

import math

import numpy as np
import torch
from torch import nn

from netkin.applications.sparsity import sparsify, sparsity_study
from netkin.results import Comparison, Federation, Ranking, TaskAccuracies, TaskEnsembles
from netkin.results.compression import CompressedLayer, Compression, TakenApart
from netkin.results.federation import RoundRecord
from table_worlds import as_caveats, table_of

TASKS = ("0-1", "2-3", "4-5")
FINETUNE = np.array([[[0.5, 0.5, 0.5], [0.9, 0.6, 0.4], [0.7, 0.8, 0.5], [0.3, 0.6, 1.0]],
                     [[0.5, 0.5, 0.5], [0.8, 0.6, 0.4], [0.7, 0.9, 0.5], [0.5, 0.6, 0.8]]])  # fmt: skip
JOINT = np.concatenate([np.full((2, 1, 3), 0.5), np.full((2, 2, 3), math.nan), np.full((2, 1, 3), 0.9)], axis=1)


def similarity(clients):
    """Return clients of which the even ones are alike, and the odd ones."""
    values = np.array([[1.0 if i == j else 0.9 if (i - j) % 2 == 0 else 0.1 for j in range(len(clients))]
                       for i in range(len(clients))])  # fmt: skip
    table = table_of(
        id="atom_cosine", name="atom_cosine", parameters={}, layers_a=clients, layers_b=clients, values=values,
        higher_is_closer=True, bounds=(-1, 1), symmetric=True, convention="Eq. 5", statistic="Filters",
        axes=("network", "network"),
    )  # fmt: skip
    return Comparison(
        a="clients", b="clients", layers_a=clients, layers_b=clients, tables={"atom_cosine": table}, shapes_a={},
        shapes_b={}, widths_a={}, widths_b={}, data="", examples=0, seed=0, version="0.1.0",
    )  # fmt: skip


def accuracy(place, number):
    return round(0.1 * number + 0.01 * place, 4)


def federation(count=4, rounds=3, tested=True, alike=True, **changes):
    clients = tuple(f"u{k}" for k in range(count))
    records = tuple(
        RoundRecord(number, clients, clients[1:] if number == 2 else clients,
                    {clients[0]: "dropped out: no update came"} if number == 2 else {}, 1 / number,
                    {name: accuracy(k, number) for k, name in enumerate(clients)} if tested else {})
        for number in range(1, rounds + 1)
    )  # fmt: skip
    found = {name: accuracy(k, rounds) for k, name in enumerate(clients)} if tested else {}
    weights = {"shared": {"body": np.ones((2, 2))}, "personal": {"conv.atoms": np.ones((count, 2, 3, 3))}}
    own = {
        "algorithm": "fedper", "coefficients": "evolving", "clients": clients, "examples": dict.fromkeys(clients, 1200),
        "accuracy": found, "rounds": records, "parts": {"body": "body", "conv.atoms": "atoms"}, "travels": ("body",),
        "numbers": 4, "leaks": "The server sees the body.", "similarity": similarity(clients) if alike else None,
        "version": "0.1.0", "provenance": {"call": "nk.federate()", "recipe": "epochs=1"}, **weights,
    }  # fmt: skip
    return Federation(**(own | changes))


def ranking(models=("a", "b", "c"), errors=True, **changes):
    values = np.linspace(0.4, 0.8, len(models))[None]
    noise = 0.01 * np.random.default_rng(0).normal(size=(6, *values.shape))
    tables = {}
    for name, scale in (("knn", 1.0), ("logme", -2.0)):
        facts = {"replicates": scale * (values + noise), "chunk_sizes": (9,) * 6} if errors else {}
        tables[name] = table_of(
            id=name, name=name, parameters={}, layers_a=("digits",), layers_b=models, values=scale * values,
            higher_is_closer=True, bounds=(-math.inf, math.inf), symmetric=False, convention=f"{name} counts",
            statistic="Evidence", kind="score", axes=("data", "model"), **facts,
        )  # fmt: skip
    facts = {"score": "knn", "tables": tables, "costs": {"knn": 1.0, "logme": 1.0}, "data": "digits", "examples": 54}
    facts |= {
        "parameters": dict.fromkeys(models, 12),
        "classes": 3,
        "version": "0.1.0",
        "caveats": as_caveats("mind this"),
    }
    facts["provenance"] = {f"features of {models[0]}": "64 wide", f"weights of {models[0]}": "12ab", "chunks": "6"}
    return Ranking(**(facts | changes))


def way(method="finetune", accuracies=FINETUNE, **changes):
    own = {
        "method": method, "tasks": TASKS, "classes": (2, 2, 2), "seeds": (0, 1), "accuracies": accuracies,
        "storage": {"shared": 1000, "each task": 130, "in all": 1390}, "recipe": "epochs=2", "version": "0.1.0",
        "caveats": as_caveats(f"mind {method}"), "provenance": {"network": "digest 12ab"},
    }  # fmt: skip
    return TaskAccuracies(**(own | changes))


def ensembles(**changes):
    members = (((), ("0-1",), ("2-3", "0-1")),) * 2
    values = {name: np.full((2, 3), value) for name, value in (("alone", 0.7), ("together", 0.75), ("further", 0.8))}
    own = {
        "tasks": TASKS, "seeds": (0, 1), "similarity": "atom_cosine", "choice": "most similar", "storage": 12,
        "candidates": "earlier tasks", "members": members, "similarities": np.ones((2, 3, 3)), **values,
    }  # fmt: skip
    return TaskEnsembles(**(own | changes))


def compressed():
    rows = (
        CompressedLayer("fc", "Linear", 64, 16, 650, 1204, 640, 1184, 0.9, 0.95, ("saves no parameters.",)),
        CompressedLayer("<conv>", "Conv2d", 32, 8, 1000, 250, 4000, 1000, 0.5, 0.75),
    )
    return Compression(
        layers=rows, against="logits", projection="least_squares", order="at once", examples=1437,
        parameters_before=2000, parameters_after=1500, accuracy_before=0.97, accuracy_after=0.75,
        replaced=(TakenApart("fc", 16, False, True),), data="digits:train", model="<digits>",
        provenance={"weights": "ab12", "torch": "2.4"},
    )  # fmt: skip


def studied():
    torch.manual_seed(0)
    models = {}
    for name in ("before <b>", "after"):
        models[name] = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    sparsify(models["after"], 0.8, method="uniform")
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(40, 12, generator=draw), torch.randint(0, 3, (40,), generator=draw)
    return sparsity_study(models, data, epsilons=[0.05], relative=[0.5], costs=True)
