"""Pairs out of a local checkout: found, closed over their helpers, and written as pair files.

    report = harvest(Path("~/src/some-library").expanduser())
    for found in report.found: found.text        # a pair file
    for left in report.skipped: left.reason      # why a candidate is none

Only syntax trees are read: nothing of the checkout is imported or run.
"""

from rag.harvest.harvest import harvest
from rag.harvest.report import Found, HarvestReport, Kind, Reason, Skipped

__all__ = ["Found", "HarvestReport", "Kind", "Reason", "Skipped", "harvest"]
