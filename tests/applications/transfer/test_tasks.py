"""Tasks compared block by block: models of any architecture on data of any size, from sketches made once."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.applications.transfer.tasks import APART, SAME
from netkin.errors import ForwardError, InvalidValue, NoValue
from netkin.identity.data import contents
from refusals import refused
from table_worlds import sentences


def net(seed, width=6, classes=3):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)]
    return nn.Sequential(*layers).double()


def inputs(n, seed=0):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


HADAMARD = "sketched_cka_by_buckets(buckets=32)"
PSI = "sketched_cka(buckets=32)"


# --- another road -----------------------------------------------------------------------------------------------------


def slow_sketch(rows, ids, seed, buckets):
    """Return the sketch of rows, example by example, in Python's own whole numbers."""
    found = np.zeros((buckets, rows.shape[1]))
    for row, number in zip(np.asarray(rows), ids.tolist(), strict=True):
        mixed = (number + (seed + 1) * 0xD1342543DE82EF95) % 2**64
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = ((mixed ^ (mixed >> 30)) * multiplier) % 2**64
        mixed ^= mixed >> 31
        found[mixed % buckets] += row * (-1 if mixed >> 63 else 1)
    return found


def slow_value(one, other):
    """Return the paper's index of two layers: the cosine of centred products of the sketched kernels."""
    kernels = []
    for features, gradients in (one, other):
        kernel = (features @ features.T) * (gradients @ gradients.T)
        centring = np.eye(len(kernel)) - 1 / len(kernel)
        kernels.append(centring @ kernel @ centring)
    K, L = kernels
    return np.sum(K * L) / np.linalg.norm(K) / np.linalg.norm(L)


FEW = ["0", "2", "4"]  # layers, where it does not matter which


@pytest.fixture(scope="module")
def tasks():
    return {"small": (net(0), inputs(40)), "wide": (net(1, 9, 4), inputs(70, 1)), "same": (net(2), inputs(40))}


def test_every_seed_of_every_pair_is_the_papers_index_worked_out_by_hand(tasks):
    many = nk.compare_tasks(tasks, HADAMARD, layers=["0", "4"], seeds=3)
    for (a, b), comparison in many.items():
        table = comparison.table()
        for seed in range(3):
            sides = []
            for model, data in (tasks[a], tasks[b]):
                ids = contents(data, len(data)).numpy().view(np.uint64)
                parts = nk.activations(model, ["0", "4"], data), nk.gradients(model, ["0", "4"], data)
                sides.append({x: [slow_sketch(part[x], ids, seed, 32) for part in parts] for x in ("0", "4")})
            wanted = [[slow_value(sides[0][x], sides[1][y]) for y in ("0", "4")] for x in ("0", "4")]
            assert np.allclose(nk.seed_values(table)[seed], wanted, atol=1e-10)


def test_values_are_means_over_seeds_and_errors_those_of_the_means(tasks):
    table = nk.compare_tasks(tasks, PSI, layers=FEW, seeds=4)["small", "wide"].table()
    subjects = [nk.ModelInput(model, data=data) for model, data in (tasks["small"], tasks["wide"])]
    asked = [f"sketched_cka(buckets=32, seed={k})" for k in range(4)]
    single = [nk.compare(*subjects, measures=one, layers=FEW).to_numpy() for one in asked]
    assert np.allclose(table.values, np.mean(single, axis=0), atol=1e-12)
    assert np.allclose(table.errors, np.std(single, axis=0, ddof=1) / 2, atol=1e-12)
    assert np.allclose(nk.seed_values(table), single, atol=1e-12)
    assert table.id == "sketched_cka(buckets=32, kernel=psi, seeds=4)"
    assert "of the mean over 4 seeds" in str(table)


def test_one_seed_is_the_measure_itself_and_has_no_error(tasks):
    table = nk.compare_tasks(tasks, PSI, seeds=1)["wide", "wide"].table()
    assert table.id == "sketched_cka(buckets=32, kernel=psi)"
    assert table.errors is None
    assert nk.seed_values(table).shape == (1, 5, 5)


