import numpy as np

from netkin.comparing.compare import compare
from netkin.reporting.words import headline, meaning_of, range_of, shortened


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
    assert says.startswith("How alike the two layers arrange the examples.")
    assert "cka_debiased does not" in cannot_see


def test_a_measure_of_others_is_told_by_its_conventions(made):
    assert meaning_of(made.table("kinship", conventions="counts cousins"))[0] == (
        "counts cousins. Higher values mean closer layers."
    )
    assert meaning_of(made.distance("feud", conventions=""))[0] == "Lower values mean closer layers."


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
        "layers of the same name are at 1.00 on average."
    )
    assert "2 of 2 layers of a find their best match" in headline(compare(rows, twice))
