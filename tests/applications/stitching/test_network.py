"""Ends, transformations and joined networks: which kinds meet, what is computed, and that models stay as they were."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from netkin.applications.stitching.joining import Adapter, LayerOutput
from netkin.applications.stitching.maps import LinearMap
from netkin.applications.stitching.network import Stitched, Transformation, stitched_network
from netkin.errors import InvalidValue, ShapeError, UnknownName
from netkin.representations.layers import gives_lines, modules
from refusals import refused
from stitching_worlds import Maps, Rows, Shares, built, drawn


def linear(p, q, seed=0):
    return LinearMap(drawn(p, q, seed=seed), drawn(q, seed=seed + 1))


def end(*shape):
    return LayerOutput.of(torch.zeros(2, *shape), "layer")


def line(*shape):
    return LayerOutput.of(torch.zeros(2, *shape), "layer", line=True)


def joined(a, x, b, y, shape_a, shape_b, **options):
    adapter = Adapter(end(*shape_a), end(*shape_b))
    transformation = Transformation(linear(adapter.a.width, adapter.b.width), adapter).double()
    return Stitched(a, x, b, y, transformation, **options)


class TestEnds:
    @pytest.mark.parametrize(
        "shape, kind, words",
        [
            ((8, 4, 6), "maps", "maps of width 8 of 4×6"),
            ((8, 4, 6, 2), "maps", "maps of width 8 of 4×6×2"),
            ((17, 8), "tokens", "tokens of width 8, 17 a sequence"),
            ((8,), "rows", "rows of width 8"),
        ],
    )
    def test_kinds(self, shape, kind, words):
        assert (end(*shape).kind, str(end(*shape)), end(*shape).width) == (kind, words, 8)

    def test_what_is_none_of_these_is_refused(self):
        with pytest.raises(ShapeError, match=r"layer 'x' gives an output of shape \(3,\); a stitch joins feature maps"):
            LayerOutput.of(torch.ones(3), "layer 'x'")

    @pytest.mark.parametrize(
        "a, b, way, words",
        [
            ((3, 8, 8), (5, 8, 8), None, ""),
            ((3, 8, 8), (5, 4, 4), "average", "8×8 resized to 4×4 (average)"),
            ((3, 4, 4), (5, 8, 8), "bilinear", "4×4 resized to 8×8 (bilinear)"),
            ((3, 8, 8), (17, 5), "average", "maps as tokens, 8×8 resized to 4×4 (average)"),
            ((3, 4, 4), (17, 5), None, "maps as tokens"),
            ((17, 3), (5, 4, 4), None, "tokens as maps"),
            ((18, 3), (5, 2, 2), "average", "tokens as maps, 4×4 resized to 2×2 (average)"),
            ((9, 3), (9, 5), None, ""),
            ((3, 4, 4), (5,), None, "maps as rows"),
            ((9, 3), (5,), None, "tokens as rows"),
            ((3, 4, 4, 4), (5, 8, 8, 8), "bilinear", "4×4×4 resized to 8×8×8 (bilinear)"),
        ],
    )
    def test_meetings(self, a, b, way, words):
        adapter = Adapter(end(*a), end(*b))
        assert (adapter.resize, adapter.words) == (way, words)
        given = drawn(2, *a, dtype=torch.float32)
        taken = adapter(given)
        assert taken.shape == (2, *(b[:-1] if len(b) == 2 else ()), 3, *(b[1:] if len(b) > 2 else ()))
        assert Transformation(linear(3, 5), adapter)(given).shape == (2, *b)

    def test_a_map_as_tokens_has_its_mean_before_its_places(self):
        maps = drawn(2, 3, 4, 4, dtype=torch.float32)
        tokens = Adapter(end(3, 4, 4), end(18, 5))(maps)
        assert torch.allclose(tokens[:, 0], maps.mean((2, 3)))
        assert torch.equal(tokens[:, 0], tokens[:, 1])
        assert torch.equal(tokens[:, 2 + 5], maps[:, :, 1, 1])

    def test_tokens_as_a_map_lose_the_class_token_and_come_back(self):
        tokens = drawn(2, 17, 3, dtype=torch.float32)
        maps = Adapter(end(17, 3), end(5, 4, 4))(tokens)
        assert torch.equal(maps[:, :, 1, 2], tokens[:, 1 + 6])
        assert torch.equal(Adapter(end(3, 4, 4), end(17, 5))(maps)[:, 1:], tokens[:, 1:])

    def test_means_over_places_and_tokens(self):
        maps, tokens = drawn(2, 3, 4, 4, dtype=torch.float32), drawn(2, 9, 3, dtype=torch.float32, seed=1)
        assert torch.allclose(Adapter(end(3, 4, 4), end(5))(maps), maps.mean((2, 3)))
        assert torch.allclose(Adapter(end(9, 3), end(5))(tokens), tokens.mean(1))

    @pytest.mark.parametrize("resize", ["average", "bilinear", "nearest"])
    @pytest.mark.parametrize("size", [(4, 4), (12, 12), (4, 12)])
    def test_named_resizes(self, resize, size):
        adapter = Adapter(end(3, 8, 8), end(5, *size), resize)
        assert adapter(torch.ones(2, 3, 8, 8)).shape == (2, 3, *size)
        assert adapter.resize == resize
        assert torch.allclose(adapter(torch.ones(2, 3, 8, 8)), torch.ones(2, 3, *size))

    @pytest.mark.parametrize(
        "a, b, sentence",
        [
            (
                (3,),
                (5, 4, 4),
                "rows have no positions, so rows of width 3 can't be stitched into maps of width 5 of 4×4",
            ),
            ((3,), (9, 5), "rows have no positions.*choose an earlier layer of the first"),
            (
                (9, 3),
                (8, 5),
                "sequences of 9 and 8 tokens can't be stitched token by token; choose layers with as many",
            ),
            ((3, 4, 4), (5, 4, 4, 4), "have different numbers of dimensions and can't be stitched; choose layers with"),
            (
                (3, 4, 4),
                (33, 5),
                "tokens of width 5, 33 a sequence are no square of positions with up to 5 class tokens",
            ),
        ],
    )
    def test_kinds_that_cannot_be_joined(self, a, b, sentence):
        with pytest.raises(ShapeError, match=sentence):
            Adapter(end(*a), end(*b))

    def test_an_unknown_resize_is_refused(self):
        with refused(UnknownName, "resize"):
            Adapter(end(3, 8, 8), end(3, 4, 4), "cubic")


class TestLines:
    """Maps of one dimension, n × c × length."""

    def test_they_are_told_from_tokens_and_say_so(self):
        assert line(8, 5) == LayerOutput("maps", 8, (5,))
        assert str(line(8, 5)) == "maps of width 8 of length 5"
        assert (line(8, 5).form, end(5, 8).form) == ("lines", "tokens")
        assert line(8, 4, 4).form == "maps"

    @pytest.mark.parametrize(
        "model, name, expected",
        [
            (nn.Conv1d(3, 4, 1), "", True),
            (nn.Linear(3, 4), "", False),
            (nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU(), nn.Dropout(), nn.Identity()), "3", True),
            (nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU()), "", True),
            (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "1", False),
            (nn.Sequential(nn.Conv1d(3, 4, 1), nn.LayerNorm(4)), "1", False),
            (nn.Sequential(nn.Sequential(nn.Conv1d(3, 4, 1)), nn.Sequential(nn.ReLU())), "1.0", True),
            (nn.Sequential(nn.Embedding(3, 4), nn.BatchNorm1d(4), nn.AvgPool1d(2)), "2", True),
            (nn.ModuleDict({"conv": nn.Conv1d(3, 4, 1), "relu": nn.ReLU()}), "relu", False),
            (nn.Sequential(nn.ReLU()), "0", False),
            (nn.Sequential(), "", False),
            (nn.GroupNorm(2, 4), "", True),
        ],
    )  # fmt: skip
    def test_modules_tell_which_outputs_are_lines(self, model, name, expected):
        assert gives_lines(modules(model), name) is expected

    @pytest.mark.parametrize(
        "a, b, words, expected",
        [
            (line(3, 8), line(5, 8), "", lambda x: x),
            (line(3, 8), line(5, 4), "8 resized to 4 (average)", lambda x: x.reshape(2, 3, 4, 2).mean(3)),
            (line(3, 8), end(8, 5), "lines as tokens", lambda x: x.transpose(0, 2, 1)),
            (line(3, 8), end(4, 5), "lines as tokens, 8 resized to 4 (average)",
             lambda x: x.reshape(2, 3, 4, 2).mean(3).transpose(0, 2, 1)),
            (line(3, 8), end(5), "lines as rows", lambda x: x.mean(2)),
        ],
    )  # fmt: skip
    def test_meetings(self, a, b, words, expected):
        adapter, x = Adapter(a, b), drawn(2, 3, 8)
        assert adapter.words == words
        assert adapter(x).numpy() == pytest.approx(expected(x.numpy()))
        transformation = Transformation(linear(3, 5), adapter).double()
        assert transformation(x).shape == (
            2,
            *((5, *b.space) if b.kind == "maps" else (b.tokens, 5) if b.tokens else (5,)),
        )

    def test_tokens_are_laid_out_as_a_line_without_class_tokens(self):
        adapter, x = Adapter(end(8, 3), line(5, 8)), drawn(2, 8, 3)
        assert adapter.words == "tokens as lines"
        assert torch.equal(adapter(x), x.transpose(1, 2))

    @pytest.mark.parametrize("resize, place", [("bilinear", 0.25), ("nearest", 0.0)])
    def test_named_resizes(self, resize, place):
        adapter = Adapter(line(1, 4), line(1, 8), resize)
        grown = adapter(torch.arange(4.0).reshape(1, 1, 4))
        assert grown.shape == (1, 1, 8)
        assert float(grown[0, 0, 1]) == place  # by hand: the second of twice as many lies a quarter on

    def test_a_line_and_a_plane_are_refused(self):
        with pytest.raises(ShapeError, match="maps of width 3 of length 8 and maps of width 5 of 4×4 have different"):
            Adapter(line(3, 8), end(5, 4, 4))

    def test_rows_are_places(self):
        x = drawn(2, 3, 8)
        assert torch.equal(line(3, 8).rows(x), x.transpose(1, 2).reshape(16, 3))
        assert torch.equal(end(3, 8).rows(x), x.reshape(6, 8))
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        assert torch.equal(end(3, 8).rows(x, mask), x[mask.bool()])
        assert torch.equal(line(3, 8).rows(x, mask), line(3, 8).rows(x))

    def test_the_transformation_is_a_convolution_of_one_dimension(self):
        channels, x = linear(3, 5), drawn(2, 3, 8)
        transformation = Transformation(channels, Adapter(line(3, 8), line(5, 8))).double()
        transformation.set(channels)
        assert [type(part) for part in transformation.linear] == [nn.Conv1d]
        expected = np.einsum("ncl,cd->ndl", x, channels.weight) + channels.bias.numpy()[:, None]
        assert transformation(x).detach().numpy() == pytest.approx(expected)


class TestTransformations:
    @pytest.mark.parametrize("shape, kind", [((5, 4, 4), nn.Conv2d), ((5, 2, 2, 2), nn.Conv3d), ((9, 5), nn.Linear)])
    def test_it_is_one_ordinary_layer_and_maps_channels(self, shape, kind):
        given = (3, *shape[1:]) if kind is not nn.Linear else (9, 3)
        adapter, channels = Adapter(end(*given), end(*shape)), linear(3, 5)
        transformation = Transformation(channels, adapter).double()
        assert [type(part) for part in transformation.linear] == [kind]
        transformation.set(channels)  # in float64
        x = torch.randn(2, *given, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        axis = -1 if kind is nn.Linear else 1
        assert torch.allclose(transformation(x), channels(x.movedim(axis, -1)).movedim(-1, axis))
        assert torch.allclose(transformation.matrix, channels.weight)
        assert torch.allclose(transformation.as_map().bias, channels.bias)

    def test_a_bottleneck_begins_as_the_best_approximation(self):
        adapter, channels = Adapter(end(4, 3, 3), end(5, 3, 3)), linear(4, 5)
        transformation = Transformation(channels, adapter, rank=2).double()
        transformation.set(channels)
        u, s, v = torch.linalg.svd(channels.weight, full_matrices=False)
        assert torch.allclose(transformation.matrix, (u[:, :2] * s[:2]) @ v[:2])
        assert len(list(transformation.parameters())) == 3
        assert torch.linalg.matrix_rank(transformation.matrix) == 2

    def test_no_random_number_is_drawn(self):
        before = torch.random.get_rng_state()
        Transformation(linear(4, 5), Adapter(end(4, 3, 3), end(5, 3, 3)), rank=2)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_maps_that_do_not_fit_are_refused(self):
        with pytest.raises(ShapeError, match=r"the map is \(4, 5\), and the layers need \(3, 5\)"):
            Transformation(linear(4, 5), Adapter(end(3), end(5)))
        with refused(InvalidValue, "rank"):
            Transformation(linear(3, 5), Adapter(end(3), end(5)), rank=4)


class TestStitched:
    def test_it_runs_the_head_the_transformation_and_the_tail(self):
        a, b = built(Maps), built(Maps, seed=1)
        network = joined(a, "mid", b, "mid", (6, 8, 8), (6, 8, 8))
        x = drawn(3, 3, 12, 12)
        middle = network.transformation(a.mid(a.front(x).relu()))
        assert torch.allclose(network(x), b.out(b.after(middle).relu().mean((2, 3))))
        assert network.cut_words == (
            "first model stopped after 'mid', nothing after it is computed; second model cut after 'mid': nothing "
            "before it is computed"
        )

    def test_only_the_head_and_the_tail_run(self):
        a, b = built(Maps), built(Maps, seed=1)
        network, ran = joined(a, "mid", b, "mid", (6, 8, 8), (6, 8, 8)), []
        for name, model in (("a", a), ("b", b)):
            for key, part in model.named_children():
                part.register_forward_hook(lambda *_, key=f"{name}.{key}": ran.append(key))
        network(drawn(3, 3, 12, 12))
        assert ran == ["a.front", "a.mid", "b.after", "b.out"]

    def test_it_is_an_ordinary_module(self):
        network = joined(built(Maps), "mid", built(Maps, seed=1), "mid", (6, 8, 8), (6, 8, 8))
        x = drawn(3, 3, 12, 12)
        expected = network(x)
        assert {name.split(".")[0] for name in network.state_dict()} == {"a", "b", "transformation"}
        for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert torch.equal(again(x), expected)
            again.load_state_dict(network.state_dict())
        assert torch.allclose(network.float()(x.float()), expected.float(), atol=1e-4)
        assert [name for name, _ in network.named_children()] == ["a", "b", "transformation"]

    def test_positional_and_keyword_inputs_go_together_as_to_any_module(self):
        class Two(Rows):
            def forward(self, x, scale, *, y=0):
                return super().forward(x * scale + y)

        a, b = built(Two), built(Two, seed=1)
        network = joined(a, "mid", b, "mid", (6,), (6,))
        x, y = drawn(7, 5), drawn(7, 5, seed=1)
        middle = network.transformation(a.mid(a.front(x * 2 + y).relu()))
        expected = b.out(b.after(middle).relu())
        assert torch.allclose(network(x, 2, y=y), expected)
        assert torch.allclose(network(x, scale=2, y=y), expected)
        assert torch.allclose(network(x=x, scale=2, y=y), expected)
        whole = joined(a, "mid", b, "mid", (6,), (6,), cuts=False)
        whole.transformation.load_state_dict(network.transformation.state_dict())
        assert torch.allclose(whole(x, 2, y=y), expected)
        assert torch.allclose(whole({"x": x, "scale": 2}), network(x, 2))

    def test_a_map_in_float64_is_taken_over_in_float64(self):
        adapter, channels = Adapter(end(6), end(6)), linear(6, 6)
        b = built(Rows, seed=1)
        network = stitched_network(built(Rows), b, ("mid", "mid"), channels, adapter)
        assert torch.equal(network.transformation.matrix, channels.weight)
        half = stitched_network(built(Rows), b.half(), ("mid", "mid"), channels, adapter, rank=2)
        assert (half.transformation.shift.dtype, half.transformation.rank) == (torch.float32, 2)

    def test_train_sets_the_mode_of_the_transformation_alone(self):
        network = joined(built(Rows), "mid", built(Rows, seed=1), "mid", (6,), (6,)).eval()
        assert not network.transformation.training
        assert network.train().transformation.training
        assert not network.a.training

    def test_both_models_run_in_evaluation_mode_and_keep_their_own(self):
        def net(seed):
            return built(
                lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 4)), seed=seed
            )

        a, b = net(0).train(), net(1).train()
        network = joined(a, "1", b, "0", (6,), (6,)).train()
        x = drawn(7, 5)
        before = copy.deepcopy(network.state_dict())
        assert torch.equal(network(x), network(x))
        assert a.training
        assert b[2].training
        assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())

    def test_the_mode_when_it_is_traced_does_not_matter(self):
        class Drops(nn.Module):
            def __init__(self):
                super().__init__()
                self.mid, self.out = nn.Linear(5, 6), nn.Linear(6, 4)

            def forward(self, x):
                return self.out(nn.functional.dropout(self.mid(x), 0.5, self.training))

        a, b = built(Rows), built(Drops, seed=1).train()
        network = joined(a, "mid", b, "mid", (6,), (6,))
        assert "cut after" in network.cut_words
        x = drawn(7, 5)
        assert torch.equal(network(x), network(x))

    def test_what_cannot_be_cut_runs_with_hooks(self):
        a, b = built(Maps), built(Maps, seed=1)
        cut, whole = (joined(a, "mid", b, "mid", (6, 8, 8), (6, 8, 8), cuts=cuts) for cuts in (True, False))
        x = drawn(3, 3, 12, 12)
        assert torch.allclose(cut(x), whole(x))
        assert "computed for nothing (its cut gave other numbers)" in whole.cut_words

    def test_calls_of_a_shared_module_are_told_apart(self):
        a, b = built(Shares), built(Shares, seed=1)
        network = joined(a, "relu#2", b, "relu#2", (6,), (6,))
        x = drawn(7, 5)
        middle = network.transformation(a.two(a.one(x).relu()).relu())
        assert torch.allclose(network(x), b.out(middle))
        crossed = joined(a, "relu", b, "relu#2", (8,), (6,))
        assert torch.allclose(crossed(x), b.out(crossed.transformation(a.one(x).relu())))