def test_seeds_go_on_from_that_of_the_measure(tasks):
    from_zero = nk.compare_tasks(tasks, PSI, layers=FEW, seeds=3)["small", "wide"].table()
    from_one = nk.compare_tasks(tasks, "sketched_cka(buckets=32, seed=1)", layers=FEW, seeds=2)["small", "wide"].table()
    assert np.allclose(nk.seed_values(from_zero)[1:], nk.seed_values(from_one), atol=1e-12)


@pytest.fixture(scope="module")
def few_buckets(tasks):
    return nk.compare_tasks(tasks, [PSI, HADAMARD], layers=FEW, seeds=2)


@pytest.fixture(scope="module")
def by_both_measures(tasks):
    return nk.compare_tasks(tasks, layers=FEW, seeds=2)


def test_all_pairs_and_each_task_with_itself_are_there_by_both_measures(by_both_measures):
    many = by_both_measures
    pairs = [("small", "small"), ("small", "wide"), ("small", "same"), ("wide", "wide"), ("wide", "same")]
    assert list(many) == [*pairs, ("same", "same")]
    assert many.measures == (
        "sketched_cka(buckets=512, kernel=psi, seeds=2)",
        "sketched_cka_by_buckets(buckets=512, kernel=hadamard, seeds=2)",
    )
    for name in ("small", "wide", "same"):
        for table in many[name, name].tables.values():
            assert np.allclose(np.diag(table.values), 1)
            assert np.allclose(table.values, table.values.T)


def test_each_task_takes_one_pass_for_all_measures_and_seeds_however_many_tasks_there_are():
    runs = []
    tasks = {}
    for k in range(4):
        model = net(k)
        model[0].register_forward_hook(lambda *_, k=k: runs.append((k, "forward")))
        model[4].register_full_backward_hook(lambda *_, k=k: runs.append((k, "backward")))
        tasks[str(k)] = (model, [inputs(8, k), inputs(8, k + 9)])
    nk.compare_tasks(tasks, [PSI, HADAMARD, "sketched_nbs(buckets=32)"], layers=FEW, seeds=3)
    for k in range(4):
        assert runs.count((k, "forward")) == 2 + 2  # two batches, and two runs of few examples
        assert runs.count((k, "backward")) == 2 + 1  # one shows that the model mixes no examples


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 0.02)])
def test_models_in_lower_precision_come_near(tasks, few_buckets, dtype, error):
    rough = {name: (copy.deepcopy(model).to(dtype), data) for name, (model, data) in tasks.items()}
    how = {"transforms": lambda inputs: inputs.to(dtype)}
    for pair, found in nk.compare_tasks(rough, [PSI, HADAMARD], layers=FEW, seeds=2, **how).items():
        assert np.abs(found.to_numpy() - few_buckets[pair].to_numpy()).max() < error


def test_threads_that_compare_the_same_tasks_agree(tasks):
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda _: nk.compare_tasks(tasks, PSI, layers=FEW, seeds=2)["small", "wide"].to_numpy(), range(3))
        )
    assert all(np.array_equal(found[0], one) for one in found[1:])


def test_one_model_may_have_many_data_sets_and_batches_and_order_do_not_matter():
    model, data = net(0), inputs(60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(data[order], torch.zeros(60)), batch_size=7)
    many = nk.compare_tasks({"a": (model, data), "b": (model, loader)}, PSI, seeds=2)
    assert np.allclose(many["a", "a"].to_numpy(), many["a", "b"].to_numpy(), atol=1e-10)
    assert many["a", "b"].provenance["buckets"] == SAME


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_how_far_data_are_shared_is_read_off_the_buckets_and_said():
    model, data = net(0), inputs(900)
    tasks = {"left": (model, data[:600]), "right": (net(1), data[300:]), "other": (model, inputs(500, 7))}
    many = nk.compare_tasks(tasks, "sketched_cka(kernel=features)", seeds=5)
    assert many["left", "left"].provenance["buckets"] == SAME
    assert not sentences(many["left", "left"])
    assert many["left", "other"].provenance["buckets"] == APART
    assert "have no examples in common buckets" in sentences(many["left", "other"])[0]
    half = many["left", "right"].provenance["buckets"]
    assert half.endswith("of the 600 and 600 examples in the same buckets")
    assert int(half.split()[1]) == pytest.approx(300, abs=600 * 4 / (5 * 512) ** 0.5)
    assert "which raises the values" in sentences(many["left", "right"])[0]


