"""Recurrent networks: hidden states over time as rows, on a small run that is trained here."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.sources import load_data, load_model
from netkin.sources.architectures import seeded

MODEL = "netkin:char_lstm,vocabulary=12,width=16,depth=2"
SENTENCE = "the rain in spain "


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A character LSTM trained on one sentence over and over, its checkpoints in a folder beside the text."""
    place = tmp_path_factory.mktemp("lstm")
    (place / "text.txt").write_text(SENTENCE * 60)
    (place / "run").mkdir()
    model = seeded(lambda: load_model(MODEL), 0)
    pieces = next(iter(load_data(f"text,window=18:{place / 'text.txt'}", batch_size=60)))

    def keep(model, step):
        if step % 10 == 0:
            torch.save(model.state_dict(), place / "run" / f"step_{step}.pt")

    keep(model, 0)
    recipe = nk.Recipe(steps=40, batch=60, order="given", optimizer="adam", lr=0.02)
    assert nk.train(model, pieces, recipe, hooks=[keep])[-1]["loss"] < 0.3
    return place


@pytest.fixture
def text(trained):
    return load_data(f"text,window=18:{trained / 'text.txt'}", batch_size=16)


def test_the_layers_of_an_lstm_are_followed_with_hidden_states_as_rows(trained, text):
    series = nk.dynamics(trained / "run", text, model=MODEL, shape="tokens")
    assert series.layers == ("embedding", "lstm1", "lstm2", "out")
    assert series[0].shapes_a["lstm1"] == "tokens"
    own = series.own()
    assert (own[0, 1:3] < own[3, 1:3]).all()
    np.testing.assert_allclose(own[-1], 1, atol=1e-6)


def test_the_rows_are_the_hidden_states_at_all_times(trained, text):
    series = nk.dynamics(trained / "run", text, "cka", model=MODEL, shape="tokens", layers="LSTM", examples=40)
    states = []
    for step in (10, 40):
        model = load_model(f"{MODEL}@{trained / 'run' / f'step_{step}.pt'}")
        pieces = torch.cat([inputs for inputs, _ in text])[:40]
        with torch.no_grad():
            hidden, _ = model.lstm1(model.embedding(pieces))
        states.append(hidden.double().reshape(-1, 16).numpy())
    X, Y = (Z - Z.mean(0) for Z in states)
    cka = np.linalg.norm(X.T @ Y) ** 2 / np.linalg.norm(X.T @ X) / np.linalg.norm(Y.T @ Y)
    assert series[10]["lstm1", "lstm1"] == pytest.approx(cka, abs=1e-6)
    assert len(states[0]) == 40 * 18


def test_an_lstm_that_learns_one_layer_at_a_time_is_read_as_such(trained, text):
    start, end = (torch.load(trained / "run" / f"step_{s}.pt", weights_only=True) for s in (0, 40))
    grown = {
        0: start,
        10: start | {k: v for k, v in end.items() if k.startswith(("embedding", "lstm1"))},
        20: start | {k: v for k, v in end.items() if not k.startswith("out")},
        30: end,
    }
    series = nk.dynamics(grown, text, model=MODEL, shape="tokens", layers=nn.LSTM)
    assert series.reached(0.999) == {"lstm1": 10, "lstm2": 20}
    assert series.bottom_up(0.999).tau == 1
