"""Every public call that reads a loader leaves the loader's own generator, and all others, as it found them."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.training import accuracy

QUIET = {"progress": False}


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def nets():
    return {"first": net(0), "second": net(1), "third": net(2)}


def labelled(n=96):
    draw = torch.Generator().manual_seed(5)
    return torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


def shuffling():
    draw = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*labelled()), 32, shuffle=True, generator=draw)


def stitches(data=None):
    first, second, given = net(0), net(1), labelled()[0] if data is None else data
    return [nk.stitch(first, "1", second, "1", given, how, **QUIET) for how in ("least_squares", "ridge")]


def interrupted(data):
    def broken(batch):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        nk.compare(net(0), net(1), data, transforms=broken, **QUIET)


CALLS = {
    "activations": lambda data, _: nk.activations(net(), data=data, **QUIET),
    "gradients": lambda data, _: nk.gradients(net(), data=data, **QUIET),
    "compare": lambda data, _: nk.compare(net(0), net(1), data, **QUIET),
    "compare, interrupted": lambda data, _: interrupted(data),
    "compare, own data": lambda data, _: nk.compare(*(nk.ModelInput(net(seed), data=data) for seed in (0, 1)), **QUIET),
    "collect": lambda data, _: nk.collect(net(0), net(1), data, **QUIET),
    "explain": lambda data, _: nk.explain(net(0), net(1), data, **QUIET),
    "compare_many": lambda data, _: nk.compare_many(nets(), data, **QUIET),
    "compare_many, saved": lambda data, place: nk.compare_many(nets(), data, save=place / "many", **QUIET),
    "explain_many": lambda data, _: nk.explain_many(nets(), data, **QUIET),
    "model_directions": lambda data, _: nk.model_directions(net(0), "1", net(1), data=data, **QUIET),
    "class_sensitivity": lambda data, _: nk.class_sensitivity(net(), data, **QUIET),
    "compress": lambda data, _: nk.compress(net(), ["2"], data=data, k=4, test=data, **QUIET),
    "explain_compress": lambda data, _: nk.explain_compress(net(), ["2"], data=data, k=4, test=data),
    "dynamics": lambda data, _: nk.dynamics({0: net(0), 9: net(1)}, data, **QUIET),
    "explain_dynamics": lambda data, _: nk.explain_dynamics({0: net(0), 9: net(1)}, data),
    "DynamicsRecorder": lambda data, _: nk.DynamicsRecorder(net(), data).probe(0),
    "FreezeTraining": lambda data, _: nk.FreezeTraining(net(), "similarity", probe=data, steps=9),
    "accuracy": lambda data, _: accuracy(net(), data),
    "train": lambda data, _: nk.train(net(), data, test=data, epochs=1, **QUIET),
    "explain_train": lambda data, _: nk.explain_train(net(), data, test=data, epochs=1),
    "train, saved": lambda data, place: nk.train(net(), data, test=data, epochs=1, save=place / "run", **QUIET),
    "lottery_tickets": lambda data, _: nk.lottery_tickets(net(), data, test=data, sparsity=0.5, epochs=1, **QUIET),
    "sparsify": lambda data, _: nk.sparsify(net(), 0.5, method="snip", data=data, **QUIET),
    "sparsity_study": lambda data, _: nk.sparsity_study(net(), data, sparsities=[0.0, 0.5], **QUIET),
    "stitch": lambda data, _: stitches(data),
    "stitch_all": lambda data, _: nk.stitch_all(net(0), net(1), data=data, test=data, **QUIET),
    "stitch_many": lambda data, _: nk.stitch_many(nets(), data=data, test=data, **QUIET),
    "explain_stitch": lambda data, _: nk.explain_stitch(net(0), net(1), data=data, test=data),
    "Stitch.evaluate": lambda data, _: stitches()[0].evaluate(data, **QUIET),
    "barrier": lambda data, _: nk.barrier(*stitches(), data, points=3, **QUIET),
    "task2vec": lambda data, _: nk.task2vec(net(), data, **QUIET),
    "fisher_rao_norm": lambda data, _: nk.fisher_rao_norm(net(), data, **QUIET),
    "layer_embeddings": lambda data, _: nk.layer_embeddings(net(), data, **QUIET),
    "mean_embedding_norm": lambda data, _: nk.mean_embedding_norm(net(), data, **QUIET),
    "adaptation_score": lambda data, _: nk.adaptation_score(net(), data, **QUIET),
    "kernel_ridge": lambda data, _: nk.kernel_ridge(net(), data, **QUIET).accuracy(data, **QUIET),
    "transfer_scores": lambda data, _: nk.transfer_scores(net(), data, **QUIET),
    "explain_recommend": lambda data, _: nk.explain_recommend(nets(), data),
    "recommend": lambda data, _: nk.recommend(nets(), data, **QUIET),
    "compare_tasks": lambda data, _: nk.compare_tasks({"one": (net(0), data), "two": (net(1), data)}, **QUIET),
    "split_tasks": lambda data, _: nk.split_tasks(data, data, 1),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_generator_of_a_loader_as_it_found_it(tmp_path, name):
    data = shuffling()

    def states():
        return data.generator.get_state().tolist(), torch.get_rng_state().tolist(), random.getstate()

    before, numpy_before = states(), np.random.get_state()[1].tolist()
    CALLS[name](data, tmp_path)
    assert states() == before
    assert np.random.get_state()[1].tolist() == numpy_before
