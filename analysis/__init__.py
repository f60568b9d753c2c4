"""What a results folder says, offline: verdicts with intervals, one page. Reads Parquet through `sweeps.results`."""
