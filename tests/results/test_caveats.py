"""Caveats: a code, a sentence and a count; those of one code that have a size are joined."""

from netkin.results import Caveat
from netkin.results.caveats import grouped


def few(examples, count=1):
    return Caveat("few-examples", f"8 examples are few; take {examples}.", count, examples)


def test_the_largest_of_a_code_stands_for_all_with_the_number_of_values():
    (one,) = grouped([few(20), few(30, 2), few(20)])
    assert (one.code, one.count, str(one)) == (
        "few-examples", 4, "8 examples are few; take 30. This holds for 4 values.",
    )  # fmt: skip


def test_groups_of_groups_count_all_values():
    groups = [grouped([few(20), few(30)]), grouped([few(30)]), grouped([few(10), few(15)])]
    (one,) = grouped(caveat for group in groups for caveat in group)
    assert str(one) == "8 examples are few; take 30. This holds for 5 values."


def test_one_sentence_for_all_values_is_said_as_it_is():
    assert [str(one) for one in grouped([few(20), few(20)])] == ["8 examples are few; take 20."]


def test_without_a_size_each_sentence_stands_once():
    models = [Caveat("random-weights", f"model {name} has random weights.") for name in "aba"]
    assert [str(one) for one in grouped(models)] == ["model a has random weights.", "model b has random weights."]


def test_what_is_counted_is_named():
    assert str(grouped([few(20), few(30)], "stitches")[0]).endswith("This holds for 2 stitches.")
