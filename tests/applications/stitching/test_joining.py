"""Ends, transformations and joined networks: which kinds meet, what is computed, and that models stay as they were."""

import copy
import pickle

import pytest
import torch
from torch import nn

from netkin.applications.stitching.ends import End, Meeting
from netkin.applications.stitching.joining import Stitched, cuts_truly, frozen, thawed
from netkin.applications.stitching.matching import LinearMap
from netkin.applications.stitching.transformations import Transformation
from netkin.errors import ShapeError, UnknownName, ValueFault
from stitching_worlds import Maps, Residual, Rows, Shares, built


def linear(p, q, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return LinearMap(
        torch.randn(p, q, generator=generator, dtype=torch.float64),
        torch.randn(q, generator=generator, dtype=torch.float64),
    )


def end(*shape):
    return End.of(torch.zeros(2, *shape), "layer")


def joined(a, x, b, y, shape_a, shape_b, **options):
    meeting = Meeting(end(*shape_a), end(*shape_b))
    transformation = Transformation(linear(meeting.a.width, meeting.b.width), meeting).double()
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
            End.of(torch.ones(3), "layer 'x'")

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
        meeting = Meeting(end(*a), end(*b))
        assert (meeting.resize, meeting.words) == (way, words)
        given = torch.randn(2, *a)
        taken = meeting(given)
        assert taken.shape == (2, *(b[:-1] if len(b) == 2 else ()), 3, *(b[1:] if len(b) > 2 else ()))
        assert Transformation(linear(3, 5), meeting)(given).shape == (2, *b)

    def test_a_map_as_tokens_has_its_mean_before_its_places(self):
        maps = torch.randn(2, 3, 4, 4)
        tokens = Meeting(end(3, 4, 4), end(18, 5))(maps)
        assert torch.allclose(tokens[:, 0], maps.mean((2, 3)))
        assert torch.equal(tokens[:, 0], tokens[:, 1])
        assert torch.equal(tokens[:, 2 + 5], maps[:, :, 1, 1])

    def test_tokens_as_a_map_lose_the_class_token_and_come_back(self):
        tokens = torch.randn(2, 17, 3)
        maps = Meeting(end(17, 3), end(5, 4, 4))(tokens)
        assert torch.equal(maps[:, :, 1, 2], tokens[:, 1 + 6])
        assert torch.equal(Meeting(end(3, 4, 4), end(17, 5))(maps)[:, 1:], tokens[:, 1:])

    def test_means_over_places_and_tokens(self):
        maps, tokens = torch.randn(2, 3, 4, 4), torch.randn(2, 9, 3)
        assert torch.allclose(Meeting(end(3, 4, 4), end(5))(maps), maps.mean((2, 3)))
        assert torch.allclose(Meeting(end(9, 3), end(5))(tokens), tokens.mean(1))

    @pytest.mark.parametrize("resize", ["average", "bilinear", "nearest"])
    @pytest.mark.parametrize("size", [(4, 4), (12, 12), (4, 12)])
    def test_named_resizes(self, resize, size):
        meeting = Meeting(end(3, 8, 8), end(5, *size), resize)
        assert meeting(torch.ones(2, 3, 8, 8)).shape == (2, 3, *size)
        assert meeting.resize == resize
        assert torch.allclose(meeting(torch.ones(2, 3, 8, 8)), torch.ones(2, 3, *size))

    @pytest.mark.parametrize(
        "a, b, sentence",
        [
            ((3,), (5, 4, 4), "rows have no places, so rows of width 3 can't be stitched into maps of width 5 of 4×4"),
            ((3,), (9, 5), "rows have no places.*choose an earlier layer of the first"),
            ((9, 3), (8, 5), "sequences of 9 and 8 tokens can't be stitched token by token"),
            ((3, 4, 4), (5, 4, 4, 4), "have different numbers of dimensions"),
            ((3, 4, 4), (33, 5), "tokens of width 5, 33 a sequence are no square of places with up to 5 class tokens"),
        ],
    )
    def test_kinds_that_cannot_be_joined(self, a, b, sentence):
        with pytest.raises(ShapeError, match=sentence):
            Meeting(end(*a), end(*b))

    def test_an_unknown_resize_is_refused(self):
        with pytest.raises(UnknownName, match="`resize` is None, 'average', 'bilinear' or 'nearest'; got 'cubic'"):
            Meeting(end(3, 8, 8), end(3, 4, 4), "cubic")


class TestTransformations:
    @pytest.mark.parametrize("shape, kind", [((5, 4, 4), nn.Conv2d), ((5, 2, 2, 2), nn.Conv3d), ((9, 5), nn.Linear)])
    def test_it_is_one_ordinary_layer_and_maps_channels(self, shape, kind):
        given = (3, *shape[1:]) if kind is not nn.Linear else (9, 3)
        meeting, channels = Meeting(end(*given), end(*shape)), linear(3, 5)
        transformation = Transformation(channels, meeting).double()
        assert [type(part) for part in transformation.linear] == [kind]
        transformation.set(channels)  # in float64
        x = torch.randn(2, *given, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        axis = -1 if kind is nn.Linear else 1
        assert torch.allclose(transformation(x), channels(x.movedim(axis, -1)).movedim(-1, axis))
        assert torch.allclose(transformation.matrix, channels.weight)
        assert torch.allclose(transformation.as_map().bias, channels.bias)

    def test_a_bottleneck_begins_as_the_best_approximation(self):
        meeting, channels = Meeting(end(4, 3, 3), end(5, 3, 3)), linear(4, 5)
        transformation = Transformation(channels, meeting, rank=2).double()
        transformation.set(channels)
        u, s, v = torch.linalg.svd(channels.weight, full_matrices=False)
        assert torch.allclose(transformation.matrix, (u[:, :2] * s[:2]) @ v[:2])
        assert len(list(transformation.parameters())) == 3
        assert torch.linalg.matrix_rank(transformation.matrix) == 2

    def test_no_random_number_is_drawn(self):
        before = torch.random.get_rng_state()
        Transformation(linear(4, 5), Meeting(end(4, 3, 3), end(5, 3, 3)), rank=2)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_maps_that_do_not_fit_are_refused(self):
        with pytest.raises(ShapeError, match=r"the map is \(4, 5\), and the layers need \(3, 5\)"):
            Transformation(linear(4, 5), Meeting(end(3), end(5)))
        with pytest.raises(ValueFault, match="`rank` must lie between 1 and the smaller width, 3; got 4"):
            Transformation(linear(3, 5), Meeting(end(3), end(5)), rank=4)


class TestStitched:
    def test_it_runs_the_head_the_transformation_and_the_tail(self):
        a, b = built(Maps), built(Maps, seed=1)
        network = joined(a, "mid", b, "mid", (6, 8, 8), (6, 8, 8))
        x = torch.randn(3, 3, 12, 12, dtype=torch.float64)
        middle = network.transformation(a.mid(a.front(x).relu()))
        assert torch.allclose(network(x), b.out(b.after(middle).relu().mean((2, 3))))
        assert network.how == (
            "first model stopped after 'mid', nothing after it is computed; second model cut after 'mid': nothing "
            "before it is computed"
        )

    def test_only_the_head_and_the_tail_run(self):
        a, b = built(Maps), built(Maps, seed=1)
        network, ran = joined(a, "mid", b, "mid", (6, 8, 8), (6, 8, 8)), []
        for name, model in (("a", a), ("b", b)):
            for key, part in model.named_children():
                part.register_forward_hook(lambda *_, key=f"{name}.{key}": ran.append(key))
        network(torch.randn(3, 3, 12, 12, dtype=torch.float64))
        assert ran == ["a.front", "a.mid", "b.after", "b.out"]

    def test_it_is_an_ordinary_module(self):
        network = joined(built(Maps), "mid", built(Maps, seed=1), "mid", (6, 8, 8), (6, 8, 8))
        x = torch.randn(3, 3, 12, 12, dtype=torch.float64)
        expected = network(x)
        assert {name.split(".")[0] for name in network.state_dict()} == {"a", "b", "transformation"}
        for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert torch.equal(again(x), expected)
            again.load_state_dict(network.state_dict())
        assert torch.allclose(network.float()(x.float()), expected.float(), atol=1e-4)
        assert [name for name, _ in network.named_children()] == ["a", "b", "transformation"]

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
        x = torch.randn(7, 5, dtype=torch.float64)
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
        assert "cut after" in network.how
        x = torch.randn(7, 5, dtype=torch.float64)
        assert torch.equal(network(x), network(x))

    def test_what_cannot_be_cut_runs_with_hooks(self):
        a, b = built(Maps), built(Maps, seed=1)
        cut, whole = (joined(a, "mid", b, "mid", (6, 8, 8), (6, 8, 8), cuts=cuts) for cuts in (True, False))
        x = torch.randn(3, 3, 12, 12, dtype=torch.float64)
        assert torch.allclose(cut(x), whole(x))
        assert "computed for nothing (its cut gave other numbers)" in whole.how

    def test_calls_of_a_shared_module_are_told_apart(self):
        a, b = built(Shares), built(Shares, seed=1)
        network = joined(a, "relu#2", b, "relu#2", (6,), (6,))
        x = torch.randn(7, 5, dtype=torch.float64)
        middle = network.transformation(a.two(a.one(x).relu()).relu())
        assert torch.allclose(network(x), b.out(middle))
        crossed = joined(a, "relu", b, "relu#2", (8,), (6,))
        assert torch.allclose(crossed(x), b.out(crossed.transformation(a.one(x).relu())))


class TestCuts:
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)

    @pytest.mark.parametrize("layer", ["stem", "blocks", "blocks.0", "blocks.1", "blocks.0.relu", "blocks.1.relu"])
    def test_residual_blocks_are_cut_around(self, layer):
        assert cuts_truly(built(Residual), layer, self.x)

    def test_a_layer_inside_a_residual_block_is_refused_naming_the_block(self):
        model = built(Residual)
        sentence = "layer 'blocks.1.conv' of 'b' has a path around it.*beside the stitch; choose 'blocks.1', which enc"
        with pytest.raises(ValueFault, match=sentence):
            cuts_truly(model, "blocks.1.conv", self.x)
        assert not any(module._forward_hooks for module in model.modules())

    def test_deeper_inside_the_nearest_good_module_is_named(self):
        model = nn.Sequential(built(Residual))
        model[0].blocks[0].conv = nn.Sequential(model[0].blocks[0].conv, nn.Tanh())
        with pytest.raises(ValueFault, match="choose '0.blocks.0', which encloses both"):
            cuts_truly(model, "0.blocks.0.conv.0", self.x)

    def test_a_path_around_with_no_module_around_both_is_refused(self):
        class Skips(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(5, 5)

            def forward(self, x):
                return x + self.inner(x)

        with pytest.raises(ValueFault, match="choose a layer that all paths lead through"):
            cuts_truly(built(Skips), "inner", torch.randn(4, 5, dtype=torch.float64))

    def test_what_depends_on_the_data_is_not_cut(self):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 4)

            def forward(self, x):
                x = self.one(x)
                return self.two(x if x.sum() > 0 else -x)

        assert not cuts_truly(built(Branches), "one", torch.randn(4, 5, dtype=torch.float64))


def test_gradient_flags_are_given_back():
    model = built(Rows)
    model.mid.requires_grad_(False)
    before = frozen(model)
    assert not any(weight.requires_grad for weight in model.parameters())
    thawed(before)
    assert model.front.weight.requires_grad
    assert not model.mid.weight.requires_grad
