import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin import jobs, results
from netkin.cli.outputs import as_json
from netkin.comparing import explain
from netkin.comparing.compare import compare
from netkin.sources import load_data, load_model
from netkin.sources.batches import sample
from recording_worlds import matrices
from table_worlds import table_of

DIGITS = "compare netkin:digits --data digits:test"


def test_a_model_is_compared_with_itself_when_alone(netkin):
    result = netkin(f"{DIGITS} --layers relu1 --layers fc --out self.netkin")
    assert result.exit_code == 0
    assert "cka" in result.stdout
    assert "relu1" in result.stdout
    saved = results.load("self.netkin")
    assert (saved.a, saved.b) == ("netkin:digits", "netkin:digits")
    assert saved["relu1", "relu1"] == pytest.approx(1)


def test_the_numbers_are_those_of_the_library(netkin):
    netkin(f"{DIGITS} --measure cka --measure nbs --layers relu1 --layers fc --out a.netkin")
    model = load_model("netkin:digits")
    data = load_data("digits:test")
    expected = compare(model, data=data, measures=["cka", "nbs"], layers=["relu1", "fc"])
    saved = results.load("a.netkin")
    assert saved.measures == ("cka", "nbs")
    for measure in saved.measures:
        assert saved[measure]["relu1", "fc"] == pytest.approx(expected[measure]["relu1", "fc"], abs=1e-6)


def test_conv_layers_are_compared_by_their_frequencies(netkin):
    netkin(f"{DIGITS} --measure svcca --layers relu1 --layers relu3 --layers fc --shape dft --out dft.netkin")
    saved = results.load("dft.netkin")
    expected = compare(
        load_model("netkin:digits"), data=load_data("digits:test"), measures="svcca", layers=["relu1", "relu3", "fc"],
        shape="dft",
    )  # fmt: skip
    assert saved.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-9)
    assert saved.table().statistic == "Spectra"
    result = netkin(f"{DIGITS} --measure cka_rbf --layers relu1 --shape dft")
    assert result.exit_code == 1
    assert result.stderr.startswith("netkin: 'cka_rbf' can't be read from spectra")
    assert (
        "Spectra, streamed"
        in netkin("compare --plan netkin:digits --data digits:test --layers relu1 --shape dft").stdout
    )


def test_json_holds_all_and_is_valid_for_strict_readers(netkin):
    line = f'{DIGITS} --measure "svcca(variance=0.95)" --measure gulp --layers "relu*" --pairs corresponding --json'
    document = json.loads(netkin(line).stdout, parse_constant=pytest.fail)
    assert document["layers_a"] == ["relu1", "relu2", "relu3", "relu4"]
    assert document["examples"] == 360
    table = document["tables"]["svcca(variance=0.95)"]
    assert table["quantity"]["parameters"] == {"variance": 0.95}
    assert table["values"][0][0] == pytest.approx(1)
    assert table["values"][0][1] is None
    ((reason, pairs),) = table["missing"].items()
    assert (reason, pairs[0]) == ("this pair was not asked for", ["relu1", "relu2"])
    assert document["tables"]["gulp"]["quantity"]["bounds"] == [0, None]


def test_json_carries_errors_with_their_reasons_and_margins():
    values = np.array([[0.5, 0.6, 1.0]])
    table = table_of(
        id="cka", name="cka", parameters={}, layers_a=("p",), layers_b=("r", "s", "t"), values=values, symmetric=True,
        higher_is_closer=True, bounds=(0, 1), convention="", statistic="Moments", chunk_sizes=(4, 5),
        replicates=[values - 0.01, values + 0.01],
    )  # fmt: skip
    facts = {"data": "digits", "examples": 9, "seed": 0, "version": "1", "layers_a": ("p",), "layers_b": table.layers_b}
    sides = {key: {} for key in ("shapes_a", "shapes_b", "widths_a", "widths_b")}
    comparison = results.Comparison(a="a", b="b", tables={"cka": table}, **facts, **sides)
    text = as_json(comparison)
    document = json.loads(text, parse_constant=pytest.fail)["tables"]["cka"]
    assert document["errors"] == [[*table.errors[0, :2].tolist(), None]]
    assert document["high"] == [[*table.interval()[1][0, :2].tolist(), None]]
    assert document["replicates"] == table.replicates.tolist()
    assert document["chunk_sizes"] == [4, 5]
    bound = "the value lies at the bound 1 of the measure"
    assert document["error_reasons"] == {bound: [["p", "t"]]}
    best = {"layer_a": "p", "layer_b": "t", "value": 1.0, "error": None, "second": "s", "clear": True}
    (match,) = document["best_matches"]
    assert match == best | {"margin": pytest.approx(0.4), "margin_error": pytest.approx(0, abs=1e-12)}


