"""Reports of results: HTML pages, figures for papers, and views in notebooks; torch is not imported."""

from netkin.reporting.figures import plot
from netkin.reporting.page import notebook_view, report

__all__ = ["notebook_view", "plot", "report"]
