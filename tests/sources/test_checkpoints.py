"""Networks that others trained reach the accuracies recorded for them; where their files are not at hand, skipped."""

from itertools import islice

import pytest

from netkin.sources import load_data, load_model
from netkin.training import accuracy

OWN, IMAGENET = "cifar10", "cifar10,normalise=imagenet"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, file, data, recorded",
    [
        ("resnet20", "resnet20w1_cifar10_seed0.pt", OWN, 0.9195),
        ("resnet20", "resnet20w1_cifar10_seed1.pt", OWN, 0.9195),
        ("resnet20a", "akamaster_resnet20-12fca82f.th", IMAGENET, 0.9173),
        ("resnet32a", "akamaster_resnet32-d509ac18.th", IMAGENET, 0.927),
        ("resnet44a", "akamaster_resnet44-014dd654.th", IMAGENET, 0.933),
    ],
)
def test_a_residual_network_reaches_its_recorded_accuracy(checkpoints, cifar10_directory, name, file, data, recorded):
    model = load_model(f"netkin:{name}@{checkpoints / file}")
    batches = load_data(f"{data}:{cifar10_directory}", batch_size=500)
    assert accuracy(model, list(islice(batches, 4))) == pytest.approx(recorded, abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_tiny10_reaches_its_recorded_accuracy(checkpoints, cifar10_directory, seed):
    model = load_model(f"netkin:tiny10@{checkpoints / f'tiny10_cifar10_seed{seed}.pt'}")
    reached = accuracy(model, load_data(f"cifar10:{cifar10_directory}", batch_size=500))
    assert 0.862 <= round(reached, 3) <= 0.871


def test_the_wrong_shortcuts_are_refused_with_the_keys(checkpoints):
    with pytest.raises(
        ValueError, match=r"do not fit netkin:resnet20a: .*missing: .*linear.weight.*unexpected: .*downsample"
    ):
        load_model(f"netkin:resnet20a@{checkpoints / 'resnet20w1_cifar10_seed0.pt'}")
