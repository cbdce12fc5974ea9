"""Reports of results: HTML pages, figures for papers, and views in notebooks; torch is not imported."""

from netkin.reporting.figures import plot
from netkin.reporting.page import report
from netkin.reporting.page.notebook import notebook_view

__all__ = ["notebook_view", "plot", "report"]
