import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from netkin import __version__, files
from netkin.errors import FileError, InvalidValue, UnknownName
from reproductions import claims, laboratory, listing, running
from reproductions.claims import Finding, Measured, all_of, verdict
from reproductions.commit import commit
from reproductions.laboratory import Lab
from reproductions.record import Claim
from reproductions.running import current, device_named, device_words, measured, record_of, run, working

CONTROL = {"size": Measured(0.25)}
ROOT = Path(__file__).parents[2]


def raising(error):
    def measure(lab):
        raise error

    return measure


def test_a_claim_is_recorded_with_its_provenance(made, lab, tmp_path):
    def measure(lab):
        lab.recipe("net")
        return Finding("holds", {"size": Measured(lab.trained() and 0.5)}, CONTROL, "a note", seeds=range(2))

    made(measure=measure, measures=["cka"])
    run(["toys"], lab, tmp_path)
    found = Claim.load(tmp_path / "toys" / "halving.cpu.json")
    assert (found.verdict, found.note, found.seeds, found.version) == ("holds", "a note", (0, 1), __version__)
    assert (found.control, found.controls, found.kind) == ("copies of copies", CONTROL, "empirical")
    assert (found.settings, found.measures) == ({"net": "epochs=3"}, ("cka",))
    assert found.call == "python -m reproductions toys/halving --scale cpu --device cpu"
    assert found.data == {"toys, 4 training images": "ab12"}
    assert found.provenance == {
        "paper": "Toy (2020), Toys.",
        "device": device_words(torch.device("cpu")),
        "data": "toys, 4 training and 2 test images",
        "commit": commit(),
        "netkin": __version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def test_the_parts_of_a_criterion_are_recorded_and_told(made, lab, tmp_path, capsys):
    def measure(lab):
        return Finding(verdict(True, all_of(True, False), None), {"size": Measured(0.5)}, CONTROL)

    made(measure=measure, criterion="Three parts: a; b; and c.")
    (outcome,) = run(["toys"], lab, tmp_path)
    assert Claim.load(tmp_path / "toys" / "halving.cpu.json").parts == outcome.claim.parts == (True, False, None)
    told = "holds in part: of its three parts 1 holds, 2 fails and 3 is undecided."
    assert f"{told}\n  Criterion: Three parts: a; b; and c.\n  Measured on 20" in listing.outcomes_as_text([outcome])


def test_data_is_noted_for_the_claim_that_asked_for_it_alone(made, lab, tmp_path):
    made("toys/a", measure=lambda lab: Finding("holds", {"images": Measured(len(lab.images().words))}, CONTROL))
    made("toys/b")
    first, second = run(["toys"], lab, tmp_path)
    assert first.claim.provenance["data"] == "toys, 4 training and 2 test images"
    assert second.claim.provenance["data"] == "made by the claim itself"
    assert (first.claim.data, second.claim.data) == ({"toys, 4 training images": "ab12"}, {})


def test_a_claim_that_crashes_does_not_stop_the_others(made, lab, tmp_path, capsys):
    made("toys/a", measure=raising(ZeroDivisionError("no\nsize")))
    made("toys/b", measure=raising(InvalidValue("too small.")))
    made("toys/c")
    outcomes = run(["toys"], lab, tmp_path)
    assert [one.fault for one in outcomes] == ["ZeroDivisionError: no size", "too small.", ""]
    assert [path.name for path in tmp_path.rglob("*.json")] == ["c.cpu.json"]
    told = capsys.readouterr().err
    assert "[1 of 3] toys/a: failed, ZeroDivisionError: no size" in told
    assert told.count("Traceback") == 1  # a refusal has said all
    assert "[3 of 3] toys/c: holds" in told


def test_an_interrupted_run_goes_on(made, lab, tmp_path, capsys):
    counted = []

    def counting(lab):
        counted.append(1)
        return Finding("does not hold", {}, CONTROL)

    made("toys/a", measure=counting)
    made("toys/b", measure=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(["toys"], lab, tmp_path)
    made("toys/c")
    outcomes = run(["toys/a", "toys/c", "toys/a"], lab, tmp_path)
    assert [one.claim.verdict for one in outcomes] == ["does not hold", "holds"]
    assert len(counted) == 1
    assert "[1 of 2] toys/a: recorded before, does not hold" in capsys.readouterr().err
    run(["toys/a"], lab, tmp_path, again=True)
    assert len(counted) == 2


def test_a_claim_that_is_judged_in_another_way_is_measured_again_and_a_record_is_never_edited(
    made, registry, lab, tmp_path
):
    numbers = iter([0.1, 0.2, 0.3, 0.4])

    def measure(lab):
        return Finding("holds", {"size": Measured(next(numbers))}, CONTROL)

    changed = [
        ({}, 0.1), ({"criterion": "size < 1"}, 0.2),
        ({"criterion": "size < 1", "control": "other copies"}, 0.3),
        ({"criterion": "size < 1", "control": "other copies", "measures": ("cka",)}, 0.4),
    ]  # fmt: skip
    for changes, number in changed:
        registry.clear()
        made(measure=measure, **changes)
        (outcome,) = run(["toys"], lab, tmp_path)
        saved = Claim.load(tmp_path / "toys" / "halving.cpu.json")
        assert saved == outcome.claim
        assert saved.measured["size"].value == number
        assert {name: getattr(saved, name) for name in changes} == changes
    before = (tmp_path / "toys" / "halving.cpu.json").read_bytes()
    registry.clear()
    made(measure=measure, **changes, sentence="halved", figure="Fig. 9", expected={"size": "half"})
    assert run(["toys"], lab, tmp_path)[0].claim.sentence == "sizes halve"  # the record's own words
    assert (tmp_path / "toys" / "halving.cpu.json").read_bytes() == before
    assert [one.figure for one in current(tmp_path)] == ["Fig. 1"]


def test_a_record_under_an_earlier_criterion_is_not_shown(made, registry, lab, tmp_path):
    made()
    run(["toys"], lab, tmp_path)
    assert [one.measured["size"].value for one in current(tmp_path)] == [0.5]
    registry.clear()
    statement = made(criterion="size < 0.1")
    assert record_of(statement, "cpu", tmp_path) is None
    assert current(tmp_path) == []
    assert "0.500" not in listing.list_as_text([statement], tmp_path)


def test_a_record_by_another_recipe_is_old(made, lab, tmp_path, monkeypatch):

    def measure(lab):
        lab.recipe("net")
        return Finding("holds", {"size": Measured(0.5)}, CONTROL)

    statement = made(measure=measure)
    run(["toys"], lab, tmp_path)
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "net", lab.recipe("net"))
    assert record_of(statement, "cpu", tmp_path) is not None
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "net", type("Other", (), {"words": "epochs=4"}))
    assert record_of(statement, "cpu", tmp_path) is None


