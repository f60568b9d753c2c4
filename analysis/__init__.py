"""What a results folder says, offline: verdicts with intervals, one page. Reads Parquet through `sweeps.results`."""

from analysis.data.load import Results, load
from analysis.judge.break_even import BreakEven, break_even
from analysis.judge.verdict import SweepVerdict
from analysis.notebook import configurations, frames, report, verdict
from analysis.server_log import ServerLog, ServerLogError, read_server_log
from sweeps import SpecsweepError
from sweeps.results.tables import TableError

__all__ = [
    "BreakEven",
    "Results",
    "ServerLog",
    "ServerLogError",
    "SpecsweepError",
    "SweepVerdict",
    "TableError",
    "break_even",
    "configurations",
    "frames",
    "load",
    "read_server_log",
    "report",
    "verdict",
]
