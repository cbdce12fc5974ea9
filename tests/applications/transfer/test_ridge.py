"""Kernel ridge regression on sketched kernels, against the exact kernel and other roads to it."""

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge as OtherRidge
from torch import nn

import netkin as nk
from netkin import files
from netkin.applications.transfer.ridge import RIDGES, fitted, held_out_error, kernel_ridge, load_kernel_ridge
from netkin.errors import FileError, ForwardError, InvalidValue, MemoryLimit, NoValue, ShapeError, UnknownName
from netkin.statistics.kernel_pairs import KERNELS
from netkin.statistics.sketches import LayerSketches, SketchSettings, places, psi_width, sketched_part
from quickly import slow_after, slow_but
from refusals import refusals

LINEAR = ("features", "gradients", "sum", "product")


def five_classes(n, seed, d=20, noise=1.0):
    """Features and gradients around a centre for each class, and the classes."""
    centres = np.random.default_rng(0).normal(size=(2, 5, d))
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 5, n)
    F, G = (centre[labels] + noise * draw.normal(size=(n, d)) for centre in centres)
    return torch.tensor(F), torch.tensor(G), labels


def sketched(F, G, labels, kernel, buckets, seed=0):
    settings = SketchSettings(buckets=buckets, seed=seed, parts=(*KERNELS[kernel], "labels"))
    collector = LayerSketches(["x"], settings)
    collector.update({"activations": {"x": F}, "gradients": {"x": G}, "outputs": {"x": (None, labels)}})
    return collector.sums("x")


def written_out(kernel, F, G, P, Q):
    """The kernel of some examples with others."""
    K, L = F @ P.T, G @ Q.T
    return {"features": K, "gradients": L, "sum": K + L, "product": (F * G) @ (P * Q).T}.get(kernel, K * L)


def exact_scores(kernel, F, G, labels, P, Q, ridge):
    """Another library's kernel ridge regression on the exact kernel."""
    K = written_out(kernel, F, G, F, G)
    other = OtherRidge(alpha=ridge * np.trace(K) / len(K), kernel="precomputed").fit(K, np.eye(5)[labels])
    return other.predict(written_out(kernel, P, Q, F, G))


def new_rows(kernel, P, Q, seed=0, buckets=512):
    psi = psi_width(P.shape[1], buckets)
    return {part: sketched_part(part, P, Q, seed, psi) for part in KERNELS[kernel]}


@pytest.mark.parametrize("kernel", [*LINEAR, "hadamard"])
def test_with_every_example_a_bucket_it_is_exact_kernel_ridge(kernel):
    (F, G, labels), (P, Q, _) = five_classes(60, 1, d=4), five_classes(30, 2, d=4)
    hot = torch.eye(5, dtype=torch.float64)[labels]
    sums = {"features": F, "gradients": G, "product": F * G, "labels": hot, "counts": hot}
    found = fitted(sums, 60, kernel, ridge=0.3).scores(new_rows(kernel, P, Q))
    wanted = exact_scores(kernel, *(one.numpy() for one in (F, G)), labels, P.numpy(), Q.numpy(), 0.3)
    assert np.allclose(found.numpy(), wanted, atol=1e-9)


@pytest.mark.parametrize("kernel", [*LINEAR, "hadamard"])
def test_where_no_bucket_holds_two_examples_it_is_exact_kernel_ridge(kernel):
    """Signs cancel between the examples and their labels."""
    (F, G, labels), (P, Q, _) = five_classes(12, 1, d=4), five_classes(30, 2, d=4)
    buckets, signs = places(SketchSettings(buckets=600), np.arange(12))
    assert len(np.unique(buckets)) == 12
    assert set(signs.ravel()) == {1.0, -1.0}
    own = sketched(F, G, labels, kernel, 600)
    found = fitted(own.parts, own.n, kernel, ridge=0.3).scores(new_rows(kernel, P, Q))
    wanted = exact_scores(kernel, F.numpy(), G.numpy(), labels, P.numpy(), Q.numpy(), 0.3)
    assert np.allclose(found.numpy(), wanted[:, : found.shape[1]], atol=1e-9)


