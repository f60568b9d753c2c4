"""What searching writes into the table `events` and the analysis reads there."""

from __future__ import annotations

BUDGET_REASON = "budget."
"""Begins the detail of `search_stopped` if a budget ended the search: some configurations may not be measured."""
