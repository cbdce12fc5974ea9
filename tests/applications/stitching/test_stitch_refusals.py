"""What `stitch` refuses: each in one sentence, with the models left as they were."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching import fit_all, stitch
from netkin.errors import ForwardError, InvalidValue, NoValue, ShapeError, UnknownName
from netkin.sources.architectures import architecture, seeded
from refusals import refused
from stitching_worlds import Maps, Rows, built, drawn, labelled

IMAGES = (3, 12, 12)


class AlwaysDrops(nn.Module):
    """Dropout that `eval()` does not switch off."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize(
    "x, y, options, error, sentence",
    [
        ("fron", "mid", {}, UnknownName, "in 'a', a Maps: no layer named 'fron'; did you mean 'front'[?]"),
        ("mid", "mids", {}, UnknownName, "in 'b', a Maps: no layer named 'mids'; did you mean 'mid'[?]"),
        ("*", "mid", {}, UnknownName, "matches 4 layers, and one is needed"),
        ("mid", "mid", {"method": "least_square"}, UnknownName, "did you mean 'least_squares'[?]"),
        (
            "mid",
            "mid",
            {"epochs": 3},
            UnknownName,
            "'least_squares' has no option 'epochs'; such options belong to",
        ),
        ("mid", "mid", {"method": "task_loss", "epoch": 3}, TypeError, "argument 'epoch'; did you mean 'epochs'"),
        (
            "mid",
            "mid",
            {"method": "taskloss"},
            UnknownName,
            "did you mean 'task_loss'[?] There are .*random, task_loss",
        ),
        (
            "mid",
            "mid",
            {"method": nk.TaskLoss(), "epochs": 3},
            InvalidValue,
            "`epochs` is given as well as a `TaskLoss`; set it there",
        ),
        ("mid", "mid", {"device": "cuda:99"}, UnknownName, "there is no device 'cuda:99' here; leave `device` out"),
        ("mid", "mid", {"resize": "cubic"}, UnknownName, "`resize` is None, 'average'"),
        ("mid", "mid", {"names": ("one",)}, InvalidValue, "`names` must be two, one for each model, such as"),
        ("mid", "mid", {"examples": 0}, InvalidValue, "`examples` must be a whole number of 1 or more; got 0"),
        ("out", "mid", {}, ShapeError, "rows have no positions, so rows of width 4 can't be stitched into maps"),
        ("mid", "mid", {"method": "reduced_rank(k=9)"}, InvalidValue, "between 1 and the smaller width, 6; got 9"),
    ],
)
def test_one_sentence(x, y, options, error, sentence):
    a, b = built(Maps), built(Maps, seed=1)
    with pytest.raises(error, match=sentence):
        stitch(a, x, b, y, labelled(b, *IMAGES), **options)
    assert not any(module._forward_hooks for model in (a, b) for module in model.modules())


def test_what_is_no_model():
    for models in ((1, built(Rows)), (built(Rows), 2)):
        with pytest.raises(InvalidValue, match="a model must be a `torch.nn.Module`; got int."):
            stitch(models[0], "mid", models[1], "mid", drawn(9, 5))


def test_an_iterator_is_no_data_to_train_on():
    with refused(InvalidValue, "data"):
        stitch(built(Rows), "mid", built(Rows), "mid", iter(labelled(built(Rows), 5)), "task_loss")


def test_no_pairs():
    with refused(InvalidValue, "pairs"):
        fit_all(built(Rows), built(Rows), [], torch.ones(4, 5))


def test_outputs_that_depend_on_the_batch():
    def net(seed):
        return built(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False)), seed=seed)

    with pytest.raises(InvalidValue, match="layer '1' of 'a' gives other values for an example when other examples"):
        stitch(net(0), "1", net(1), "1", drawn(20, 5))


@pytest.mark.parametrize(
    "after, sentence",
    [
        (
            lambda: nn.BatchNorm1d(6, track_running_stats=False),
            "'b' gives other answers for an example when other examples are in its batch [(]by",
        ),
        (AlwaysDrops, "'b' answers the same examples differently when it is asked again [(]by .*draws nothing at"),
    ],
)
def test_answers_that_depend_on_more_than_the_example(after, sentence):
    a = built(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)))
    b = built(lambda: nn.Sequential(nn.Linear(5, 6), after(), nn.Linear(6, 4)), seed=1)
    with pytest.raises(InvalidValue, match=sentence):
        stitch(a, "0", b, "0", drawn(20, 5))


