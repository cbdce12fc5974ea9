import pytest

from netkin.reporting.words import short_names, shortened

FOLDER = "netkin:tiny10@/data/checkpoints/"


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
