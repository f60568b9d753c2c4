"""Simulated sweeps of known truth for `benchmarks.verdicts`: their numbers, their noise, their plan, their goals."""