def test_nan_in_the_weights_after_the_layer():
    a, b = built(Rows), built(Rows, seed=1)
    with torch.no_grad():
        b.out.weight[0, 0] = float("nan")
    with pytest.raises(InvalidValue, match="the output of 'new' holds 4 NaN or Inf among 16 values for the first 4"):
        stitch(a, "mid", b, "mid", drawn(20, 5), names=("old", "new"))


def test_nan_in_the_activations():
    a, b = built(Rows), built(Rows, seed=1)
    data = labelled(b, 5)
    data[1][0][3] = float("nan")
    with pytest.raises(InvalidValue, match="layer 'mid' of 'a' in batch 1 holds 6 NaN or Inf among 240 values"):
        stitch(a, "mid", b, "mid", data)


def test_nan_in_the_answers():
    a, b = built(Rows), built(Rows, seed=1)
    found = stitch(a, "mid", b, "mid", labelled(b, 5))
    with torch.no_grad():
        b.out.weight[0, 0] = float("nan")
    sentence = "the second model in batch 0 gives 40 NaN or Inf among 160 scores; fix the model or leave out"
    with pytest.raises(ForwardError, match=sentence):
        found.evaluate(labelled(a, 5))


def test_nan_in_the_answers_of_the_stitched_network_alone():
    class Grows(Rows):
        def forward(self, x):
            return self.out(self.after(self.mid(self.front(x).relu()).exp()))

    a, b = built(Rows), built(Grows, seed=1)
    found = stitch(a, "mid", b, "mid", labelled(b, 5))
    with torch.no_grad():
        found.transformation.shift.add_(1e3)
    with pytest.raises(ForwardError, match="the stitched network in batch 0 gives 160 NaN or Inf among 160 scores"):
        found.evaluate(labelled(b, 5))


def test_nan_in_the_test_data():
    a, b = built(Rows), built(Rows, seed=1)
    found = stitch(a, "mid", b, "mid", labelled(b, 5), names=("old", "new"))
    test = labelled(b, 5)
    test[1][0][3] = float("nan")
    sentence = "what the stitch makes of layer 'mid' of 'old' in batch 1 holds 6 NaN or Inf among 240 values"
    with pytest.raises(InvalidValue, match=sentence):
        found.evaluate(test)


def test_a_layer_that_does_not_run():
    model = built(Rows)
    model.idle = nn.Linear(5, 5)
    with pytest.raises(ForwardError, match="layer 'idle' did not run in the forward of this batch; choose"):
        stitch(model, "idle", built(Rows), "mid", drawn(9, 5))
    with pytest.raises(ForwardError, match="layer 'idle' of 'a' did not run"):
        fit_all(model, built(Rows), [("idle", "mid"), ("mid", "mid")], drawn(9, 5))


def test_outputs_that_are_no_scores():
    a, b = built(Maps), built(lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)), seed=1)
    with pytest.raises(ShapeError, match=r"output has shape \(20, 2, 10, 10\); a stitch is evaluated by the scores"):
        stitch(a, "front", b, "0", drawn(20, *IMAGES), test=drawn(20, *IMAGES, seed=1))


def test_labels_of_another_shape():
    a, b = (seeded(architecture("char_lstm,width=6,vocabulary=20"), seed).eval() for seed in (0, 1))
    text = torch.randint(0, 20, (30, 7), generator=torch.Generator().manual_seed(0))
    sentence = r"the labels have shape \(30,\), and the second model answers for 30 × 7 places; give one label for"
    with pytest.raises(ShapeError, match=sentence):
        stitch(a, "lstm1", b, "lstm1", [text], test=[(text, text[:, 0])])


def test_a_constant_layer():
    a, b = built(Rows), built(Rows, seed=1)
    nn.init.zeros_(a.mid.weight)
    with pytest.raises(NoValue, match="layer 'mid' of 'a' is constant over the 120 examples"):
        stitch(a, "mid", b, "mid", labelled(b, 5))
    nn.init.zeros_(b.mid.weight)
    found = stitch(built(Rows), "mid", b, "mid", labelled(b, 5), test=labelled(b, 5))
    assert (found.evaluation.r2, found.evaluation.cka) == (None, None)
    assert found.evaluation.agreement == 1
