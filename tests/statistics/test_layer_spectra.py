"""`LayerSpectra` as a statistic: batches, merging, files, the sample; and what spectra refuse."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.measures import measures
from netkin.statistics import LayerMoments, LayerSpectra, Spectra
from quickly import slow_after
from refusals import refusals


def streamed(layers, sizes, pair_blocks, first=0):
    """Return the spectra of layers in batches of these sizes, whose examples are numbered from `first` on."""
    collector, start = LayerSpectra(pair_blocks), 0
    for size in sizes:
        numbers = first + np.arange(start, start + size)
        collector.update({name: maps[start : start + size] for name, maps in layers.items()}, numbers)
        start += size
    return collector


@pytest.fixture
def mixed(worlds):
    """Layers of 8 × 8, 8 × 8, 4 × 4, 4 × 8 and no space, 300 examples that grow and drift."""
    drift = np.linspace(0, 3, 300)
    sizes = {"a": (3, 8, 8), "b": (2, 8, 8), "c": (4, 4, 4), "d": (2, 4, 8), "e": (5,)}
    hidden = worlds.normal(300, 1)
    return {
        name: worlds.normal(300, *size) * (1 + drift.reshape(-1, *[1] * len(size))) * np.linspace(0.2, 3, size[-1])
        + (hidden + drift[:, None]).reshape(-1, *[1] * len(size))
        for name, size in sizes.items()
    }


ALL = [(["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "e"])]


def same(one, other, names=("cka", "cca_mean", "cka_uncentered", "linear_regression_r2", "magnitude_difference")):
    for a in "abcde":
        for b in "abcde":
            for name in names:
                values = [float(measures()[name](collector[a, b])) for collector in (one, other)]
                assert values[0] == pytest.approx(values[1], abs=1e-9), (a, b, name)


@pytest.mark.parametrize(
    "sizes", slow_after(1, [[300], [1] * 300, [7, 93, 150, 50], [299, 1]]), ids=["one", "ones", "some", "last"]
)
def test_batches_do_not_matter(mixed, sizes):
    same(streamed(mixed, sizes, ALL), streamed(mixed, [128, 128, 44], ALL))


def test_streamed_pairs_are_those_of_whole_arrays(mixed):
    collector = streamed(mixed, [50] * 6, ALL)
    for a in "abcde":
        for b in "abcde":
            direct = float(nk.cca_mean(Spectra.of(mixed[a], mixed[b])))
            assert float(nk.cca_mean(collector[a, b])) == pytest.approx(direct, abs=1e-10), (a, b)


def test_layers_without_space_give_what_moments_give(mixed):
    moments = LayerMoments([(["e"], ["e"])])
    moments.update({"e": mixed["e"]})
    pair = streamed(mixed, [300], ALL)["e", "e"]
    sums = [one.cross.numpy() / one.x.scale**2 for one in (pair, moments["e", "e"])]
    assert sums[0] == pytest.approx(sums[1], rel=1e-10)
    assert not pair.cross.is_complex()


def halves(mixed, first=110):
    parts = [{name: maps[:first] for name, maps in mixed.items()}, {name: maps[first:] for name, maps in mixed.items()}]
    return [streamed(part, [len(part["a"])], ALL, start) for part, start in zip(parts, (0, first), strict=True)]


def test_merging_is_as_good_as_one_pass(mixed):
    one, other = halves(mixed)
    whole = streamed(mixed, [300], ALL)
    same(one.merge(other), whole)
    same(other.merge(one), whole)
    assert one.n == 110  # neither is changed
    assert one.merge(other).n == 300


def test_merging_with_an_empty_one_changes_nothing(mixed):
    whole, empty = streamed(mixed, [300], ALL), LayerSpectra(ALL)
    same(whole.merge(empty), whole)
    same(empty.merge(whole), whole)


def test_a_part_that_does_not_vary_takes_the_scale_of_the_other(worlds):
    still, moving = np.full((9, 2, 4, 4), 7.0), 7.0 + worlds.normal(40, 2, 4, 4) * 1e12
    parts = []
    for maps in (still, moving):
        collector = LayerSpectra([(["x"], ["x"])])
        collector.update({"x": maps})
        parts.append(collector)
    whole = Spectra.of(np.concatenate([still, moving]), np.concatenate([still, moving]))
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert float(merged["x", "x"].x.total / merged["x", "x"].x.scale ** 2) == pytest.approx(
            float(whole.x.total / whole.x.scale**2), rel=1e-9
        )


def test_merged_samples_hold_examples_of_both(mixed):
    one, other = halves(mixed)
    merged = one.merge(other)
    assert merged.sampled_rows.n == 64
    assert 0 <= merged.off_block_share("a") < 1


def test_what_differs_is_not_merged(mixed):
    whole = streamed(mixed, [300], ALL)
    refusals(
        (lambda: whole.merge(LayerSpectra([(["a"], ["b"])])), ShapeError, ""),
        (lambda: whole.merge(LayerSpectra(ALL, precision=torch.float32)), ShapeError, ""),
        (lambda: whole.merge(LayerMoments(ALL)), ShapeError, ""),
    )
    smaller = streamed({**mixed, "a": mixed["a"][..., :4]}, [300], ALL)
    with pytest.raises(ShapeError, match=r"their sizes differ.*'a': \(3, 8, 8\).*'a': \(3, 8, 4\)"):
        whole.merge(smaller)


def test_the_callers_array_may_change_afterwards(worlds):
    maps, collector = worlds.normal(30, 2, 4, 4), LayerSpectra([(["x"], ["x"])])
    buffer = maps.copy()
    collector.update({"x": buffer})
    buffer[:] = 0
    assert float(collector["x", "x"].x.total) == pytest.approx(float(Spectra.of(maps, maps).x.total))


def test_the_share_off_the_blocks_comes_from_the_sample(mixed):
    collector = streamed(mixed, [100] * 3, ALL)
    assert collector.sampled_rows.n == 64
    assert collector.off_block_share("a") > collector.off_block_share("a", "c")
    assert collector.off_block_share("a", "e") == collector.off_block_share("a")
    small = streamed({name: maps[:20] for name, maps in mixed.items()}, [20], ALL)
    assert small.off_block_share("b") == pytest.approx(nk.off_block_share(mixed["b"][:20]), abs=1e-12)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_map_that_does_not_vary_has_no_value(worlds):
    still, moving = np.full((30, 2, 4, 4), 1e6), worlds.normal(30, 2, 4, 4)
    with pytest.raises(NoValue, match=r"layer 'X' is constant over the 30 examples \(width 32\)"):
        nk.cka(Spectra.of(still, moving))
    stuck = (still + 1e-12 * moving).astype(np.float32)
    with pytest.raises(NoValue, match="layer 'Y' is constant over the 30 examples"):
        nk.cca_mean(Spectra.of(moving, stuck))
    with pytest.raises(NoValue, match="layer 'X' is constant over the 1 examples"):
        nk.cka(Spectra.of(moving[:1], moving[:1]))


def test_rounding_of_a_large_offset_is_no_variation(worlds):
    noise = np.float32(1e6) + np.spacing(np.float32(1e6)) * worlds.rng.integers(-1, 2, size=(30, 2, 5, 5)) / 2
    with pytest.raises(NoValue, match="is constant"):
        nk.cka(Spectra.of(noise.astype(np.float32), worlds.normal(30, 2, 5, 5)))


def test_a_channel_that_is_stuck_far_off_does_not_hide_the_others(worlds):
    maps = worlds.normal(30, 2, 4, 4)
    maps[:, 0] = 1e9
    assert float(nk.cka(Spectra.of(maps, maps))) == pytest.approx(1)
    assert Spectra.of(maps, maps).x.rank == 16


def test_maps_constant_over_space_have_the_rank_of_their_means(worlds):
    flat = np.broadcast_to(worlds.normal(40, 3, 1, 1), (40, 3, 5, 7)).copy()
    assert Spectra.of(flat, flat).x.rank == 3
    assert Spectra.of(flat.astype(np.float32), flat).x.rank == 3


def test_measures_of_units_and_debiasing_sums_say_why_they_have_no_value(worlds):
    spectra = Spectra.of(worlds.normal(30, 2, 4, 4), worlds.normal(30, 2, 4, 4))
    with pytest.raises(
        NoValue,
        match="layer 'X' is held as spectra, whose frequencies cover all positions",
    ):
        nk.pwcca(spectra)
    with pytest.raises(
        NoValue, match="layer 'X' is held as spectra, which have no rows and no debiasing sums; use.*'flatten'"
    ):
        nk.cka_debiased(spectra)
    with pytest.raises(NoValue, match="layer 'X' is held as spectra, which have no rows and no debiasing sums"):
        spectra.x.norm_squares  # noqa: B018


def test_few_examples_are_counted_against_one_frequency(worlds):
    spectra = Spectra.of(worlds.normal(6, 3, 4, 4), worlds.normal(6, 4, 4, 4))
    assert "6 examples are fewer than the 3 + 4 features of the two layers at each frequency" in str(
        spectra.few_examples
    )
    assert Spectra.of(worlds.normal(7, 3, 4, 4), worlds.normal(7, 4, 4, 4)).few_examples is None


def test_an_infinite_information_is_refused_with_the_features_of_one_frequency(worlds):
    maps = worlds.normal(30, 2, 4, 4)
    with pytest.raises(NoValue, match="32 of 32 canonical correlations are 1.*more than the 4 features of both"):
        nk.gaussian_mutual_information(Spectra.of(maps, maps))


def test_what_a_device_was_not_waited_for_to_tell_is_refused_on_reading(worlds):
    broken = torch.from_numpy(worlds.normal(70, 2, 4, 4))
    broken[3] = torch.inf
    collector = LayerSpectra([(["x"], ["x"])])
    collector._fold({"x": [broken]}, {})  # as on a GPU, where maps are not looked at before they are read
    with pytest.raises(InvalidValue, match="layer 'x' gave NaN or Inf; fix the model or leave out the examples"):
        collector["x", "x"]


def test_sizes_that_do_not_divide_each_other_share_no_frequencies(worlds):
    with pytest.raises(NoValue, match="layer 'X' has maps of 6 × 6 and layer 'Y' of 4 × 4, .*share no frequencies"):
        Spectra.of(worlds.normal(9, 2, 6, 6), worlds.normal(9, 2, 4, 4))


def test_maps_at_hand_have_gradients(mixed):
    maps = {name: torch.tensor(mixed[name], requires_grad=True) for name in "ac"}
    pair = Spectra.of(maps["a"], maps["c"])
    nk.nbs(pair).backward()
    direction = torch.randn(maps["a"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = [nk.nbs(Spectra.of(maps["a"].detach() + step * direction, maps["c"].detach())) for step in (-1e-5, 1e-5)]
    assert float((maps["a"].grad * direction).sum()) == pytest.approx(float(ends[1] - ends[0]) / 2e-5, rel=1e-5)


def test_a_layer_that_begins_to_vary_within_a_fold_is_summed_in_its_new_unit():
    draw = torch.Generator().manual_seed(0)
    maps = 1e9 * torch.randn(600, 2, 4, 4, generator=draw, dtype=torch.float64)
    maps[:300] = 5e9  # the first examples that are transformed together are all alike
    other = torch.randn(600, 3, 4, 4, generator=draw, dtype=torch.float64)
    collector = LayerSpectra([(["a"], ["b"])])
    collector.update({"a": maps, "b": other})
    pair = collector["a", "b"]
    X, Y = ((one - one.mean(0)).numpy() for one in (maps, other))
    assert float(pair.x.total) / pair.x.scale**2 == pytest.approx((X**2).sum(), rel=1e-12)
    products = np.einsum("nchw,ndhw->cd", X, Y)  # the transform keeps them, summed over its frequencies
    found = pair.cross.sum(0).real / pair.x.scale / pair.y.scale
    assert found.numpy() == pytest.approx(products, rel=1e-9)


def test_maps_of_other_examples_or_with_nan_and_maps_of_another_form_are_refused(worlds):
    maps, collector = worlds.normal(5, 2, 8, 8), LayerSpectra([(["x"], ["x"])])
    with pytest.raises(ShapeError, match="`X` and `Y` must describe the same examples; got 5 and 4"):
        Spectra.of(maps, maps[:4])
    with pytest.raises(InvalidValue, match="`Y` holds 1 NaN or Inf"):
        Spectra.of(maps, np.where(np.arange(maps.size).reshape(maps.shape) == 3, np.nan, maps))
    collector.update({"x": maps})
    for other in (worlds.normal(3, 2, 4, 16), worlds.normal(3, 128)):  # of as many numbers
        with pytest.raises(ShapeError):
            collector.update({"x": other})
