"""When a drafter counts as inert: the one rule that measuring and analysis share."""

from __future__ import annotations

import math

INERT_CYCLES = 100
"""Fewer do not tell an inert draft from a poor one: accepted at 5 %, 0.6 % of trials this long see no draft token."""
INERT_ACCEPTED = 0.05
"""Draft tokens accepted per cycle below which a drafter does not fit its target. A head of another tokenizer or other
layers hits frequent tokens by chance, 1 to 3 % of the time; a trained drafter far from its domain hits 20 % or more.
Nothing is lost: 5 % of tokens do not pay for the drafting and the wider verify."""


def is_inert(accepted: float, cycles: int) -> bool:
    """Whether fewer than INERT_ACCEPTED draft tokens per verify cycle were accepted, by three standard errors.

    Args:
        accepted: draft tokens accepted in all cycles together, (accept length - 1) x cycles.
    """
    return cycles >= INERT_CYCLES and accepted + 3.0 * math.sqrt(max(accepted, 0.0) + 1.0) < INERT_ACCEPTED * cycles