def test_options_reach_the_library(netkin):
    options = "--examples 100 --batch-size 30 --shape flatten --memory 1GB --device cpu --seed 5"
    document = json.loads(netkin(f"{DIGITS} --layers relu4 {options} --json").stdout)
    assert (document["examples"], document["seed"]) == (100, 5)
    assert document["shapes_a"] == {"relu4": "flatten"}
    assert document["widths_a"] == {"relu4": 64 * 4 * 4}


@pytest.fixture
def sorted_folder(netkin, tmp_path):
    """Pictures of two colours in a folder for each, of which the first alone would all be black."""
    pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")
    for colour, name in ((0, "black"), (255, "white")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for place in range(12):
            pillow.fromarray(np.full((4, 4, 3), colour, np.uint8)).save(tmp_path / "photos" / name / f"{place:02}.png")
    (tmp_path / "nk_photo_nets.py").write_text("from torch import nn\ndef flat():\n    return nn.Flatten()\n")


@pytest.mark.usefixtures("sorted_folder")
def test_a_sample_of_a_sorted_folder_varies_where_the_first_examples_do_not(netkin):
    line = "compare nk_photo_nets:flat --data images:photos --layers Flatten --examples 8 --seed 1 --json"
    document = json.loads(netkin(line).stdout)
    assert document["tables"]["cka"]["values"] == [[pytest.approx(1)]]
    assert (document["data"], document["examples"]) == ("images:photos, a sample of 8 of 24 (seed 1)", 8)
    document = json.loads(netkin(f"{line} --balanced").stdout)
    assert document["data"] == "images:photos, a balanced sample of 8 of 24 (seed 1)"
    # in Python `examples` are the first, here all of one colour: nothing varies
    data, model = load_data("images:photos"), torch.nn.Sequential(torch.nn.Flatten())
    assert compare(model, data=data, layers="0", examples=8).table().missing


@pytest.mark.usefixtures("sorted_folder")
def test_what_cannot_be_balanced_is_refused(netkin):
    line = "compare nk_photo_nets:flat --data images:photos/black --layers Flatten"
    result = netkin(f"{line} --examples 5 --balanced")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("netkin: the classes of 'images:photos/black' are not known")
    result = netkin(f"{line} --balanced")
    assert result.exit_code == 2
    assert "--balanced needs --examples N, the number of examples." in result.stderr


def test_larger_maps_are_averaged_down_where_asked(netkin):
    line = f"{DIGITS} --layers relu1 --layers relu4 --shape positions --examples 50 --json"
    apart, together = (json.loads(netkin(f"{line} {more}").stdout) for more in ("", "--resize average"))
    assert apart["tables"]["cka"]["values"][0][1] is None
    assert 0 < together["tables"]["cka"]["values"][0][1] < 1
    assert together["shapes_a"]["relu1"] == "positions, larger maps averaged down"


def test_two_models_keep_their_names_in_the_order_given(netkin, tmp_path):
    (tmp_path / "nk_cli_net.py").write_text("from netkin.training import untrained_digits_net\n"
        "def other():\n    return untrained_digits_net(9)\n")  # fmt: skip
    document = json.loads(netkin("compare netkin:digits nk_cli_net:other --data digits:test --layers fc --json").stdout)
    assert (document["a"], document["b"]) == ("netkin:digits", "nk_cli_net:other")
    assert 0 < document["tables"]["cka"]["values"][0][0] < 1
    assert math.isfinite(document["tables"]["cka"]["values"][0][0])


def test_warnings_stand_below_the_table_and_nowhere_else(netkin):
    result = netkin(f"{DIGITS} --measure cca_mean --layers relu4 --examples 40")
    assert result.exit_code == 0
    random, inflated = result.stdout.split("warning:")[1:]
    assert "'netkin:digits' was given no weights, so they are random, drawn from seed 0." in " ".join(random.split())
    assert "are inflated" in inflated
    assert "InflatedWarning" not in result.stderr


@pytest.mark.parametrize(
    "line, words",
    [
        (f"{DIGITS} --measure ckaa", "no measure named 'ckaa'; did you mean 'cka'?"),
        (f"{DIGITS} --layers reluu1", "did you mean 'relu1'?"),
        ("compare netkin:digits --data digit", "no data set named 'digit'; did you mean 'digits'?"),
        ("compare netkin:digits@gone.pt --data digits", "found no weights file 'gone.pt'."),
    ],
)
def test_what_is_unknown_is_refused_in_one_sentence(netkin, line, words):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("netkin: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        ("--memory much", "'much' is not an amount of memory"),
        ("--out nowhere/x.netkin", "the folder 'nowhere' does not exist."),
        ("--pairs some", "`pairs` is 'all', 'corresponding', 'band:2' or a list of (layer, layer); got 'some'."),
        ("--tokens 0", "0 is not in the range x>=1"),
        ("--examples 0", "0 is not in the range x>=1"),
    ],
)
def test_options_that_make_no_sense_are_a_misuse(netkin, options, words):
    result = netkin(f"{DIGITS} {options}")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


