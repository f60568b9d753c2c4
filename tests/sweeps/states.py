"""Configurations that one server can hold as states, for tests."""

from __future__ import annotations

from dataclasses import replace

from sweeps.spec.space import Configuration


def at_steps(chain: Configuration, *steps: int) -> tuple[Configuration, ...]:
    """The chain at each step count; its target alone at 0."""
    return tuple(
        replace(chain, num_steps=each, num_draft_tokens=each + 1) if each else chain.target_alone() for each in steps
    )