@pytest.mark.slow
def test_scores_come_nearer_to_the_exact_ones_with_more_buckets():
    (F, G, labels), (P, Q, _) = five_classes(400, 1, d=6), five_classes(50, 2, d=6)
    for kernel in ("features", "psi", "hadamard"):
        wanted = exact_scores(kernel, F.numpy(), G.numpy(), labels, P.numpy(), Q.numpy(), 1.0)
        errors = []
        for buckets in (32, 512):
            found = []
            for seed in range(8):
                own = sketched(F, G, labels, kernel, buckets, seed)
                scores = fitted(own.parts, own.n, kernel, ridge=1.0).scores(new_rows(kernel, P, Q, seed)).numpy()
                found.append(np.linalg.norm(scores - wanted) / np.linalg.norm(wanted))
            errors.append(np.mean(found))
        assert errors[1] < errors[0] / 1.8, kernel


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("kernel", ["features", "product", "hadamard", "psi"])
def test_scales_of_features_and_gradients_change_no_score(kernel, scale):
    (F, G, labels), (P, Q, _) = five_classes(200, 1, d=6), five_classes(50, 2, d=6)
    plain, scaled = sketched(F, G, labels, kernel, 32), sketched(scale * F, scale * G, labels, kernel, 32)
    one, other = (fitted(own.parts, own.n, kernel) for own in (plain, scaled))
    assert other.ridge == one.ridge
    wanted = one.scores(new_rows(kernel, P, Q))
    assert torch.allclose(other.scores(new_rows(kernel, scale * P, scale * Q)), wanted, atol=1e-7)


def test_labels_have_signs_where_the_kernel_keeps_them_and_none_where_they_cancel():
    """In the paper's product of sketched kernels the sign of g fᵀ cancels, and signed labels fit nothing."""
    (F, G, labels), (P, Q, wanted) = five_classes(2000, 1), five_classes(1000, 2)

    def accuracy(kernel, part=None):
        own = sketched(F, G, labels, kernel, 256)
        parts = own.parts | ({} if part is None else {"labels": own.parts[part], "counts": own.parts[part]})
        scores = fitted(parts, own.n, kernel).scores(new_rows(kernel, P, Q))
        return (scores.argmax(1).numpy() == wanted).mean()

    assert accuracy("hadamard", "labels") < 0.45
    assert 0.9 < accuracy("hadamard") < 0.99
    assert accuracy("psi") > 0.99
    assert accuracy("psi", "counts") < 0.45


def test_held_out_errors_are_those_of_fits_without_one_bucket():
    draw = np.random.default_rng(0)
    X, T = draw.normal(size=(15, 4)), draw.normal(size=(15, 3))
    K = X @ X.T
    values, vectors = map(torch.tensor, np.linalg.eigh(K))
    for ridge in (0.1, 3.0):
        total = 0.0
        for m in range(15):
            rest = np.arange(15) != m
            guess = T[rest].T @ np.linalg.inv(K[np.ix_(rest, rest)] + ridge * np.eye(14)) @ K[rest, m]
            total += ((guess - T[m]) ** 2).sum()
        found = held_out_error(values, vectors, vectors.mT @ torch.tensor(T), ridge)
        assert found == pytest.approx(total / 45, rel=1e-9)


def test_the_ridge_of_the_least_held_out_error_is_taken():
    F, G, labels = five_classes(500, 1, noise=3.0)
    own = sketched(F, G, labels, "features", 64)
    X, T = own.parts["features"].numpy(), own.parts["labels"].numpy()
    K = X @ X.T
    errors = []
    for ridge in RIDGES:
        inverse = np.linalg.inv(K + ridge * np.trace(K) / 500 * np.eye(64))
        errors.append((((inverse @ T) / np.diag(inverse)[:, None]) ** 2).sum())
    best = int(np.argmin(errors))
    assert 0 < best < len(RIDGES) - 1
    assert fitted(own.parts, own.n, "features").ridge == pytest.approx(RIDGES[best])


# --- models -----------------------------------------------------------------------------------------------------------


def small_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).to(
        dtype
    )


def points(n, seed, dtype=torch.float64):
    centres = np.random.default_rng(5).normal(size=(3, 6)) * 2
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, n)
    return torch.tensor(centres[labels] + draw.normal(size=(n, 6))).to(dtype), torch.tensor(labels)


def in_batches(inputs, labels, size=32, order=None):
    order = torch.arange(len(inputs)) if order is None else order
    return [(inputs[part], labels[part]) for part in order.split(size)]