@pytest.mark.parametrize("kernel", ["features", pytest.param("psi", marks=pytest.mark.slow)])
@pytest.mark.parametrize("buckets", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_between_different_data_nothing_but_effective_ranks_is_seen(kernel, buckets):
    """With Gaussian buckets E⟨K, L⟩ is M tr K tr L and E‖K‖² is M (M + 1) Σλ² + M (Σλ)²."""
    tasks, layers = {"a": (net(0, 12), inputs(1500)), "b": (net(1, 20, 5), inputs(1000, 1))}, ["0", "1", "2"]
    found = nk.compare_tasks(tasks, f"sketched_cka(kernel={kernel}, buckets={buckets})", layers=layers, seeds=10)
    ranks = []
    for model, data in tasks.values():
        rows = nk.activations(model, layers, data), nk.gradients(model, layers, data)
        for layer in layers:
            X = (
                torch.einsum("ni,nj->nij", rows[0][layer], rows[1][layer]).flatten(1)
                if kernel == "psi"
                else rows[0][layer]
            )
            eigenvalues = torch.linalg.svdvals(X - X.mean(0)) ** 2
            ranks.append(float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()))
    shares = np.sqrt(np.array(ranks) / (buckets + 1 + np.array(ranks)))
    assert np.allclose(found["a", "b"].to_numpy(), np.outer(shares[:3], shares[3:]), rtol=0.25)
    assert found["a", "b"].to_numpy().max() < 0.5


def test_independent_buckets_part_tasks_that_hold_the_same_data():
    model, data = net(0), inputs(200)
    together = nk.compare_tasks({"a": (model, data), "b": (model, data)}, PSI, seeds=2)
    apart = nk.compare_tasks({"a": (model, data), "b": (model, data)}, PSI, seeds=2, share_buckets=False)
    assert np.allclose(together["a", "b"].to_numpy(), together["a", "a"].to_numpy(), atol=1e-12)
    assert np.allclose(apart["a", "a"].to_numpy(), together["a", "a"].to_numpy(), atol=1e-12)
    assert (np.diag(apart["a", "b"].to_numpy()) < 0.7).all()
    assert apart["a", "b"].provenance["buckets"] == APART
    # the buckets of the second are those of the seeds that follow
    further = nk.compare_tasks({"b": (model, data)}, "sketched_cka(buckets=32, seed=2)", seeds=2)
    assert np.allclose(apart["b", "b"].to_numpy(), further["b", "b"].to_numpy(), atol=1e-12)


@pytest.mark.slow
def test_few_buckets_do_not_make_different_data_the_same():
    tasks = {str(k): (net(0), inputs(50, k)) for k in range(6)}
    for seeds in (1, 2):
        many = nk.compare_tasks(tasks, "sketched_cka_by_buckets(kernel=features, buckets=2)", seeds=seeds)
        assert {one.provenance["buckets"] for (a, b), one in many.items() if a != b} == {APART}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sketches_of_a_gpu_stand_beside_those_of_the_host(tasks):
    measures = [PSI, HADAMARD, "sketched_nbs(buckets=32)"]
    asked = [f"{one[:-1]}, seed={seed})" for one in measures for seed in (0, 1)]
    here = nk.compare_tasks(tasks, measures, seeds=2)
    there = nk.compare_tasks(tasks, measures, seeds=2, device="cuda")
    kept = {name: nk.collect(model, data=data, measures=asked) for name, (model, data) in tasks.items()}
    mixed = nk.compare_tasks({**tasks, "wide": kept["wide"]}, measures, seeds=2, device="cuda")
    for pair in here:  # `sketched_nbs` sums roots, also of eigenvalues that are zero but for rounding
        for measure, within in zip(measures, (1e-9, 1e-9, 1e-8), strict=True):
            expected = pytest.approx(here[pair].to_numpy(measure), abs=within)
            assert there[pair].to_numpy(measure) == expected
            assert mixed[pair].to_numpy(measure) == expected


