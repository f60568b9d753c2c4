"""What-if claims against what was measured, from recorded sweeps: `python -m benchmarks.what_if`.

Four claims of the report and the search, each with what it predicted and what was measured:

- throughput at another accept length is that length over the cycle time;
- the same over two sweeps: cycles at accept length 1, throughput where the server pinned 3;
- a chain's histogram tells the accept length of every shorter chain;
- a drafter of conditional accuracy p would give t tok/s.

Configurations whose greedy text is not the control's are left out and named: their accept lengths are not those of the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from analysis.judge.break_even import accept_length_at, accuracy_for
from benchmarks.record import record
from sweeps.results.tables import ResultsFolder, read_table

RECORDINGS = Path(__file__).parents[1] / "recordings"
MINIATURE = "h200_miniature_v1"
AT_ONE, PINNED = "h200_kimi_mini_v1", "h200_kimi_mini_pinned_v1"
GOOD, POOR = "trained", "stopped_early"
CONCURRENCIES = (1, 4)
WITHIN = 0.02
"""The claim: predictions are right within so much."""
_MOVED = 0.5
"""A block whose accept length is so far from the other blocks' tests the claim; others repeat it."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One completed trial with its blocks."""

    facts: Mapping[str, Any]
    blocks: Rows

    @property
    def chain(self) -> tuple[str | None, int]:
        return self.facts["drafter"], self.facts["num_steps"]

    def at(self, concurrency: int) -> Rows:
        """Blocks at a concurrency; recordings older than the column have one request at a time."""
        return [block for block in self.blocks if (block["concurrency"] or 1) == concurrency]


def trials_of(recording: str) -> list[Trial]:
    """Completed trials of a recorded sweep."""
    folder = ResultsFolder(RECORDINGS / recording)
    blocks = read_table(folder, "blocks").to_pylist()
    return [
        Trial(row, [each for each in blocks if _key(each) == _key(row)])
        for row in read_table(folder, "trials").to_pylist()
        if row["status"] == "completed"
    ]


def wrong_texts(recording: str) -> set[str]:
    """Trials whose greedy texts begin unlike the control's, prompt by prompt at one request at a time."""
    requests = read_table(ResultsFolder(RECORDINGS / recording), "requests").to_pylist()
    alone = [row for row in requests if (row["concurrency"] or 1) == 1]
    control = {row["prompt_id"]: row["head_hash"] for row in alone if row["trial_id"].startswith("k")}
    return {row["trial_id"] for row in alone if row["head_hash"] != control[row["prompt_id"]]}


def other_accept_lengths(trials: Iterable[Trial], concurrency: int) -> list[dict[str, Any]]:
    """Each block predicted from its accept length and the other blocks' cycle time, where its length is another."""
    rows = []
    for trial in trials:
        blocks = trial.at(concurrency)
        for number, block in enumerate(blocks if trial.facts["num_steps"] else ()):
            others = [*blocks[:number], *blocks[number + 1 :]]
            if abs(block["accept_length"] - _mean(others, "accept_length")) < _MOVED:
                continue
            predicted = 1000 * concurrency * block["accept_length"] / _mean(others, "cycle_ms")
            rows.append(
                _against(
                    predicted,
                    block["tok_s"],
                    label=trial.facts["label"],
                    accept_length=block["accept_length"],
                    others_accept_length=_mean(others, "accept_length"),
                )
            )
    return rows


def pinned_from_one() -> list[dict[str, Any]]:
    """Throughput at a pinned length, from cycles of another sweep in which no draft was accepted."""
    cycles = {
        (row.facts["num_steps"], row.facts["eagle_topk"]): _mean(row.blocks, "cycle_ms") for row in trials_of(AT_ONE)
    }
    rows = []
    for trial in trials_of(PINNED):
        key = (trial.facts["num_steps"], trial.facts["eagle_topk"])
        if trial.facts["num_steps"] and key in cycles:
            length = _mean(trial.blocks, "accept_length")
            measured = _rate(trial.blocks)
            rows.append(
                _against(1000 * length / cycles[key], measured, label=trial.facts["label"], accept_length=length)
            )
    return rows


