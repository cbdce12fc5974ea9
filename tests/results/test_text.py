import numpy as np
import pytest

from netkin.results.labels import brief
from netkin.results.text import grid, with_errors
from table_worlds import as_caveats

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
    table = made.table(rows=names, columns=names, values=np.where(np.eye(7) == 1, np.nan, 1), missing=holes)
    assert str(table).splitlines()[-1] == "–  and 2 other reasons; `missing` lists all"


def test_many_long_names_fit_the_terminal(made, width):
    text = str(made.comparison(made.table(rows=LONG, columns=LONG)))
    assert max(map(len, text.splitlines())) <= width
    assert "columns have the numbers of the rows" in text


def test_numbered_columns_that_are_shown_are_listed_once(made, width):
    columns = tuple(f"block{i}.conv" for i in range(30))
    text = str(made.table(rows=LONG, columns=columns, values=np.arange(720).reshape(24, 30) / 720))
    listed = " ".join(text[text.index("columns: ") :].split())
    assert listed.startswith("columns: 1 block0.conv, 2 block1.conv, ")
    assert ", 30 block29.conv " in listed
    assert max(map(len, text.splitlines())) <= width


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
    [
        (0.004, "0.0040"),
        (0.0721, "0.072"),
        (0.0004, "4.0e-04"),
        (123456.0, "1.2e+05"),
        (0.0, "0.00"),
        (-0.001, "-0.0010"),
        (1234.5, "1234.50"),
    ],
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


def test_errors_that_are_given_are_summed_up(made, wide):
    assert str(made.table(errors=np.full((3, 3), 0.01))).endswith("\nstandard errors: median 0.01, largest 0.01")
    assert "standard" not in str(made.table(errors=np.full((3, 3), np.nan)))


def test_errors_stand_beside_the_values_where_they_fit(made, wide):
    values = [[1.0, 0.6], [0.5, 0.9]]
    table = made.jackknifed(rows=("p", "q"), columns=("r", "s"), values=values, spread=0.02)
    errors = [[f"±{error:.2f}" for error in row] for row in table.errors.tolist()]
    known = table.errors[np.isfinite(table.errors)]
    assert str(table).splitlines()[1:5] == [
        "            r           s",
        f"p  1.00        0.60 {errors[0][1]}",
        f"q  0.50 {errors[1][0]}  0.90 {errors[1][1]}",
        f"standard errors: median {np.median(known):.2g}, largest {known.max():.2g}, by the jackknife over 5 chunks",
    ]
    assert "no standard error: the value lies at the bound 1 of the measure (1 pair)" in str(table)


@pytest.mark.parametrize("columns, whole", [(5, "inside"), (9, "below"), (20, "summed up")])
def test_errors_go_where_there_is_room(made, monkeypatch, columns, whole):
    monkeypatch.setenv("COLUMNS", "80")
    names = tuple(f"b{i}" for i in range(columns))
    text = str(made.jackknifed(rows=names, columns=names))
    assert (f"0.90 ±{made.jackknifed(rows=names, columns=names).errors[0, 0]:.2f}" in text) == (whole == "inside")
    assert ("\nstandard errors\n" in text) == (whole == "below")
    assert "standard errors: median" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_list_shows_errors_beside_its_values(made, wide):
    unasked = {(a, b): "this pair was not asked for" for a in "pq" for b in "pq" if a != b}
    facts = {"rows": ("p", "q"), "columns": ("p", "q"), "values": [[0.5, np.nan], [np.nan, 0.7]], "missing": unasked}
    table = made.jackknifed(**facts)
    other = made.table("rsa", **facts, error_reasons={("p", "p"): "ranks", ("q", "q"): "ranks"})
    lines = str(made.comparison(table, other)).splitlines()
    assert f"p  0.50 ±{table.errors[0, 0]:.2f}" in lines
    assert lines[-1] == "no standard error: ranks (2 pairs)"
    ids = [f"svcca(variance={share})" for share in (0.9, 0.95)]
    both = made.comparison(*(made.jackknifed(id=id, name="svcca", **facts) for id in ids))
    assert any(line.startswith("standard errors of svcca(variance=0.95): ") for line in str(both).splitlines())


@pytest.mark.parametrize(
    "values, errors, shown",
    [
        ([[0.5]], [[0.0042]], "0.500 ±0.004"),
        ([[0.5]], [[2e-7]], "0.5000 ±2e-07"),
        ([[0.5]], [[0.0]], "0.50 ±0.00"),
        ([[123456.0]], [[1234.0]], "1.2e+05 ±1.2e+03"),
        ([[0.002]], [[0.0003]], "0.0020 ±0.0003"),
        ([[0.002]], [[0.03]], "0.0020 ±0.03"),
        ([[0.0002]], [[0.0003]], "2.0e-04 ±3.0e-04"),
        ([[np.nan]], [[np.nan]], "–"),
    ],
)
def test_values_get_the_decimals_that_their_errors_need(values, errors, shown):
    assert with_errors(np.array(values), np.array(errors)) == [[shown]]


