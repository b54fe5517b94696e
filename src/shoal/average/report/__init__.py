"""Reports of where the time of averaging went: a table, JSON, a picture and a trace."""

from shoal.average.report.breakdown import StepBreakdown, break_down
from shoal.average.report.report import AveragingReport, report_on

__all__ = ["AveragingReport", "StepBreakdown", "break_down", "report_on"]
