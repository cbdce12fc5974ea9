"""What a type checker must know of a measure. `make check` reads this file; nothing in it is run."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import netkin as nk

if TYPE_CHECKING:
    from typing_extensions import assert_type

    X, T = np.ones((3, 2)), torch.ones(3, 2)
    assert_type(nk.cka(X, X), float)
    assert_type(nk.svcca(X, T, variance=0.9), Tensor)
    nk.svcca(X, X, varianc=0.9)  # type: ignore[call-overload]  # an ignore that is not needed is an error
