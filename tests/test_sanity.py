"""The sanity check of the field: a layer is closest to its own counterpart in a network of another seed."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sanity = pytest.importorskip("sanity", reason="bench/ is not part of this copy")

DATA, CHECKPOINTS = (os.environ.get(name, "") for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"))


def test_rows_and_columns_with_their_largest_entry_on_the_diagonal_are_found():
    assert sanity.found_again(np.eye(3)) == 6
    assert sanity.found_again(np.array([[0.9, 0.1], [0.95, 0.2]])) == 2


def test_a_tie_is_a_miss_and_so_is_a_hole():
    assert sanity.found_again(np.ones((3, 3))) == 0
    assert sanity.found_again(np.array([[1.0, 1.0 - 1e-12], [0.0, 0.5]])) == 2
    assert sanity.found_again(np.full((2, 2), np.nan)) == 0


def test_the_page_shows_the_recorded_figures():
    figures = json.loads(sanity.RESULTS.read_text())
    assert sanity.PAGE.read_text() == sanity.page(figures)
    assert figures["cka"]["seeds"] == 12
    assert figures["cka"]["found"] >= 0.98 * figures["cka"]["cases"]


@pytest.mark.slow
@pytest.mark.skipif(not (DATA and CHECKPOINTS), reason="set NETKIN_DATA and NETKIN_CHECKPOINTS to CIFAR-10 and Tiny-10")
def test_cka_knows_a_layer_of_another_seed_again():
    found, cases = sanity.found_in_pair(Path(DATA), Path(CHECKPOINTS), ("cka",), 1, (0, 1))["cka"]
    assert found >= 0.98 * cases
