"""Output folders of training runs in, one self-contained HTML page out."""

from lsg.report.page import render
from lsg.report.runs import StoredRun, find_runs

__all__ = ["StoredRun", "find_runs", "render"]
