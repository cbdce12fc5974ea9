import json

from netkin.cli.options import KNOWN
from netkin.measures import measures, registry
from netkin.representations import layers
from netkin.sources import load_data, load_model
from netkin.sources.datasets import CATALOGUE


def test_every_measure_is_listed_with_its_direction_and_summary(netkin):
    lines = netkin("list measures").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(measures())
    for line, measure in zip(lines, measures().values(), strict=True):
        assert line.split()[1] == ("similarity" if measure.facts.higher_is_closer else "distance")
        assert line.endswith(measure.summary)


def test_ranges_are_written_with_infinity_as_a_sign(netkin):
    listed = {line.split()[0]: line.split()[2] for line in netkin("list measures").stdout.splitlines()}
    assert (listed["cka"], listed["procrustes_distance"], listed["gulp"]) == ("0..1", "0..1.414", "0..∞")


def test_the_list_is_there_for_programs_too(netkin):
    listed = json.loads(netkin("list measures --json").stdout)
    found = {measure["name"]: measure for measure in listed}
    assert found["cka"]["bounds"] == [0, 1]
    assert found["gulp"]["bounds"] == [0, None]
    assert found["svcca"]["parameters"] == {"variance": 0.99}
    assert found["pwcca"]["symmetric"] is False


def test_one_measure_is_told_in_full(netkin):
    text = netkin("list measures procrustes_distance").stdout
    assert text.startswith("procrustes_distance: Return")
    for words in (
        "direction",
        "0..1.414",
        "is metric     yes",
        "unchanged by  rotation, scaling, translation",
        "arXiv",
    ):
        assert words in text


def test_a_measure_may_be_asked_for_with_its_parameters(netkin):
    assert "variance=0.9" in netkin('list measures "svcca(variance=0.9)"').stdout


def test_an_unknown_measure_is_refused_with_the_nearest_name(netkin):
    result = netkin("list measures ckaa")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "netkin: no measure named 'ckaa'; did you mean 'cka'? `netkin list measures` lists all.\n"


def test_a_package_whose_measures_cannot_be_loaded_is_named(netkin, monkeypatch):
    why = "the measures of package 'theirs' could not be loaded: ImportError: gone."
    for place in ("netkin.measures", "netkin.measures.registry"):
        monkeypatch.setattr(f"{place}.broken_packages", lambda: {"theirs": why})
    for line in ("list measures", "list measures cka"):
        result = netkin(line)
        assert result.exit_code == 0
        assert result.stderr == f"warning: {why}\n"
    registry._warn_of.cache_clear()
    doctor = netkin("doctor")
    assert doctor.exit_code == 0
    assert f"package theirs   {why}" in doctor.stdout
    registry._warn_of.cache_clear()


def test_the_default_layers_are_listed_with_their_types(netkin):
    lines = [line.split() for line in netkin("list layers netkin:tiny10").stdout.splitlines()]
    assert [name for name, _ in lines] == layers(load_model("netkin:tiny10"))
    assert dict(lines)["fc"] == "Linear"


def test_all_modules_are_listed_when_asked(netkin):
    listed = json.loads(netkin("list layers netkin:digits --all --json").stdout)
    assert listed[0] == {"name": "conv1", "type": "Conv2d"}
    assert {"relu1", "relu4", "bn2", "fc"} <= {layer["name"] for layer in listed}


def test_a_model_that_cannot_be_loaded_is_refused_in_one_sentence(netkin):
    result = netkin("list layers netkin:tiny1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("netkin: no reference architecture named 'tiny1'; did you mean 'tiny10'?")


def test_every_source_is_listed_with_the_place_it_is_looked_for(netkin):
    text = " ".join(netkin("list data").stdout.split())
    assert len(CATALOGUE) > 5
    for source in CATALOGUE:
        for words in (source.name, source.what, source.where, f"example: --data {source.example}", source.options):
            assert " ".join(words.split()) in text


def test_the_list_of_data_is_there_for_programs_too(netkin):
    listed = json.loads(netkin("list data --json").stdout)
    assert [set(source) for source in listed] == [{"name", "what", "where", "example", "options"}] * len(CATALOGUE)


def test_what_is_bundled_loads_from_its_example():
    example = next(source.example for source in CATALOGUE if source.name.startswith("digits"))
    assert load_data(example).examples > 0


def test_scores_are_listed_with_the_command_that_computes_them(netkin):
    rows = json.loads(netkin("list scores --json").stdout)
    commands = {row["name"]: row["command"] for row in rows}
    known = {"recommend": "transfer scores", "tasks": "task scores", "stitch": "stitching scores"}
    assert commands == {score: command for command, kind in known.items() for score in KNOWN[kind]}
    lines = netkin("list scores").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(commands)


def test_one_score_is_told_in_full_and_an_unknown_one_refused(netkin):
    text = netkin("list scores cross_entropy").stdout
    for words in ("lower is better", "0..∞", "nats", "cannot see"):
        assert words in text
    refused = netkin("list scores logmee")
    assert refused.exit_code == 1
    assert refused.stderr == "netkin: no score named 'logmee'; did you mean 'logme'? `netkin list scores` lists all.\n"