def test_an_error_smaller_than_the_others_is_no_power_of_ten():
    shown = with_errors(np.full((1, 5), 0.5), np.array([[0.01, 0.02, 0.02, 0.004, 0.000012]]))
    assert [cell.strip() for cell in shown[0]] == [f"0.50 ±{e}" for e in ("0.01", "0.02", "0.02", "0.004", "1e-05")]


def test_more_bias_than_error_names_the_measure_without_it(made, wide):
    table = made.jackknifed()
    biased = {"replicates": table.replicates + 0.2, "errors": table.errors}
    largest = np.abs(made.jackknifed(**biased).bias()).max()
    note = f"for 9 of 9 pairs the jackknife finds a bias larger than the standard error, up to {largest:.2g}"
    for name, better in (("cka", "cka_debiased"), ("cka_rbf", "cka_rbf_debiased")):
        text = " ".join(str(made.jackknifed(id=name, debiased_as=better, **biased)).split())
        assert f"bias: {note}; {better} corrects for it" in text
    assert f"bias: {note} best" in " ".join(str(made.jackknifed(id="nbs", **biased)).split())
    assert "bias" not in str(table)


def test_matches_that_are_not_clear_are_named(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    values = np.full((8, 2), 0.5)
    values[:, 1] += 0.001
    names = tuple(f"row{i}" for i in range(8))
    table = made.jackknifed(rows=names, columns=("r", "s"), values=values)
    last = str(table).splitlines()[-1]
    assert last.startswith("best matches: 8 of 8 are not clearly better than the second best: row0 (s over r by 0.001")
    assert last.endswith(", and 3 more")
    sure = made.jackknifed(rows=("p",), columns=("r", "s"), values=[[0.1, 0.9]])
    assert "each is clearly better than the second best" in str(sure)
    assert "best matches" not in str(made.table())


def test_a_comparison_without_data_says_so(made, wide):
    bare = made.comparison(examples=0, data="", shapes_a={}, shapes_b={}, widths_a={}, widths_b={})
    assert bare.needs_no_data
    assert str(bare).splitlines()[:4] == [
        "seed0 (rows) and seed1 (columns), layer by layer",
        "from the weights alone: no data were run",
        "",
        "cka: similarity (higher is closer), 0 to 1, exact",
    ]
    assert repr(bare).endswith("3 × 3 layers, weights alone)")
    assert not made.comparison().needs_no_data


def test_warnings_and_interruptions_are_told(made, wide):
    text = str(made.comparison(complete=False, caveats=as_caveats("values are inflated")))
    assert "interrupted: the numbers come from a part" in text
    assert text.endswith("warning: values are inflated")


def test_mixed_shapes_are_counted(made, wide):
    shapes = {"conv1": "pool", "conv2": "pool", "head": "flatten"}
    assert "what one example is: pool (5 layers), flatten (1 layer)" in str(made.comparison(shapes_a=shapes))
    classes = made.comparison(made.table(axes=("layer", "class")), shapes_a=shapes)
    assert "what one example is: pool (2 layers), flatten (1 layer)" in str(classes)


def test_a_comparison_without_layers_says_so(made, wide):
    assert str(made.table(rows=(), columns=(), values=np.ones((0, 0)))).endswith("no layers")


@pytest.mark.parametrize("same", [True, False])
def test_a_wide_table_shows_its_ends_and_how_to_see_all(same):
    rows, columns = [f"a{i}" for i in range(30)], [f"{'a' if same else 'b'}{i}" for i in range(30)]
    entries = [[f"{i}.{j:02}" for j in range(30)] for i in range(30)]
    head, *lines = "\n".join(grid(rows, columns, entries, 60)).splitlines()
    kept = [int(number) - 1 for number in head.split() if number != "…"]
    assert (kept[0], kept[-1], max(map(len, [head, *lines])) <= 60) == (0, 29, True)
    for i, line in enumerate(lines[:30]):
        assert [cell for cell in line.split()[2:] if cell != "…"] == [entries[i][j] for j in kept]
    told = " ".join(" ".join(lines[30:]).split())
    named = "columns have the numbers of the rows" if same else ", ".join(f"{j + 1} b{j}" for j in kept)
    assert named in told
    assert f"{len(kept)} of 30 columns are shown; --json, --report or, in Python" in told
