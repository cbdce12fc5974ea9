"""The page as text: what stands in it, without a browser."""

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import netkin.reporting
from netkin.errors import FileError, InvalidValue
from netkin.reporting import report
from netkin.reporting.html import POLICY
from netkin.reporting.page import page
from netkin.reporting.words import figure_caption
from netkin.results import Comparisons, load
from netkin.results.text import cells
from table_worlds import as_caveats


class Reader(HTMLParser):
    """What a parser finds: elements with their attributes, all text, the data, the rows of every heatmap."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.data, self.heatmaps, self._inside = [], [], "", [], []
        self.feed(text)
        self.data = json.loads(self.data)

    def handle_starttag(self, name, attributes):
        attributes = dict(attributes)
        self.elements.append((name, attributes))
        self._inside.append((name, attributes.get("id")))
        if name == "table" and attributes.get("class") == "heat":
            self.heatmaps.append([])
        if name == "tr" and self.heatmaps:
            self.heatmaps[-1].append([])

    def handle_data(self, text):
        name, key = self._inside[-1] if self._inside else ("", None)
        if key == "data":
            self.data += text
        elif name not in ("style", "script"):
            self.words.append(text)
        if name == "td" and self.heatmaps and self.heatmaps[-1]:
            self.heatmaps[-1][-1].append(text)

    def handle_endtag(self, name):
        while self._inside and self._inside.pop()[0] != name:
            pass

    @property
    def text(self):
        return " ".join(self.words)


def read(results):
    return Reader(page(results))


def test_every_number_a_heatmap_points_at_is_the_saved_one(made, tmp_path):
    made.comparison(made.holed(), made.distance(errors=np.full((3, 3), 0.1))).save(tmp_path / "ab.netkin")
    saved = load(tmp_path / "ab.netkin")
    text = page(saved)
    heatmaps = made.blocks_in(text, "heatmap")
    for heatmap, table in zip(heatmaps, saved.tables.values(), strict=True):
        values = np.array(heatmap["values"], dtype=float)
        assert np.array_equal(values, table.values, equal_nan=True)
    assert heatmaps[1]["errors"] == saved["procrustes_distance"].errors.tolist()


def test_each_number_stands_once_in_the_document(made):
    value = 0.123456789012345
    numbers = made.table(values=np.full((3, 3), value))
    held = page(made.comparison(numbers)).partition('id="data">')[2].partition("</script>")[0]
    assert held.count("float64") == held.count(base64.b64encode(numbers.values.tobytes()).decode()) == 1


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.html.gz"])
def test_a_page_under_another_name_is_refused(made, tmp_path, name):
    with pytest.raises(InvalidValue, match=rf"a page whose name ends in \.html or \.htm; got '.*{name}'"):
        report(made.comparison(), tmp_path / name)
    assert not (tmp_path / name).exists()
    assert report(made.comparison(), tmp_path / "page.HTM").exists()


def test_every_cell_shows_its_number(made):
    comparison = made.comparison(made.holed(), made.distance())
    shown = read(comparison).heatmaps
    for heatmap, table in zip(shown, comparison.tables.values(), strict=True):
        assert heatmap[1:4] == cells(table.values)


def test_the_layers_names_stand_in_rows_and_columns(made):
    comparison = made.comparison(made.table(rows=("in", "out"), columns=("first", "second", "third")))
    text = page(comparison)
    assert all(f'<th scope="row"><bdi>{name}</bdi></th>' in text for name in ("in", "out"))
    assert all(f'<th scope="col"><span><bdi>{name}</bdi></span></th>' in text for name in ("first", "second", "third"))


def test_a_long_name_is_shortened_and_given_whole_beside(made):
    long = "encoder.layer.11.attention.self.query.projection"
    text = page(made.comparison(made.table(rows=(long, "out"))))
    assert f'title="{long}" aria-label="{long}"' in text
    assert "<bdi>encoder.lay…projection</bdi>" in text


def test_the_page_holds_no_address_and_may_ask_for_none(made):
    text = page(made.comparison())
    shown = re.sub(r'(?<="float64":")[^"]*|(?<="results":")[^"]*', "", text)  # packed numbers may hold any letters
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import|srcset|<link|<iframe|<base", shown)
    assert POLICY.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")
    metas = [attributes for name, attributes in Reader(text).elements if name == "meta"]
    assert {"http-equiv": "Content-Security-Policy", "content": POLICY} in metas


def test_hostile_names_stay_text(made):
    reader = read(made.hostile())
    assert "img" not in {name for name, _ in reader.elements}
    assert not any(key.startswith("on") for _, attributes in reader.elements for key in attributes)
    assert made.page_in(page(made.hostile()))["results"][0]["a"] == made.NAME
    assert sum(name == "script" for name, _ in reader.elements) == 2
    assert made.NAME in reader.text


def test_the_data_has_no_letter_that_ends_a_script(made):
    text = page(made.hostile()).partition('id="data">')[2].partition("</script>")[0]
    assert not set(text) & set("<>&\u2028\u2029")


def test_a_text_that_is_no_unicode_is_shown_with_a_question_mark(made, tmp_path):
    report(made.comparison(made.table(), caveats=as_caveats("read from in\ud800")), tmp_path / "page.html")
    assert "read from in?" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_hole_is_hatched_and_its_reason_told(made):
    reader = read(made.comparison(made.holed()))
    assert sum(attributes.get("class") == "hole" for name, attributes in reader.elements if name == "td") == 1
    assert "no value: layer 'head' is constant over the data (1 pair)" in reader.text
    (heatmap,) = made.blocks_in(page(made.comparison(made.holed())), "heatmap")
    assert heatmap["missing"] == {"layer 'head' is constant over the data": [[1, 2]]}


def test_many_reasons_are_counted(made):
    values, rows = made.table().values * np.nan, ("conv1", "conv2", "head")
    holes = {(a, b): f"reason {a} {b}" for a in rows for b in rows}
    text = read(made.comparison(made.table(values=values, missing=holes))).text
    assert "No value for 9 pairs, for 9 reasons" in text
    assert "cka has no value for any pair of layers" in text


def test_a_reason_that_several_measures_give_is_said_once(made):
    reader = read(made.comparison(made.holed(), made.holed("cka"), made.table("nbs")))
    assert reader.text.count("layer 'head' is constant over the data") == 1
    assert "no value by several measures: layer 'head' is constant over the data (1 pair)" in reader.text
    other = made.holed("nbs", missing={("conv2", "head"): "too few examples"})
    text = read(made.comparison(made.holed(), made.holed("cka"), other)).text
    assert "no value: too few examples (1 pair)" in text
    assert "no value by several measures: layer 'head'" in text
    assert "no value by every measure: layer 'head'" in read(made.comparison(made.holed(), made.holed("cka"))).text


def test_a_comparison_without_data_says_so(made):
    bare = made.comparison(made.table(), examples=0, data="", shapes_a={}, shapes_b={}, widths_a={}, widths_b={})
    text = read(bare).text
    assert text.count("from the weights alone: no data were run") == 2  # among the facts, and where numbers come from
    assert "example" not in text.partition("How similarly")[0]
    assert "what one example is" not in text
    assert "width" not in text
    assert "from the weights alone: no data were run" in bare._repr_html_()


def test_digests_are_folded(made):
    digests = {
        "weights a": "11aa",
        "weights b": "22bb",
        "data digest": "33cc",
        "settings digest": "44dd",
        "call": "55ee",
    }
    text = page(made.comparison(provenance={"device": "cpu", "model a": "a net"} | digests))
    shown, _, folded = text.partition("Identity: digests of weights, data and settings</summary>")
    folded = folded.partition("</details>")[0]
    assert all(key in folded and value in folded for key, value in digests.items())
    assert not any(f"<td>{value}" in shown for value in digests.values())
    assert "<td>a net" in shown
    assert "Identity" not in page(made.comparison())


def test_layers_left_out_are_told(made):
    text = read(made.comparison(caveats=as_caveats("2 layers were left out: drop1, drop2 give no tensor"))).text
    assert "Before you read the numbers (1) 2 layers were left out: drop1, drop2 give no tensor" in text


def test_warnings_stand_before_the_numbers(made):
    warning = "fewer examples than features: CCA values are inflated; 3,000 would do"
    text = page(made.comparison(caveats=as_caveats(warning)))
    assert 0 < text.index(warning) < text.index("<table")


def test_caveats_of_one_kind_are_folded(made):
    models = as_caveats(*(f"model {k} has random weights, from seed {k}." for k in range(6)), code="random-weights")
    said = *models, *as_caveats("few examples: 12")
    text = page(made.comparison(caveats=said))
    shown = re.search(r'<details class="warnings".*?</ul></details>(?!</li>)', text)[0]
    assert "Before you read the numbers (7)" in shown
    assert re.search(r"<li>model 0 has random weights, from seed 0.<details><summary>5 more like this</summary>", shown)
    assert all(shown.count(f"<li>{one}") == 1 for one in said)
    three = page(made.comparison(caveats=said[:3]))
    assert "more like this" not in three


def test_an_interrupted_comparison_says_so(made):
    assert "This comparison was interrupted" in page(made.comparison(complete=False))
    assert "This comparison was interrupted" not in page(
        made.comparison(complete=False, caveats=as_caveats("interrupted: the first 100 examples.", code="interrupted"))
    )


def test_the_headline_is_computed_from_the_numbers(made):
    text = read(made.comparison()).text
    assert "By cka, the closest pair of layers is conv1 × conv1 at 0.91" in text
    assert "3 of 3 layers of seed0 find their best match in the layer of the same name of seed1" in text


def test_one_layer_is_no_plural(made):
    text = read(made.comparison(made.table(rows=("fc",), columns=("fc", "out"), values=[[0.5, 0.4]]))).text
    assert "seed0, 1 layer " in " ".join(text.split())
    assert "seed1, 2 layers" in text


def test_classes_correspond_to_no_layers(made):
    some = made.table(rows=("0", "1", "2"), columns=("0", "1"), axes=("layer", "class"))
    text = read(made.comparison(some, a="layers", b="classes")).text
    assert "By cka, the closest pair of layer and class is 0 × 0 at 0.91." in text
    for words in ("3 layers × 2 classes", "Every layer with every class", "layers in rows, classes in columns"):
        assert words in text
    assert "best match in" not in text
    assert "Profile of corresponding layers" not in text


def test_everything_that_a_number_says_about_itself_is_told(made):
    table = made.table("svcca(variance=0.95)", parameters={"variance": 0.95}, errors=np.full((3, 3), 0.25))
    text = read(made.comparison(table, made.distance(symmetric=False))).text
    for words in (
        "digits", "1,797", "pool", "7", "device", "cpu", "0.1.0", "variance = 0.95", "biased HSIC, centred", "Moments",
        "exact", "similarity: higher is closer", "distance: lower is closer", "0 to √2 ≈ 1.41",
        "median 0.25, largest 0.25", "not asked for", "no: exchanging the models changes the values",
        "0 of 9", "16", "32",
    ):  # fmt: skip
        assert words in text


def test_a_choice_of_measures_is_offered_beyond_four(made):
    ids = ["cka", "nbs", "svcca", "pwcca", "cca_mean"]
    assert "Measures shown" in page(made.comparison(*map(made.table, ids)))
    assert "Measures shown" not in page(made.comparison(*map(made.table, ids[:4])))


def test_an_open_ended_measure_is_coloured_by_its_range(made):
    gulp = made.distance("gulp", bounds=(0, np.inf))
    reader = read(made.comparison(gulp))
    (heatmap,) = made.blocks_in(page(made.comparison(gulp)), "heatmap")
    scale = heatmap["scale"]
    assert (scale["low"], scale["high"]) == (gulp.values.min(), gulp.values.max())
    assert "range of the values here" in reader.text
    assert heatmap["bounds"] == [0, None]


def test_several_comparisons_get_a_chooser_and_a_summary(made):
    three = [made.comparison(a=a, b=b) for a, b in [("x", "y"), ("x", "z"), ("y", "z")]]
    for several in (three, Comparisons(three)):
        reader = read(several)
        assert [a["value"] for name, a in reader.elements if name == "option"] == ["0", "1", "2"]
        text = page(several)
        summary = made.blocks_in(text, "heatmap")[0]
        assert summary["rows"] == ["x", "y", "z"]
        wanted = Comparisons(three).summary("cka")
        assert np.array_equal(np.array(summary["values"], float), wanted, equal_nan=True)
        assert summary["opens"][0] == [None, 0, 1]
        assert [0, 0] in summary["missing"]["no model was compared with itself"]
        assert "no model was compared with itself" not in reader.text


def test_the_number_of_layers_behind_each_mean_is_shown(made):
    small = made.table(rows=("a", "b"), columns=("a", "b"), values=[[0.9, 0.1], [0.1, 0.7]])
    mixed = made.table(rows=("a", "b"), columns=("b", "c", "d"), values=[[0.3, 0.1, 0.1], [0.1, 0.1, 0.5]])
    deep = made.table(rows=("b", "c", "d"), columns=("b", "c", "d"))
    pairs = {("x", "y"): small, ("x", "z"): mixed, ("y", "z"): mixed, ("z", "w"): deep}
    text = page([made.comparison(table, a=a, b=b) for (a, b), table in pairs.items()])
    reader, summary = Reader(text), made.blocks_in(text, "heatmap")[0]
    assert summary["counts"] == [[0, 2, 2, 0], [2, 0, 2, 0], [2, 2, 0, 3], [0, 0, 3, 0]]
    assert summary["values"][0][2] == pytest.approx(0.4)
    assert "the mean over n pairs of layers, 2 to 3, at the same relative depth" in reader.text
    assert "n = 3" in reader.text
    many = Comparisons(made.comparison(table, a=a, b=b) for (a, b), table in pairs.items())
    assert "Means over 2 to 3 pairs of layers at the same relative depth" in figure_caption(many)
    assert "the mean over n pairs of layers, 2 to 3" in many._repr_html_()
    alike = read([made.comparison(a=a, b=b) for a, b in [("x", "y"), ("x", "z"), ("y", "z")]])
    assert "the mean over 3 pairs of layers at the same relative depth" in alike.text
    assert "n = 3" not in alike.text


def test_comparisons_with_other_measures_and_a_twin_are_shown_too(made):
    other = made.comparison(made.table("nbs"), a="x", b="y")
    heatmaps = made.blocks_in(page([made.comparison(), other]), "heatmap")
    assert [one["id"] for one in heatmaps if one["level"] == "models"] == ["cka", "procrustes_distance", "nbs"]
    twins = page([made.comparison(), made.comparison(data="letters")])
    assert {one["level"] for one in made.blocks_in(twins, "heatmap")} == {"layers"}
    assert "2: seed0 and seed1, letters" in Reader(twins).text


def test_models_without_a_value_in_common_leave_a_reasoned_hole_in_the_summary(made):
    values, rows = made.table().values * np.nan, ("conv1", "conv2", "head")
    empty = made.table(values=values, missing={(a, b): "constant" for a in rows for b in rows})
    reader = read([made.comparison(made.table(), a="x", b="y"), made.comparison(empty, a="x", b="z")])
    assert "no pair of layers has a value" in reader.text


def test_the_json_of_the_page_is_the_comparison_that_is_chosen(made, saved_by):
    several = [made.comparison(made.jackknifed(), a="x", b="y"), made.comparison(made.holed(), a="x", b="z")]
    odd = made.comparison(made.table(), a="y", b="é 文 \U0001f600", seed=2**60 + 1)
    for results in (several[:1], [*several, odd], [made.hostile()]):
        assert saved_by(page(results), *results)


def test_a_large_page_stays_small(made):
    assert len(page(made.large()).encode()) < 1_000_000


@pytest.mark.parametrize("rows, columns", [(("only",), ("only",)), ((), ()), (("a", "b"), ("x", "y", "z"))])
def test_odd_sizes_are_drawn(made, rows, columns):
    text = page(made.comparison(made.table(rows=rows, columns=columns)))
    (heatmap,) = made.blocks_in(text, "heatmap")
    assert heatmap["rows"] == list(rows)


def test_a_comparison_without_a_measure_is_drawn(made):
    text = page(made.comparison(tables={}))
    assert "This comparison holds no measure." in text


def test_the_page_is_written_whole_or_not_at_all(made, tmp_path, monkeypatch):
    assert report(made.comparison(), tmp_path / "page.html") == tmp_path / "page.html"
    before = (tmp_path / "page.html").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match="cannot write '.*page.html': No space left on device."):
        report(made.comparison(a="other"), tmp_path / "page.html", overwrite=True)
    assert (tmp_path / "page.html").read_bytes() == before
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_bad_path_is_one_clear_sentence(made, tmp_path):
    with pytest.raises(FileError, match=r"cannot write '.*gone.page.html': No such file or directory."):
        report(made.comparison(), tmp_path / "gone" / "page.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(FileError, match=r"cannot write '.*': "):
        report(made.comparison(), tmp_path / "folder.html")


def test_what_is_no_comparison_is_refused(made, tmp_path):
    with pytest.raises(
        InvalidValue,
        match=r"a report shows comparisons, a series, .* in a row; got str. `nk.load\(path\)` opens a saved one.",
    ):
        report("ab.netkin", tmp_path / "page.html")
    with pytest.raises(
        InvalidValue,
        match="a sparsity study, a compression or tasks learnt in a row; got int.$",
    ):
        report([made.comparison(), 3], tmp_path / "page.html")
    with pytest.raises(InvalidValue, match="a report needs at least one comparison; got none."):
        report([], tmp_path / "page.html")


@pytest.mark.slow
def test_a_saved_comparison_is_reported_without_torch(made, tmp_path):
    made.comparison().save(tmp_path / "ab.netkin")
    program = (
        "import sys, netkin.reporting as r, netkin.results as s\n"
        "r.report(s.load(sys.argv[1]), sys.argv[2])\n"
        "assert not {'torch', 'matplotlib'} & sys.modules.keys(), 'a heavy package was imported'"
    )
    source = str(Path(netkin.reporting.__file__).parent.parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "ab.netkin", tmp_path / "ab.html"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ab.html").exists()


def test_numpys_numbers_are_welcome(made):
    (told,) = made.page_in(page(made.comparison(widths_a={"conv1": np.int64(3)}, seed=np.int32(1))))["results"]
    assert told["seed"] == 1


def test_the_labels_go_along_with_the_data(made):
    comparison = made.comparison()
    (found,) = made.page_in(page(comparison))["results"]
    for word in ("a", "b", "data", "examples", "seed", "version", "created", "complete"):
        assert found[word] == getattr(comparison, word)
    for word in ("shapes_a", "shapes_b", "widths_a", "widths_b", "provenance"):
        assert found[word] == dict(getattr(comparison, word))
    assert found["layers_a"] == list(comparison.layers_a)


@pytest.mark.slow
def test_a_page_and_a_figure_are_written_over_nothing(made, tmp_path):
    comparison = made.comparison()
    for name, write in (("ab.html", report), ("ab.png", plotted), ("ab.svg", plotted), ("ab.pdf", plotted)):
        path = tmp_path / name
        path.write_bytes(b"%PDF-1.4 precious")
        with pytest.raises(FileError, match=f"this would write over '.*{name}'"):
            write(comparison, path)
        assert path.read_bytes() == b"%PDF-1.4 precious"
        write(comparison, path, overwrite=True)
        assert b"precious" not in path.read_bytes()


def plotted(comparison, path, **how):
    pytest.importorskip("matplotlib")
    comparison.plot(path=path, **how)
