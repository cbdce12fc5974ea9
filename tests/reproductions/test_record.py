import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import netkin
from netkin.errors import FileError, InvalidValue, ShapeError
from reproductions.record import Claim, Measured, figure_order, later_notes, record_path, recorded


def claim(**changes):
    facts = {
        "id": "svcca/few-directions",
        "figure": "Fig. 2a",
        "sentence": "25 directions “suffice” – nearly",
        "expected": {"accuracy kept": "nearly all", "directions": 25},
        "criterion": "holds if 95% is kept",
        "measured": {"accuracy kept": Measured(0.9721, 0.0042, 3), "time": Measured(12.5, unit="s")},
        "verdict": "holds",
        "scale": "cpu",
        "control": "as many random neurons",
        "controls": {"accuracy kept": Measured(0.5, 0.01, 3)},
        "call": "python -m reproductions svcca/few-directions --scale cpu --data DIR --device cpu",
        "data": {"CIFAR-10, 5,000 training images": "5c1e"},
        "settings": {"net": "epochs=3"},
        "measures": ("svcca",),
        "seeds": (0, 1, 2),
        "note": "on digits",
        "curves": {"Accuracy": {"k": [1, 2, 4], "kept": [0.1, None, 0.97]}},
        "provenance": {"device": "CPU, 2 threads", "torch": "2.4"},
        "seconds": 3.5,
        "version": "0.1.0",
    }
    return Claim(**(facts | changes))


def test_a_saved_claim_comes_back_whole(tmp_path):
    path = claim().save(tmp_path)
    assert path == tmp_path / "svcca" / "few-directions.cpu.json"
    assert Claim.load(path) == claim(created=Claim.load(path).created)
    assert Claim.load(path).measured["accuracy kept"] == Measured(0.9721, 0.0042, 3)


def test_parts_come_back_as_they_were(tmp_path):
    path = claim(parts=[np.True_, None, False]).save(tmp_path)
    assert '  "parts": [true, null, false],\n' in path.read_text(encoding="utf-8")
    assert Claim.load(path).parts == (True, None, False)


def test_a_record_of_before_has_no_call_and_no_digests_of_data(tmp_path):
    path = claim().save(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.pop("data") == {"CIFAR-10, 5,000 training images": "5c1e"}
    content = {name: value for name, value in content.items() if name not in ("call", "parts")} | {"format": 2}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert Claim.load(path) == claim(call="", data={}, created=content["created"])


def test_the_digest_of_code_in_an_old_record_is_not_read(tmp_path):
    path = claim().save(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"digest": "12ab"}), encoding="utf-8")
    assert Claim.load(path) == claim(created=content["created"])


def test_a_later_note_stands_beside_its_record_until_that_is_measured_again(tmp_path):
    one, other = claim(created="2025-01-02"), claim(scale="gpu", created="2025-01-03")
    assert later_notes(tmp_path, [one, other]) == {}
    note = {"date": "2025-02-01", "note": "The disk was slow.", "records": {"svcca/few-directions.cpu": one.created}}
    (tmp_path / "notes.json").write_text(json.dumps([note, note | {"note": "Still."}]), encoding="utf-8")
    noted = ["The disk was slow. (2025-02-01)", "Still. (2025-02-01)"]
    assert later_notes(tmp_path, [one, other]) == {(one.id, "cpu"): noted}
    assert later_notes(tmp_path, [claim(created="2025-03-01")]) == {}
    (tmp_path / "notes.json").write_text('[{"note": "no date"}]', encoding="utf-8")
    with pytest.raises(FileError, match="notes.json' is damaged"):
        later_notes(tmp_path, [one])


def test_a_short_time_is_not_told_as_nothing():
    assert [claim(seconds=seconds).time for seconds in (0.1, 3.5, 12.3, 1234)] == ["0.1 s", "3.5 s", "12 s", "1,234 s"]


def test_the_file_is_json_for_people(tmp_path):
    text = claim().save(tmp_path).read_text(encoding="utf-8")
    assert json.loads(text)["kind"] == "claim"
    assert '      "kept": [0.1, null, 0.97]\n' in text
    assert '    "time": {"value": 12.5, "unit": "s"}\n' in text
    assert "“suffice” –" in text


