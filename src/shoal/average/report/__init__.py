"""Reports of where the time of averaging went: tables, pictures, traces, and records of calls."""

from shoal.average.report.breakdown import StepBreakdown, break_down
from shoal.average.report.flight import FlightDump
from shoal.average.report.report import AveragingReport, report_on

__all__ = ["AveragingReport", "FlightDump", "StepBreakdown", "break_down", "report_on"]
