"""Pictures of results: the page for any browser, figures for papers, the view in a notebook. No torch here."""

from netkin.reporting.figures import plot
from netkin.reporting.page import report
from netkin.reporting.page.notebook import notebook_view

__all__ = ["notebook_view", "plot", "report"]
