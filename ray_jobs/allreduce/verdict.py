"""What an all-reduce table allows one to say: which NCCL sets differ from the default at decode sizes, by how much."""

from __future__ import annotations

from collections.abc import Sequence

from ray_jobs.allreduce import by_launches, paired
from ray_jobs.allreduce.set_rows import Row, SetVerdict


def judge_sets(rows: Sequence[Row]) -> tuple[SetVerdict, ...]:
    """One verdict per set, in the order of the table: by paired differences, or by launches in tables of schema 1."""
    return paired.judge_sets(rows) if paired.is_paired(rows) else by_launches.judge_sets(rows)


def noise_sentence(rows: Sequence[Row]) -> str | None:
    """By how much measurements with equal variables differ; None if the table cannot tell."""
    if not paired.is_paired(rows):
        noise = by_launches.launch_noise(rows)
        if noise is None:
            return None
        return f"Launches with NCCL's default choice differ by up to {noise:.1%}; smaller differences are noise."
    spread = paired.spread_of_communicators(rows)
    if spread is None:
        return None
    sentence = (
        f"Communicators with equal variables differ by up to {spread.largest:.1%}; smaller differences are noise."
    )
    if spread.degrees >= paired.ENOUGH_DEGREES:
        return sentence
    return (
        f"{sentence} There are few of them, so no difference below {paired.MAX_COMMUNICATOR_DIFFERENCE:.0%}"
        f" is called an effect. Use --copies {paired.ENOUGH_DEGREES + 1} to find smaller ones."
    )