PLANNED = "compare --plan netkin:digits --data digits:test"


def test_the_plan_is_that_of_the_library(netkin):
    plan = explain(load_model("netkin:digits"), data=load_data("digits:test"), memory=10**9)
    shown = json.loads(netkin(f"{PLANNED} --memory 1GB --json").stdout)
    assert (shown["pairs"], shown["bytes"], shown["passes"]) == (plan.pairs, plan.bytes, 3)
    assert list(shown["widths"]["netkin:digits"]) == list(plan.widths["a"])


def test_the_text_tells_cost_and_memory(netkin):
    result = netkin(f'{PLANNED} --layers "relu*" --measure cka --measure cka_rbf')
    assert result.exit_code == 0
    for words in ("4 layers, the widest", "pairs: 16", "examples: 360, in 3 batches of up to 128", "forward passes: 3,",
                  "cka_rbf: Rows, a sample of at most 2,048", "memory: "):  # fmt: skip
        assert words in result.stdout


def test_what_would_be_refused_is_said_with_exit_code_1(netkin):
    line = "netkin:digits --data digits:test --shape flatten --memory 1MB"
    plan, refusal = netkin(f"compare --plan {line}"), netkin(f"compare {line}")
    assert plan.exit_code == refusal.exit_code == 1
    said = refusal.stderr.strip().removeprefix("netkin: --memory: ")
    assert plan.stdout.splitlines()[-1] == f"would be refused: {said}"
    assert json.loads(netkin(f"compare --plan {line} --json").stdout)["refused"] in refusal.stderr


def test_an_unknown_name_is_one_sentence_as_in_compare(netkin):
    result = netkin(f"{PLANNED} --measure ckaa")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "did you mean 'cka'?" in result.stderr


TRANSFORMS = "def doubled(images):\n    return 2 * images\n\n\ndef halved(images):\n    return images / 2\n"


