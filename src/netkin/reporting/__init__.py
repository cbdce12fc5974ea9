"""Pictures of results: the page for any browser, figures for papers, the view in a notebook. No torch here."""

from netkin.reporting.figures import plot
from netkin.reporting.notebooks import notebook_view
from netkin.reporting.page import report

__all__ = ["notebook_view", "plot", "report"]