def shorter_chains(chains: Mapping[tuple[str | None, int], Trial]) -> list[dict[str, Any]]:
    """Accept length of each chain of the good drafter, from the histogram of its longest."""
    steps = sorted(num_steps for drafter, num_steps in chains if drafter == GOOD)
    counts = _histogram(chains[GOOD, steps[-1]].at(1))
    rows = []
    for num_steps in steps[:-1]:
        predicted = sum(min(tokens, num_steps + 1) * count for tokens, count in enumerate(counts)) / sum(counts)
        blocks = chains[GOOD, num_steps].at(1)
        measured = _mean(blocks, "accept_length")
        rows.append({"num_steps": num_steps, **_against(predicted, measured)})
    return rows


def another_drafter(chains: Mapping[tuple[str | None, int], Trial], concurrency: int) -> dict[str, Any]:
    """Throughput of the good drafter's chains, from the poor drafter's cycles and the good one's accuracy.

    The accuracy is the constant one at which the longest chain reaches its accept length. Cycles of step counts that
    the poor drafter did not run lie on the line through those that it did.
    """
    poor = {
        steps: _mean(trial.at(concurrency), "cycle_ms") for (drafter, steps), trial in chains.items() if drafter == POOR
    }
    good = {steps: trial.at(concurrency) for (drafter, steps), trial in chains.items() if drafter == GOOD}
    slope, intercept = map(float, np.polyfit(list(poor), list(poor.values()), 1))
    longest = max(good)
    accuracy = accuracy_for(_mean(good[longest], "accept_length"), num_steps=longest).conditional_accuracy
    assert accuracy is not None, "a measured accept length is within reach"
    rows = []
    for num_steps, blocks in sorted(good.items()):
        cycle_ms = poor.get(num_steps, intercept + slope * num_steps)
        predicted = 1000 * concurrency * accept_length_at(accuracy, num_steps=num_steps) / cycle_ms
        facts = {"num_steps": num_steps, "cycle_ms": cycle_ms, "extrapolated": num_steps not in poor}
        rows.append({**facts, **_against(predicted, _rate(blocks))})
    return {"conditional_accuracy": accuracy, "chains": rows}


def figures() -> dict[str, Any]:
    """Every claim with its rows, and in short how far off it was."""
    wrong = wrong_texts(MINIATURE)
    trials = trials_of(MINIATURE)
    sound = [trial for trial in trials if trial.facts["trial_id"] not in wrong]
    chains = {trial.chain: trial for trial in sound if trial.facts["eagle_topk"] == 1}
    found: dict[str, Any] = {
        "left out, text unlike the control's": [
            trial.facts["label"] for trial in trials if trial.facts["trial_id"] in wrong
        ],
    }
    for concurrency in CONCURRENCIES:
        found[f"another accept length, {concurrency} at a time"] = _judged(other_accept_lengths(sound, concurrency))
    found["pinned length from cycles of another sweep"] = _judged(pinned_from_one())
    found["shorter chains from the longest"] = _judged(shorter_chains(chains))
    for concurrency in CONCURRENCIES:
        claim = another_drafter(chains, concurrency)
        found[f"another drafter, {concurrency} at a time"] = {
            "conditional_accuracy": claim["conditional_accuracy"],
            **_judged(claim["chains"]),
        }
    return found


def main() -> None:
    """Print and record."""
    found = figures()
    for name, value in found.items():
        print(name, {key: each for key, each in value.items() if key != "rows"} if isinstance(value, dict) else value)
    print(record("what_if", found))


def _judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "predictions": len(rows),
        "median_error": median(errors),
        "largest_error": max(errors),
        "within_2_percent": sum(error <= WITHIN for error in errors),
        "rows": rows,
    }


def _against(predicted: float, measured: float, **facts: Any) -> dict[str, Any]:
    return {**facts, "predicted": predicted, "measured": measured, "error": predicted / measured - 1}


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["trial_id"], row["attempt"]


def _mean(blocks: Rows, column: str) -> float:
    """Mean over the cycles of all blocks, so that an accept length is tokens over cycles."""
    return fmean((block[column] for block in blocks), weights=[block["num_cycles"] for block in blocks])


def _rate(blocks: Rows) -> float:
    return float(sum(block["decode_tokens"] for block in blocks) / sum(block["decode_s"] for block in blocks))


def _histogram(blocks: Rows) -> list[int]:
    longest = max(len(block["accept_histogram"]) for block in blocks)
    padded = [[*block["accept_histogram"], *[0] * (longest - len(block["accept_histogram"]))] for block in blocks]
    return [sum(counts) for counts in zip(*padded, strict=True)]


if __name__ == "__main__":
    main()
