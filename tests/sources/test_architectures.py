import pytest
import torch

from netkin.errors import UnknownName
from netkin.sources.architectures import architecture, digits, seeded, tiny10


def parameter_count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_tiny10_has_the_published_number_of_parameters():
    assert parameter_count(tiny10()) == 86_778


def test_tiny10_has_the_published_channels_and_positions():
    model, sizes = tiny10().eval(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[1:])}))
    model(torch.zeros(1, 3, 32, 32))
    found = [sizes[f"relu{number}"] for number in range(1, 9)]
    assert [channels for channels, *_ in found] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert [height for _, height, _ in found] == [30, 28, 13, 11, 9, 4, 2, 2]
    assert sizes["fc"] == (10,)


def test_only_convolutions_norms_and_the_head_hold_weights():
    owners = {key.partition(".")[0] for key in tiny10().state_dict()}
    assert owners == {f"{kind}{number}" for kind in ("conv", "bn") for number in range(1, 9)} | {"fc"}


def test_the_digits_network_gives_ten_scores_for_each_image():
    model = digits()
    assert parameter_count(model) == 33_482
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_same_seed_builds_the_same_weights_and_another_seed_others():
    first, again, other = seeded(digits, 3).fc.weight, seeded(digits, 3).fc.weight, seeded(digits, 4).fc.weight
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_torchs_random_numbers_as_they_were():
    before = torch.random.get_rng_state()
    seeded(digits, 7)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_architecture_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match=r"no reference architecture named 'tiny11'; did you mean 'tiny10'\? We have"):
        architecture("tiny11")
