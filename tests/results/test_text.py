import numpy as np
import pytest

from netkin.results.text import brief

LONG = tuple(f"encoder.layer.{block}.attention.output.{part}" for block in range(12) for part in ("dense", "dropout"))


@pytest.fixture(params=[40, 80, 120])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_a_small_table_is_shown_whole(made, wide):
    assert str(made.comparison()).splitlines() == [
        "seed0 (rows) and seed1 (columns), layer by layer",
        "on digits: 1,797 examples, seed 0",
        "what one example is: pool",
        "",
        "cka: similarity (higher is closer), 0 to 1, exact",
        "       conv1  conv2  head",
        "conv1   1.00   0.50  0.33",
        "conv2   0.50   1.00  0.50",
        "head    0.33   0.50  1.00",
    ]


def test_holes_are_dashes_with_their_reason_below(made, wide):
    assert str(made.holed()).splitlines()[1:] == [
        "       in   out",
        "in   1.00     –",
        "out  0.25  0.50",
        "–  layer 'out' is constant over the data (1 pair)",
    ]


def test_many_reasons_are_counted(made, wide):
    names = tuple("abcdefg")
    holes = {(name, name): f"reason {name}" for name in names}
    table = made.table(rows=names, columns=names, values=np.where(np.eye(7) == 1, np.nan, 1), holes=holes)
    assert str(table).splitlines()[-1] == "–  and 2 other reasons; `holes` lists all"


def test_many_long_names_fit_the_terminal(made, width):
    text = str(made.comparison(made.table(rows=LONG, columns=LONG)))
    assert max(map(len, text.splitlines())) <= width
    assert "columns have the numbers of the rows" in text


def test_numbered_columns_are_all_listed_once(made, width):
    columns = tuple(f"block{i}.conv" for i in range(30))
    text = str(made.table(rows=LONG, columns=columns, values=np.arange(720).reshape(24, 30) / 720))
    listed = " ".join(text[text.index("columns: ") :].split())
    assert listed == "columns: " + ", ".join(f"{i} {name}" for i, name in enumerate(columns, start=1))
    assert max(map(len, text.splitlines())) <= width


def test_numbered_blocks_hold_every_number_in_its_place(made, width):
    values = np.arange(24 * 30).reshape(24, 30) / 100
    lines = str(made.table(rows=LONG, columns=tuple(map(str, range(30))), values=values, bounds=(0, 9))).splitlines()
    heads = [i for i, line in enumerate(lines) if line.replace(" ", "").isdigit()]
    seen = {}
    for head in heads:
        for row, line in enumerate(lines[head + 1 : head + 25]):
            entries = line.split()[-len(lines[head].split()) :]
            seen |= {(row, int(column) - 1): float(e) for column, e in zip(lines[head].split(), entries, strict=True)}
    assert seen == {(i, j): pytest.approx(values[i, j]) for i in range(24) for j in range(30)}


def test_rows_that_had_to_be_cut_are_listed_in_full(made, width):
    rows = tuple(f"{'a' * 50}{i}{'b' * 50}.{i}" for i in range(6))
    text = str(made.table(rows=rows, columns=rows))
    assert all(name in text.replace("\n   ", "") for name in rows)
    assert max(map(len, text.splitlines())) <= width


def test_the_distinct_parts_of_names_survive(made, wide):
    lines = str(made.table(rows=LONG, columns=LONG)).splitlines()
    assert lines[2].startswith("1 …0…dense ")
    assert lines[25].startswith("24 …11…dropout ")


@pytest.mark.parametrize("names", [["layer.0.0", "layer.1.0"], ["a.x.y", "a.y.x"], ["only.one"], ["stem", "head"]])
def test_names_that_would_become_alike_or_empty_stay(names):
    assert brief(names) == names


def test_numbered_rows_begin_with_their_own_number(made, width):
    lines = str(made.table(rows=LONG, columns=LONG)).splitlines()
    for i in range(1, 25):
        assert any(line.startswith(f"{i} ") for line in lines)


@pytest.mark.parametrize(
    "value, shown",
    [(0.004, "4.0e-03"), (123456.0, "1.2e+05"), (0.0, "0.00"), (-0.001, "-1.0e-03"), (1234.5, "1234.50")],
)
def test_numbers_of_any_size_can_be_read(made, wide, value, shown):
    assert str(made.table(rows=("x",), columns=("x",), values=[[value]])).split()[-1] == shown


@pytest.mark.parametrize(
    "bounds, words",
    [
        ((0, 2**0.5), "0 to 1.414"),
        ((0, np.inf), "from 0"),
        ((-np.inf, np.inf), "unbounded"),
        ((-np.inf, 1), "at most 1"),
    ],
)
def test_a_distance_is_called_one_with_its_range(made, wide, bounds, words):
    assert str(made.table(bounds=bounds, higher_is_closer=False)).startswith(
        f"cka: distance (lower is closer), {words}, exact"
    )


def test_standard_errors_are_mentioned(made, wide):
    assert "exact, standard errors up to 0.01\n" in str(made.table(errors=np.full((3, 3), 0.01)))
    assert "standard" not in str(made.table(errors=np.full((3, 3), np.nan)))


def test_warnings_and_interruptions_are_told(made, wide):
    text = str(made.comparison(complete=False, warnings=("values are inflated",)))
    assert "interrupted: the numbers come from a part" in text
    assert text.endswith("warning: values are inflated")


def test_mixed_shapes_are_counted(made, wide):
    shapes = {"conv1": "pool", "conv2": "pool", "head": "flatten"}
    assert "what one example is: pool (5 layers), flatten (1 layers)" in str(made.comparison(shapes_a=shapes))
    classes = made.comparison(shapes_a=shapes, provenance={"model b": "logits"})
    assert "what one example is: pool (2 layers), flatten (1 layers)" in str(classes)


def test_a_comparison_without_layers_says_so(made, wide):
    assert str(made.table(rows=(), columns=(), values=np.ones((0, 0)))).endswith("no layers")
