"""What a record says of the data that its claim read."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from netkin.identity import weights_digest
from reproductions.claims import Finding, Measured
from reproductions.image_sets import Images
from reproductions.keeping import Notes, cache_with_notes, noting
from reproductions.laboratory import Lab, _apart
from reproductions.matching import nets
from reproductions.running import call_of, measured, working

CONTROL = {"size": Measured(0.25)}


@pytest.fixture
def digits(tmp_path, monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    return Lab("cpu", cache=tmp_path / "cache")


def with_data(folder, **options):
    (folder / "shakespeare").mkdir(exist_ok=True)
    (folder / "shakespeare" / "input.txt").write_text("to be or not to be " * 20)
    return Lab("cpu", cache=folder / "cache", data=folder, **options)


def random_images(name="CIFAR-10", seed=0):
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.rand(6, 3, 32, 32, generator=draw)
    return Images(name, ("a", "b"), pixels[:4], torch.tensor([0, 1, 0, 1]), pixels[4:], torch.tensor([1, 0]))


def test_a_set_has_a_digest_for_each_part_that_changes_with_pixels_and_labels_alone():
    images = random_images()
    assert list(images.digests) == ["CIFAR-10, 4 training images", "CIFAR-10, 2 test images"]
    assert random_images().digests == images.digests
    for part in ("train_images", "train_labels"):
        other = replace(images, **{part: getattr(images, part).roll(1, 0)}).digests
        assert other["CIFAR-10, 4 training images"] != images.digests["CIFAR-10, 4 training images"], part
        assert other["CIFAR-10, 2 test images"] == images.digests["CIFAR-10, 2 test images"]
    last = images.train_images.contiguous(memory_format=torch.channels_last)
    assert replace(images, train_images=last).digests == images.digests


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_digest_is_the_same_on_a_gpu():
    images = random_images()
    parts = {name: value.cuda() for name, value in vars(images).items() if isinstance(value, torch.Tensor)}
    assert replace(images, **parts).digests == images.digests


def test_sets_that_an_earlier_claim_read_are_noted_again(made, digits):
    reading = lambda lab: Finding("holds", {"n": Measured(len(lab.probe(3)))}, CONTROL)  # noqa: E731
    first, second = (measured(made(f"toys/{name}", measure=reading), digits) for name in "ab")
    assert len(first.data) == 2
    assert (first.data, first.provenance["data"]) == (second.data, second.provenance["data"])


def test_text_is_noted_also_where_its_pieces_were_read_before(tmp_path):
    lab = with_data(tmp_path)
    lab.held_out(2)
    with noting() as notes:
        lab.held_out(2)
    assert notes.data == ["shakespeare, 380 bytes of text"]
    before = notes.digests["shakespeare, 380 bytes of text"]
    (tmp_path / "shakespeare" / "input.txt").write_text("to be or not to bE " * 20)
    with noting() as notes:
        lab.text()
    assert notes.digests["shakespeare, 380 bytes of text"] != before


def test_published_weights_are_noted_by_their_digest(tmp_path):
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "net.pt")
    with noting() as notes:
        Lab("cpu", cache=tmp_path, checkpoints=tmp_path).checkpoint("net.pt")
    assert notes.digests == {"weights net.pt": weights_digest(model)}


def test_what_a_remembered_function_read_is_noted_at_every_call(tmp_path):
    calls = []

    @cache_with_notes
    def network(lab, name):
        calls.append(name)
        lab.checkpoint(name)
        return name.upper()

    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "net.pt")
    lab = Lab("cpu", cache=tmp_path, checkpoints=tmp_path)
    for _ in range(2):
        with noting() as notes:
            assert network(lab, "net.pt") == "NET.PT"
        assert list(notes.digests) == ["weights net.pt"]
    assert calls == ["net.pt"]


def test_sets_that_a_paper_reads_itself_are_noted(digits, monkeypatch):
    digits.data = "somewhere"
    digits.__dict__["_images"] = random_images()
    batches = [(torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))]
    monkeypatch.setattr(nets, "load_data", lambda name, batch_size: batches)
    for _ in range(2):
        with noting() as notes:
            nets.images(digits, "svhn")
        assert "SVHN, 4 training and 2 test images" in notes.data
        assert {"SVHN, 4 training images", "SVHN, 2 test images"} <= notes.digests.keys()


def read(lab, task):
    lab.images()
    lab.recipe("lstm")
    return task


def test_what_workers_read_is_noted_in_the_record(made, digits, tmp_path, monkeypatch):
    def measure(lab):
        return Finding("holds", {"size": Measured.over(lab.over(read, [1, 2, 3]))}, CONTROL)

    alone = measured(made("toys/alone", measure=measure), digits)
    spread = Lab("cpu", cache=tmp_path / "cache")
    setting = spread._setting
    monkeypatch.setattr(Lab, "_setting", setting)
    spread._workers = ThreadPoolExecutor(2)
    with torch.random.fork_rng([]), noting() as notes:
        spread.device = torch.device("cuda")  # nothing is placed there
        assert spread.over(read, [1, 2, 3]) == [1, 2, 3]
    assert notes.digests == alone.data
    assert list(notes.recipes) == list(alone.settings) == ["lstm"]


def test_what_finished_parts_of_a_killed_claim_read_is_noted(made, digits, tmp_path):
    done = tmp_path / "done"

    def reading(lab, task):
        done.write_text(done.read_text() + "x" if done.exists() else "x")
        return read(lab, task)

    def measure(lab):
        found = lab.over(reading, [1, 2], keep=True)
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt
        return Finding("holds", {"size": Measured.over(found)}, CONTROL)

    statement = made(measure=measure)
    with pytest.raises(KeyboardInterrupt), working(statement, digits):
        measured(statement, digits)
    with working(statement, digits):
        found = measured(statement, digits)
    assert done.read_text() == "xx"
    assert (list(found.settings), found.data) == (["lstm"], digits.images().digests)


def test_notes_do_not_depend_on_the_order_of_reading():
    one, other = Notes(["b"], {"x": "2"}, {"n": "w"}), Notes(["a"], {"x": "1", "a": "3"}, {"m": "v"})
    joined = [Notes(), Notes()]
    for notes, parts in zip(joined, [(one, other, one), (other, one)], strict=True):
        for part in parts:
            notes.join(part)
    assert joined[0] == joined[1] == Notes(["a", "b"], {"a": "3", "x": "1, 2"}, {"m": "v", "n": "w"})
    assert list(joined[0].digests) == list(joined[1].digests) == ["a", "x"]


def test_the_call_names_no_folder_of_this_machine(made, tmp_path):
    lab = with_data(tmp_path, checkpoints=tmp_path)
    assert call_of(made(), lab) == (
        "python -m reproductions toys/halving --scale cpu --data DIR --checkpoints DIR --device cpu"
    )
    assert _apart(read_nothing, Lab("cpu", cache=tmp_path)._setting, 1) == (1, Notes())


def read_nothing(lab, task):
    return task
