"""The report of a run: one HTML file that needs nothing else. `render` takes a `ReportData` and returns
it.
"""

from leyden.cli.report.data import ReportData
from leyden.cli.report.page import render

__all__ = ["ReportData", "render"]
