"""What a results folder says, offline: verdicts, their intervals, one page. Reads Parquet through `sweeps.tables` alone."""