def test_an_empirical_claim_without_its_control_fails_and_an_identity_has_none(made, lab, tmp_path):
    made("toys/bare", measure=lambda lab: Finding("holds", {"size": Measured(1)}))
    made("toys/algebra", kind="identity", measure=lambda lab: Finding("holds", {"size": Measured(1)}))
    faults = {one.statement.id: one.fault for one in run(["toys"], lab, tmp_path)}
    assert faults == {
        "toys/algebra": "",
        "toys/bare": "the function of 'toys/bare' must measure its control, copies of copies; got none.",
    }


def test_after_the_limit_no_claim_is_begun(made, lab, tmp_path, capsys):
    made("toys/a")
    made("toys/b")
    assert run(["toys"], lab, tmp_path, limit=-1) == []
    assert "-1 s are over; not begun: toys/a, toys/b" in capsys.readouterr().err


def test_finished_parts_of_a_killed_claim_are_kept(made, tmp_path):
    done = tmp_path / "done"

    def doubled(lab, task):
        with done.open("a") as file:
            file.write(f"{task} ")
        if done.read_text() == "1 2 ":
            raise KeyboardInterrupt  # as if killed: nothing is written after the last finished part
        return 2 * task

    def measure(lab):
        return Finding("holds", {"size": Measured.over(lab.over(doubled, [1, 2, 3], keep=True))}, CONTROL)

    lab = Lab("cpu", cache=tmp_path / "cache")
    statement = made(measure=measure)
    with pytest.raises(KeyboardInterrupt), working(statement, lab):
        measured(statement, lab)
    with working(statement, lab):
        assert measured(statement, lab).measured["size"].value == 4
    assert done.read_text() == "1 2 2 3 "
    assert list((tmp_path / "cache" / "jobs").iterdir()) == []  # a finished claim needs no parts


