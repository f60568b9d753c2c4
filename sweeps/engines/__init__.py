"""Engines: what serves a configuration and reports its cycles. `open_engine` picks one by name."""
