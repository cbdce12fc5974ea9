"""What comes out: labelled, frozen tables that say how they came to be. NumPy only; torch is never imported here."""

from netkin.results.comparison import Comparison, Values
from netkin.results.comparisons import Comparisons
from netkin.results.loading import load

__all__ = ["Comparison", "Comparisons", "Values", "load"]
