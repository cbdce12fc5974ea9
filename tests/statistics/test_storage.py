"""What a file holds of statistics: values and objects as JSON and named tensors, and back."""

from netkin.measures import find
from netkin.statistics import LayerMoments
from netkin.statistics.grams import GramSettings
from netkin.statistics.storage import Stored, from_plain, to_plain


def test_a_file_is_read_whatever_module_its_classes_were_in_when_it_was_written():
    tensors = {}
    written = to_plain(GramSettings(batch=7), tensors, "settings")
    assert written["class"] == "netkin.GramSettings"
    assert from_plain(written, tensors) == GramSettings(batch=7)


def test_files_tell_all_classes_of_netkin_apart():
    def below(kind):
        return [one for child in kind.__subclasses__() for one in (child, *below(child))]

    names = [kind.__qualname__ for kind in below(Stored) if kind.__module__.startswith("netkin.")]
    assert sorted(names) == sorted(set(names))
    assert not [name for name in names if "." in name]


def test_reading_parts_takes_time_with_their_number_not_its_square(worlds):
    class Tensors(dict):
        """Tensors of which each is asked for by its name, as a search for the part's own would read all of them."""

        def __iter__(self):
            raise AssertionError("all tensors are read for one part")

        items = keys = values = __iter__

    X, Y = worlds.related(30, 4, 3)
    made = LayerMoments([(["a"], ["b"])], debiased=True)
    made.update({"a": X, "b": Y})
    tensors = {}
    written = to_plain({"first": [made], "second": {"third": made}}, tensors, "all")
    again = from_plain(written, Tensors(tensors))
    values = [float(find("cka_debiased")(one["a", "b"])) for one in (made, again["first"][0], again["second"]["third"])]
    assert values[0] == values[1] == values[2]
