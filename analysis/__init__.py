"""What a results folder says, offline: verdicts with intervals, one page. Knows Parquet through `sweeps.results.tables`."""
