"""Comparing: all pairs of layers, every measure, one pass.

`netkin.comparing.compare` is the module; its function is `nk.compare`.
"""

from netkin.comparing.compare import collect, explain, merge, model_directions
from netkin.comparing.many_models import compare_many, explain_many
from netkin.comparing.pass_statistics import Statistics
from netkin.comparing.planning import Plan
from netkin.comparing.subjects import Subject

__all__ = [
    "Plan",
    "Statistics",
    "Subject",
    "collect",
    "compare_many",
    "explain",
    "explain_many",
    "merge",
    "model_directions",
]
