"""Quantities: what numbers are, declared by measures, scores and accuracies alike."""

import pickle

import pytest

from netkin.applications.stitching.evaluating import SCORES
from netkin.applications.transfer.scores import SCORES as TRANSFER
from netkin.measures import measures
from netkin.measures.registry import find
from netkin.results import Quantity
from netkin.results.quantity import ACCURACY


@pytest.mark.parametrize("name", sorted(measures()))
def test_measures_declare_their_quantity(name):
    measure = find(name)
    quantity = measure.quantity
    assert (quantity.id, quantity.name, dict(quantity.parameters)) == (measure.id, name, measure.settings)
    assert quantity.kind == ("similarity" if measure.facts.higher_is_closer else "distance")
    assert quantity.means
    assert quantity.cannot_see


@pytest.mark.parametrize("scores", [SCORES, TRANSFER])
def test_scores_are_quantities_by_their_names(scores):
    assert all(score.quantity.id == name and score.quantity.is_score for name, score in scores.items())


def test_a_quantity_is_frozen_hashed_and_copied():
    one = Quantity(id="svcca(variance=0.9)", bounds=(0, 1), parameters={"variance": 0.9})
    assert one == pickle.loads(pickle.dumps(one))
    assert one.name == "svcca"
    assert len({one, ACCURACY}) == 2
    with pytest.raises(TypeError):
        one.parameters["variance"] = 0.5
