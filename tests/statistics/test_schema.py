"""What a file holds of a statistic: a wrong attribute is refused when it is read, and says which it is."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import netkin as nk
from netkin import files
from netkin.errors import FileError, InvalidValue, NoValue, UnknownName
from netkin.statistics import CrossMoments, LayerFilters, LayerRows, schema
from netkin.statistics.collector import Numbers, Settings
from netkin.statistics.statistic import Stored
from tests.file_worlds import write_unchecked


@pytest.fixture
def moments(tmp_path):
    """Return a file of moments in chunks, as its header and arrays."""
    collector = nk.LayerMoments([(["in"], ["out"])], debiased=True, chunks=3)
    collector.update({"in": torch.randn(30, 4), "out": torch.randn(30, 2)})
    collector.to_file(tmp_path / "moments")
    return files.read(tmp_path / "moments")


def refused(tmp_path, header, arrays, words):
    write_unchecked(tmp_path / "wrong", header, arrays)
    with pytest.raises(FileError, match=f"wrong' is damaged.*{words}"):
        nk.load(tmp_path / "wrong")


def sums(header):
    """Return what the header says of the first layer, and of the first pair."""
    return header["_layers"]["mapping"][0][1]["holds"], header["_blocks"][0]["holds"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("chunks", 4, "the layers and their counts do not fit"),
        ("chunks", True, "`chunks` of a LayerMoments must be a count"),
        ("precision", {"dtype": "int8"}, "`precision` of a LayerMoments must be a type of numbers"),
        ("names", ["in", "in"], "the layers and their pairs do not fit"),
        ("debiased", False, "the layers and their sums do not fit"),
        ("_counts", [10, 10, 10], "`_counts` of a LayerMoments must be whole numbers of 64 bits"),
        ("_numbers", {"class": "netkin.Nothing", "path": "", "holds": {}}, "KeyError"),
        ("_waiting", [1], "`_waiting` of a LayerMoments must be empty"),
        ("sizes", {"mapping": []}, ""),
    ],
)
def test_a_wrong_attribute_of_moments_is_named(tmp_path, moments, name, value, words):
    header, arrays = moments
    header[name] = value
    if words:
        refused(tmp_path, header, arrays, words)
    else:  # sizes are those of the batches, of which a collector of given rows has none
        write_unchecked(tmp_path / "fine", header, arrays)
        assert nk.load(tmp_path / "fine")["in", "out"].n == 30


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("width", 5, "`width` of a LayerSums|`shift` of a LayerSums"),
        ("scale", -1.0, "`scale` of a LayerSums must be a positive number"),
        ("key", "other", "the layers and their sums"),
        ("varies", 1, "`varies` of a LayerSums must be true or false"),
    ],
)
def test_a_wrong_attribute_of_a_layer_is_named(tmp_path, moments, name, value, words):
    header, arrays = moments
    sums(header)[0][name] = value
    refused(tmp_path, header, arrays, words)


def test_pairs_must_be_those_of_the_layers(tmp_path, moments):
    header, arrays = moments
    sums(header)[1]["rows"]["mapping"][0][1] = {"slice": [0, 3]}
    refused(tmp_path, header, arrays, "the sums of layers and those of their pairs")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda one: one * 0, "the rows of layers and those of their pairs"),
        (lambda one: one.astype(np.float16), "`sums` of a CrossSums must be a tensor of chunks × blocks"),
        (lambda one: one[:2], "the sums of layers and those of their pairs"),
    ],
)
def test_the_sums_of_pairs_have_the_counts_and_sizes_of_the_layers(tmp_path, moments, harm, words):
    header, arrays = moments
    refused(tmp_path, header, {**arrays, "_blocks.0.sums": harm(arrays["_blocks.0.sums"])}, words)


def test_huge_sums_of_a_pair_are_refused_and_nan_of_a_layer_is_not(tmp_path, moments):
    header, arrays = moments
    huge = arrays["_blocks.0.sums"].copy()
    huge[0, 0, 0, 0] = 1e300
    refused(tmp_path, header, {**arrays, "_blocks.0.sums": huge}, "the sums of layers and those of their pairs")
    huge[0, 0, 0, 0] = np.nan  # as a GPU sums a layer that gave NaN
    own = {name: one.copy() for name, one in arrays.items() if name.startswith("_layers.0")}
    own["_layers.0.own"][0, 0, 0, 0] = np.nan
    write_unchecked(tmp_path / "nan", header, {**arrays, **own, "_blocks.0.sums": huge})
    with pytest.raises(InvalidValue, match="layer 'in' gave NaN or Inf"):
        nk.load(tmp_path / "nan")["in", "out"]


def test_axes_of_one_name_are_of_one_length():
    class Square(Stored):
        stored = schema.fields(width=schema.COUNT, matrix=schema.tensor("width", "width"))

    header = {"width": 2, "matrix": {"tensor": "matrix"}}
    assert Square._restored({"matrix": torch.eye(2)}, header).width == 2
    with pytest.raises(ValueError, match="`matrix` of a Square must be a tensor of width × width"):
        Square._restored({"matrix": torch.eye(3)}, header)


def test_attributes_without_fields_are_taken_as_they_are():
    class Plain(Stored):
        stored = ("anything",)

    assert Plain._restored({}, {"anything": -3}).anything == -3


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        (schema.COUNT, 0, -1), (schema.WHOLE, -3, 2**63), (schema.NUMBER, 0.5, np.inf), (schema.KEY, ("a", 1), []),
        (schema.SIZE, 0, -0.5), (schema.DTYPE, torch.float32, torch.int8), (schema.HASH, 2**64 - 1, 2**64),
        (schema.SLICE, slice(0, 3), slice(3, 0)), (schema.none_or(schema.TEXT), None, 3),
        (schema.one_of("linear"), "linear", "cubic"), (schema.tuple_of(schema.COUNT, 2), (1, 2), (1, 2, 3)),
        (schema.mapping_of(schema.COUNT), {"a": 1}, [("a", 1)]), (schema.object_of(Numbers), Numbers(), 3),
        (schema.whole_numbers(None), np.arange(3), np.arange(3.0)),
        (schema.numbers(None), np.ones(2), np.full(2, np.nan)),
    ],
)  # fmt: skip
def test_a_field_takes_what_it_says(field, good, bad):
    assert field.holds(good, {})
    assert not field.holds(bad, {})


# --- of whole statistics too ------------------------------------------------------------------------------------------


def test_only_the_first_layer_of_cross_moments_can_be_measured():
    collector = CrossMoments([("in", "out")])
    collector.update({"in": torch.randn(20, 3), "out": torch.randn(20, 2)})
    with pytest.raises(NoValue, match="only the mean was gathered, which is enough for a map and for no measure"):
        nk.cca_mean(collector["in", "out"])


def test_an_unknown_layer_of_filters_is_refused():
    filters = LayerFilters.of({"conv1": {"weight": torch.randn(2, 2, 3, 3)}})
    with pytest.raises(UnknownName, match="no layer 'conv2' in these filters; did you mean 'conv1'"):
        filters["conv1", "conv2"]


def test_rows_of_one_chunk_have_no_value_without_it():
    rows = LayerRows(["in"], chunks=2)
    rows.update({"in": torch.randn(1, 3)})
    chunk = int(np.argmax(rows.chunk_sizes))
    with pytest.raises(NoValue, match="all rows kept of layer 'in' are of one chunk of the examples"):
        rows.pair("in", "in", chunk)


@dataclass(frozen=True)
class TheirSettings(Settings):
    """Settings of another package, whose defaults say less than their types."""

    kernel: str | None = None
    levels: float = 1
    steps: int = 1
    exact: bool = False
    sizes: tuple[int, ...] = ()
    extra: object = None


@pytest.mark.parametrize(
    "given", [{"kernel": "rbf"}, {"levels": 0.5}, {"levels": 2}, {"sizes": [1, 2]}, {"extra": {"a": 1}}, {}]
)
def test_settings_are_read_by_the_types_of_their_fields(given):
    found = TheirSettings.from_json(given)
    assert TheirSettings.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "given", [{"kernel": 1}, {"levels": "x"}, {"levels": True}, {"steps": 0.5}, {"exact": 1}, {"sizes": 3}]
)
def test_settings_of_other_types_are_refused(given):
    (name,) = given
    with pytest.raises(TypeError, match=f"`{name}` of a TheirSettings can't be a"):
        TheirSettings.from_json(given)