def test_parts_of_a_claim_that_another_commit_measured_are_measured_again(made, tmp_path, monkeypatch):
    done, counts = [], []

    def measure(lab):
        lab.over(lambda lab, task: done.append(task), [7], keep=True)
        raise KeyboardInterrupt

    statement, lab = made(measure=measure), Lab("cpu", cache=tmp_path)
    for name in ("one", "one", "other"):
        monkeypatch.setattr(running, "commit", lambda name=name: name)
        with pytest.raises(KeyboardInterrupt), working(statement, lab):
            measured(statement, lab)
        counts.append(len(done))
    assert counts == [1, 1, 2]


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def test_a_record_says_how_long_was_trained_and_an_old_one_what_its_claim_declares(made, lab, tmp_path):
    nets = {"training": lambda scale, shared: f"{shared}; heads 2 epochs", "papers_training": "90 epochs"}
    statement = made(
        **nets, measure=lambda lab: lab.recipe("lstm") and Finding("holds", {"size": Measured(1)}, CONTROL)
    )
    assert (
        running.training_of(statement, "cpu", ["lstm", "unheard-of"]) == "1,500 steps of batches of 32; heads 2 epochs"
    )
    assert running.training_of(made("toys/other"), "gpu", ["convnet", "resnet"]) == (
        "convnet 30 epochs of batches of 512, resnet 40 epochs of batches of 512"
    )
    new = running.measured(statement, lab)
    assert new.provenance["training"] == "1,500 steps of batches of 32; heads 2 epochs"
    old = replace(new, provenance={}, scale="gpu")
    assert running.trainings([new, old]) == {
        ("toys/halving", "cpu"): ("90 epochs", "1,500 steps of batches of 32; heads 2 epochs"),
        ("toys/halving", "gpu"): ("90 epochs", "4,000 steps of batches of 64; heads 2 epochs"),
    }


def test_the_commit_of_a_checkout_is_named_with_uncommitted_changes_of_its_code(tmp_path):
    read, code = commit.__wrapped__, tmp_path / "reproductions" / "claim.py"
    assert read(tmp_path) == "not known, outside of git"
    git(tmp_path, "init")
    code.parent.mkdir()
    code.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = read(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (code.parent / "results").mkdir()
    (code.parent / "results" / "claim.cpu.json").write_text("a record is no change of the code")
    (tmp_path / "notes.md").write_text("nor is this")
    assert read(tmp_path) == clean
    seen = []
    for change in (lambda: code.write_text("2"), lambda: (code.parent / "new.py").write_text("3")):
        change()
        seen.append(read(tmp_path))
    assert seen == [f"{clean} with uncommitted changes"] * 2
    assert read(code.parent) == "not known, outside of git"  # a copy of the code inside another repository


def test_a_damaged_record_is_named_and_can_be_replaced(made, lab, tmp_path):
    made()
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "halving.cpu.json").write_text("{")
    (outcome,) = run(["toys"], lab, tmp_path)
    assert "halving.cpu.json' is damaged" in outcome.fault
    assert run(["toys"], lab, tmp_path, again=True)[0].claim.verdict == "holds"


def test_what_was_measured_is_shown_also_where_the_disk_is_full(made, lab, tmp_path, monkeypatch):
    def full(path, *_, **__):
        raise FileError(f"cannot write {str(path)!r}: No space left on device.")

    made()
    monkeypatch.setattr(files, "write_text", full)
    outcomes = run(["toys"], lab, tmp_path)
    assert outcomes[0].claim.verdict == "holds"
    assert "Its record is not kept: cannot write" in listing.outcomes_as_text(outcomes)
    assert "No space left on device" in outcomes[0].fault


def test_parts_of_a_claim_stay_until_its_record_is_written(made, tmp_path, monkeypatch):
    done = tmp_path / "done"

    def halved(lab, task):
        with done.open("a") as file:
            file.write(f"{task} ")
        return task / 2

    made(measure=lambda lab: Finding("holds", {"size": Measured.over(lab.over(halved, [1, 2], keep=True))}, CONTROL))
    lab, place = Lab("cpu", cache=tmp_path / "cache"), tmp_path / "results" / "toys" / "halving.cpu.json"
    write = files.write_text
    monkeypatch.setattr(
        files, "write_text", lambda path, *rest, **options: _full_at(place, write, path, *rest, **options)
    )
    assert "No space left" in run(["toys"], lab, tmp_path / "results")[0].fault
    monkeypatch.setattr(files, "write_text", write)
    assert run(["toys"], lab, tmp_path / "results")[0].claim.measured["size"].value == 0.75
    assert done.read_text() == "1 2 "
    assert list((tmp_path / "cache" / "jobs").iterdir()) == []


