import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import netkin as nk
from continual_worlds import RECIPE, small_net
from netkin import files
from netkin.applications.continual import TaskAccuracies, learn_tasks
from netkin.errors import FileError, UnknownName
from refusals import refused
from table_worlds import sentences


def drawn(seeds=3, tasks=4, **changes):
    values = np.random.default_rng(0).uniform(size=(seeds, tasks + 1, tasks))
    own = {
        "method": "ewc", "tasks": tuple("abcd"[:tasks]), "classes": (2,) * tasks, "seeds": tuple(range(seeds)),
        "accuracies": values, "storage": {"shared": 9, "each task": 2, "in all": 17}, "recipe": "epochs=2",
    }  # fmt: skip
    return TaskAccuracies(**own | changes)


def test_acc_bwt_and_fwt_are_those_of_slow_loops():
    """Eqs. 2 to 4 of Lopez-Paz & Ranzato (2017), with tasks from 1 to T and row 0 the start."""
    record, T = drawn(), 4
    for s in range(3):
        R = {(i, j): record.accuracies[s, i, j - 1] for i in range(T + 1) for j in range(1, T + 1)}
        acc = bwt = fwt = 0.0
        for j in range(1, T + 1):
            acc += R[T, j] / T
        for i in range(1, T):
            bwt += (R[T, i] - R[i, i]) / (T - 1)
        for i in range(2, T + 1):
            fwt += (R[i - 1, i] - R[0, i]) / (T - 1)
        assert (record.acc[s], record.bwt[s], record.fwt[s]) == pytest.approx((acc, bwt, fwt))


def test_the_spread_is_a_standard_error_over_seeds():
    record = drawn()
    mean, error = record.metrics()["ACC"]
    assert mean == pytest.approx(sum(record.acc) / 3)
    assert error == pytest.approx(math.sqrt(sum((one - mean) ** 2 for one in record.acc) / 2 / 3))
    assert math.isnan(drawn(seeds=1).metrics()["ACC"][1])


def test_one_task_has_neither_transfer():
    record = drawn(tasks=1)
    assert np.isnan(record.bwt).all()
    assert np.isnan(record.fwt).all()
    assert "BWT: –" in str(record)


def test_nothing_is_forgotten_by_atoms_and_the_record_says_that_this_is_by_construction(learnt):
    assert learnt.record.bwt.tolist() == [0.0, 0.0]
    assert "forgets nothing by construction" in sentences(learnt.record)[0]
    for j in range(3):
        column = learnt.record.accuracies[:, j + 1 :, j]
        assert (column == column[:, :1]).all()


def test_joint_training_has_no_accuracy_on_the_way(tasks):
    record = learn_tasks(small_net, tasks, "joint", **RECIPE).record
    assert np.isnan(record.accuracies[0, 1:-1]).all()
    assert not np.isnan(record.accuracies[0, -1]).any()
    assert math.isnan(record.bwt[0])
    assert record.table().missing["0-1", "2-3"] == "not trained yet"


def test_the_matrix_is_labelled(learnt):
    record = learnt.record
    assert record.table().axes == ("after", "task")
    assert record.table().layers_a == ("start", "0-1", "2-3", "4-5")
    assert record["2-3", "0-1"] == pytest.approx(record.accuracies[:, 2, 0].mean())
    assert record.table(1)["4-5", "2-3"] == record.accuracies[1, 3, 1]
    for pair in (("0-2", "0-1"), ("0-1", "start")):
        with refused(UnknownName, "task"):
            record[pair]
    with pytest.raises(UnknownName, match="ask for a pair"):
        record["0-1"]
    with refused(UnknownName, "seed"):
        record.table(5)


def test_a_file_of_another_kind_is_refused_as_that(tmp_path):
    files.write(tmp_path / "a.netkin", "series", {}, {})
    with pytest.raises(FileError, match="a.netkin' holds 'series', not 'task accuracies'; load it as what it is"):
        TaskAccuracies.load(tmp_path / "a.netkin")


def test_a_record_comes_back_from_its_file(learnt, tasks, tmp_path):
    joint = learn_tasks(small_net, tasks, "joint", **RECIPE).record
    for record in (learnt.record, joint):
        record.save(tmp_path / "tasks.netkin", overwrite=True)
        found = nk.load(tmp_path / "tasks.netkin")
        assert found == record
        assert str(found) == str(record)
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(FileError):
        record.save(tmp_path / "other.txt")


def test_a_record_is_frozen():
    record = drawn()
    with pytest.raises(FrozenInstanceError):
        record.method = "atoms"
    with pytest.raises(ValueError, match="read-only"):
        record.accuracies[0] = 1
    with pytest.raises(TypeError):
        record.storage["shared"] = 0


def test_it_is_told_in_a_table_and_as_a_data_frame():
    text = str(drawn())
    assert "4 tasks learnt in a row by 'ewc', 3 seeds" in text
    assert "9 shared, 2 each task, 17 in all" in text
    frame = drawn().to_pandas()
    assert len(frame) == 3 * 5 * 4
    assert list(frame.columns) == ["seed", "after", "task", "accuracy"]