def test_no_half_file_is_left_when_writing_fails(tmp_path, monkeypatch):
    claim().save(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match="cannot write '.*few-directions.cpu.json': No space left on device."):
        claim(verdict="does not hold").save(tmp_path, overwrite=True)
    assert Claim.load(tmp_path / "svcca/few-directions.cpu.json").verdict == "holds"
    assert os.listdir(tmp_path / "svcca") == ["few-directions.cpu.json"]


def test_a_record_is_written_over_only_where_that_is_allowed(tmp_path):
    path = claim().save(tmp_path)
    with pytest.raises(FileError, match="this would write over '.*cpu.json'; choose another name, or give `overwrite"):
        claim(verdict="does not hold").save(tmp_path)
    assert Claim.load(path).verdict == "holds"
    assert Claim.load(claim(verdict="does not hold").save(tmp_path, overwrite=True)).verdict == "does not hold"


def test_a_claim_is_frozen_copies_and_pickles():
    one = claim()
    with pytest.raises(TypeError):
        one.measured["accuracy kept"] = Measured(1)
    with pytest.raises(TypeError):
        one.curves["Accuracy"]["kept"] = []
    with pytest.raises(AttributeError):
        one.verdict = "does not hold"
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert one != claim(verdict="holds in part")
    assert repr(one) == "Claim('svcca/few-directions', scale='cpu', verdict='holds')"
    assert (one.paper, one.name) == ("svcca", "few-directions")


@pytest.mark.parametrize("values", [[0.5, 0.75, 0.9], [3.0, 3.0], [-1.0, 2.0, 0.5, 8.0]])
def test_the_standard_error_over_seeds_is_numpys(values):
    found = Measured.over(np.array(values))
    assert found.value == pytest.approx(sum(values) / len(values))
    spread = sum((value - found.value) ** 2 for value in values) / (len(values) - 1)
    assert found.error == pytest.approx((spread / len(values)) ** 0.5)
    assert found.n == len(values)


def test_one_seed_has_no_error():
    assert Measured.over([0.5]) == Measured(0.5, None, 1)


@pytest.mark.parametrize(
    "measured, text",
    [
        (Measured(0.87234, 0.0123), "0.872 ± 0.012"),
        (Measured(0.87234, 0.0123, 5), "0.872 ± 0.012 (n = 5)"),
        (Measured(1234.5, 120, unit="s"), "1,234 ± 120 s"),
        (Measured(25), "25"),
        (Measured(0.123456), "0.1235"),
        (Measured(10000, n=2000), "10,000 (n = 2,000)"),
        (Measured(0.5, 0), "0.5 ± 0"),
        (Measured(1.0, 1.2e-17, 5), "1 ± 0 (n = 5)"),
        (Measured(1.0, 3e-9, 5), "1 ± 3e-09 (n = 5)"),
        (Measured(0.2500000000000003), "0.25"),
    ],
)
def test_a_number_is_written_to_the_digits_its_error_allows(measured, text):
    assert str(measured) == text


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Measured(float("nan")), "a measured value must be a finite number; got nan."),
        (lambda: Measured(1, float("inf")), "a measured error must be a finite number; got inf."),
        (lambda: Measured(1, -0.5), "a measured error must be zero or more; got -0.5."),
        (lambda: Measured.over([]), "a mean needs at least one value; got none."),
        (
            lambda: claim(verdict="yes"),
            "a verdict is one of 'holds', 'holds in part', 'undecided', 'does not hold'; got 'yes'.",
        ),
        (lambda: claim(kind="sure"), "a kind of claim is one of 'empirical', 'identity'; got 'sure'."),
        (lambda: claim(scale="tpu"), "a scale is one of 'cpu', 'gpu'; got 'tpu'."),
        (lambda: claim(id="../x"), "a claim's id is a paper and a name in small letters.*; got '../x'."),
        (lambda: record_path(".", "svcca", "cpu"), "as in 'svcca/bottom-up'; got 'svcca'."),
    ],
)
def test_what_is_wrong_is_refused(make, words):
    with pytest.raises(InvalidValue, match=words):
        make()


