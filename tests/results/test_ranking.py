"""Rankings: what comes first, by how much, and how a ranking is kept."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import netkin as nk
from netkin.errors import FileError, NoValue
from netkin.results import Ranking, load
from table_worlds import as_caveats, table_of

SIZES = (10, 11, 12, 13, 14, 15)


def table(values, id="logme", spread=0.01, models=("a", "b", "c"), **changes):
    values = np.array([values], dtype=float)
    noise = np.random.default_rng(len(id)).normal(size=(len(SIZES), *values.shape)) * spread
    shares = np.array(SIZES)[:, None, None] / sum(SIZES)
    noise -= ((1 - shares) * noise).sum(0) / (len(SIZES) - 1)
    facts = {"replicates": values + noise, "chunk_sizes": SIZES} if spread else {}
    facts |= {"higher_is_closer": True, "bounds": (-math.inf, math.inf), "symmetric": False, "kind": "score"}
    words = {"convention": f"{id} says so", "statistic": "Evidence", "axes": ("data", "model"), "parameters": {}}
    return table_of(id=id, name=id, layers_a=("digits",), layers_b=models, values=values, **(facts | words | changes))


def ranking(*tables, **changes):
    tables = tables or (table([0.2, 0.9, 0.5]), table([3.0, 1.0, 2.0], "adaptation_score", higher_is_closer=False))
    facts = {"score": tables[0].id, "tables": {one.id: one for one in tables}, "costs": {one.id: 1.0 for one in tables}}
    facts |= {"parameters": {"a": 10, "b": 2_000, "c": 30}, "data": "digits", "examples": 75, "classes": 10}
    return Ranking(**(facts | {"version": "0.1.0", "provenance": {"seed": "0"}} | changes))


def by_hand(value, replicates):
    """The delete-m_j jackknife of Busing et al. (1999), equation by equation."""
    n, total, pseudo = sum(SIZES), 0.0, []
    for size, one in zip(SIZES, replicates, strict=True):
        pseudo.append(n / size * value - (n / size - 1) * one)
        total += (1 - size / n) * one
    estimate = len(SIZES) * value - total
    return math.sqrt(sum((p - estimate) ** 2 / (n / s - 1) for p, s in zip(pseudo, SIZES, strict=True)) / len(SIZES))


def test_models_come_by_their_score_and_the_direction_of_it():
    ranked = ranking()
    assert ranked.models == ("b", "c", "a")
    assert list(ranked) == ["b", "c", "a"]
    assert ranked.best == "b"
    assert (ranked["a"], ranked["a", "adaptation_score"]) == (0.2, 3.0)
    other = ranked.by("adaptation_score")
    assert other.models == ("b", "c", "a")  # the lowest first
    assert other.by("logme") == ranked
    assert other.scores == ("adaptation_score", "logme")


def test_differences_to_the_first_have_errors_of_their_own():
    noise = np.random.default_rng(0).normal(size=(len(SIZES), 1, 1))
    values = np.array([[0.50, 0.49, 0.1]])
    paired = table(values[0], replicates=values + noise + 1e-4 * noise * [1, 2, 3])
    ranked = ranking(paired)
    assert paired.errors.min() > 0.1
    found = ranked.behind()
    assert found["a"].value == 0
    for model, place in (("b", 1), ("c", 2)):
        apart = paired.replicates[:, 0, 0] - paired.replicates[:, 0, place]
        assert found[model].value == pytest.approx(values[0, 0] - values[0, place])
        assert found[model].error == pytest.approx(by_hand(found[model].value, apart))
        assert found[model].clear
    assert ranked.lead.margin_error == pytest.approx(found["b"].error)
    assert ranked.unclear() == ()
    assert (
        "more than its error over these examples (95 % interval), and so are its leads over all other"
        in ranked.conclusion
    )


def test_a_lead_within_its_error_is_said_to_be_none():
    ranked = ranking(table([0.50, 0.49, 0.1], spread=0.05))
    assert ranked.unclear() == ("b",)
    assert "'a' comes first by logme; its lead over 'b' by this score is 0.01" in ranked.conclusion
    assert "not more than its error. These examples cannot distinguish it from 'b'." in ranked.conclusion
    close = ranking(table([0.5] * 6, spread=0.05, models=tuple("abcdef")), parameters={})
    assert "from 'b', 'c', 'd' and 2 more." in close.conclusion
    bare = ranking(table([0.5, 0.4, 0.1], spread=0))
    assert "Without standard errors nothing tells whether that is more than chance." in bare.conclusion
    assert bare.behind()["b"].clear is None


def test_scores_that_disagree_on_the_first_model_are_told():
    other = table([0.9, 0.2, 0.5], "knn")
    same = ranking(table([0.9, 0.2, 0.3]), other, table([0.9, 0.1, 0.1], "gbc", spread=0))
    assert same.agreement == "'a' comes first by knn, gbc, too."
    assert same.conclusion.endswith(same.agreement)
    apart = ranking(table([0.2, 0.9, 0.3]), other, table([0.2, 0.9, 0.9], "gbc"))
    assert apart.agreement.startswith("'b' comes first by gbc, too. Scores disagree: by knn 'a' comes first, 0.7")
    assert apart.agreement.endswith("before 'b', more than its error.")
    assert apart.agreement in " ".join(str(apart).split())
    assert apart.by("knn").agreement.startswith("Scores disagree: by logme 'b' comes first")
    close = ranking(table([0.2, 0.9, 0.3]), table([0.50, 0.49, 0.1], "knn", spread=0.05))
    assert "before 'b', not more than its error." in close.agreement
    below = ranking(table([0.2, 0.9, 0.3]), table([3.0, 2.0, 1.0], "adaptation_score", higher_is_closer=False))
    assert "by adaptation_score 'c' comes first, 1" in below.agreement
    alone = ranking(table([0.2, 0.9, 0.3]))
    assert alone.agreement == ""
    assert alone.conclusion == alone.lead_in_words


def test_how_reliable_a_score_was_is_told_where_it_is_known(tmp_path):
    ranked = ranking(reliability={"logme": (0.66, 0.07)})
    assert "0.66 ± 0.07 by logme" in ranked.reliability_in_words
    assert ranked.reliability_in_words in " ".join(str(ranked).split())
    ranked.save(tmp_path / "r.netkin")
    assert Ranking.load(tmp_path / "r.netkin").reliability == ranked.reliability == {"logme": (0.66, 0.07)}
    assert ranking().reliability_in_words == ""


def test_models_that_a_score_does_not_serve_come_last_with_the_reason():
    hole = {("digits", "b"): "the model has no classes"}
    ranked = ranking(table([0.2, np.nan, 0.5], missing=hole), table([1.0, 2.0, 3.0], "knn"))
    assert ranked.models == ("c", "a", "b")
    assert "b" not in ranked.behind()
    with pytest.raises(NoValue, match="no value for 'digits' and 'b': the model has no classes"):
        ranked["b"]
    assert list(ranked.reasons()) == ["'b' has no value by logme: the model has no classes"]
    assert [cells[0] for cells in ranked.cells()][-1] == "–"
    nothing = ranking(table([np.nan] * 3, missing={("digits", model): "it crashed" for model in "abc"}))
    with pytest.raises(NoValue, match="'logme' has a value for none of the 3 models"):
        _ = nothing.best
    assert nothing.conclusion in str(nothing)
    assert nothing.conclusion == "logme has a value for none of the 3 models."
    alone = ranking(table([np.nan, 1.0, np.nan], missing={("digits", model): "it crashed" for model in "ac"}))
    assert alone.conclusion == "Of 3 models 'b' comes first by logme, the only one with a value."


def test_few_models_and_long_names_are_told_plainly(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    two = ranking(table([0.5, 0.1], models=("a", "b")), parameters={})
    assert two.conclusion.endswith("more than its error over these examples (95 % interval).")
    one = ranking(table([0.5], models=("a",)), parameters={})
    assert one.title == "1 model for digits"
    assert one.conclusion == "Of 1 model 'a' comes first by logme; there is no other."
    names = tuple(f"netkin:{net}@/some/very/long/folder/of/weights/{net}_seed0.pt" for net in ("tiny10", "resnet20"))
    long = ranking(table([0.5, 0.1], models=names), parameters={})
    assert "'tiny10@tiny10' comes first by logme; its lead over 'resnet20@resnet20' by" in long.conclusion
    text = str(long)
    assert "1 tiny10@tiny10" in text
    assert " ".join(text.splitlines()[2].split()) == "logme behind parameters"
    assert all(name in text for name in names)


def test_the_text_and_the_frames_hold_the_same_numbers():
    ranked = ranking(caveats=as_caveats("few examples"))
    text = str(ranked)
    assert "3 models for digits: 75 examples, 10 classes" in text
    assert text.index("b  ") < text.index("c  ") < text.index("a  ")
    assert "cost: 1 forward pass of each model over the examples" in text
    assert text.endswith("warning: few examples")
    assert "logme: score of a model (higher is better)" in str(ranked.table())
    frame, long = ranked.to_pandas(), ranked.to_pandas(long=True)
    assert list(frame.index) == ["b", "c", "a"]
    assert frame.loc["a", "adaptation_score"] == 3.0
    row = long[(long.model == "c") & (long.score == "adaptation_score")].iloc[0]
    assert row.behind == pytest.approx(1.0)
    assert row.error == pytest.approx(ranked.table("adaptation_score").errors[0, 2])


def test_a_ranking_is_frozen_copied_saved_and_read(tmp_path):
    hole = {("digits", "b"): "no classes"}
    ranked = ranking(table([0.2, np.nan, 0.5], missing=hole), table([1.0, 2.0, 3.0], "knn"))
    with pytest.raises(FrozenInstanceError):
        ranked.score = "knn"
    assert copy.deepcopy(ranked) == ranked == pickle.loads(pickle.dumps(ranked))
    ranked.save(tmp_path / "r.netkin")
    assert Ranking.load(tmp_path / "r.netkin") == ranked == load(tmp_path / "r.netkin")
    document = nk.document(ranked)
    assert document["ranks"][0]["model"] == "c"
    assert document["conclusion"] == ranked.conclusion
    json.dumps(document, allow_nan=False)
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileError, match="note.txt"):
        ranked.save(tmp_path / "note.txt")
    assert ranked != ranking()
