"""What a sweep is about: model, server, machine, prompts, date. What its rows do not tell is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.data.load import Results

_MOST = 4
"""Values of one fact that are listed; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the table `what was measured`."""

    name: str
    value: str


def about(results: Results) -> tuple[Fact, ...]:
    """In the order of the page."""
    trials = results.all_trials
    commands = [list(command) for command in trials["command"].drop_nulls()]
    found = {
        "model": _after("--model-path", commands),
        "drafters": _after("--speculative-draft-model-path", commands),
        results.engine: _texts(trials["engine_version"]),
        "NCCL": _effective(trials, "nccl_version"),
        "attention backend": _effective(trials, "attention_backend"),
        "machine": _texts(trials["machine"]),
        "hosts": _texts(trials["node"]),
        "GPUs of a trial": _texts(trials["num_gpus"]),
        "prompts": list(_prompts(results.requests)),
        "requests at a time": [", ".join(map(str, sorted(results.concurrencies)))] if results.concurrencies else [],
        "accept length": ["pinned by the server"] if results.pinned else ["as the drafter earned it"],
        "measured": list(_dates(trials)),
    }
    return tuple(Fact(name, _listed(values)) for name, values in found.items() if values)


def _after(flag: str, commands: Iterable[list[str]]) -> list[str]:
    """The words that follow a flag."""
    words = (command[command.index(flag) + 1] for command in commands if flag in command[:-1])
    return sorted(set(words))


def _texts(column: pl.Series) -> list[str]:
    return sorted(map(str, column.drop_nulls().unique()))


def _effective(trials: pl.DataFrame, name: str) -> list[str]:
    """Values of one argument by the server's own account."""
    told = (dict(row) for row in trials["effective"].drop_nulls())
    return sorted({row[name] for row in told if row.get(name)})


def _prompts(requests: pl.DataFrame) -> Iterator[str]:
    if requests.is_empty():
        return
    count = requests["prompt_id"].n_unique()
    yield (
        f"{count} of {_range(requests['prompt_tokens'])} tokens, answers of {_range(requests['output_tokens'])} tokens"
    )


def _range(column: pl.Series) -> str:
    low, high = _number(column.min()), _number(column.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _number(value: Any) -> int:
    return int(value)


def _dates(trials: pl.DataFrame) -> Iterator[str]:
    days = sorted({at.date().isoformat() for at in trials["started_at"].drop_nulls()})
    if days:
        yield days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _listed(values: list[str]) -> str:
    more = len(values) - _MOST
    return ", ".join(values[:_MOST]) + (f" and {more} more" if more > 0 else "")
