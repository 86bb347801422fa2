"""What a run records and shows: metrics, samples, times, and its summary."""

from rlflow.tracking.records import format_metric, read_records, series, summary
from rlflow.tracking.tracker import Tracker

__all__ = ["Tracker", "format_metric", "read_records", "series", "summary"]