def test_models_data_and_pages_have_the_names_that_people_give(netkin, tmp_path):
    line = "compare netkin:digits netkin:digits --data 'my probe=digits:test' --examples 40 --layers fc --name old"
    result = netkin(f"{line} --name new --title 'Old & new' --report ab.html --figure ab.svg --out ab.netkin")
    assert result.exit_code == 0, result.stderr
    found = nk.load("ab.netkin")
    assert (found.a, found.b, found.data) == ("old", "new", "my probe, a sample of 40 of 360 (seed 0)")
    page = (tmp_path / "ab.html").read_text()
    assert page.count("<title>Old &amp; new</title>") == page.count("<h1>Old &amp; new</h1>") == 1
    assert "Old &amp; new" in (tmp_path / "ab.svg").read_text()
    assert netkin("report ab.netkin --out again.html --title Again").exit_code == 0
    assert "<h1>Again</h1>" in (tmp_path / "again.html").read_text()


def test_a_file_of_statistics_is_read_under_other_names(netkin):
    netkin("collect netkin:digits --data digits:test --layers fc --name mine --out s.stats")
    assert netkin("compare s.stats").stdout.startswith("mine and mine, layer by layer\n")
    assert netkin("compare s.stats --name yours").stdout.startswith("yours and yours, layer by layer\n")


def test_a_transform_is_named_as_a_function_of_a_module(netkin, tmp_path):
    (tmp_path / "nk_transforms.py").write_text(TRANSFORMS)
    line = "compare netkin:digits netkin:digits --data digits:test --layers relu1 --json"
    both = json.loads(netkin(f"{line} --transform nk_transforms:doubled --transform nk_transforms:halved").stdout)
    models = [nk.load_model("netkin:digits", seed=seed) for seed in (0, 1)]
    functions = [lambda images: 2 * images, lambda images: images / 2]
    expected = nk.compare(*models, nk.load_data("digits:test"), layers="relu1", transforms=functions)
    plain = json.loads(netkin(line).stdout)
    values = [document["tables"]["cka"]["values"][0][0] for document in (both, plain)]
    assert values[0] == pytest.approx(expected["relu1", "relu1"], abs=1e-6)
    assert values[1] != pytest.approx(values[0], abs=1e-6)


@pytest.mark.parametrize(
    "options, code, words",
    [
        ("--title x", 2, "--title needs --report or --figure"),
        ("--name a --name b", 2, "--name is given once for each model, or not at all; got 2 for 1 model."),
        ("--transform doubled", 2, "--transform is written package.module:function; got 'doubled'."),
        ("--transform a:b --transform c:d", 2, "--transform is given once for all models, or once for each; got 2."),
        ("--transform nk_nowhere:f", 1, "found no module 'nk_nowhere'"),
    ],
)
def test_names_titles_and_transforms_that_do_not_fit_are_refused(netkin, options, code, words):
    result = netkin(f"{DIGITS} --layers fc {options}")
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())


def test_several_models_are_compared_each_with_every_other(netkin):
    line = f"{DIGITS} --layers relu1 --layers fc --examples 100".replace("netkin:digits", "netkin:digits " * 3)
    result = netkin(f"{line} --out three.netkin --report three.html")
    assert result.exit_code == 0, result.output
    assert "3 models, 3 pairs" in result.stdout
    many = results.load("three.netkin")
    assert many.models == ("netkin:digits (1)", "netkin:digits (2)", "netkin:digits (3)")
    models = [load_model("netkin:digits", seed=seed) for seed in (0, 2)]
    expected = compare(*models, data=sample(load_data("digits:test"), 100), layers=["relu1", "fc"])
    pair = many["netkin:digits (1)", "netkin:digits (3)"]
    assert pair["relu1", "fc"] == pytest.approx(expected["relu1", "fc"], abs=1e-6)
    assert "Dendrogram" in Path("three.html").read_text(encoding="utf-8")
    again = netkin("report three.netkin --out again.html")
    assert again.exit_code == 0, again.output


SEVERAL = "netkin:digits netkin:digits netkin:digits --data digits:test --layers fc --examples 100"


