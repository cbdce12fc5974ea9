"""The transformation of a stitch: a 1 × 1 convolution, a linear layer, or one linear layer for every token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from netkin.applications.stitching.ends import End, Meeting
from netkin.applications.stitching.matching import LinearMap
from netkin.errors import ShapeError, ValueFault


class Transformation(nn.Module):
    """Brings activations of one layer into the form of another and maps their channels: ``x @ matrix + shift``.

    With `rank` the map is a bottleneck of two factors, which start as the best approximation of the matrix given.
    """

    def __init__(self, linear: LinearMap, meeting: Meeting, *, rank: int | None = None):
        super().__init__()
        p, q = meeting.a.width, meeting.b.width
        if linear.weight.shape != (p, q):
            raise ShapeError(f"the map is {tuple(linear.weight.shape)}, and the layers need {(p, q)}.")
        refuse_unfit_rank(rank, meeting)
        self.meeting, self.rank = meeting, rank
        narrowing = [] if rank is None else [_layer(meeting.b, p, rank, bias=False)]
        self.linear = nn.Sequential(*narrowing, _layer(meeting.b, rank or p, q, bias=True))
        self.set(linear)

    def forward(self, output: Tensor) -> Tensor:
        """Return what the second model's layer would have given."""
        return self.linear(self.meeting(output))

    @property
    def matrix(self) -> Tensor:
        """The map of channels, p × q."""
        first, *others = [weight.flatten(1).T for weight in self._weights]
        return first if not others else first @ others[0]

    @property
    def shift(self) -> Tensor:
        """What is added, of length q."""
        return self.linear[-1].get_parameter("bias")

    @property
    def _weights(self) -> list[Tensor]:
        return [part.get_parameter("weight") for part in self.linear]

    @torch.no_grad()
    def set(self, linear: LinearMap) -> None:
        """Take over a map; a bottleneck takes its best approximation in the Frobenius norm."""
        factors = [linear.weight] if self.rank is None else _factored(linear.weight, self.rank)
        for weight, factor in zip(self._weights, factors, strict=True):
            weight.copy_(factor.T.reshape(weight.shape))
        self.shift.copy_(linear.bias)

    def as_map(self) -> LinearMap:
        """Return the map of channels as it stands."""
        return LinearMap(self.matrix.detach().double(), self.shift.detach().double())


def refuse_unfit_rank(rank: int | None, meeting: Meeting) -> None:
    """Refuse a rank that no map between two layers has."""
    most = min(meeting.a.width, meeting.b.width)
    if rank is not None and not 1 <= rank <= most:
        raise ValueFault(f"`rank` must lie between 1 and the smaller width, {most:,}; got {rank}.")


def _layer(end: End, inputs: int, outputs: int, bias: bool) -> nn.Module:
    # its weights are set at once, so none are drawn: the random state of the user stays as it is
    if end.kind != "maps":
        return skip_init(nn.Linear, inputs, outputs, bias=bias)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(end.space) - 1]
    return skip_init(kind, inputs, outputs, kernel_size=1, bias=bias)


def _factored(weight: Tensor, rank: int) -> list[Tensor]:
    """Return two factors of equal size whose product is the best approximation of that rank."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = values[:rank].sqrt()
    return [left[:, :rank] * root, root.unsqueeze(1) * right[:rank]]
