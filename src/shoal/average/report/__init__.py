"""Reports of where the time of averaging went: a table, JSON and a trace."""

from shoal.average.report.report import AveragingReport, report_on

__all__ = ["AveragingReport", "report_on"]
