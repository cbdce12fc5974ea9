import re

import numpy as np
import pytest

from netkin.comparing.compare import compare
from netkin.reporting.page import page
from netkin.reporting.words import headline, meaning_of, range_of, short_names, shortened

FOLDER = "netkin:tiny10@/data/checkpoints/"


def test_every_measure_has_its_meaning():
    from netkin.measures import measures

    ours = [found.facts for found in measures().values() if found.function.__module__.startswith("netkin.")]
    assert len(ours) > 30
    assert all(facts.means.endswith(".") and facts.cannot_see.endswith(".") for facts in ours)


def test_a_page_says_what_the_measure_declared_and_a_saved_result_keeps_it(tmp_path, made):
    from netkin.results import load

    rows = {"one": np.random.default_rng(0).normal(size=(20, 3))}
    compare(rows, rows).save(tmp_path / "c.netkin")
    says, cannot_see = meaning_of(load(tmp_path / "c.netkin").tables["cka"])
    assert says.startswith("How similarly the two layers arrange the examples.")
    assert "cka_debiased does not" in cannot_see


def test_a_measure_of_others_is_told_by_its_conventions(made):
    assert meaning_of(made.table("kinship", convention="counts cousins"))[0] == (
        "counts cousins. Higher values mean closer layers."
    )
    assert meaning_of(made.distance("feud", convention=""))[0] == "Lower values mean closer layers."


def test_names_that_would_look_alike_get_their_numbers():
    names = [f"{'a' * 30}{middle}{'b' * 30}" for middle in "xy"]
    short = shortened(names)
    assert len(set(short)) == 2
    assert all(len(name) <= 22 for name in short)
    assert short[1].startswith("2 ")


def test_ranges_are_told_in_words(made):
    told = [
        range_of(made.table(bounds=b)) for b in [(0, 1), (0, np.inf), (-np.inf, np.inf), (-np.inf, 1), (0, np.pi / 2)]
    ]
    assert told == ["0 to 1", "from 0 up", "unbounded", "at most 1", "0 to π/2 ≈ 1.57"]


def test_where_only_corresponding_layers_were_compared_none_is_called_the_best():
    rng = np.random.default_rng(0)
    rows = {"one": rng.normal(size=(60, 4)), "two": rng.normal(size=(60, 5))}
    twice = {name: 2 * array for name, array in rows.items()}
    assert headline(compare(rows, twice, pairs="corresponding")).endswith(
        "the 2 layers of the same name are at 1.00 on average."
    )
    assert "2 of 2 layers of a find their best match" in headline(compare(rows, twice))


def test_all_layers_are_counted_where_few_have_the_name_of_another(made):
    values = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.5]]
    table = made.table(rows=("stem", "block1", "block2", "fc"), columns=("stem", "fc"), values=values)
    told = headline(made.comparison(table))
    assert "1 of 4 layers of seed0 finds its best match in the layer of the same name of seed1" in told
    assert told.endswith("and the 2 layers of the same name are at 0.70 on average.")


def test_one_is_not_written_as_several(made):
    """No page says "1 layers": one pair of layers, one example and one step."""
    lone = made.comparison(made.table(rows=("conv1",)), examples=1)
    stitch = made.comparison(made.stitched([0.9], rows=("conv1",)), examples=1)
    short = made.series(steps=(0, 10), rows=("conv1",))
    for results in (lone, [lone, made.comparison(made.table(rows=("conv1",)), a="x", examples=1)], stitch, short):
        text = re.sub(r"<[^>]*>", " ", page(results).partition("<script")[0])
        assert not re.search(r"(?<![\d.,×] )(?<![\d.,])\b1 (layers|examples|pairs|steps|measures)\b", text)


def test_one_stitch_is_told_as_one(made):
    one = made.comparison(made.stitched([0.9], rows=("conv1",)))
    assert headline(one) == "By relative_accuracy, the stitch at conv1 reaches 0.90 with least_squares."
    assert "seed0 stitched into seed1 at conv1</h1>" in page(one)
    assert "Profile of" not in page(one)
    assert headline(made.comparison(made.diagonal([0.9], rows=("conv1",)))) == "By cka, conv1 × conv1 is at 0.90."


@pytest.mark.parametrize(
    "names, short",
    [
        (["seed0", "seed1"], ["seed0", "seed1"]),
        ([f"{FOLDER}tiny10_cifar10_seed{i}.pt" for i in (0, 1, 10)], ["seed0", "seed1", "seed10"]),
        (["netkin:tiny10@runs/first/model.pt", "netkin:tiny10@runs/second/model.pt"], ["first", "second"]),
        ([f"{FOLDER}a.pt", "netkin:resnet20@/data/checkpoints/b.pt"], ["tiny10@a", "resnet20@b"]),
        (["hf:models/of/many/kinds/bert-1", "hf:models/of/many/kinds/bert-2"], ["bert-1", "bert-2"]),
        ([f"{FOLDER}a.pt (1)", f"{FOLDER}a.pt (2)"], ["a.pt (1)", "a.pt (2)"]),
        ([f"{FOLDER}a.pt", f"{FOLDER}a.pt"], ["netkin:tiny10@a.pt"]),
        (["x" * 30 + "a", "x" * 30 + "b"], ["x" * 30 + "a", "x" * 30 + "b"]),
        (["", FOLDER], ["", FOLDER]),
    ],
)
def test_names_lose_what_they_share_and_stay_distinct(names, short):
    assert list(short_names(names).values()) == short


def test_labels_of_models_differ():
    assert shortened([f"{FOLDER}tiny10_cifar10_seed{i}.pt" for i in range(3)]) == ["seed0", "seed1", "seed2"]