def test_several_models_are_a_job_beside_their_result(netkin):
    assert netkin(f"compare {SEVERAL} --out three.netkin").exit_code == 0
    assert jobs.read("three.netkin").condition == "done"
    tables = {part: part.stat().st_mtime_ns for part in Path("three.netkin.job/parts").iterdir()}
    again = netkin(f"compare {SEVERAL} --out three.netkin")
    assert "saved to three.netkin" in again.stderr
    assert {part: part.stat().st_mtime_ns for part in Path("three.netkin.job/parts").iterdir()} == tables
    other = netkin(f"compare {SEVERAL} --out three.netkin --seed 1")
    assert other.exit_code == 1
    assert "'three.netkin.job' holds a comparison that differs in data and seed" in other.stderr
    assert netkin(f"compare {SEVERAL} --out three.netkin --seed 1 --overwrite").exit_code == 0


def test_the_plan_of_several_models_tells_passes_and_bytes(netkin):
    text = netkin(f"compare --plan {SEVERAL}")
    assert text.exit_code == 0, text.stderr
    for words in ("models: 3, ", "pairs of models: 3", "forward passes: 3, one of each", "memory: "):
        assert words in text.stdout
    facts = json.loads(netkin(f"compare --plan {SEVERAL} --json").stdout)
    assert (facts["models"], facts["pairs"], facts["passes"], facts["schedule"]["blocks"]) == (3, 3, 3, 1)
    refused = netkin(f"compare --plan {SEVERAL} --memory 1kB")
    assert (refused.exit_code, "would be refused: " in refused.stdout) == (1, True)


def test_a_sample_of_rows_is_for_several_models(netkin):
    line = f"{SEVERAL} --rows 40".replace("--examples 100", "")
    facts = json.loads(netkin(f"compare --plan {line} --memory 330kB --json").stdout)
    assert (facts["schedule"]["is_sample"], facts["schedule"]["examples"]) == (True, 40)
    assert netkin(f"compare {line} --memory 330kB --out three.netkin").exit_code == 0
    pair = results.load("three.netkin")["netkin:digits (1)", "netkin:digits (2)"]
    assert pair["cka"].exactness == "a sample of 40 of 360 examples"
    for command in ("compare", "compare --plan"):
        two = netkin(f"{command} netkin:digits netkin:digits --data digits:test --rows 40")
        assert two.exit_code == 2
        assert "--rows is for three models or more" in two.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("netkin:digits --engine distributed", "--plan runs in one process; leave out --engine distributed."),
        ("--engine ray", "--engine ray plans for two models or more; leave it out for one."),
    ],
)
def test_plans_of_engines_that_have_none_are_a_misuse(netkin, options, words):
    result = netkin(f"{PLANNED} {options}")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["compare", "compare --plan"])
def test_a_crash_of_one_of_several_models_is_one_sentence(netkin, command):
    result = netkin(f"{command} netkin:digits netkin:resnet20 netkin:digits --data digits:test")
    assert result.exit_code == 1
    assert result.stderr.startswith("netkin: 'netkin:resnet20': ResNet could not be run on inputs of type float32")
    assert "expected input[128, 1, 8, 8] to have 3 channels" in result.stderr


def test_statistics_stand_beside_no_models(netkin):
    netkin("collect netkin:digits --data digits:test --examples 50 --layers relu1 --out part.stats")
    for line in ("compare part.stats netkin:digits netkin:digits", "compare netkin:digits netkin:digits part.stats"):
        result = netkin(line)
        assert result.exit_code == 2
        assert "is a file of statistics, which holds both models; give it alone" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_compares_and_continues_beside_the_result(netkin):
    call = 'compare netkin:digits netkin:digits --data digits:test --layers "relu*" --examples 100'
    both = f"{call} --engine ray --out ab.netkin --device cpu"
    result = netkin(both)
    assert result.exit_code == 0, result.stderr
    found = results.load("ab.netkin")
    assert (found.a, found.b, found.examples) == ("netkin:digits (1)", "netkin:digits (2)", 100)
    assert netkin(f"{call} --out one.netkin").exit_code == 0
    one = results.load("one.netkin")
    assert found["cka"].values == pytest.approx(one["cka"].values, abs=1e-6)
    assert found.data == one.data
    assert jobs.read("ab.netkin").condition == "done"
    other = netkin(f"{both} --seed 1")
    assert other.exit_code == 1
    assert "'ab.netkin.job' holds a comparison that differs in data and seed" in other.stderr
    assert netkin(f"{both} --seed 1 --overwrite").exit_code == 0
    plan = netkin(f"{call} --engine ray".replace("compare", "compare --plan"))
    assert "forward passes: 2, one of each model on each batch" in plan.stdout
    assert "cluster: 2 tasks at once on 2 nodes" in plan.stdout


