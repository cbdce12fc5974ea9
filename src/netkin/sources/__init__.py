"""Models, weights and data sets, loaded by name.

`load_model("netkin:tiny10@seed0.pt")` gives a model, `load_data("digits:test")` gives batches.
"""

from netkin.sources.datasets import Batches, load_data
from netkin.sources.models import load_model

__all__ = ["Batches", "load_data", "load_model"]
