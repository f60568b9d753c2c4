"""A results folder as something to run again: recorded trials, blocks and cycles by configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pyarrow as pa

from sweeps.engines.base import Evidence, KernelTime
from sweeps.results.tables import CYCLE_COLUMNS, ResultsFolder, TableError, read_table

Row = Mapping[str, Any]
BlockKey = tuple[str, int, int, int]
"""trial_id, attempt, block_index, concurrency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedConfiguration:
    """All that a recording has of one configuration."""

    trials: tuple[Row, ...]
    blocks: tuple[Row, ...]
    """At the first of the wanted concurrencies."""
    beside: Mapping[int, tuple[Row, ...]]
    """Those at the others, by concurrency."""

    def blocks_at(self, index: int, concurrency: int) -> tuple[Row, ...]:
        """Recorded blocks with this index; all of them where it was never reached (pruned trials)."""
        rows = self.beside.get(concurrency, self.blocks)
        return tuple(row for row in rows if row["block_index"] == index) or rows

    @property
    def measured(self) -> tuple[Row, ...]:
        """Trials that have blocks."""
        return tuple(row for row in self.trials if row["num_blocks"])

    @property
    def tok_s(self) -> float:
        """Tokens over seconds with equal weight of every block index: what endless replay converges to."""
        by_index: dict[int, list[Row]] = {}
        for row in self.blocks:
            by_index.setdefault(row["block_index"], []).append(row)
        tokens, seconds = (
            fmean(fmean(row[name] for row in rows) for rows in by_index.values())
            for name in ("decode_tokens", "decode_s")
        )
        return tokens / seconds


class Recording:
    """Reads a results folder once. Raises TableError where it is none, or holds no block at a wanted concurrency."""

    def __init__(self, root: Path, concurrencies: tuple[int, ...] = (1,)) -> None:
        folder = ResultsFolder(root)
        self.manifest = folder.read_manifest()
        trials = [row for row in read_table(folder, "trials").to_pylist() if row["configuration_id"]]
        owner = {(row["trial_id"], row["attempt"]): row["configuration_id"] for row in trials}
        blocks = read_table(folder, "blocks").to_pylist()
        if not blocks:
            raise TableError(f"{root}: wanted a recording with measured blocks, but its table `blocks` is empty")
        known = {concurrency_of(row) for row in blocks}
        if lacking := sorted(set(concurrencies) - known):
            raise TableError(f"{root}: recorded at concurrency {sorted(known)}, wanted {lacking} as well")
        by_concurrency = {wanted: [row for row in blocks if concurrency_of(row) == wanted] for wanted in concurrencies}
        self._folder = folder
        self.configurations: dict[str, RecordedConfiguration] = {
            name: RecordedConfiguration(
                trials=tuple(row for row in trials if row["configuration_id"] == name),
                blocks=_owned(by_concurrency[concurrencies[0]], owner, name),
                beside={wanted: _owned(by_concurrency[wanted], owner, name) for wanted in concurrencies[1:]},
            )
            for name in dict.fromkeys(owner.values())
        }
        self.num_blocks = 1 + max(row["block_index"] for row in blocks)
        self._trials = trials

    @cached_property
    def boot_s(self) -> dict[str, float]:
        """Median seconds by activity over all launches: for configurations that were only ever switched to."""
        launched = [row for row in self._trials if row["relaunched"] and row["num_blocks"]]
        return {
            activity: median(row[f"{activity}_s"] for row in launched) if launched else 0.0
            for activity in ("launch", "weight_load", "capture")
        }

    @cached_property
    def switch_s(self) -> float | None:
        """Median of the recorded switches in place; None where the recording has none."""
        switched = [row["switch_s"] for row in self._trials if row["relaunched"] is False]
        return median(switched) if switched else None

    @cached_property
    def stop_s(self) -> float:
        """Median over the stops that were recorded."""
        stops = [row["stop_s"] for row in self._trials if row["stop_s"] > 0.0]
        return median(stops) if stops else 0.0

    def cycles(self, key: BlockKey) -> pa.Table:
        """`CYCLE_COLUMNS` of one block; may be empty."""
        table, runs = self._cycles
        parts = [table.slice(start, stop - start) for start, stop in runs.get(key, ())]
        return pa.concat_tables(parts).select(CYCLE_COLUMNS.names) if parts else CYCLE_COLUMNS.empty_table()

    def requests(self, key: BlockKey) -> tuple[Row, ...]:
        return self._requests.get(key, ())

    def evidence(self, trial: Row) -> tuple[Evidence, ...]:
        """The rows of one trial."""
        return tuple(Evidence(**row) for row in self._of_trial(self._evidence, trial))

    def kernels(self, configuration: RecordedConfiguration) -> tuple[KernelTime, ...] | None:
        """Of the first of its trials that was traced; None where none was."""
        for trial in configuration.trials:
            if rows := self._of_trial(self._kernels, trial):
                return tuple(KernelTime(**row) for row in rows)
        return None

    @cached_property
    def _evidence(self) -> list[Row]:
        return list(read_table(self._folder, "evidence").to_pylist())

    @cached_property
    def _kernels(self) -> list[Row]:
        return list(read_table(self._folder, "kernels").to_pylist())

    @staticmethod
    def _of_trial(rows: list[Row], trial: Row) -> list[dict[str, Any]]:
        keys = ("sweep_id", "trial_id", "attempt")
        return [
            {name: value for name, value in row.items() if name not in keys}
            for row in rows
            if row["trial_id"] == trial["trial_id"] and row["attempt"] == trial["attempt"]
        ]

    @cached_property
    def _requests(self) -> dict[BlockKey, tuple[Row, ...]]:
        grouped: dict[BlockKey, list[Row]] = {}
        for row in read_table(self._folder, "requests").to_pylist():
            key = (row["trial_id"], row["attempt"], row["block_index"], concurrency_of(row))
            grouped.setdefault(key, []).append(row)
        return {key: tuple(rows) for key, rows in grouped.items()}

    @cached_property
    def _cycles(self) -> tuple[pa.Table, dict[BlockKey, list[tuple[int, int]]]]:
        """The whole table, and where in it each block's runs of rows begin and end."""
        table = read_table(self._folder, "cycles").combine_chunks()
        runs: dict[BlockKey, list[tuple[int, int]]] = {}
        if not table.num_rows:
            return table, runs
        trial = table["trial_id"].combine_chunks().dictionary_encode()
        numbers = (table["attempt"], table["block_index"], table["concurrency"].fill_null(1))
        codes = [np.asarray(trial.indices), *map(np.asarray, numbers)]
        changed = np.any([code[1:] != code[:-1] for code in codes], axis=0)
        starts = [0, *(np.flatnonzero(changed) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
            attempt, index, concurrency = (int(code[start]) for code in codes[1:])
            key = (trial.dictionary[int(codes[0][start])].as_py(), attempt, index, concurrency)
            runs.setdefault(key, []).append((start, stop))
        return table, runs


def concurrency_of(row: Row) -> int:
    """Of a block or request; rows older than the column ran one request at a time."""
    return row["concurrency"] or 1


def _owned(rows: list[dict[str, Any]], owner: Mapping[tuple[str, int], str], name: str) -> tuple[Row, ...]:
    return tuple(row for row in rows if owner.get((row["trial_id"], row["attempt"])) == name)
