"""`stitch`: any two networks in one call, with the numbers by slower roads."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.applications.stitching import fit_all, stitch
from netkin.errors import InflatedWarning, InvalidValue, NoValue, UnknownName
from netkin.measures import cca_mean, cka, svcca
from netkin.representations import positions, run_from, run_until
from netkin.representations.hooks import main_tensor
from netkin.sources.architectures import architecture, seeded
from quickly import slow_after
from refusals import refused
from stitching_worlds import Lines, Maps, Residual, Rows, Shares, Spoken, Tokens, built, drawn, labelled

IMAGES = (3, 12, 12)


def rows(model, layer, x):
    """Return the rows of a layer, the plain way."""
    output = run_until(model, layer, x)
    return (positions(output) if output.ndim == 4 else output.flatten(0, -2)).detach().double()


class TestOneCall:
    def test_the_map_is_the_least_squares_one_of_all_places(self):
        a, b = built(Maps), built(Maps, seed=1)
        data = labelled(b, *IMAGES)
        x = torch.cat([batch[0] for batch in data])
        A, B = rows(a, "mid", x).numpy(), rows(b, "mid", x).numpy()
        expected = np.linalg.lstsq(np.column_stack([A, np.ones(len(A))]), B)[0]
        found = nk.stitch(a, "mid", b, "mid", data)
        assert found.map.weight.numpy() == pytest.approx(expected[:-1], abs=1e-9)
        assert found.map.bias.numpy() == pytest.approx(expected[-1], abs=1e-9)
        assert (found.layers, found.examples, found.method) == (("mid", "mid"), 120, "least_squares")

    def test_the_evaluation_by_slow_roads(self):
        a, b = built(Maps), built(Maps, seed=1)
        data, test = labelled(a, *IMAGES), labelled(a, *IMAGES, seed=9)
        found = stitch(a, "mid", b, "mid", data, "procrustes", test)
        x, labels = (torch.cat(parts) for parts in zip(*test, strict=True))
        with torch.no_grad():
            said, own = found.network(x), b(x)
            middle = found.transformation(run_until(a, "mid", x))
        A, B = positions(middle), rows(b, "mid", x)
        evaluation = found.evaluation
        assert evaluation.examples == 120
        assert evaluation.accuracy == pytest.approx(float((said.argmax(1) == labels).double().mean()))
        assert evaluation.accuracy_b == pytest.approx(float((own.argmax(1) == labels).double().mean()))
        assert found.relative_accuracy == pytest.approx(evaluation.accuracy / evaluation.accuracy_b)
        assert evaluation.agreement == pytest.approx(float((said.argmax(1) == own.argmax(1)).double().mean()))
        assert evaluation.cross_entropy == pytest.approx(float(cross_entropy(said, own.softmax(1))))
        assert evaluation.r2 == pytest.approx(float(1 - (A - B).square().sum() / (B - B.mean(0)).square().sum()))
        assert evaluation.cka == pytest.approx(float(cka(A, B)))
        assert evaluation.cca == pytest.approx(float(cca_mean(A, B)))
        assert evaluation.svcca == pytest.approx(float(svcca(A, B)))
        assert evaluation.as_dict()["relative_accuracy"] == found.relative_accuracy
        assert "relative_accuracy" in str(evaluation)

    def test_r2_is_not_refitted_and_may_be_negative(self):
        a, b = built(Maps), built(Maps, seed=1)
        test = labelled(a, *IMAGES)
        found = stitch(a, "mid", b, "mid", test, "random", test)
        assert found.evaluation.r2 < 0
        assert stitch(a, "mid", b, "mid", test, "random(seed=1)").map.weight[0, 0] != found.map.weight[0, 0]
        again = stitch(a, "mid", b, "mid", test, "random", seed=1)
        assert torch.equal(again.map.weight, stitch(a, "mid", b, "mid", test, "random(seed=1)").map.weight)

    def test_without_labels_there_is_no_accuracy(self):
        a, b = built(Rows), built(Rows, seed=1)
        inputs = drawn(60, 5)
        found = stitch(a, "mid", b, "mid", inputs, test=inputs)
        assert found.evaluation.accuracy is None
        assert found.evaluation.relative_accuracy is None
        assert 0 <= found.evaluation.agreement <= 1
        for one in (found, stitch(a, "mid", b, "mid", inputs)):
            with pytest.raises(NoValue, match="no relative accuracy without labelled test data; pass `test=`"):
                one.relative_accuracy  # noqa: B018

    def test_labels_that_the_second_model_does_not_know(self):
        a, b = built(Rows), built(Rows, seed=1)
        wrong = [(x, (labels + 1) % 4) for x, labels in labelled(b, 5)]
        sentence = "the second model itself gets 0.0% of 120 examples right, no more than chance among 4 classes; are"
        with pytest.warns(InflatedWarning, match=sentence):
            found = stitch(a, "mid", b, "mid", wrong, test=wrong)
        with pytest.raises(NoValue, match="as the second model itself gets none of 120 test examples right; are these"):
            found.relative_accuracy  # noqa: B018
        with pytest.warns(InflatedWarning, match=sentence):
            made = fit_all(a, b, [("mid", "mid")], wrong, test=wrong)
        assert made[("mid", "mid"), "least_squares"].evaluation == found.evaluation
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert found.evaluate(labelled(b, 5)).doubt is None

    def test_labels_in_some_batches_only(self):
        a, b = built(Rows), built(Rows, seed=1)
        data = labelled(b, 5)
        found = stitch(a, "mid", b, "mid", data)
        with pytest.raises(
            InvalidValue, match="batch 1 of the data has no labels, and the batches before it have some"
        ):
            found.evaluate([data[0], data[1][0]])
        with pytest.raises(InvalidValue, match="batch 2 of the data has labels, and the batches before it have none"):
            found.evaluate([data[0][0], data[1][0], data[2]])

    def test_examples_limit_the_data(self):
        a, b = built(Rows), built(Rows, seed=1)
        data = labelled(b, 5)
        few = stitch(a, "mid", b, "mid", data, examples=50)
        assert few.examples == 50
        cut = [data[0], tuple(part[:10] for part in data[1])]
        assert torch.allclose(few.map.weight, stitch(a, "mid", b, "mid", cut).map.weight)
        told = []
        assert few.evaluate(data, examples=30, progress=lambda *one: told.append(one)).examples == 30
        assert told[-1][2] == "evaluating"
        assert stitch(a, "mid", b, "mid", data, "identity").examples == 0

    @pytest.mark.parametrize(
        "how", ["identity", "task_loss(init=identity, steps=1)", "task_loss(init=random, steps=1)"]
    )
    def test_a_start_that_is_blind_to_the_data_does_not_run_the_models_on_them(self, how):
        a, b = built(Rows), built(Rows, seed=1)
        seen = []
        b.front.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        found = stitch(a, "mid", b, "mid", labelled(b, 5), how)
        trains = "task" in how
        assert seen.count(40) == 3 * (1 + trains)  # `labelled` runs it too
        assert found.examples == 120 * trains

    def test_fewer_rows_than_unknowns_are_warned_of(self):
        a, b = built(Rows), built(Rows, seed=1)
        sentence = "5 rows of layer 'mid' of 'a' are fewer than the 7 unknowns for each neuron, so 'least_squares' fits"
        with pytest.warns(InflatedWarning, match=sentence):
            stitch(a, "mid", b, "mid", drawn(5, 5))
        with pytest.warns(InflatedWarning, match="5 rows .* are fewer than the 6 unknowns .* about 60 rows"):
            stitch(a, "mid", b, "mid", drawn(5, 5), "reduced_rank(k=2, affine=False)")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stitch(a, "mid", b, "mid", drawn(5, 5), "ridge")
            stitch(a, "mid", b, "mid", drawn(7, 5))

    def test_it_says_what_it_is(self):
        a, b = built(Maps, stride=2), built(Maps, seed=1)
        found = stitch(a, "mid", b, "mid", labelled(b, *IMAGES), names=("old", "new"))
        assert found.resize == "bilinear"
        assert str(found) == (
            "old/mid → new/mid by least_squares, from 120 examples\n"
            "maps of width 6 of 4×4 → maps of width 6 of 8×8\n"
            "first model stopped after 'mid', nothing after it is computed; 4×4 resized to 8×8 (bilinear); second "
            "model cut after 'mid': nothing before it is computed"
        )
        assert repr(found) == str(found)

    def test_a_model_is_lent_to_the_device(self):
        a, b = built(Rows), built(Rows, seed=1)
        assert stitch(a, "mid", b, "mid", labelled(b, 5), device="cpu").transformation.shift.device.type == "cpu"
        with refused(UnknownName, "device"):
            stitch(a, "mid", b, "mid", labelled(b, 5), device="meta")

    def test_task_loss_begins_with_a_direct_method_and_is_trained(self):
        a, b = built(Rows, dtype=torch.float32), built(Rows, seed=1, dtype=torch.float32)
        data = labelled(b, 5)
        direct = stitch(a, "mid", b, "mid", data, "reduced_rank(k=2)", data)
        found = stitch(a, "mid", b, "mid", data, "task_loss(rank=2)", data, epochs=20, lr=0.02)
        assert found.method == "task_loss(rank=2, epochs=20, lr=0.02)"
        assert found.evaluation.cross_entropy < direct.evaluation.cross_entropy
        assert found.transformation.rank == 2
        assert found.history[-1]["loss"] < found.history[0]["loss"]
        assert found.training["steps"] == 60
        again = stitch(a, "mid", b, "mid", data, nk.TaskLoss(rank=2, epochs=20, lr=0.02), data)
        assert (again.method, again.evaluation) == (found.method, found.evaluation)
        assert torch.equal(again.map.weight, found.map.weight)


class TestAnyNetworks:
    @pytest.mark.parametrize(
        "a, x, b, y, shape",
        slow_after(
            2,
            [
                (Maps, "mid", Residual, "blocks.0", IMAGES),
                (Residual, "blocks.0.conv", Maps, "front", IMAGES),
                (Maps, "mid", Maps, "out", IMAGES),
                (Tokens, "mid", Tokens, "front", (9, 5)),
                (Tokens, "front", Tokens, "out", (9, 5)),
                (Shares, "relu", Shares, "relu#2", (5,)),
            ],
            several=True,
        ),
    )
    def test_kinds_and_sizes(self, a, x, b, y, shape):
        first, second = built(a), built(b, seed=1)
        data = labelled(second, *shape)
        found = stitch(first, x, second, y, data, test=data)
        assert found.evaluation.r2 > stitch(first, x, second, y, data, "random", data).evaluation.r2
        assert found.network(data[0][0]).shape == (40, 4)
        agrees_with_numpy(found, torch.cat([batch[0] for batch in data]))

    @pytest.mark.slow
    @pytest.mark.parametrize("x, y", [("relu3", "blocks.0"), pytest.param("relu1", "embed", marks=pytest.mark.slow)])
    def test_a_convnet_into_a_transformer_and_back(self, x, y):
        a, b = seeded(architecture("tiny10")).eval().double(), seeded(architecture("vit,depth=2")).eval().double()
        data = labelled(b, 3, 32, 32, batches=2, n=6)
        inputs = torch.cat([batch[0] for batch in data])
        into = stitch(a, x, b, y, data, test=data)
        assert "maps as tokens" in into.cut_words
        agrees_with_numpy(into, inputs)
        back = stitch(b, y, a, x, labelled(a, 3, 32, 32, batches=2, n=6))
        assert "tokens as maps" in back.cut_words
        agrees_with_numpy(back, inputs)

    def test_a_recurrent_network_of_tokens(self):
        a, b = (seeded(architecture("char_lstm,width=12,vocabulary=20"), seed).eval() for seed in (0, 1))
        text = torch.randint(0, 20, (30, 7), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            data = [(text, b(text).argmax(2))]
        found = stitch(a, "lstm1", b, "lstm1", data, test=data)
        assert found.evaluation.examples == 30
        assert found.evaluation.accuracy is not None
        A, B = (rows_of_tuple(model, "lstm1", text) for model in (a, b))
        solved = np.linalg.lstsq(np.column_stack([A, np.ones(len(A))]), B)[0]
        assert found.map.weight.numpy() == pytest.approx(solved[:-1], abs=1e-4)

    def test_a_model_with_itself_is_left_unchanged_by_the_stitch(self):
        model = built(Maps)
        data = labelled(model, *IMAGES)
        found = stitch(model, "mid", model, "mid", data, test=data)
        assert torch.allclose(found.map.weight, torch.eye(6, dtype=torch.float64), atol=1e-8)
        assert found.relative_accuracy == 1
        other = stitch(model, "front", model, "mid", data, test=data)
        assert other.relative_accuracy <= 1

    @pytest.mark.parametrize(
        "x, y", slow_after(1, [("conv", "conv"), ("conv", "pool"), ("norm", "relu"), ("relu", "out")], several=True)
    )
    def test_convolutions_of_one_dimension_are_mapped_place_by_place(self, x, y):
        a, b = built(Lines, 5), built(Lines, 6, seed=1)
        data = labelled(b, 3, 10)
        found = stitch(a, x, b, y, data, test=data)
        inputs = torch.cat([batch[0] for batch in data])
        with torch.no_grad():
            A, B = (run_until(model, layer, inputs).numpy() for model, layer in ((a, x), (b, y)))
            transformed = found.transformation(torch.tensor(A)).numpy()
        form = A.mean(2) if y == "out" else np.einsum("mi,nci->ncm", resizing(A.shape[2], B.shape[2]), A)
        X, Y = (np.moveaxis(side, 1, -1).reshape(-1, side.shape[1]) for side in (form, B))
        solved = np.column_stack([X, np.ones(len(X))]) @ np.linalg.lstsq(np.column_stack([X, np.ones(len(X))]), Y)[0]
        ours = np.moveaxis(transformed, 1, -1).reshape(Y.shape)
        assert ours == pytest.approx(solved, abs=1e-8)
        assert found.map.weight.shape == (A.shape[1], B.shape[1])
        evaluation = found.evaluation
        assert evaluation.r2 == pytest.approx(1 - ((ours - Y) ** 2).sum() / ((Y - Y.mean(0)) ** 2).sum())
        assert evaluation.cka == pytest.approx(float(cka(ours, Y)))
        trained = stitch(a, x, b, y, data, "task_loss(steps=2)", data)
        assert trained.history[0]["r2"] == pytest.approx(evaluation.r2)

    def test_other_precisions(self):
        a, b = built(Maps), built(Maps, seed=1, dtype=torch.float32)
        data = labelled(b, *IMAGES)
        found = stitch(a, "mid", b, "mid", data, test=data)
        assert found.transformation.shift.dtype == torch.float32
        assert found.evaluation.accuracy is not None
        half = stitch(a.to(torch.bfloat16), "mid", b, "mid", data, test=data)
        assert half.evaluation.r2 == pytest.approx(found.evaluation.r2, abs=0.05)

    def test_a_stitch_into_a_model_of_half_precision_is_trained_in_float32(self):
        a, b = built(Maps, dtype=torch.float32), built(Maps, seed=1, dtype=torch.float32)
        data = labelled(b, *IMAGES)
        found = stitch(a, "mid", b.to(torch.bfloat16), "mid", data, "task_loss", test=data, epochs=3, lr=1e-4)
        assert found.transformation.shift.dtype == torch.float32
        moved = found.map.weight - stitch(a, "mid", b, "mid", data).map.weight
        assert 0 < moved.abs().max() < 1e-2  # steps of 1e-4 would be lost in bfloat16
        assert found.network(data[0][0]).dtype == torch.bfloat16

    def test_mappings_in_and_out_with_padding_left_aside(self):
        a, b = built(Spoken), built(Spoken, seed=1)
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(0, 20, (50, 6), generator=generator)
        mask = (torch.arange(6) < torch.randint(1, 7, (50, 1), generator=generator)).long()
        batch = {"input_ids": words, "attention_mask": mask, "labels": torch.zeros(50, dtype=torch.long)}
        found = stitch(a, "mid", b, "mid", [batch], test=[batch])
        A, B = (run_until(model, "mid", batch)[mask.bool()].detach().numpy() for model in (a, b))
        solved = np.linalg.lstsq(np.column_stack([A, np.ones(len(A))]), B)[0]
        assert found.map.weight.numpy() == pytest.approx(solved[:-1], abs=1e-8)
        assert found.evaluation.examples == 50
        keywords = {key: value for key, value in batch.items() if key != "labels"}
        assert torch.equal(found.network(**keywords)["logits"], found.network(batch)["logits"])

    def test_many_pairs_and_methods_in_one_pass(self):
        a, b = built(Maps), built(Maps, seed=1)
        data, reads = labelled(b, *IMAGES), []

        def read():
            reads.append(1)
            yield from data

        class Once:
            def __iter__(self):
                return read()

        pairs = [("front", "mid"), ("mid", "mid"), ("mid", "front")]
        made = fit_all(a, b, pairs, Once(), ["least_squares", "procrustes"], data)
        assert reads == [1]
        for (pair, how), found in made.items():
            alone = stitch(a, pair[0], b, pair[1], data, how, data)
            assert torch.allclose(found.map.weight, alone.map.weight)
            assert found.evaluation == alone.evaluation


def resizing(old, new):
    """Return the matrix that averages a line of `old` places down to `new`, or grows it linearly, by the textbook."""
    matrix = np.zeros((new, old))
    for place in range(new):
        if new <= old:
            covered = slice(place * old // new, -(-(place + 1) * old // new))
            matrix[place, covered] = 1 / len(range(*covered.indices(old)))
        else:
            where = min(max((place + 0.5) * old / new - 0.5, 0), old - 1)
            low = min(int(where), old - 2)
            matrix[place, low : low + 2] = 1 - (where - low), where - low
    return matrix


def in_form_of(A, B):
    """Return activations in the form of others, by NumPy: maps n × c × h × w, tokens n × t × d with one class token."""
    if B.ndim == 2:
        return A if A.ndim == 2 else A.mean(1) if A.ndim == 3 else A.mean((2, 3))
    if A.ndim == B.ndim == 3:
        return A
    if A.ndim == 3:
        side = int(np.sqrt(A.shape[1]))
        A = A[:, -(side**2) :].transpose(0, 2, 1).reshape(len(A), -1, side, side)
    size = B.shape[2:] if B.ndim == 4 else [int(np.sqrt(B.shape[1]))] * 2
    maps = np.einsum("hi,wj,ncij->nchw", resizing(A.shape[2], size[0]), resizing(A.shape[3], size[1]), A)
    if B.ndim == 4:
        return maps
    places = maps.reshape(*maps.shape[:2], -1).transpose(0, 2, 1)
    return np.concatenate([places.mean(1, keepdims=True)] * (B.shape[1] - places.shape[1]) + [places], 1)


def agrees_with_numpy(found, inputs):
    """Hold a least-squares stitch against NumPy's solution, from the forms of the activations on."""
    network = found.network
    with torch.no_grad():
        A, B = (
            main_tensor(run_until(model, layer, inputs), layer)
            for model, layer in ((network.a, network.layer_a), (network.b, network.layer_b))
        )
        transformed = network.transformation(A).numpy()
        answers = network(inputs)
        assert torch.allclose(answers, run_from(network.b, network.layer_b, torch.tensor(transformed), inputs))
    form = in_form_of(A.numpy(), B.numpy())
    axis = 1 if form.ndim == 4 else -1
    X, Y = (np.moveaxis(side, axis, -1).reshape(-1, side.shape[axis]) for side in (form, B.numpy()))
    solved = np.column_stack([X, np.ones(len(X))]) @ np.linalg.lstsq(np.column_stack([X, np.ones(len(X))]), Y)[0]
    ours = np.moveaxis(transformed, axis, -1).reshape(solved.shape)
    np.testing.assert_allclose(ours, solved, rtol=0, atol=1e-6 * np.abs(Y).max())


def rows_of_tuple(model, layer, x):
    return run_until(model, layer, x)[0].flatten(0, 1).detach().double().numpy()
