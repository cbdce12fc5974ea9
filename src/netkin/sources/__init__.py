"""Models, weights and data sets, loaded by name.

`load_model("netkin:tiny10@seed0.pt")` gives a model, `load_data("digits:test")` gives batches, and
`recorded("states/")` what layers gave before.
"""

from netkin.sources.datasets import Batches, load_data
from netkin.sources.models import load_model
from netkin.sources.recordings import RecordedRows, recorded

__all__ = ["Batches", "RecordedRows", "load_data", "load_model", "recorded"]