@pytest.mark.parametrize(
    "curve, words",
    [
        ({"k": [1, 2]}, "the curve 'Fig' must hold an x axis and at least one line, of one length; got 1 lists"),
        ({"k": [1, 2], "kept": [1]}, "got 2 lists of lengths 1, 2."),
        ({}, "got 0 lists of lengths none."),
    ],
)
def test_a_curve_that_cannot_be_drawn_is_refused(curve, words):
    with pytest.raises(ShapeError, match=words):
        claim(curves={"Fig": curve})


def test_curves_are_short_plain_numbers_and_a_nan_is_a_hole():
    curve = {"layer": ["a", "b"], "kept": np.array([1 / 3, np.nan], dtype=np.float32)}
    assert claim(curves={"Fig": curve}).curves["Fig"] == {"layer": ("a", "b"), "kept": (0.333333, None)}


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is damaged: JSONDecodeError"),
        ("[]", "is damaged: TypeError|is damaged: AttributeError"),
        ('{"kind": "claim", "format": 1, "id": "a/b", "measured": {}}', "is damaged: TypeError"),
        ('{"kind": "ranking", "format": 1}', "is a JSON document of kind 'ranking', and no record"),
        ('{"kind": "claim", "format": 9}', "has format 9; this netkin reads claims up to format 3"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FileError, match=f"x.json.*({words})"):
        Claim.load(tmp_path / "x.json")


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(FileError, match="cannot read '.*gone.json': No such file or directory."):
        Claim.load(tmp_path / "gone.json")


def test_records_come_in_the_order_of_the_figures(tmp_path):
    for id, figure, scale in [
        ("svcca/z", "Fig. 10", "cpu"), ("svcca/a", "App. 2", "cpu"), ("svcca/m", "Fig. 2b", "gpu"),
        ("svcca/m", "Fig. 2b", "cpu"), ("cka/x", "Table 1", "cpu"),
    ]:  # fmt: skip
        claim(id=id, figure=figure, scale=scale).save(tmp_path)
    found = [(one.id, one.scale) for one in recorded(tmp_path)]
    assert found == [("cka/x", "cpu"), ("svcca/m", "cpu"), ("svcca/m", "gpu"), ("svcca/z", "cpu"), ("svcca/a", "cpu")]
    assert recorded(tmp_path / "nothing") == []


def test_figures_without_a_number_come_last():
    assert sorted(["text", "Fig. 4, App. 3", "Fig. App. 6", "Fig. 1"], key=figure_order) == [
        "Fig. 1", "Fig. 4, App. 3", "text", "Fig. App. 6",
    ]  # fmt: skip


def test_the_row_shows_one_number_of_each(tmp_path):
    assert claim().row == {
        "claim": "svcca/few-directions", "figure": "Fig. 2a", "number": "accuracy kept", "the paper": "nearly all",
        "ours": "0.9721 ± 0.0042 (n = 3)", "control": "0.500 ± 0.010 (n = 3)", "scale": "cpu", "verdict": "holds",
    }  # fmt: skip
    assert claim(expected={"other": 1}).headline == "accuracy kept"
    assert claim(kind="identity", control="", controls={}).row["control"] == "algebra"


