"""Comparing: all pairs of layers, every measure, one pass.

`netkin.comparing.compare` is the module; its function is `nk.compare`.
"""

from netkin.comparing.compare import collect, explain, merge, model_directions
from netkin.comparing.comparer import Comparer
from netkin.comparing.inputs import ModelInput
from netkin.comparing.many import compare_many, explain_many
from netkin.comparing.plan import Plan

__all__ = [
    "Comparer",
    "ModelInput",
    "Plan",
    "collect",
    "compare_many",
    "explain",
    "explain_many",
    "merge",
    "model_directions",
]
