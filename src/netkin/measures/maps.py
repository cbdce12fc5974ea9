"""Measures called on feature maps rather than on matrices."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from netkin.arrays import exact_products
from netkin.errors import InflatedWarning, ShapeError
from netkin.measures.canonical import cca_mean, svcca
from netkin.statistics import Spectra


def dft_cca(X: Any, Y: Any, *, variance: float | None = None) -> Any:
    """Return the mean canonical correlation of two conv layers' maps, n × c × h × w, frequency by frequency, 0 to 1.

    Correlations of all frequencies are pooled and divided by the smaller total rank, so that on data closed under
    translation this is `cca_mean` of the flattened maps, and with `variance`, say 0.99, `svcca`, whose cut is taken
    over all frequencies together. A larger map is regrouped to the grid of the smaller one, which must divide it; a
    matrix, n × d, meets the zero frequency alone. On other data see `nk.off_block_share`.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(40, 3, 8, 8))
        >>> round(dft_cca(X, np.roll(X, 1, axis=3)), 6)
        1.0
    """
    with exact_products():
        spectra = Spectra.of(X, Y)
        if len(spectra.x.mean) == len(spectra.y.mean) == 1 and not spectra.cross.is_complex():
            raise ShapeError("neither `X` nor `Y` is a map, n × c × h × w; use `cca_mean` or `svcca` for matrices.")
        if spectra.few_examples:
            warnings.warn(spectra.few_examples, InflatedWarning, stacklevel=2)
        value = cca_mean(spectra) if variance is None else svcca(spectra, variance=variance)
    return value if isinstance(X, Tensor) or isinstance(Y, Tensor) else float(value)
