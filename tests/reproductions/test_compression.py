"""The claim about compression, on a small network: what it measures is what it says."""

import pytest

from netkin.sources.architectures import svcca_convnet
from reproductions import laboratory
from reproductions.laboratory import Lab, Recipe
from reproductions.svcca import compression


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of digits with a small network, trained for an epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETKIN_DATA", raising=False)
        small = {"convnet": Recipe(lambda: svcca_convnet(width=1), epochs=1, batch=64, rate=0.02)}
        patch.setitem(laboratory.RECIPES, "cpu", small)
        yield Lab("cpu", cache=tmp_path_factory.mktemp("cache"))


def test_the_top_of_a_network_is_the_network(lab):
    model = lab.trained("convnet", 0).model
    top = compression.Top.of(lab, model)
    assert compression._accuracy(top.net, top.test) == pytest.approx(lab.accuracy(model))


@pytest.mark.slow
def test_compression(lab):
    found = compression.compression(lab)
    assert found.seeds == (0, 1)
    measured = {name: one.value for name, one in found.measured.items()}
    assert measured["fc2: share of its 262,656 parameters at 0.35 of its 512 inputs"] == pytest.approx(0.70, abs=0.001)
    assert measured["out: share of its 5,130 parameters at 0.35 of its 512 inputs"] > 18
    at_all = [lab.accuracy(lab.trained("convnet", seed).model) for seed in (0, 1)]
    assert measured["test accuracy"] == pytest.approx(sum(at_all) / 2)
    line = found.curves["Test accuracy, compressed one after the other"]["against the logits"]
    lost = measured["test accuracy lost with all layers at 0.35, against the logits"]
    assert line[0] - line[-1] == pytest.approx(lost)
    assert lost < 0.05
    few = "fewest directions at a loss of 0.01 on training images: "
    assert 0 < measured[f"{few}share of these layers' parameters"] < 1
    assert measured[f"{few}directions kept of fc1"] < 128
