"""Small, mergeable statistics: run both models on a batch, fold it in, forget it."""

from netkin.statistics.frequencies import off_block_share
from netkin.statistics.grams import Grams, LayerGrams
from netkin.statistics.layer_moments import LayerMoments
from netkin.statistics.moments import Moments
from netkin.statistics.outputs import Outputs
from netkin.statistics.rows import LayerRows, Rows
from netkin.statistics.spectra import LayerSpectra, Spectra
from netkin.statistics.statistic import Statistic

__all__ = [
    "Grams",
    "LayerGrams",
    "LayerMoments",
    "LayerRows",
    "LayerSpectra",
    "Moments",
    "Outputs",
    "Rows",
    "Spectra",
    "Statistic",
    "off_block_share",
]