# --- files ------------------------------------------------------------------------------------------------------------


def test_tasks_are_saved_loaded_and_told_as_any_result(tasks, by_both_measures, tmp_path):
    many = by_both_measures
    many.save(tmp_path / "tasks.netkin")
    loaded = nk.load(tmp_path / "tasks.netkin")
    assert [loaded[pair] == many[pair] for pair in many] == [True] * 6
    origin = loaded["small", "wide"].provenance
    assert (origin["examples a"], origin["examples b"]) == ("40", "70")
    assert origin["data b digest"] == nk.collect(tasks["wide"][0], data=tasks["wide"][1]).digest.hex
    assert (origin["data a"], loaded["small", "wide"].shapes_a["0"]) == ("Tensor", "matrix")
    assert origin["values"] == "mean over 2 seeds of the sketch"
    assert origin["standard errors"] == "of the mean over 2 seeds; one sketch varies √2 times as much"
    assert loaded["small", "wide"].examples == 110


def test_sketches_that_were_kept_stand_for_their_task(tasks, few_buckets, tmp_path):
    asked = [
        f"{name}(buckets=32, seed={seed})" for name in ("sketched_cka", "sketched_cka_by_buckets") for seed in (0, 1)
    ]
    whole = few_buckets
    for name, (model, data) in tasks.items():
        nk.collect(model, data=data, measures=asked, layers=FEW).save(tmp_path / name)
    kept = {name: nk.load(tmp_path / name) for name in tasks}
    for found in (kept, tasks | {"wide": kept["wide"]}):
        again = nk.compare_tasks(found, layers=FEW if found is not kept else None)
        assert again.measures == whole.measures
        for pair in whole:
            assert np.allclose(again[pair].to_numpy(), whole[pair].to_numpy(), atol=1e-12)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6).double()

    def forward(self, x):
        return {"last_hidden_state": self.body(x)}


class Severed(nn.Module):
    """A model whose layer `aside` does not reach the loss."""

    def __init__(self):
        super().__init__()
        self.aside, self.head = nn.Linear(4, 6).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        self.aside(x)
        return self.head(x)


def test_a_model_without_logits_is_refused_by_the_name_of_its_task():
    with pytest.raises(ForwardError, match=r"^task 'bare': the model gives no logits, but last_hidden_state; pass a"):
        nk.compare_tasks({"bare": (Headless(), inputs(8))}, PSI)


def test_labels_out_of_range_are_refused_with_the_numbers():
    batches = [(inputs(4), torch.tensor([0, 1, 2, 7]))]
    with pytest.raises(
        InvalidValue, match=r"task 't': the labels run from 0 to 7, and the model has 3 classes, 0 to 2"
    ):
        nk.compare_tasks({"t": (net(0), batches)}, "sketched_cka(target=labels)")


@pytest.mark.parametrize("beta", ["1.0", "-0.1", "1.5"])
def test_a_beta_outside_its_range_is_refused(beta):
    with pytest.raises(InvalidValue, match=r"`beta` must be at least 0 and below 1; got"):
        nk.compare_tasks({"t": (net(0), inputs(8))}, f"sketched_cka(beta={beta})")


@pytest.mark.parametrize("buckets", [0, -3])
def test_a_sketch_without_buckets_is_refused(buckets):
    with pytest.raises(
        InvalidValue, match=rf"needs at least 1 bucket, in stacks of equal height; got buckets={buckets}"
    ):
        nk.compare_tasks({"t": (net(0), inputs(8))}, f"sketched_cka(buckets={buckets})")