def by_hand(model, inputs):
    """Features and tempered gradients of the second linear layer, one example at a time."""
    F, G = [], []
    for one in inputs:
        hidden = model[2](model[1](model[0](one.clone()))).detach().requires_grad_()
        logits = model[4](model[3](hidden))
        q = (0.5 * logits).softmax(0).detach()
        (gradient,) = torch.autograd.grad(-(q * logits.log_softmax(0)).sum(), hidden)
        F.append(hidden.detach())
        G.append(gradient)
    return torch.stack(F).numpy(), torch.stack(G).numpy()


@pytest.mark.parametrize("kernel", slow_but(["features", "hadamard"], "hadamard"))
def test_a_model_is_fitted_and_predicts_as_written_out_by_hand(kernel):
    """With so many buckets that no two of ten examples meet, Eq. 49 is that of the exact kernel."""
    model, (inputs, labels), (fresh, _) = small_model(), points(10, 1), points(40, 2)
    fit = kernel_ridge(model, in_batches(inputs, labels, 4), layers="2", kernel=kernel, buckets=1500, ridge=0.2, seed=3)
    F, G = by_hand(model, inputs)
    P, Q = by_hand(model, fresh)
    K = written_out(kernel, F, G, F, G)
    T = np.eye(3)[labels.numpy()]
    scores = T.T @ np.linalg.inv(K + 0.2 * np.trace(K) / 10 * np.eye(10)) @ written_out(kernel, F, G, P, Q)
    assert np.abs(np.diff(np.sort(scores, axis=0)[-2:], axis=0)).min() > 1e-6
    assert fit.predict([fresh[:15], fresh[15:]])["2"].tolist() == scores.argmax(0).tolist()
    assert fit.ridge == {"2": 0.2}


@pytest.mark.parametrize("kernel", slow_after(2, ["psi", "hadamard", "features", "gradients", "sum", "product"]))
def test_classes_are_learnt_at_every_layer_whatever_the_order_of_the_data(kernel):
    model, (inputs, labels), test = small_model(), points(300, 1), in_batches(*points(200, 2))
    fit = kernel_ridge(model, in_batches(inputs, labels), kernel=kernel, buckets=128)
    assert len(fit.layers) >= 3
    accuracy = fit.accuracy(test)
    assert accuracy[fit.layers[0]] > 0.8
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    other = kernel_ridge(model, in_batches(inputs, labels, 17, order), kernel=kernel, buckets=128)
    for name, one in fit.fits.items():
        assert one.ridge == other.ridge[name]
        for part, sums in one.sums.items():
            assert torch.allclose(sums, other.fits[name].sums[part], atol=1e-10)
    wanted = torch.cat([labels for _, labels in test]).numpy()
    assert {name: (one == wanted).mean() for name, one in fit.predict(test).items()} == pytest.approx(accuracy)


def test_labels_that_know_nothing_are_not_predicted():
    model, (inputs, _) = small_model(), points(600, 1)
    labels = torch.tensor(np.random.default_rng(0).integers(0, 3, 600))
    fit = kernel_ridge(model, in_batches(inputs, labels), layers="2")
    fresh = torch.tensor(np.random.default_rng(1).integers(0, 3, 600))
    assert fit.accuracy(in_batches(points(600, 2)[0], fresh))["2"] < 0.42


def test_the_model_is_left_as_it_was():
    model, batches = small_model().train(), in_batches(*points(60, 1))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    fit = kernel_ridge(model, batches, buckets=32)
    fit.predict(batches)
    with pytest.raises(InvalidValue, match="no labels in the batches"):
        fit.accuracy([inputs for inputs, _ in batches])
    assert model.training
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(one.grad is None for one in model.parameters())


