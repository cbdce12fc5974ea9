"""Normalising: pixels from 0 to 255 become what a network was trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from netkin.errors import UnknownName, did_you_mean

# mean and standard deviation of each channel of the training images, on a scale from 0 to 1
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "mnist": ((0.1307,), (0.3081,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "none": ((0.0,), (1.0,)),
}


def normalisation(name: str, channels: int = 3) -> Callable[[Tensor], Tensor]:
    """Return the function that makes ``(x / 255 - mean) / std`` of images with so many `channels`.

    `name` is the image set whose mean and standard deviation are meant, or `none` for pixels from 0 to 1.

    Example:
        >>> normalisation("none")(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
        tensor([1., 1., 1.])
    """
    fitting = [each for each, (mean, _) in STATISTICS.items() if len(mean) in (1, channels)]
    if name not in fitting:
        have = ", ".join(f"`{each}`" for each in fitting)
        raise UnknownName(
            f"no normalisation {name!r} for {channels} channels{did_you_mean(name, fitting) or '.'} We have {have}."
        )
    return partial(_normalised, name=name)


def _normalised(images: Tensor, name: str) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in STATISTICS[name])
    return (images.float() / 255 - mean) / std
