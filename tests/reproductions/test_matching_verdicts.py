"""The verdicts of the claims about stitching, on numbers that are made up."""

from types import SimpleNamespace

import numpy as np
import pytest

from reproductions.claims import verdict
from reproductions.laboratory import Lab
from reproductions.matching import indices, kinds, restricted, starts, sweeps


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A laboratory of digits, in which nothing is trained."""
    for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)
    return Lab("cpu", cache=tmp_path)


def test_soft_and_true_labels_are_compared_pair_by_pair_and_with_another_pair(lab, monkeypatch):
    shared = {("soft", layer): [0.1 * k, 0.2] for k, layer in enumerate("abcd")}
    shared |= {("true", layer): [0.1 * k + 0.01, 0.3 - 0.1 * k] for k, layer in enumerate("abcd")}
    monkeypatch.setattr(sweeps, "wishes", lambda lab, kind, way: {layer: [] for layer in "abcd"})
    monkeypatch.setattr(sweeps, "shares", lambda lab, wanted: shared)
    found = sweeps.labels(lab)
    assert found.measured[sweeps.TOGETHER].value == pytest.approx(np.mean([1, 0]))  # a line that stands still has none
    assert found.controls[sweeps.TOGETHER].value == pytest.approx(np.mean([-1, 0]))


@pytest.mark.parametrize(
    "later, first, judgement",
    [
        ((0.001, 0.002, 0.0), (-0.2, -0.21, -0.19), "holds"),
        ((0.06, 0.061, 0.06), (-0.2, -0.21, -0.19), "does not hold"),
        ((0.001, 0.002, 0.0), (0.001, 0.002, 0.0), "does not hold"),  # the control does as well
        ((0.03, -0.03, 0.0), (-0.2, -0.21, -0.19), "undecided"),
    ],
)
def test_procrustes_must_equal_least_squares_at_later_layers_and_not_at_the_first(
    lab, monkeypatch, later, first, judgement
):
    names = {kind: ["x", "y", "z", *sweeps.LATER[kind]] for kind in sweeps.NAMES}
    asked = {kind: {layer: [SimpleNamespace(a="a", b="b", layer=layer)] for layer in found}
             for kind, found in names.items()}  # fmt: skip
    monkeypatch.setattr(sweeps, "wishes", lambda lab, kind, way: asked[kind])
    monkeypatch.setattr(sweeps, "made", lambda lab, wanted: {})
    exact = sweeps.Sweep({layer: [_score(0.9)] * 3 for kind in names for layer in names[kind]})

    def swept(wish, stitches):
        rotated = {layer: [_score(0.9 + gap) for gap in (first if layer in "xyz" else later)] for layer in wish}
        made_up = isinstance(next(iter(wish.values()))[0], SimpleNamespace)
        return sweeps.Sweep(rotated if made_up else {layer: exact.by_layer[layer] for layer in wish})

    monkeypatch.setattr(sweeps, "_sweep", swept)
    found = sweeps.procrustes(lab)
    assert found.verdict == judgement
    assert found.measured[f"Tiny-10: {sweeps.LATEST}"].value == pytest.approx(np.mean(later))
    assert found.controls[f"Tiny-10: {sweeps.LATEST}"].value == pytest.approx(np.mean(first))


def _score(share):
    """A stitch of this relative accuracy."""
    return SimpleNamespace(evaluation=SimpleNamespace(relative_accuracy=share, cross_entropy=1.0))


@pytest.mark.parametrize(
    "ours, control, judgement",
    [
        ((0.97, 0.98, 0.99), 0.5, "holds"),
        ((0.80, 0.81, 0.79), 0.5, "does not hold"),
        ((0.97, 0.98, 0.99), 1.1, "does not hold"),  # an untrained first network does as well
        ((0.97, 0.80, 0.95), 0.5, "undecided"),
    ],
)
def test_task_loss_from_least_squares_must_be_better_than_least_squares(lab, monkeypatch, ours, control, judgement):
    def sweep(shares):
        return sweeps.Sweep({"x": [_score(share) for share in shares], "y": [_score(share) for share in shares]})

    ways = {"least_squares": sweep((0.9, 0.9, 0.91)), "task_loss": sweep(ours)}
    ways["from an untrained network"] = sweep([control, control, control + 0.001])
    monkeypatch.setattr(
        sweeps, "sweeps", lambda lab, *asked: {kind: {w: ways[w] for w in asked} for kind in sweeps.NAMES}
    )
    monkeypatch.setattr(sweeps, "origin", lambda lab, *kinds: "made up")
    found = sweeps.task_loss_from_least_squares(lab)
    assert found.verdict == judgement
    gain = np.mean(np.array(ours) - [0.9, 0.9, 0.91])
    assert found.measured[f"Tiny-10: {sweeps.GAIN_FROM_DIRECT}"].value == pytest.approx(gain)


@pytest.mark.parametrize(
    "slopes, rise, judgement",
    [
        ((0, 0, 0), 0.1, "holds"),
        ((0.1, 0.11, 0.12), 0.1, "holds in part"),
        ((-0.1, -0.11, -0.1), 0.1, "holds in part"),
        ((0.1, -0.11, 0.1), 0.1, "undecided"),
        ((0.1, 0.11, 0.12), -0.1, "does not hold"),  # from a random map CKA falls as much
    ],
)
def test_svcca_must_not_correlate_with_the_performance_in_either_direction(lab, monkeypatch, slopes, rise, judgement):
    courses = [[_record(step, slope, -0.1 - 0.001 * k) for step in range(4)] for k, slope in enumerate(slopes)]
    control = [[_record(step, 0, rise + 0.001 * k) for step in range(4)] for k in range(len(slopes))]
    monkeypatch.setattr(indices, "_courses", lambda lab, **options: control if options else courses)
    found = indices.indices_and_training(lab)
    assert found.verdict == judgement
    expected = np.mean([np.sign(slope) for slope in slopes])
    assert found.measured[indices.UNRELATED].value == pytest.approx(expected)


def _record(step, slope, cka):
    """The record of a training in which all goes straight."""
    record = {"loss": 2.0 - 0.1 * step - 0.001 * step * abs(cka), "r2": 0.8 - 0.1 * step, "cka": 0.5 + cka * step}
    return record | {"step": step, "accuracy": 0.1 * step, "cca": 0.5, "svcca": 0.7 + slope * step}


@pytest.mark.parametrize(
    "low, full, judgement",
    [
        (0.3, 0.01, "holds"),
        (0.01, 0.3, "does not hold"),  # the gain has nothing to do with the rank
        (-0.2, 0.01, "does not hold"),
    ],
)
def test_the_task_loss_must_gain_more_at_a_low_rank_than_at_full_rank(lab, monkeypatch, low, full, judgement):
    def shares(lab, wanted):
        gained = {(how, k): (low if k else full) * (how == restricted.TRAINED) for how, _, k in wanted}
        return {(how, layer, k): [0.5 + gained[how, k] * (1 + 0.01 * n) for n in range(3)] for how, layer, k in wanted}

    monkeypatch.setattr(restricted, "shares", shares)
    monkeypatch.setattr(restricted, "pairs", lambda *_: [("a", "b")] * 3)
    monkeypatch.setattr(restricted, "layers", lambda *_: dict.fromkeys(restricted.LAYERS, "bn"))
    monkeypatch.setattr(restricted, "origin", lambda *_: "")
    found = restricted.low_rank(lab)
    assert found.verdict == judgement
    name = "Layer 3, rank 4: relative accuracy, task loss minus SVD"
    assert (found.measured[name].value, found.controls[name].value) == pytest.approx((low * 1.01, full * 1.01))


@pytest.mark.parametrize(
    "random, aimless, direct, judgement",
    [
        ((0.93, 0.94, 0.935), (0.3, 0.31, 0.3), (0.96, 0.961, 0.962), "holds"),
        ((0.93, 0.94, 0.935), (0.93, 0.94, 0.935), (0.96, 0.961, 0.962), "holds in part"),  # the control does as well
        ((0.93, 0.94, 0.935), (0.3, 0.31, 0.3), (0.91, 0.911, 0.912), "holds in part"),  # random starts end higher
        ((0.3, 0.31, 0.3), (0.3, 0.31, 0.3), (0.8, 0.961, 0.962), "does not hold"),
    ],
)
def test_random_starts_must_end_near_the_direct_ones_and_more_so_than_without_training(
    lab, monkeypatch, random, aimless, direct, judgement
):
    def shares(lab, wanted):
        assert [nets[0].startswith("untrained-") for nets, _ in wanted] == [False, False, True]
        return dict(zip(wanted, (random, direct, aimless), strict=True))

    monkeypatch.setitem(starts.STARTS, "cpu", 3)
    monkeypatch.setattr(starts, "shares", shares)
    monkeypatch.setattr(starts, "pairs", lambda *_: [("a/0", "b/0")])
    monkeypatch.setattr(starts, "layers", lambda *_: {starts.LAYER: "bn3"})
    monkeypatch.setattr(starts, "origin", lambda *_: "")
    found = starts.starts(lab)
    assert found.verdict == judgement
    assert found.controls["relative accuracy from random starts"].value == pytest.approx(np.mean(aimless))


def test_the_trend_over_widths_is_taken_within_layers_and_by_pair():
    rising = {(f"resnet20w{w}", layer): [base + 0.01 * w, base - 0.01 * w]
              for w in kinds.WIDTHS for layer, base in (("low", 0.1), ("high", 0.9))}  # fmt: skip
    assert kinds._trend(rising, ("low", "high"), 0) > 0.98
    assert kinds._trend(rising, ("low", "high"), 1) < -0.98


def test_sparse_lines_are_read_between_their_points():
    assert restricted._read([(0.0, 1.0), (0.9, 0.1), (0.5, 0.9)], [0.25, 0.7]) == pytest.approx([0.95, 0.5])
    assert np.isnan(restricted._read([(0.0, 1.0), (0.1, 0.9)], [0.85])).all()  # nothing is read beyond the sparsest


def test_a_line_that_ends_early_supports_no_claim():
    whole = {"direct": [0.9] * 3, "task loss": [0.9] * 3}
    ends = {"direct": [0.2, 0.21, 0.2], "task loss": [0.8, 0.8, 0.81], "pruned": [0.3, 0.31, 0.3]}
    assert verdict(restricted._judged(ends, whole)) == "holds"
    as_well = ends | {"pruned": [0.8, 0.81, 0.8]}  # pruning does as well
    assert verdict(restricted._judged(as_well, whole)) == "undecided"
    assert verdict(restricted._judged(ends | {"task loss": [float("nan")] * 3}, whole)) == "does not hold"