def test_batches_are_read_one_after_the_other():
    model, (inputs, labels) = small_model(), points(96, 1)
    fit = kernel_ridge(model, in_batches(inputs, labels), layers="2", buckets=32)
    sizes = {part: tuple(one.shape) for part, one in fit.fits["2"].sums.items()}
    longer = kernel_ridge(model, in_batches(*points(480, 1)), layers="2", buckets=32)
    assert {part: tuple(one.shape) for part, one in longer.fits["2"].sums.items()} == sizes
    stream = ((inputs[start : start + 32], labels[start : start + 32]) for start in (0, 32, 64))
    assert fit.accuracy(stream) == fit.accuracy(in_batches(inputs, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_less_precision_learn_the_same_classes(dtype):
    test = in_batches(*points(200, 2, dtype))
    fit = kernel_ridge(small_model(dtype), in_batches(*points(300, 1, dtype)), kernel="features", buckets=128)
    assert min(fit.accuracy(test).values()) > 0.8


def test_mappings_with_labels_and_models_that_give_mappings_are_read():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()

        def forward(self, points, attention_mask=None):
            return {"logits": self.head(self.body(points).tanh())}

    torch.manual_seed(0)
    (inputs, labels), plain = points(120, 1), Named()
    named = kernel_ridge(plain, [{"points": inputs, "labels": labels}], layers="body", buckets=64)
    listed = kernel_ridge(
        plain, [(inputs, labels.tolist())], layers="body", buckets=64, forward=lambda model, batch: model(batch[0])
    )
    assert named.accuracy([{"points": inputs, "labels": labels}])["body"] > 0.8
    assert listed.accuracy([(inputs, labels.tolist())])["body"] > 0.8


def test_layers_without_a_gradient_are_left_out_unless_asked_for():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aside, self.head = nn.Linear(6, 8), nn.Linear(6, 3), nn.Linear(8, 4)

        def forward(self, x):
            self.aside(x)
            return self.head(self.main(x))

    torch.manual_seed(0)
    model, batches = Aside().double(), in_batches(*points(60, 1))
    assert kernel_ridge(model, batches, buckets=32, kernel="psi").layers == ["main", "head"]
    assert kernel_ridge(model, batches, buckets=32, kernel="features").layers == ["main", "aside", "head"]
    with pytest.raises(ForwardError, match="no path leads from layer 'aside' to the loss; choose layers"):
        kernel_ridge(model, batches, layers=["aside", "main"], kernel="psi")


def test_a_layer_that_is_zero_is_left_out_unless_asked_for():
    model, batches = small_model(), in_batches(*points(60, 1))
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    fit = kernel_ridge(model, batches, layers=None, kernel="features", buckets=32)
    assert "2" not in fit.layers
    assert fit.left_out["2"] == "layer '2': its kernel is zero for all examples."
    with pytest.raises(NoValue, match="layer '2': its kernel is zero"):
        kernel_ridge(model, batches, layers="2", kernel="features", buckets=32)


@pytest.mark.parametrize("kernel", ["features", "hadamard", "psi"])
def test_fits_come_back_from_their_file_for_the_same_model(kernel, tmp_path):
    model, batches, test = small_model(), in_batches(*points(60, 1)), in_batches(*points(50, 2))
    fit = kernel_ridge(model, batches, kernel=kernel, buckets=32, shape="flatten", beta=0.25)
    fit.save(tmp_path / "fit.netkin")
    again = nk.load(tmp_path / "fit.netkin", model)
    assert again.ridge == fit.ridge
    assert again.reading == fit.reading
    for name, one in fit.predict(test).items():
        assert one.tolist() == again.predict(test)[name].tolist()
    with pytest.raises(InvalidValue, match="reads the model with the weights .*; pass that model"):
        nk.load(tmp_path / "fit.netkin")
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(InvalidValue, match="reads the model with the weights .*; pass that model"):
        nk.load(tmp_path / "fit.netkin", model)


def test_functions_that_no_file_can_hold_are_asked_for(tmp_path):
    model, batches = small_model(), in_batches(*points(60, 1))
    kernel_ridge(model, batches, layers="2", buckets=32, transform=torch.neg).save(tmp_path / "fit.netkin")
    with pytest.raises(InvalidValue, match="was made with a `transform` that no file can hold; pass the same"):
        load_kernel_ridge(tmp_path / "fit.netkin", model)
    assert load_kernel_ridge(tmp_path / "fit.netkin", model, transform=torch.neg).layers == ["2"]


def test_a_damaged_file_of_fits_is_refused(tmp_path):
    files.write(tmp_path / "fit.netkin", "kernel ridge", {"kernel": "psi", "ridge": {"a": 1.0}}, {})
    with pytest.raises(FileError, match="is damaged: KeyError"):
        nk.load(tmp_path / "fit.netkin", small_model())
    fit = kernel_ridge(small_model(), in_batches(*points(60, 1)), layers="2", kernel="psi", buckets=32)
    fit.save(tmp_path / "whole.netkin")
    header, arrays = files.read(tmp_path / "whole.netkin")
    for what, change in {
        "it holds no layer": {"ridge": {}},
        "no kernel named": {"kernel": "ps"},
        "'surprise'": {"functions": ["surprise"]},
        "`beta` must be": {"beta": 2},
    }.items():
        header_of = {name: one for name, one in {**header, **change}.items() if name not in ("kind", "format")}
        files.write(tmp_path / "harmed.netkin", "kernel ridge", header_of, arrays, overwrite=True)
        with pytest.raises(FileError, match=f"is damaged: .*{what}"):
            nk.load(tmp_path / "harmed.netkin", small_model())
    fewer = {**arrays, "0/psi": arrays["0/psi"][:5]}
    del header["kind"], header["format"]
    files.write(tmp_path / "harmed.netkin", "kernel ridge", header, fewer, overwrite=True)
    with pytest.raises(FileError, match="has 32 coefficients for each class, not one a bucket"):
        nk.load(tmp_path / "harmed.netkin", small_model())


def test_what_can_not_be_fitted_is_refused():
    model, (inputs, labels) = small_model(), points(40, 1)
    batches = in_batches(inputs, labels)
    refusals(
        (lambda: kernel_ridge(model, [inputs]), InvalidValue, ""),
        (lambda: kernel_ridge(model, in_batches(inputs, torch.full_like(labels, 2))), InvalidValue, ""),
        (lambda: kernel_ridge(model, in_batches(inputs, labels - 1)), InvalidValue, ""),
        (lambda: kernel_ridge(model, batches, classes=2), InvalidValue, ""),
        (lambda: kernel_ridge(model, batches, buckets=2), InvalidValue, ""),
        (lambda: kernel_ridge(model, batches, buckets=8, classes=10), InvalidValue, "classes"),
        (lambda: kernel_ridge(model, in_batches(inputs, labels.double())), ShapeError, ""),
        (lambda: kernel_ridge(model, in_batches(inputs, torch.eye(3)[labels].long())), ShapeError, ""),
        (lambda: kernel_ridge(model, batches, ridge=0), InvalidValue, "ridge"),
        (lambda: kernel_ridge(model, batches, kernel="ps"), UnknownName, "kernel"),
        (lambda: kernel_ridge(model, batches, kernel="transport"), InvalidValue, "kernel"),
        (lambda: kernel_ridge(model, batches, buckets=32).accuracy([(inputs, labels + 1)]), InvalidValue, ""),
    )
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ShapeError, match="layer '0' gives 32 rows for 8 examples.*choose .pool"):
        kernel_ridge(conv, [(torch.randn(8, 1, 4, 4), labels[:8])], layers="0", shape="positions")


@pytest.mark.parametrize("kernel", ["features", "psi"])
def test_more_buckets_than_there_is_memory_for_are_refused_before_it_is_taken(kernel, monkeypatch):
    model, batches = small_model(), in_batches(*points(40, 1))
    monkeypatch.setattr("netkin.applications.transfer.ridge.free_memory", lambda: 8 * 10**9)
    said = r"200,000 buckets need [1-4]\d{3}\.\d GB: .*320\.0 GB each.*8\.0 GB are free.*fewer buckets"
    with pytest.raises(MemoryLimit, match=said):
        kernel_ridge(model, batches, kernel=kernel, buckets=200_000)
    monkeypatch.undo()
    with pytest.raises(MemoryLimit, match="Use fewer buckets"):  # of whatever this machine has
        kernel_ridge(model, batches, kernel=kernel, buckets=10**8)


def test_the_sums_of_wide_layers_count_as_memory(monkeypatch):
    """ψ of 600 units at 300 buckets: 2,048 numbers in each, 4.9 MB, beside six matrices of 0.7 MB each."""
    torch.manual_seed(0)
    model, (inputs, labels) = nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 4)).double(), points(40, 1)
    monkeypatch.setattr("netkin.applications.transfer.ridge.free_memory", lambda: 8 * 10**6)
    with pytest.raises(MemoryLimit, match="300 buckets need 9 MB: 5 MB for the sums of 1 layer,.*8 MB are free"):
        kernel_ridge(model, in_batches(inputs, labels), layers="0", kernel="psi", buckets=300)
    fit = kernel_ridge(model, in_batches(inputs, labels), layers="0", buckets=300)
    assert fit.fits["0"].kernel == "features"


def test_a_fit_says_what_it_is():
    model, (inputs, labels) = small_model(), points(40, 1)
    fit = kernel_ridge(model, in_batches(inputs, labels), layers="0", kernel="features", buckets=32)
    assert repr(fit) == "KernelRidge of 3 classes, kernel features, at 0"
