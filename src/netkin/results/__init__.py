"""Results: labelled, immutable tables with their provenance. NumPy only; torch is never imported here."""

from netkin.results.caveats import Caveat
from netkin.results.comparison import Comparison, Values
from netkin.results.comparisons import Comparisons
from netkin.results.diff import Diff
from netkin.results.federation import Federation
from netkin.results.packing import document, load
from netkin.results.quantity import Quantity
from netkin.results.ranking import Ranking
from netkin.results.series import THRESHOLDS, Series, Trend
from netkin.results.side_by_side import side_by_side
from netkin.results.task_accuracies import TaskAccuracies, TaskEnsembles
from netkin.results.values import Match
from netkin.results.weight_sparsity import SparsityStudy

__all__ = [
    "THRESHOLDS",
    "Caveat",
    "Comparison",
    "Comparisons",
    "Diff",
    "Federation",
    "Match",
    "Quantity",
    "Ranking",
    "Series",
    "SparsityStudy",
    "TaskAccuracies",
    "TaskEnsembles",
    "Trend",
    "Values",
    "document",
    "load",
    "side_by_side",
]
