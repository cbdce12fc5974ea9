"""What tests of the distributed engine run on every rank, in one start of the ranks.

Each function of `SAME` makes one result, by any engine; each of `REFUSED` makes a call that some rank must refuse, told
its rank and how many there are. What every rank got is left in the folder, as a file of the result or as a sentence.
"""

import os
import time
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import netkin as nk
from netkin.comparing.engines import distributed

ERRORS = {"errors": True, "chunks": 4}
LINEAR = ["cka", "cka_debiased", "svcca", "procrustes_distance"]
SEVERAL = [*LINEAR, "cka_minibatch(batch=16)", "cka_rbf"]
LAYERS = ["conv1", "conv2", "fc"]


class Maps(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(2, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width + 1, 3, padding=1, stride=2)
        self.fc = nn.Linear(width + 1, 3)

    def forward(self, images):
        return self.fc(torch.relu(self.conv2(torch.relu(self.norm(self.conv1(images))))).mean((2, 3)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, 5), nn.Linear(5, 5)

    def forward(self, input_ids, attention_mask=None):
        return torch.tanh(self.layer(self.embed(input_ids)))


def nets(dtype=torch.float64, kind=Maps, count=2):
    torch.manual_seed(0)
    return [kind().to(dtype).eval() for _ in range(count)]


def images(count=50, dtype=torch.float64):
    made = torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (made + torch.linspace(0, 20, count)[:, None, None, None]).to(dtype)  # each share has another mean


def sentences():
    drawn = torch.Generator().manual_seed(2)
    mask = torch.arange(7) < torch.randint(2, 8, (40, 1), generator=drawn)
    ids = torch.randint(1, 11, (40, 7), generator=drawn) * mask
    return [{"input_ids": ids[part], "attention_mask": mask[part].long()} for part in (slice(0, 25), slice(25, 40))]


class Counted(TensorDataset):
    """Examples that note which of them are read."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.read = []

    def __getitem__(self, place):
        self.read.append(place)
        return super().__getitem__(place)


def sampled(engine, **options):
    """Return the images, under torchrun in a loader whose sampler has split them among the ranks."""
    data = TensorDataset(images())
    if engine == "local":
        return data
    return DataLoader(data, batch_size=7, sampler=DistributedSampler(data, **options))


# --- results that do not depend on the engine -------------------------------------------------------------------------


def doubles(engine):
    return nk.compare(*nets(), images(), SEVERAL, layers=LAYERS, engine=engine, **ERRORS)


def floats(engine):
    data = images(dtype=torch.float32)
    return nk.compare(*nets(torch.float32), data, SEVERAL, layers=LAYERS, engine=engine, **ERRORS)


def batches_of_a_loader(engine):
    data = DataLoader(TensorDataset(images(), torch.arange(50)), batch_size=7)
    return nk.compare(*nets(), data, SEVERAL, layers=LAYERS, engine=engine)


def a_loader_that_drops(engine):
    data = DataLoader(TensorDataset(images()), batch_size=8, drop_last=True)
    return nk.compare(*nets(), data, LINEAR, layers=LAYERS, engine=engine)


def listed_batches(engine):
    return nk.compare(*nets(), list(images().split(9)), LINEAR, layers=LAYERS, examples=31, engine=engine)


def a_sampler(engine):
    return nk.compare(*nets(), sampled(engine, shuffle=False), SEVERAL, layers=LAYERS, engine=engine, **ERRORS)


def a_sampler_that_shuffles(engine):
    data = sampled(engine, shuffle=True, seed=3)
    return nk.compare(*nets(), data, SEVERAL, layers=LAYERS, engine=engine, **ERRORS)


def wide_rows(engine):
    rng = np.random.default_rng(3)
    X, Y = rng.normal(size=(40, 60)), rng.normal(size=(40, 50))
    return nk.compare({"x": X, "z": X**2}, {"y": Y}, measures=SEVERAL, engine=engine, **ERRORS)


def places(engine):
    options = {"layers": ["conv1", "conv2"], "shape": "positions", "resize": "average"}
    return nk.compare(*nets(), images(24)[..., :4, :4], SEVERAL, engine=engine, **options, **ERRORS)


def frequencies(engine):
    return nk.compare(*nets(), images(), ["cka", "svcca"], layers=LAYERS[:2], shape="dft", engine=engine, **ERRORS)


def tokens(engine):
    return nk.compare(*nets(kind=Words), sentences(), LINEAR, shape="tokens", engine=engine, **ERRORS)


def gradients(engine):
    return nk.compare(*nets(), images(), "kernel_cka", layers=LAYERS, engine=engine)


def sketches(engine):
    return nk.compare(*nets(), images(), "sketched_cka", layers=["fc"], engine=engine)


def data_of_their_own(engine):
    """Compare by sketches two models of which each has its own data, of other sizes."""
    first, second = nets()
    subjects = nk.ModelInput(first, data=images()), nk.ModelInput(second, data=images(31))
    return nk.compare(*subjects, measures="sketched_cka", layers=["fc"], engine=engine)


def weights_alone(engine):
    return nk.compare(*nets(), measures="weight_cosine", engine=engine)


def many(engine):
    return nk.compare_many(nets(count=3), images(), LINEAR, layers=LAYERS, engine=engine, **ERRORS)


def alone(engine):
    return nk.compare(nets()[0], data=images(), layers=LAYERS, engine=engine)


def data_of_netkin(engine):
    return nk.compare(nk.load_model("netkin:digits"), data=nk.load_data("digits:test"), layers="relu*", engine=engine)


def collected(engine):
    return nk.collect(*nets(), images(), layers=LAYERS, engine=engine, **ERRORS)


def wrapped(engine):
    """Compare models in `DistributedDataParallel`, whose buffers are the rank's own, as training leaves them."""
    models = nets()
    if engine == "local":
        return nk.compare(*models, images(), LINEAR, layers=LAYERS, engine=engine)
    models = [DistributedDataParallel(model) for model in models]
    for model in models:
        model.module.norm.running_mean += dist.get_rank()
    found = nk.compare(*models, images(), LINEAR, layers=LAYERS, engine=engine)
    assert all(bool((model.module.norm.running_mean == dist.get_rank()).all()) for model in models)
    return found


def dispatched(engine):
    """Compare a model that accelerate has spread over devices, here over one."""
    models = nets()
    if engine != "local":
        from accelerate import dispatch_model

        models = [dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True) for model in models]
    return nk.compare(*models, images(), LINEAR, layers=LAYERS, engine=engine)


def initialised_by_hand(engine):
    return nk.compare({"x": np.eye(6)}, {"x": np.eye(6)[::-1].copy()}, engine=engine)


SAME = [
    doubles, floats, batches_of_a_loader, a_loader_that_drops, listed_batches, a_sampler, a_sampler_that_shuffles,
    wide_rows, places, frequencies, tokens, gradients, sketches, data_of_their_own, weights_alone, many, alone,
    data_of_netkin, collected, wrapped, dispatched, initialised_by_hand,
]  # fmt: skip


def tables_of(result):
    if isinstance(result, nk.Comparisons):
        return {(*pair, name): table for pair, one in result.items() for name, table in one.tables.items()}
    found = dict((result.compute() if isinstance(result, nk.Comparer) else result).tables)
    found.pop("gaussian_mutual_information", None)  # which multiplies rounding by 1/(1 - ρ²)
    return found


def assert_same(found, whole, within):
    """Assert that values, replicates and standard errors agree, those above 1 in so many digits."""
    mine, theirs = tables_of(found), tables_of(whole)
    assert list(mine) == list(theirs)
    for name, table in theirs.items():
        assert mine[name].values == pytest.approx(table.values, within, within, True), name
        assert dict(mine[name].missing) == dict(table.missing)
        assert (mine[name].chunk_sizes, mine[name].exactness) == (table.chunk_sizes, table.exactness)
        assert (mine[name].replicates is None) == (table.replicates is None)
        if table.replicates is not None:
            assert mine[name].replicates == pytest.approx(table.replicates, within, within, True), name
            assert mine[name].errors == pytest.approx(table.errors, within, within, True), name


# --- calls that are refused -------------------------------------------------------------------------------------------


def call(data=None, models=None, function=nk.compare, **options):
    data = images() if data is None else data
    return function(*(models or nets()), data, **{"layers": LAYERS, "engine": "distributed", **options})


def a_model_that_crashes(rank, count):
    models = nets()
    models[1].fc.register_forward_hook(crash_on_the_last)
    return call(models=models)


def crash_on_the_last(module, inputs, output):
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError("this rank is broken")


def a_model_that_crashes_later(rank, count):
    seen = []

    def forward(model, batch):
        seen.append(batch)
        if rank == count - 1 and len(seen) > 4:
            raise OSError("this rank is broken")
        return model(batch)

    return call(list(images(60).split(2)), forward=forward)


def a_table_that_fails(rank, count):
    return call(images(3), measures="cka_debiased" if count < 4 else "cka", pairs=[("fc", "absent")])


def not_a_number(rank, count):
    data = images()
    data[-1] = torch.nan
    return call(data)


def other_weights(rank, count):
    models = nets()
    with torch.no_grad():
        models[0].fc.bias += rank
    return call(models=models)


class Bent(Maps):
    """The same weights, with another activation."""

    def __init__(self, act):
        super().__init__()
        self.act, self.device = act, f"cuda:{dist.get_rank()}"  # each rank has a device of its own

    def forward(self, images):
        return self.fc(self.act(self.conv2(self.act(self.norm(self.conv1(images))))).mean((2, 3)))


def other_activations(rank, count):
    torch.manual_seed(0)
    return call(models=[Bent(nn.Tanh() if rank else nn.ReLU()).double().eval(), Maps().double().eval()])


def other_code(rank, count):
    """Call with a class of the same name and the same weights, whose code was edited on some ranks."""
    models = nets()

    class Edited(Maps):
        def forward(self, images):
            return self.fc(torch.relu(self.conv1(images)).mean((2, 3)))

    class Other(Maps):
        def forward(self, images):
            return self.fc(torch.tanh(self.conv1(images)).mean((2, 3)))

    Edited.__qualname__ = Other.__qualname__ = "Net"
    models[0].__class__ = Other if rank else Edited
    return call(models=models, layers=["conv1"])


def other_widths(rank, count):
    torch.manual_seed(0)
    return call(models=[Maps(4 + rank).double(), Maps().double()])


def a_sampler_of_another_rank(rank, count):
    data = TensorDataset(images())
    return call(DataLoader(data, sampler=DistributedSampler(data, num_replicas=count + 1, rank=rank)))


def a_sampler_that_drops(rank, count):
    data = TensorDataset(images(3 * count + 1) if count > 1 else images())
    return call(DataLoader(data, sampler=DistributedSampler(data, drop_last=True), batch_size=4, drop_last=True))


def samplers_of_other_epochs(rank, count):
    data = TensorDataset(images())
    sampler = DistributedSampler(data, shuffle=True)
    sampler.set_epoch(rank)
    return call(DataLoader(data, sampler=sampler, batch_size=10))


class Skipping(DistributedSampler):
    def __iter__(self):
        return iter(list(super().__iter__())[:-3])


def a_sampler_that_skips(rank, count):
    data = TensorDataset(images())
    return call(DataLoader(data, sampler=Skipping(data, shuffle=False), batch_size=10))


class Unsized:
    def __iter__(self):
        return iter(images().split(8))


class Exaggerating(Unsized):
    examples = 60


def a_sharded_model(rank, count):
    from torch.distributed.fsdp import fully_shard

    return call(models=[fully_shard(model) for model in nets()])


PLAIN = {
    "other_seeds": lambda rank, count: call(seed=rank),
    "other_measures": lambda rank, count: call(measures="nbs" if rank else "cka"),
    "other_layers": lambda rank, count: call(layers="fc" if rank else "conv1"),
    "other_calls": lambda rank, count: call(images(50 + rank)),
    "a_stream": lambda rank, count: call(iter(images().split(8))),
    "an_unsized_stream": lambda rank, count: call(Unsized()),
    "fewer_than_they_say": lambda rank, count: call(Exaggerating()),
    "a_shuffled_loader": lambda rank, count: call(DataLoader(TensorDataset(images()), shuffle=True)),
    "too_few_examples": lambda rank, count: call(images(count)[: count - 1] if count > 1 else images(0)),
    "a_part": lambda rank, count: call(part="1/2", function=nk.collect),
    "a_start": lambda rank, count: call(start=3, function=nk.collect),
    "a_partial_call": lambda rank, count: call(partial=True),
    "a_file": lambda rank, count: nk.compare_many(nets(), images(), engine="distributed", save="many.netkin"),
}
REFUSED = {make.__name__: make for make in [
    a_model_that_crashes, a_model_that_crashes_later, a_table_that_fails, not_a_number, other_weights, other_widths,
    other_activations, other_code,
    a_sampler_of_another_rank, a_sampler_that_drops, samplers_of_other_epochs, a_sampler_that_skips,
    a_sharded_model,
]} | PLAIN  # fmt: skip


def a_rank_that_does_not_come(rank, count):
    """Call on all ranks but the last, after which no more calls can be made: ranks count them."""
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
    distributed.GRACE = 0.1
    if rank < count - 1:
        call()
    raise TimeoutError("this rank has not called")


def run_with_one_that_ends(rank, folder, after):
    """Call on all ranks, of which the last ends without a fault after some runs of its model; None: it never calls."""
    distributed.GRACE = 0.1
    is_last, runs = rank == dist.get_world_size() - 1, []
    if is_last and after is None:
        return

    def forward(model, batch):
        runs.append(batch)
        if is_last and len(runs) > after:
            os._exit(0)
        return model(batch)

    try:
        call(list(images(60).split(2)), forward=forward)
        sentence = "nothing was refused"
    except Exception as refusal:
        sentence = f"{type(refusal).__name__}: {refusal}"
    (folder / f"ended.{rank}").write_text(sentence)


def run_with_one_that_is_late(rank, folder):
    """Call on all ranks, of which the last comes so late that the others check whether it is still there."""
    distributed.ALIVE = 0.1
    for number in range(2):
        if rank == dist.get_world_size() - 1:
            time.sleep(1)
        doubles("distributed").save(folder / f"late{number}.{rank}")


def shares():
    """Return how often each example was read on this rank, and the number of them."""
    data = Counted(images())
    nk.compare(*nets(), DataLoader(data, batch_size=4), layers=["fc"], engine="distributed")
    return np.bincount(data.read, minlength=50)


def run_all(rank, folder):
    """Make every result and every refusal on this rank."""
    warnings.simplefilter("ignore")
    count = dist.get_world_size()
    for make in SAME:
        make("distributed").save(folder / f"{make.__name__}.{rank}")
    np.save(folder / f"shares.{rank}.npy", shares())
    for name, make in (REFUSED | {"a_rank_that_does_not_come": a_rank_that_does_not_come}).items():
        try:
            make(rank, count)
            sentence = "nothing was refused"
        except Exception as refusal:
            sentence = f"{type(refusal).__name__}: {refusal}"
        (folder / f"{name}.{rank}").write_text(sentence)
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(minutes=1))
    dist.barrier()


def run_on_device(rank, folder, kind="cuda"):
    """Compare on a device of this rank's own."""
    device = f"{kind}:{rank}" if kind == "cuda" else kind
    if kind == "cuda":
        torch.cuda.set_device(device)
    models, data = [model.to(device) for model in nets()], images().to(device)
    found = nk.compare(*models, data, SEVERAL, layers=LAYERS, engine="distributed", **ERRORS)
    found.save(folder / f"on_device.{rank}")