@pytest.mark.parametrize(
    "mine, theirs, words",
    [
        ("beta=0.25", "beta=0.75", r"beta=0.25 \(these have beta=0.75\)"),
        ("buckets=16", "buckets=32", r"buckets=16 \(these have buckets=32\)"),
        ("seed=3", "seed=4", r"seed=3 \(these have seed=4\)"),
    ],
)
def test_sketches_that_differ_are_refused_with_both_values(mine, theirs, words):
    made = {name: nk.collect(net(0), data=inputs(8), measures=f"sketched_cka({one})") for name, one in
            (("a", mine), ("b", theirs))}  # fmt: skip
    with pytest.raises(InvalidValue, match=rf"task 'b': .* LayerSketches without {words}"):
        nk.compare_tasks(made)


def test_a_layer_that_does_not_reach_the_loss_is_a_hole_with_the_reason():
    many = nk.compare_tasks({"t": (Severed(), inputs(30)), "u": (net(0), inputs(20, 1))}, PSI, seeds=2)
    for pair in (("t", "t"), ("t", "u")):
        table = many[pair].table()
        with pytest.raises(NoValue, match="no path leads from it to the loss"):
            table["aside", table.layers_b[-1]]
        assert np.isfinite(table["head", table.layers_b[-1]])
    named = nk.compare_tasks({"t": (Severed(), inputs(30))}, "sketched_cka(kernel=features)", seeds=2)
    assert named["t", "t"]["aside", "aside"] == pytest.approx(1)


@pytest.mark.parametrize(
    "task, words",
    [
        (None, "a task is (model, data), an `nk.ModelInput` or sketches; got NoneType"),
        ((1, 2, 3), "a task is (model, data), an `nk.ModelInput` or sketches; got tuple"),
        ((net(0), None), "a task needs a model that can be run, and data to run it on"),
        (({"x": inputs(3)}, inputs(3)), "a task needs a model that can be run, and data to run it on"),
        ((net(0), []), "the data gave no batches"),
        ((net(0), inputs(0)), "the data gave no batches"),
        ((3.5, inputs(3)), "must be a torch module"),
    ],
)
def test_what_is_no_task_is_refused_by_its_name(task, words):
    with pytest.raises(nk.NetkinError) as refusal:
        nk.compare_tasks({"mine": task}, PSI)
    assert str(refusal.value).startswith("task 'mine': ")
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("tasks", "got"), [({}, "an empty dict"), ([(net(0), inputs(3))], "a list"), (None, "a NoneType")]
)
def test_tasks_are_a_mapping(tasks, got):
    with pytest.raises(InvalidValue, match=rf"`tasks` is a mapping from names to .* at least; got {got}\.$"):
        nk.compare_tasks(tasks)


@pytest.mark.parametrize("seeds", [0, -1, True, 2.5])
def test_a_number_of_seeds_that_is_none_is_refused(seeds):
    with pytest.raises(InvalidValue, match=f"`seeds` must be a whole number of 1 or more; got {seeds}"):
        nk.compare_tasks({"t": (net(0), inputs(8))}, PSI, seeds=seeds)


def test_a_measure_that_pairs_examples_is_refused_with_one_that_does_not():
    with pytest.raises(
        InvalidValue, match=r"'cka' pairs the examples of two models.*'sketched_cka\(kernel=features\)'"
    ):
        nk.compare_tasks({"t": (net(0), inputs(8))}, "cka")


def test_options_of_a_task_that_there_is_not_are_refused():
    with refused(InvalidValue, "layers"):
        nk.compare_tasks({"tee": (net(0), inputs(8))}, PSI, layers={"toe": ["0"]})


def test_sketches_of_two_models_or_with_other_buckets_are_refused():
    both = nk.collect(net(0), net(1), data=inputs(8), measures=PSI)
    with pytest.raises(InvalidValue, match="task 't': a task is one model with its data; these sketches are of 2"):
        nk.compare_tasks({"t": both})
    one = nk.collect(net(0), data=inputs(8), measures=PSI)
    with pytest.raises(InvalidValue, match="task 't': the buckets of these sketches are made already"):
        nk.compare_tasks({"t": one}, share_buckets=False)
    linear = nk.collect(net(0), data=inputs(8))
    with pytest.raises(
        InvalidValue, match=r"task 't': these statistics can't serve 'sketched_cka\(.*they hold LayerMoments"
    ):
        nk.compare_tasks({"t": linear})
