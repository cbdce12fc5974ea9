import json

from netkin.representations import layers
from netkin.sources import load_model


def test_the_default_layers_are_listed_with_their_types(netkin):
    lines = [line.split() for line in netkin("layers netkin:tiny10").stdout.splitlines()]
    assert [name for name, _ in lines] == layers(load_model("netkin:tiny10"))
    assert dict(lines)["fc"] == "Linear"


def test_all_modules_are_listed_when_asked(netkin):
    listed = json.loads(netkin("layers netkin:digits --all --json").stdout)
    assert listed[0] == {"name": "conv1", "type": "Conv2d"}
    assert {"relu1", "relu4", "bn2", "fc"} <= {layer["name"] for layer in listed}


def test_a_model_that_cannot_be_loaded_is_refused_in_one_sentence(netkin):
    result = netkin("layers netkin:tiny1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("netkin: no reference architecture named 'tiny1'; did you mean 'tiny10'?")
