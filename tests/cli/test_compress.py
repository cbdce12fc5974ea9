"""`netkin compress` and `netkin sparsity`."""

import json

import pytest
import torch
from click.testing import CliRunner

import netkin as nk
from netkin.cli import cli

DIGITS = "compress netkin:digits --data digits:test --layer conv4 --layer fc"


def test_the_table_is_that_of_the_library_and_the_file_can_be_loaded(netkin):
    result = netkin(f"{DIGITS} --k 8 --order from_the_top --projection orthogonal --out small.netkin")
    random = "warning: 'netkin:digits' was given no weights, so they are random, drawn from seed 0.\n"
    assert (result.exit_code, result.stderr) == (0, f"{random}saved to small.netkin\n")
    model, data = nk.load_model("netkin:digits"), nk.load_data("digits:test")
    same = {"k": 8, "order": "from_the_top", "projection": "orthogonal", "name": "netkin:digits"}
    small = nk.compress(model, ["conv4", "fc"], data=data, **same)
    assert result.stdout == f"{small.compression}\n"
    images = next(iter(data))[0]
    assert torch.equal(nk.load_compressed("small.netkin", model)(images), small(images))


def test_shares_and_json(netkin):
    shown = json.loads(netkin(f"{DIGITS} --k 0.25 --examples 128 --test digits:train --json").stdout)
    assert [row["kept"] for row in shown["layers"]] == [8, 16]
    assert (shown["examples"], shown["against"]) == (128, "logits")
    assert shown["data"] == "digits:test, a sample of 128 of 360 (seed 0)"


def test_against_another_model(netkin):
    result = netkin(f"{DIGITS} --variance 0.5 --against netkin:digits")
    assert result.stdout.startswith(
        "2 layers of netkin:digits compressed against another ConvNet (least squares, at once, 360 examples)"
    )


def test_a_glob_takes_what_fits_and_the_table_names_the_rest(netkin):
    result = netkin("compress netkin:digits --data digits:test --layer '*[c4]*' --k 8")
    assert result.exit_code == 0, result.stderr
    table = nk.compress(
        nk.load_model("netkin:digits"),
        ["conv2", "conv3", "conv4", "fc"],
        k=8,
        data=nk.load_data("digits:test"),
        name="netkin:digits",
    )
    assert result.stdout.splitlines()[:-1] == str(table.compression).splitlines()
    assert result.stdout.splitlines()[-1].startswith("left out: conv1, bn4, relu4. Why 'conv1': ")


def test_a_glob_of_which_nothing_fits_and_a_layer_by_name_are_refused(netkin):
    result = netkin("compress netkin:digits --data digits:test --layer 'relu*' --k 8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "none of 4 layers can be compressed; the first: layer 'relu1' is a ReLU" in result.stderr
    assert (
        "layer 'relu1' is a ReLU"
        in netkin("compress netkin:digits --data digits --layer fc --layer relu1 --k 8").stderr
    )


@pytest.mark.parametrize(
    "line, code, message",
    [
        ("compress netkin:digits --data digits --layer fc", 1, "--k: pass one of `k`, `variance` and `accuracy_drop`"),
        ("compress netkin:digits --data digits --layer con4 --k 2", 1, "no layer named 'con4'; did you mean 'conv4'?"),
        ("compress netkin:digits --data digits --layer fc --k some", 2, "'some' is neither a whole number nor a share"),
        (
            "compress netkin:tiny10 --data digits --layer fc --k 2",
            1,
            "(RuntimeError: Given groups=1",
        ),
        ("compress netkin:digits --data digits --layer fc --k 2 --out no/x", 2, "the folder 'no' does not exist"),
    ],
)
def test_refusals_are_one_sentence(netkin, line, code, message):
    result = netkin(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def run(*arguments):
    return CliRunner().invoke(cli, ["sparsity", *map(str, arguments)])


@pytest.fixture
def files(tmp_path):
    torch.manual_seed(0)
    dense, sparse = nk.load_model("netkin:digits", seed=0), nk.load_model("netkin:digits", seed=0)
    torch.save(dense.state_dict(), tmp_path / "before.pt")
    nk.sparsify(sparse, 0.9)
    nk.save_sparse(sparse, tmp_path / "after.pt")
    return f"netkin:digits@{tmp_path / 'before.pt'}", f"netkin:digits@{tmp_path / 'after.pt'}"


@pytest.mark.slow
def test_two_networks_stand_side_by_side(files, tmp_path):
    saved = tmp_path / "study.netkin"
    options = [
        "--data",
        "digits:test",
        "--examples",
        "60",
        "--report",
        tmp_path / "page.html",
        "--out",
        saved,
        "--quiet",
    ]
    done = run(*files, *options, "--epsilon", "0.02", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    before, after = found["networks"].values()
    assert (before["weights"], before["left"], after["left"]) == (33040, 33040, 33040 - 29736)
    model = nk.load_model(files[1])
    assert after["epsilon_sparsity"][0] == {
        "epsilon": 0.02, "of_all": nk.epsilon_sparsity(model, 0.02),
        "of_left": nk.epsilon_sparsity(model, 0.02, of_left=True),
    }  # fmt: skip
    assert found["examples"] == 60
    assert set(found["accuracy"]) == set(files)
    assert set(found["curve"]) == {"sparsity", *files}
    assert "Distribution of the weights" in (tmp_path / "page.html").read_text()
    assert nk.document(nk.load(saved)) == found
    again = CliRunner().invoke(cli, ["report", str(saved), "--out", str(tmp_path / "again.html")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.html").read_text() == (tmp_path / "page.html").read_text()


def test_one_network_without_data_shows_its_weights(files):
    done = run(files[1], "--layer", "conv*")
    assert done.exit_code == 0, done.output
    assert "conv4" in done.stdout
    assert "fc" not in done.stdout
    assert "in a file" in done.stdout


@pytest.mark.slow
def test_the_shape_of_an_example_is_chosen(files):
    options = [files[0], "--data", "digits:test", "--examples", "40", "--quiet", "--shape"]
    flat, pooled = (run(*options, shape) for shape in ("flatten", "pool"))
    assert "(flatten, matrix)" in flat.stdout
    assert "(matrix, pool)" in pooled.stdout
    refused = run(*options, "flat")
    assert (refused.exit_code, "'flatten'" in refused.output) == (1, True)


def test_the_same_network_twice_is_numbered(files):
    done = run(files[0], files[0], "--json")
    assert list(json.loads(done.stdout)["networks"]) == [f"{files[0]} (1)", f"{files[0]} (2)"]


def test_refusals_are_a_sentence(files, tmp_path):
    done = run(files[0], "--epsilon", "-1")
    assert (done.exit_code, "ε is a size above 0" in done.output) == (1, True)
    (tmp_path / "mine.html").write_text("my own")
    done = run(files[0], "--report", tmp_path / "mine.html")
    assert (done.exit_code, "--overwrite" in done.output) == (1, True)
    assert (tmp_path / "mine.html").read_text() == "my own"


def test_test_data_that_overlap_the_data_are_told_with_their_number(netkin):
    line = "compress netkin:digits --layer fc --k 4 --data digits:train --examples 100 --test"
    told = "100 of the 1,437 test examples are also among the 100 of `data`, which flatters the result; give other"
    assert told in netkin(f"{line} digits:train").stdout
    assert "also among" not in netkin(f"{line} digits:test").output
