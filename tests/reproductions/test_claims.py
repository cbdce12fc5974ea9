import json
import pickle

import pytest

import reproductions.claims
from netkin.errors import InvalidValue, NameClash, SourceError, UnknownName
from reproductions.claims import Finding, Measured, all_of, chosen, claim, claims, line, papers, verdict
from reproductions.record import SCALES


def test_the_decorator_files_the_claim_and_leaves_the_function_alone(registry):
    facts = {"figure": "Fig. 1", "sentence": "s", "expected": {"size": 0.5}, "criterion": "c", "control": "none"}

    @claim("toys/own", **facts)
    def own(lab):
        return Finding("holds", {"size": Measured(1)})

    statement = registry["toys/own"]
    assert own(None).verdict == "holds"
    assert statement.measure is own
    assert {name: getattr(statement, name) for name in facts} == facts
    assert (statement.paper, statement.scales) == ("toys", SCALES)


def test_claims_come_in_the_order_of_the_figures(made):
    for id, figure in [("toys/c", "App. 1"), ("toys/b", "Fig. 10"), ("toys/a", "Fig. 9")]:
        made(id, figure=figure)
    assert [one.id for one in claims("toys")] == ["toys/a", "toys/b", "toys/c"]


def test_a_paper_or_one_claim_may_be_named(made):
    made("toys/small", scales=("cpu",))
    made("toys/both")
    assert {one.id for one in chosen("toys", "cpu")} == {"toys/small", "toys/both"}
    assert [one.id for one in chosen("toys", "gpu")] == ["toys/both"]
    assert [one.id for one in chosen("toys/both", "gpu")] == ["toys/both"]


@pytest.mark.parametrize(
    "name, scale, fault, words",
    [
        ("toy", "cpu", UnknownName, "no paper 'toy'; did you mean 'toys'. There are toys."),
        ("cka/x", "cpu", UnknownName, "no paper 'cka'. There are toys."),
        (
            "toys/smal",
            "cpu",
            UnknownName,
            "no claim 'toys/smal'; did you mean 'toys/small'. `python -m reproductions toys --li",
        ),
        ("toys/small", "gpu", InvalidValue, "the claim 'toys/small' is measured at the scale 'cpu' only; got 'gpu'."),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(made, name, scale, fault, words):
    made("toys/small", scales=("cpu",))
    with pytest.raises(fault, match=words):
        chosen(name, scale)


def test_a_line_has_the_means_of_its_points_and_their_errors():
    assert line("loss", [[1, 3], [2]]) == {"loss": [2, 2], "loss ±": [1, 0]}


def test_two_functions_may_not_share_an_id(made, registry):
    def other(lab):
        return Finding("holds", {})

    made("toys/own")
    with pytest.raises(NameClash, match="both claim the id 'toys/own'; rename one."):
        made("toys/own", measure=other)
    made("toys/twice", measure=other)
    made("toys/twice", measure=other)  # a module imported a second time


@pytest.mark.parametrize("scales, got", [(("cpu", "tpu"), "'cpu', 'tpu'"), ((), "")])
def test_strange_scales_are_refused(made, scales, got):
    with pytest.raises(InvalidValue, match=f"the scales of 'toys/halving' are one or both of cpu, gpu; got .{got}.."):
        made(scales=scales)


def test_a_bad_id_and_a_bad_verdict_are_refused(made):
    with pytest.raises(InvalidValue, match="a claim's id is a paper and a name"):
        made("halving")
    with pytest.raises(
        InvalidValue, match="a verdict is one of 'holds', 'holds in part', 'undecided', 'does not hold'; got"
    ):
        Finding("true", {})
    with pytest.raises(InvalidValue, match="a verdict follows from at least one condition; got none."):
        verdict()


def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_claims.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SourceError, match="broken_claims.py could not be imported: ModuleNotFoundError: No module"):
        reproductions.claims._imported("broken_claims")


def test_every_paper_of_ours_has_a_reference_and_claims_that_say_all():
    for paper, reference in papers().items():
        assert "arXiv" in reference or "NeurIPS" in reference
        for one in claims(paper):
            assert all([one.figure, one.sentence, one.expected, one.criterion]), one.id


@pytest.mark.parametrize(
    "parts, found",
    [
        ([True, True], "holds"),
        ([True, None], "undecided"),
        ([None, None], "undecided"),
        ([True, False, None], "holds in part"),
        ([False, None], "does not hold"),
        ([all_of(True, False)], "does not hold"),  # what cannot fail makes no part of a failure
        ([all_of(True, None)], "undecided"),
    ],
)
def test_a_verdict_follows_from_parts_each_of_which_could_fail(parts, found):
    assert verdict(*parts) == found


def test_a_verdict_knows_its_parts_and_of_a_single_part_the_conditions():
    assert verdict(True, None, all_of(True, False)).parts == (True, None, False)
    assert verdict(all_of(True, None, True)).parts == (True, None, True)
    assert verdict(all_of(all_of(True, False), True)).parts == (False, True)
    all_of(True, False)
    assert verdict(False).parts == (False,)  # not what was joined before
    assert verdict(True).parts == (True,)
    copied = pickle.loads(pickle.dumps(verdict(True, False)))
    assert (copied, copied.parts) == ("holds in part", (True, False))


@pytest.mark.parametrize("kind, control", [("empirical", ""), ("identity", "copies"), ("certain", "copies")])
def test_a_claim_names_a_control_or_is_algebra(made, kind, control):
    with pytest.raises(InvalidValue, match="is empirical and names a control in which it should fail, or an identity"):
        made(kind=kind, control=control)


def test_the_measures_of_our_claims_exist():
    from netkin.measures import measures

    named = {name for paper in papers() for one in claims(paper) for name in one.measures}
    assert named <= set(measures())


def test_every_record_belongs_to_a_claim():
    from reproductions.record import recorded
    from reproductions.running import RESULTS

    known = {one.id: one for paper in papers() for one in claims(paper)}
    for record in recorded(RESULTS):
        assert record.scale in known[record.id].scales


def test_every_later_note_is_of_a_measurement_that_is_recorded():
    """A note on a record that was measured again is to be deleted from `notes.json`."""
    from reproductions.record import recorded
    from reproductions.running import RESULTS

    times = {f"{one.id}.{one.scale}": one.created for one in recorded(RESULTS)}
    for note in json.loads((RESULTS / "notes.json").read_text(encoding="utf-8")):
        assert note["records"].items() <= times.items()