@pytest.mark.parametrize("option", ["--address auto", "--gpus 0.5"])
def test_options_of_a_cluster_go_with_one(netkin, option):
    result = netkin(f"{DIGITS} {option}")
    assert result.exit_code == 2
    assert f"{option.split()[0]} needs --engine ray." in result.stderr


def test_each_model_may_have_its_own_layers(netkin):
    line = "compare netkin:digits other=netkin:digits --data digits:test --examples 60 --json"
    document = json.loads(netkin(f"{line} --layers a:fc --layers other:relu*").stdout)
    assert (document["layers_a"], document["layers_b"]) == (["fc"], ["relu1", "relu2", "relu3", "relu4"])
    result = netkin("compare netkin:digits netkin:digits --data digits:test --layers c:fc")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--layers: `layers` names 'c'; the models are 'netkin:digits (1)', 'netkin:digits (2)'." in result.stderr


def test_layers_may_have_shapes_of_their_own(netkin):
    line = 'compare netkin:digits --data digits:test --examples 60 --layers "relu*" --json'
    document = json.loads(netkin(f"{line} --shape relu1=flatten --shape relu[23]=pool --shape positions").stdout)
    assert document["shapes_a"] == {"relu1": "flatten", "relu2": "pool", "relu3": "pool", "relu4": "positions"}
    result = netkin(f"{line} --shape pool --shape flatten")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "without a pattern of layers it is given once; got pool, flatten." in " ".join(result.stderr.split())
    result = netkin(f"{line} --shape rely1=pool")
    assert "did you mean 'relu1'?" in result.stderr


def test_two_recordings_are_compared_without_data(netkin, tmp_path):
    x, y = matrices()
    np.savez(tmp_path / "a.npz", x=x, ids=np.arange(90))
    (tmp_path / "b").mkdir()
    for place, part in enumerate(np.array_split(np.arange(90)[::-1], 3)):
        np.savez(tmp_path / "b" / f"{place}.npz", y=y[part], ids=part)
    done = netkin("compare a.npz b/ --json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["tables"]["cka"]["values"][0][0] == pytest.approx(nk.cka(x, y), abs=1e-6)
    assert "forward passes: none" in netkin("compare a.npz b/ --plan").stdout
    (tmp_path / "b" / "1.npz").unlink()
    done = netkin("compare a.npz b/")
    assert (done.exit_code, "lacks 1 of 3 shards, the first number 1" in " ".join(done.stderr.split())) == (1, True)


def test_a_recording_is_compared_with_a_model_on_its_data(netkin, tmp_path):
    model = load_model("netkin:digits", seed=3)
    data = load_data("digits:test", batch_size=64)
    nk.activations(model, "relu*", data, save=tmp_path / "states", progress=False)
    done = netkin("compare netkin:digits states --data digits:test --layers 'relu*' --json")
    assert done.exit_code == 0, done.stderr
    live = compare(load_model("netkin:digits"), model, data, layers="relu*", progress=False)
    assert json.loads(done.stdout)["tables"]["cka"]["values"] == live.to_numpy("cka").tolist()
    assert netkin("compare netkin:digits states --layers 'relu*'").exit_code == 2
    many = netkin("compare netkin:digits states netkin:digits --data digits:test --layers 'relu*'")
    assert many.exit_code == 0, many.stderr