@pytest.mark.parametrize(
    "changes, end",
    [
        ({}, "; so by its criterion the claim holds."),
        ({"verdict": "holds in part"}, "; so by its criterion the claim holds in part."),
        ({"verdict": "undecided"}, "; so by its criterion the runs do not decide the claim."),
        (
            {"verdict": "does not hold", "controls": {"accuracy kept": Measured(0.9700, 0.0042, 3)}},
            "; so by its criterion the claim does not hold: the control differs by less than one standard error.",
        ),
        (
            {"verdict": "undecided", "controls": {"accuracy kept": Measured(0.9500, 0.0100, 3)}},  # two errors apart
            "; so by its criterion the runs do not decide the claim.",
        ),
        (
            {
                "verdict": "holds in part",
                "criterion": "Four parts. A; b; c; and d.",
                "parts": (True, False, True, None),
            },
            "the claim holds in part: of its four parts 1 and 3 hold, 2 fails and 4 is undecided.",
        ),
        (
            {
                "verdict": "does not hold",
                "parts": (True, False),
                "controls": {"accuracy kept": Measured(0.9700, 0.0042, 3)},
            },
            "; so by its criterion the claim does not hold: of its two conditions 1 holds and 2 fails, and the control "
            "differs by less than one standard error.",
        ),
        ({"parts": (True, True, True)}, "; so by its criterion the claim holds: all three of its conditions hold."),
        ({"parts": (True,)}, "; so by its criterion the claim holds."),
        ({"kind": "identity", "controls": {}}, "is 0.9721 ± 0.0042 (n = 3), which is algebra and agrees."),
    ],
)
def test_one_sentence_says_claim_control_and_what_follows(changes, end):
    text = claim(**changes).conclusion
    assert text.startswith("The paper says “25 directions “suffice” – nearly” (Fig. 2a); here accuracy kept is 0.9721")
    assert text.endswith(end)
    if changes.get("kind") != "identity":
        assert "and in the control, as many random neurons, " in text


def test_a_record_of_the_first_format_is_read(tmp_path):
    old = json.loads(claim().to_json())
    for name in ("nature", "control", "controls", "settings", "measures"):
        del old[name]
    (tmp_path / "old.json").write_text(json.dumps(old | {"format": 1}))
    found = Claim.load(tmp_path / "old.json")
    assert (found.kind, found.control, dict(found.controls)) == ("empirical", "", {})


@pytest.mark.parametrize("values", [[0.5, 0.6, 0.7], [1.0, 2.0], [3.0, 3.1, 2.9, 3.05, 3.2]])
def test_the_interval_is_students_t(values):
    from scipy import stats

    expected = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert Measured.over(values).interval == pytest.approx(expected)


@pytest.mark.parametrize(
    "values, above, below, within",
    [
        ([0.5, 0.51, 0.52], True, False, True),
        ([0.1, 0.5, 0.9], None, None, None),  # more than two standard errors above 0, which is not enough for three
        ([-0.5, -0.51, -0.52], False, True, False),
        ([0.5], None, None, None),
        ([0.5, 0.5], True, False, True),
    ],
)
def test_what_lies_in_the_interval_is_undecided(values, above, below, within):
    found = Measured.over(values)
    assert (found.above(0), found.below(0), found.within(0.2, 0.8)) == (above, below, within)


def test_a_difference_of_other_runs_has_both_errors_and_the_fewer_degrees_of_freedom():
    found = Measured(0.9, 0.03, 5).minus(Measured(0.5, 0.04, 3))
    assert (found.value, found.error, found.n) == (pytest.approx(0.4), pytest.approx(0.05), 3)
    assert Measured(0.9, None, 1).minus(Measured(0.5, 0.04, 3)).error is None


@pytest.mark.slow
def test_a_record_is_read_without_torch(tmp_path):
    path = claim().save(tmp_path)
    program = (
        "import sys; from reproductions.record import Claim; Claim.load(sys.argv[1]); sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(netkin.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", program, path], env=environment).returncode == 0


def test_a_number_that_a_record_calls_by_a_score_is_shown_in_words():
    name = "kernel_ridge_hadamard"
    found = claim(id="gradients/recommender", expected={name: "not measured"}, measured={name: Measured(0.3)})
    assert found.row["number"] == "Kendall's τ of kernel ridge with accuracy after fine-tuning"
    assert "here Kendall's τ of kernel ridge with accuracy after fine-tuning is 0.3" in found.conclusion


def test_the_sentence_tells_by_how_much_a_number_is_above_each_control_run_by_run():
    numbers = {
        "size": Measured.over([0.5, 0.6]),
        "size, less that of the walk": Measured.over([0.1, 0.2, 0.3]),
        "size, less that of the line": Measured(0.25),
    }
    told = claim(expected={"size": 1}, measured=numbers).conclusion
    assert (
        "; run by run it exceeds that of the walk by 0.2 (95% interval -0.048 to 0.45) and that of the line by 0.25; so"
    ) in told
