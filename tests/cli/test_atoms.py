import json
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.training import untrained_digits_net


@pytest.fixture
def nets(netkin):
    """Three state dicts near one start, in the folder at hand."""
    start = untrained_digits_net(0)
    for place, name in enumerate("abc"):
        torch.manual_seed(place)
        near = {
            key: one + 0.05 * torch.randn_like(one) if one.ndim == 4 else one for key, one in start.state_dict().items()
        }
        torch.save(near, f"{name}.pt")
    return [f"netkin:digits@{name}.pt" for name in "abc"]


def test_plain_networks_share_coefficients_first_and_that_is_told(netkin, nets):
    result = netkin(f"atoms {' '.join(nets)} --atoms 6 --by-layer --out all.netkin --report all.html")
    assert result.exit_code == 0, result.output
    assert "3 networks, each with every other" in result.stdout
    assert "3 networks with coefficients fitted to all" in result.stderr
    assert "channels shuffled" in result.stderr
    found = nk.load("all.netkin")
    models = {spec: nk.load_model(spec) for spec in nets}
    expected = nk.atom_similarity(nk.share_coefficients(models, 6).models, by_layer=True)
    np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), atol=1e-9)
    page = Path("all.html").read_text()
    assert "Dendrogram" in page
    assert "the closest networks are" in page


def test_the_nearest_are_printed_as_text_and_json(netkin, nets):
    line = f"atoms {' '.join(nets)} --atoms 6 --top 1"
    assert "netkin:digits@a.pt: netkin:digits@" in netkin(line).stdout
    listed = json.loads(netkin(f"{line} --json").stdout)
    assert list(listed) == nets
    assert listed[nets[0]][0]["network"] in nets[1:]
    assert "no table to save or draw" in netkin(f"{line} --out x.netkin").stderr
    assert "--top asks for 3 other networks, but there are only 2" in netkin(f"{line} --top 3").stderr


def test_json_of_all_pairs_is_a_comparison(netkin, nets):
    document = json.loads(netkin(f"atoms {' '.join(nets[:2])} --atoms 6 --source {nets[0]} --json").stdout)
    assert document["tables"]["atom_cosine"]["axes"] == ["network", "network"]
    assert 0 < document["tables"]["atom_cosine"]["values"][0][1] < 1


def test_misuse_and_networks_without_atoms_are_refused(netkin, nets):
    refused = netkin(f"atoms {' '.join(nets)}")
    assert refused.exit_code == 1
    assert "has no layers made of atoms" in refused.stderr
    misuse = netkin(f"atoms {' '.join(nets)} --block 4")
    assert misuse.exit_code == 2
    assert "--source and --block need --atoms" in misuse.stderr
    assert netkin("atoms").exit_code == 2
    assert netkin(f"atoms {nets[0]} --atoms 3").exit_code == 1


def test_the_same_name_twice_is_numbered_and_random_weights_are_told(netkin, nets):
    result = netkin("atoms netkin:digits netkin:digits --atoms 4")
    assert "netkin:digits (1)" in result.stdout
    assert "random" in result.stderr


def test_compare_and_its_plan_take_measures_of_weights_without_data(netkin, nets):
    line = (
        f"{nets[0]} {nets[1]} --measure weight_cosine --measure grassmann(atoms=4) --layers conv* --pairs corresponding"
    )
    result = netkin("compare " + line.replace("(", "\\(").replace(")", "\\)"))
    assert result.exit_code == 0, result.output
    assert "from the weights alone" in result.stdout
    plan = netkin(f"compare --plan {nets[0]} {nets[1]} --measure weight_cosine")
    assert "examples: none, the weights alone are compared" in plan.stdout
    assert netkin(f"compare --plan {nets[0]} --measure cka").exit_code == 2
    assert "--data is missing" in netkin(f"compare {nets[0]} {nets[1]} --measure weight_cosine --measure cka").stderr