def _full_at(full, write, path, *rest, **options):
    if path == full:
        raise FileError(f"cannot write {str(path)!r}: No space left on device.")
    write(path, *rest, **options)


def test_a_folder_that_cannot_be_written_is_found_before_measuring(made, lab, tmp_path):
    made(measure=raising(AssertionError("it was measured")))
    (tmp_path / "toys").write_text("a file where the folder should be")
    (outcome,) = run(["toys"], lab, tmp_path)
    assert outcome.fault.startswith("cannot write ")
    assert "toys" in outcome.fault


def test_what_returns_no_finding_fails(made, lab, tmp_path):
    made(measure=lambda lab: 0.5)
    fault = "the function of 'toys/halving' must return a Finding; got float."
    assert [one.fault for one in run(["toys"], lab, tmp_path)] == [fault]


def test_a_claim_draws_the_same_numbers_whatever_ran_before_and_leaves_chance_alone(made, lab):
    statement = made(measure=lambda lab: Finding("holds", {"x": Measured(torch.rand(()).item())}, CONTROL))
    first = measured(statement, lab).measured["x"]
    state = torch.random.get_rng_state()
    assert measured(statement, lab).measured["x"] == first
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_paper_without_claims_at_a_scale_is_refused(made, lab, tmp_path):
    made(scales=("gpu",))
    with pytest.raises(InvalidValue, match="'toys' has no claim at the scale 'cpu'; `--list` shows the scales of all."):
        run(["toys"], lab, tmp_path)


def test_devices_are_named_in_words():
    assert device_words(torch.device("cpu")).startswith("CPU, ")
    assert device_words(torch.device("meta")) == "META"
    assert device_named(None) is None
    assert device_named("cpu") == torch.device("cpu")
    with pytest.raises(UnknownName, match="there is no device 'cuda:99' here."):
        device_named("cuda:99")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_called_by_its_name():
    assert device_words(torch.device("cuda")) == torch.cuda.get_device_name()


def test_tables_for_the_terminal(made, lab, tmp_path):
    made("toys/a", figure="Fig. 2", sentence="a sentence that is rather long " * 9)
    made("toys/b", figure="Fig. 3", scales=("gpu",))
    made("toys/c", figure="Fig. 4", measure=raising(InvalidValue("too small.")))
    outcomes = run(["toys"], lab, tmp_path)
    first, criterion, measured_on, second = listing.outcomes_as_text(outcomes).splitlines()
    assert first.startswith("toys/a, cpu scale, 0.0 s: holds. The paper says “a sentence that is rather long")
    assert first.endswith(
        "long” (Fig. 2); here size is 0.500 ± 0.010 (n = 3), and in the control, copies of copies, 0.250 ± 0.010 (n = "
        "3); so by its criterion the claim holds."
    )
    assert criterion == f"  Criterion: {outcomes[0].claim.criterion}"
    assert measured_on.endswith(f": made by the claim itself; {device_words(lab.device)}; seeds 0, 1, 2.")
    assert second == "toys/c, failed: too small."
    listed = [" ".join(line.split()) for line in listing.list_as_text(listing.listed(["toys"]), tmp_path).splitlines()]
    assert listed[0] == "claim figure number the paper ours control scale verdict"
    assert listed[1] == "toys/a Fig. 2 size 0.5 0.500 ± 0.010 (n = 3) 0.250 ± 0.010 (n = 3) cpu holds"
    assert listed[2] == "toys/a Fig. 2 size 0.5 gpu not yet"
    assert listed[3] == "toys/b Fig. 3 size 0.5 gpu not yet"
    assert [one.id for one in listing.listed(["toys/b"])] == ["toys/b"]
    claims._STATEMENTS.pop("toys/a")
    made("toys/a", figure="Fig. 2", criterion="holds if it is twice as large.")
    assert "cpu measured before the claim changed" in " ".join(
        listing.list_as_text(listing.listed(["toys/a"]), tmp_path).split()
    )
