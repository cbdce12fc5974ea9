"""Marks: what tells batches, data and models from others."""

import pytest
import torch

from netkin.applications.stitching.marks import Marks, marked
from task_loss_worlds import batches


def inputs_and_labels():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(30, 3, generator=generator), torch.randint(0, 3, (30,), generator=generator)


def mark_of(data):
    marks = Marks()
    assert len(list(marks.noting(data))) == len(data)
    return str(marks)


def test_a_mark_is_of_all_bits():
    inputs, _ = inputs_and_labels()
    other = inputs.clone()
    other[2, 1] += 1e-6
    assert marked(inputs) == marked(inputs.numpy())
    assert marked(inputs) != marked(other)
    assert marked({"x": inputs.bfloat16(), "texts": ["a", "b"]}) != marked(
        {"x": inputs.bfloat16(), "texts": ["a", "c"]}
    )


def test_data_have_the_same_mark_in_any_order_and_any_batches():
    inputs, labels = inputs_and_labels()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    mark = mark_of(batches(inputs, labels, 10))
    assert mark.startswith("30 examples, mark ")
    assert mark == mark_of(batches(inputs[order], labels[order], 7))


@pytest.mark.parametrize("change", ["input", "label", "pairing", "twice"])
def test_other_data_have_another_mark(change):
    inputs, labels = inputs_and_labels()
    mark, other = mark_of(batches(inputs, labels)), [inputs.clone(), labels.clone()]
    if change == "input":
        other[0][4, 1] += 1e-6
    elif change == "label":
        other[1][4] = 2 - other[1][4] + (other[1][4] == 1)
    elif change == "pairing":
        other[1] = labels.roll(1)
    else:
        other = [torch.cat([one, one[:1]]) for one in other]
    assert mark != mark_of(batches(*other))
