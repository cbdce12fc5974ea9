"""Small, mergeable statistics: run both models on a batch, fold it in, forget it."""

from netkin.statistics.grams import Grams, LayerGrams
from netkin.statistics.layer_moments import LayerMoments
from netkin.statistics.moments import Moments
from netkin.statistics.outputs import Outputs
from netkin.statistics.rows import LayerRows, Rows
from netkin.statistics.statistic import Statistic

__all__ = ["Grams", "LayerGrams", "LayerMoments", "LayerRows", "Moments", "Outputs", "Rows", "Statistic"]
