"""What code changes, by its bytecode: attributes of `self` and what lies in them, globals, and names it closes over."""

import pytest

from netkin.identity.code import changes_of

CHOSEN, LOG, TOTAL = [1], {}, 2


class Ways:
    """Each method changes what its name in the table below says, and reads other things."""

    def item(self, model, step):
        self.log[step] = self.rate

    def number(self, model, step):
        self.count += 1

    def alias(self, model, step):
        seen = self.seen
        seen.append(step)

    def added_to(self, inputs):
        self.counts[self.key] += self.rate

    def in_place(self, inputs):
        self.buffer.add_(1)
        return inputs.add(self.scale)

    def deleted(self):
        del self.log[self.key]
        self.other.count += 1

    def part(self):
        self.rows[1 : self.stop] = self.value

    def mapping_elsewhere(self):
        LOG["total"] = TOTAL

    def variable(self):
        global TOTAL
        TOTAL = 3

    def only_reads(self, inputs):
        inputs = inputs.clone()
        inputs[:, CHOSEN] = 0
        return inputs

    def another_object(self, model):
        model.rate = self.rate
        model.head.weight.mul_(self.weight)


@pytest.mark.parametrize(
    "way, names",
    [
        ("item", {("attribute", "log")}),
        ("number", {("attribute", "count")}),
        ("alias", {("attribute", "seen")}),
        ("added_to", {("attribute", "counts")}),
        ("in_place", {("attribute", "buffer")}),
        ("deleted", {("attribute", "log"), ("attribute", "count")}),
        ("part", {("attribute", "rows")}),
        ("mapping_elsewhere", {("variable", "LOG")}),
        ("variable", {("variable", "TOTAL")}),
        ("only_reads", set()),
        ("another_object", set()),
    ],
)
def test_what_code_changes_is_found_and_nothing_that_it_reads(way, names):
    assert changes_of(getattr(Ways, way).__code__).names == names


def test_names_that_are_closed_over_are_variables():
    count, seen = 0, []

    def step(model, number):
        nonlocal count
        count += 1
        seen.append(number)

    assert changes_of(step.__code__).names == {("variable", "count"), ("variable", "seen")}


def test_the_method_add_changes_sets_and_no_tensors():
    def step(self, value):
        self.known.add(value)

    changes = changes_of(step.__code__)
    assert changes.has("attribute", "known", {1})
    assert not changes.has("attribute", "known", 1.5)
