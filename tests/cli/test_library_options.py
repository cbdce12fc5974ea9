"""Options that functions of the library have and commands hand on: the numbers are those of the library."""

import netkin as nk


def saved(netkin, line):
    done = netkin(f"{line} --out found.netkin --quiet")
    assert done.exit_code == 0, done.stderr
    return nk.load("found.netkin")


def test_shares_to_prune_are_chosen(netkin):
    study = saved(netkin, "sparsity netkin:digits --data digits:test --sparsity 0.5 --sparsity 0")
    found = nk.sparsity_study({"netkin:digits": nk.load_model("netkin:digits")}, "digits:test", sparsities=(0.5, 0))
    assert study.curve == found.curve
    assert study.curve["sparsity"] == (0.5, 0)


def test_the_cut_of_a_compression_is_chosen(netkin):
    model = nk.load_model("netkin:digits")
    line = "compress netkin:digits --layer conv4 --k 4 --data digits:test --json --quiet --cut"
    wide, narrow = (nk.compress(model, "conv4", k=4, data="digits:test", cut=cut).compression for cut in (0.99, 0.3))
    assert wide["conv4"].variance != narrow["conv4"].variance
    assert f'"variance": {narrow["conv4"].variance}' in netkin(f"{line} 0.3").stdout


def test_the_gauge_of_atoms_is_chosen(netkin):
    found = saved(netkin, "atoms netkin:digits netkin:digits --atoms 4 --gauge orthonormal")
    assert list(found.tables) == ["atom_cosine(gauge=orthonormal)"]


def test_the_inputs_of_a_classifier_are_transformed(netkin, tmp_path):
    (tmp_path / "halved.py").write_text("def half(images):\n    return images / 2 + 1\n")
    line = "classes netkin:digits --data digits:test --layers relu1"
    assert saved(netkin, f"{line} --transform halved:half") != saved(netkin, f"{line} --overwrite")


def test_what_one_example_is_for_the_similarities_of_stitches_is_chosen(netkin):
    line = "stitch netkin:digits netkin:digits --at relu4 --data digits:test --examples 100 --shape pool"
    assert saved(netkin, line).shapes_a == {"relu4": "pool"}


def test_a_training_of_a_stitch_is_evaluated_on_other_data(netkin):
    line = "stitch netkin:digits netkin:digits --at relu4 --data digits:test --examples 100"
    line = f"{line} --method 'task_loss(epochs=1)'"
    alone, judged = (saved(netkin, f"{line} --overwrite {more}") for more in ("", "--validation digits:train"))
    assert "validation" in str(judged.provenance)
    assert judged.provenance != alone.provenance
