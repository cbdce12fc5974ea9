"""`stitch`: any two networks in one call, politely, and what it refuses."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.applications.stitching import fit_all, stitch
from netkin.errors import ForwardError, NoValue, ShapeError, UnknownName, ValueFault
from netkin.measures import cca_mean, cka, svcca
from netkin.representations import positions, run_until
from netkin.sources.architectures import architecture, seeded
from stitching_worlds import Maps, Residual, Rows, Shares, Spoken, Tokens, built, labelled

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
        inputs = torch.randn(60, 5, dtype=torch.float64)
        found = stitch(a, "mid", b, "mid", inputs, test=inputs)
        assert found.evaluation.accuracy is None
        assert found.evaluation.relative_accuracy is None
        assert 0 <= found.evaluation.agreement <= 1
        for one in (found, stitch(a, "mid", b, "mid", inputs)):
            with pytest.raises(NoValue, match="no relative accuracy without labelled test data; pass `test=`"):
                one.relative_accuracy  # noqa: B018

    def test_examples_limit_the_data(self):
        a, b = built(Rows), built(Rows, seed=1)
        data = labelled(b, 5)
        few = stitch(a, "mid", b, "mid", data, examples=50)
        assert few.examples == 50
        cut = [data[0], tuple(part[:10] for part in data[1])]
        assert torch.allclose(few.map.weight, stitch(a, "mid", b, "mid", cut).map.weight)
        assert few.evaluate(data, examples=30).examples == 30
        assert stitch(a, "mid", b, "mid", data, "identity").examples == 0

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

    def test_a_model_is_lent_to_the_device(self):
        a, b = built(Rows), built(Rows, seed=1)
        assert stitch(a, "mid", b, "mid", labelled(b, 5), device="cpu").transformation.shift.device.type == "cpu"
        with pytest.raises(ValueFault, match="'meta' device computes no numbers"):
            stitch(a, "mid", b, "mid", labelled(b, 5), device="meta")

    def test_task_loss_begins_with_a_direct_method_and_is_trained(self):
        a, b = built(Rows, dtype=torch.float32), built(Rows, seed=1, dtype=torch.float32)
        data = labelled(b, 5)
        direct = stitch(a, "mid", b, "mid", data, "reduced_rank(k=2)", data)
        found = stitch(a, "mid", b, "mid", data, "task_loss(rank=2)", data, epochs=20, rate=0.02)
        assert found.method == "task_loss(rank=2, epochs=20, rate=0.02)"
        assert found.evaluation.cross_entropy < direct.evaluation.cross_entropy
        assert found.transformation.rank == 2
        assert found.history[-1]["loss"] < found.history[0]["loss"]
        assert found.training["steps"] == 60


class TestAnyNetworks:
    @pytest.mark.parametrize(
        "a, x, b, y, shape",
        [
            (Maps, "mid", Residual, "blocks.0", IMAGES),
            (Residual, "blocks.0.conv", Maps, "front", IMAGES),
            (Maps, "mid", Maps, "out", IMAGES),
            (Tokens, "mid", Tokens, "front", (9, 5)),
            (Tokens, "front", Tokens, "out", (9, 5)),
            (Shares, "relu", Shares, "relu#2", (5,)),
        ],
    )
    def test_kinds_and_sizes(self, a, x, b, y, shape):
        first, second = built(a), built(b, seed=1)
        data = labelled(second, *shape)
        found = stitch(first, x, second, y, data, test=data)
        assert found.evaluation.r2 > stitch(first, x, second, y, data, "random", data).evaluation.r2
        assert found.network(data[0][0]).shape == (40, 4)

    @pytest.mark.parametrize("x, y", [("relu3", "blocks.0"), ("relu1", "embed")])
    def test_a_convnet_into_a_transformer_and_back(self, x, y):
        a, b = seeded(architecture("tiny10")).eval(), seeded(architecture("vit,depth=2")).eval()
        data = [(torch.randn(8, 3, 32, 32), torch.arange(8)) for _ in range(2)]
        into = stitch(a, x, b, y, data, test=data)
        assert "maps as tokens" in into.how
        assert into.network(data[0][0]).shape == (8, 10)
        back = stitch(b, y, a, x, data, test=data)
        assert "tokens as maps" in back.how
        assert back.network(data[0][0]).shape == (8, 10)

    def test_a_recurrent_network_of_tokens(self):
        a, b = (seeded(architecture("char_lstm,width=12,vocabulary=20"), seed).eval() for seed in (0, 1))
        text = torch.randint(0, 20, (30, 7), generator=torch.Generator().manual_seed(0))
        data = [(text, text.roll(-1, 1))]
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
        found = stitch(a, "mid", b.to(torch.bfloat16), "mid", data, "task_loss", test=data, epochs=3, rate=1e-4)
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


def rows_of_tuple(model, layer, x):
    return run_until(model, layer, x)[0].flatten(0, 1).detach().double().numpy()


class TestPoliteness:
    def state(self, model):
        flags = [
            (module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
        ]
        return flags, [weight.requires_grad for weight in model.parameters()], copy.deepcopy(model.state_dict())

    def net(self, seed):
        parts = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(), nn.Conv2d(6, 5, 3)]
        return built(lambda: nn.Sequential(*parts, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(320, 4)), seed=seed)

    def test_models_and_random_states_stay_as_they_were(self):
        a, b = self.net(0).train(), self.net(1).train()
        b[0].requires_grad_(False)
        data = labelled(self.net(2), *IMAGES)
        before = self.state(a), self.state(b)
        states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        found = stitch(a, "1", b, "1", data, test=data)
        found.network(data[0][0])
        for (flags, grads, weights), model in zip(before, (a, b), strict=True):
            now = self.state(model)
            assert (flags, grads) == now[:2]
            assert all(torch.equal(weights[name], tensor) for name, tensor in now[2].items())
        assert torch.equal(states[0], torch.random.get_rng_state())
        assert states[1] == random.getstate()
        assert np.array_equal(states[2], np.random.get_state()[1])

    def test_the_mode_of_the_models_does_not_matter(self):
        a, b = self.net(0), self.net(1)
        data = labelled(b, *IMAGES)
        quiet = stitch(a, "1", b, "1", data, test=data)
        a.train(), b.train()
        loud = stitch(a, "1", b, "1", data, test=data)
        assert torch.equal(quiet.map.weight, loud.map.weight)
        assert quiet.evaluation == loud.evaluation

    def test_steps_in_place_after_a_layer_do_not_reach_the_fit(self):
        a, b = self.net(0), self.net(1)
        data = labelled(b, *IMAGES)
        x = torch.cat([batch[0] for batch in data])
        A, B = a[1](a[0](x)), b[1](b[0](x))
        assert (A < 0).any()
        A, B = (positions(output).detach().numpy() for output in (A, B))
        solved = np.linalg.lstsq(np.column_stack([A, np.ones(len(A))]), B)[0]
        made = fit_all(a, b, [("1", "1"), ("4", "4")], data)
        assert made[("1", "1"), "least_squares"].map.weight.numpy() == pytest.approx(solved[:-1], abs=1e-8)

    def test_nothing_is_left_behind_by_a_crash(self):
        a, b = self.net(0).train(), self.net(1).train()
        before = self.state(a)[0], self.state(b)[0]
        with pytest.raises(RuntimeError):
            stitch(a, "1", b, "1", [(torch.ones(4, 3, 12, 12), 0), (torch.ones(4, 9, 12, 12), 0)])
        assert (self.state(a)[0], self.state(b)[0]) == before


class TestRefusals:
    @pytest.mark.parametrize(
        "x, y, options, error, sentence",
        [
            ("fron", "mid", {}, UnknownName, "no layer named 'fron'; did you mean 'front'[?]"),
            ("mid", "mids", {}, UnknownName, "no layer named 'mids'; did you mean 'mid'[?]"),
            ("*", "mid", {}, UnknownName, "stands for 4 layers, and one is needed"),
            ("mid", "mid", {"how": "least_square"}, UnknownName, "did you mean 'least_squares'[?]"),
            (
                "mid",
                "mid",
                {"epochs": 3},
                UnknownName,
                "'least_squares' has no option 'epochs'; such options belong to",
            ),
            (
                "mid",
                "mid",
                {"how": "task_loss", "epoch": 3},
                UnknownName,
                "has no option 'epoch'; did you mean 'epochs'",
            ),
            ("mid", "mid", {"resize": "cubic"}, UnknownName, "`resize` is None, 'average'"),
            ("mid", "mid", {"names": ("one",)}, ValueFault, "`names` are two, one for each model; got"),
            ("mid", "mid", {"examples": 0}, ValueFault, "`examples` must be at least 1; got 0"),
            ("out", "mid", {}, ShapeError, "rows have no places, so rows of width 4 can't be stitched into maps"),
            ("mid", "mid", {"how": "reduced_rank(k=9)"}, ValueFault, "between 1 and the smaller width, 6; got 9"),
        ],
    )
    def test_one_sentence(self, x, y, options, error, sentence):
        a, b = built(Maps), built(Maps, seed=1)
        with pytest.raises(error, match=sentence):
            stitch(a, x, b, y, labelled(b, *IMAGES), **options)
        assert not any(module._forward_hooks for model in (a, b) for module in model.modules())

    def test_no_pairs(self):
        with pytest.raises(ValueFault, match="no pairs of layers to stitch were given"):
            fit_all(built(Rows), built(Rows), [], torch.ones(4, 5))

    def test_a_layer_inside_a_residual_block(self):
        with pytest.raises(ValueFault, match="layer 'blocks.0.conv' of 'b' has a path around it.*'blocks.0'"):
            stitch(built(Maps), "mid", built(Residual), "blocks.0.conv", torch.randn(20, *IMAGES), resize="bilinear")

    def test_outputs_that_depend_on_the_batch(self):
        def net(seed):
            return built(
                lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False)), seed=seed
            )

        with pytest.raises(ValueFault, match="layer '1' of 'a' gives other values for an example when other examples"):
            stitch(net(0), "1", net(1), "1", torch.randn(20, 5))

    def test_nan_in_the_activations(self):
        a, b = built(Rows), built(Rows, seed=1)
        data = labelled(b, 5)
        data[1][0][3] = float("nan")
        with pytest.raises(ValueFault, match="layer 'mid' of 'a' in batch 1 holds 6 NaN or Inf among 240 values"):
            stitch(a, "mid", b, "mid", data)

    def test_nan_in_the_answers(self):
        a, b = built(Rows), built(Rows, seed=1)
        found = stitch(a, "mid", b, "mid", labelled(b, 5))
        with torch.no_grad():
            b.out.weight[0, 0] = float("nan")
        with pytest.raises(ForwardError, match="the second model gives NaN or Inf on these data"):
            found.evaluate(labelled(a, 5))

    def test_a_layer_that_does_not_run(self):
        model = built(Rows)
        model.idle = nn.Linear(5, 5)
        with pytest.raises(ForwardError, match="layer 'idle' did not run in the forward of this batch"):
            stitch(model, "idle", built(Rows), "mid", torch.randn(9, 5))
        with pytest.raises(ForwardError, match="layer 'idle' of 'a' did not run"):
            fit_all(model, built(Rows), [("idle", "mid"), ("mid", "mid")], torch.randn(9, 5))

    def test_outputs_that_are_no_scores(self):
        a, b = built(Maps), built(lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)), seed=1)
        with pytest.raises(ShapeError, match=r"output has shape \(20, 2, 10, 10\); a stitch is judged by the scores"):
            stitch(a, "front", b, "0", torch.randn(20, *IMAGES), test=torch.randn(20, *IMAGES))

    def test_labels_of_another_shape(self):
        a, b = (seeded(architecture("char_lstm,width=6,vocabulary=20"), seed).eval() for seed in (0, 1))
        text = torch.randint(0, 20, (30, 7))
        with pytest.raises(ShapeError, match=r"there are labels of shape \(30,\) for \(30, 7\) places"):
            stitch(a, "lstm1", b, "lstm1", [text], test=[(text, text[:, 0])])

    def test_a_constant_layer(self):
        a, b = built(Rows), built(Rows, seed=1)
        nn.init.zeros_(a.mid.weight)
        with pytest.raises(NoValue, match="layer 'mid' of 'a' is constant over the 120 examples"):
            stitch(a, "mid", b, "mid", labelled(b, 5))
        nn.init.zeros_(b.mid.weight)
        found = stitch(built(Rows), "mid", b, "mid", labelled(b, 5), test=labelled(b, 5))
        assert (found.evaluation.r2, found.evaluation.cka) == (None, None)
        assert found.evaluation.agreement == 1
