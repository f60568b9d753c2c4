"""Lies of a server, each told to one trial of the real engine: which rule or kind of failure names it.

    python -m benchmarks.implausible

The stub server (`tests/stub_server.py`) tells them, so processes, streams and probe files are real. A lie is caught if
its trial fails and the rule or kind that was expected says so; it is believed if one block of it may be compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.record import record
from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import ResultsFolder, read_part
from sweeps.spec.model import Deadlines, EngineSpec, ResourceSpec, SearchSpec, SweepSpec, WorkloadSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import plan_blocks

ROOT = Path(__file__).parents[1]
STUB = ROOT / "tests" / "stub_server.py"


@dataclass(frozen=True, slots=True)
class Lie:
    """One way to answer what cannot be true."""

    name: str
    says: str
    caught_by: str
    """Rule of `sweeps.results.plausible`, or kind of failure."""
    fault: str = ""
    """Of the stub; `lie:NAME` if empty."""


LIES: tuple[Lie, ...] = (
    Lie("answers_half", "answers 12 tokens of 24 and calls itself done", "asked_tokens"),
    Lie("counts_tenfold", "counts ten times the tokens that it sent", "asked_tokens"),
    Lie("counts_chunks", "counts chunks in place of tokens", "asked_tokens"),
    Lie("counts_negative", "counts -24 tokens", "asked_tokens"),
    Lie("counts_fall", "counts fewer tokens as the stream goes on", "falling_count"),
    Lie("ids_missing", "sends a third of the token ids that it counts", "counted_ids"),
    Lie("ids_negative", "sends token ids below 0", "counted_ids"),
    Lie("one_request_id", "gives two answers one request id", "request_ids"),
    Lie("prompt_longer", "counts 3 tokens too many in each prompt", "prompt_tokens"),
    Lie("prompt_cached", "takes whole prompts from its prefix cache", "cached_tokens"),
    Lie("cached_negative", "took -1 tokens from its prefix cache", "cached_tokens"),
    Lie("is_buffered", "holds the stream and sends all chunks at its end", "throughput"),
    Lie("comes_in_one_chunk", "sends one chunk at the end", "times"),
    Lie("first_chunk_holds_most", "sends three quarters of the tokens with the first chunk", "buffered"),
    Lie("last_chunk_late", "sends the last chunk half a second late", "throughput"),
    Lie("loops", "alternates between two tokens", "looping"),
    Lie("says_one_token", "repeats one token", "looping"),
    Lie("ignores_the_prompt", "gives every prompt the same answer", "same_answer"),
    Lie("wrong_output", "answers otherwise than its controls", "wrong_output", fault="wrong_output"),
    Lie("draft_inert", "accepts no draft token", "draft_inert", fault="draft_inert"),
    Lie("hardly_accepts", "accepts 1 draft in 100 cycles", "draft_inert"),
    Lie("no_json", "sends chunks that are no JSON", "bad_answer"),
    Lie("no_object", "sends lists", "bad_answer"),
    Lie("null", "sends null", "bad_answer"),
    Lie("invalid_utf8", "sends invalid UTF-8", "bad_answer"),
    Lie("html", "sends an HTML page with status 200", "bad_answer"),
    Lie("nested", "sends 100,000 nested brackets", "bad_answer"),
    Lie("comes_empty", "sends nothing with status 200", "bad_answer"),
    Lie("count_as_text", "counts in text", "bad_answer"),
    Lie("count_of_2_to_70", "counts 2^70 tokens", "bad_answer"),
    Lie("count_missing", "counts nothing", "bad_answer"),
    Lie("info_is_html", "describes itself in HTML", "bad_answer"),
    Lie("info_is_a_list", "describes itself in a list", "bad_answer"),
    Lie(
        "draft_tokens", "describes itself with another tree size than asked for", "not_effective", fault="draft_tokens"
    ),
    Lie("simulates_acceptance", "simulates acceptance, by an inherited variable", "not_effective"),
    Lie("probe_counts_half", "its probe counts half of the tokens", "cycle_tokens"),
    Lie("probe_counts_double", "its probe counts twice the tokens", "cycle_tokens"),
    Lie("probe_drops_cycles", "its probe leaves out every second cycle", "probe_tokens"),
    Lie("cycles_too_short", "its cycles last a tenth of the time", "cycle_clock"),
    Lie("cycles_too_long", "its cycles last eight times the time", "throughput"),
    Lie("cycles_negative", "its cycles last less than nothing", "times"),
    Lie("phase_not_a_number", "its verify time is NaN", "phases"),
    Lie("phases_sum_to_less", "its phases sum to less than a cycle", "phases"),
    Lie("forward_longer_than_verify", "its forward lasts longer than the verify around it", "phases"),
    Lie("rank_misses_a_cycle", "rank 1 ran one cycle less", "rank_cycles"),
    Lie("rank_is_slower", "rank 1 takes three times as long for the same cycles", "rank_times"),
    Lie("clock_runs_backward", "cycles start in the wrong order", "cycle_clock"),
    Lie("cycles_of_yesterday", "cycles are a day old", "cycle_window"),
    Lie("batch_of_seven", "seven requests in a cycle, one in flight", "batch"),
    Lie("cycle_time_null", "its probe answers no time for a cycle", "no_handshake"),
    Lie("cycle_time_text", "its probe answers `1.2.3` for a time", "no_handshake"),
    Lie("tokens_of_2_to_70", "its probe counts 2^70 tokens", "no_handshake"),
    Lie("columns_of_two_lengths", "its probe answers columns of two lengths", "no_handshake"),
    Lie("probe_answers_a_list", "its probe answers a list", "no_handshake"),
    Lie("half_cycles", "its probe's answer is torn", "no_handshake", fault="half_cycles"),
    Lie("handshake_torn", "a rank's handshake is torn", "no_handshake"),
    Lie("handshake_without_states", "a rank's handshake lacks a field", "no_handshake"),
)

SPEC = SweepSpec(
    sweep="implausible",
    engine=EngineSpec(
        kind="sglang",
        launcher=(sys.executable, "-I", "-S", str(STUB)),
        model_path="stub",
        args={"tp-size": 2},
        deadlines_s=Deadlines(load=60, nccl_init=60, capture=60, draft_init=60, first_request=60, block=60, stop=60),
    ),
    search=SearchSpec(num_steps=(2,)),
    drafters={"any": "any"},
    workload=WorkloadSpec(prompt_tokens=8, output_tokens=24, blocks=5, requests_per_block=2, warmup_blocks=0),
    resources=ResourceSpec(gpus=2),
)


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one lie."""

    lie: Lie
    outcome: Outcome
    believed: int
    """Blocks that may be compared, in a trial that ended as completed or pruned."""

    @property
    def names(self) -> str:
        """Kind, and the rules for blocks that cannot be true."""
        kind = self.outcome.kind or self.outcome.status
        return f"{kind}: {self.outcome.reason or ''}" if kind == "implausible" else str(kind)

    @property
    def is_caught(self) -> bool:
        """By the rule or kind that was expected."""
        rules = self.names.replace(";", ":").replace(" ", ":").split(":")
        return self.outcome.status == "failed" and self.lie.caught_by in rules and not self.believed


def tell(lies: Sequence[Lie], folder: Path) -> list[Told]:
    """Measure the control, which tells the truth, then one trial for each lie. Returns what became of them."""
    control, candidate = Space(SPEC).control, Space(SPEC).configurations()[0]
    truth = _measure(folder, "k0000", control, "none")
    assert truth.status == "completed", truth
    told = []
    for number, lie in enumerate(lies):
        trial_id = f"t{number:04d}"
        outcome = _measure(folder, trial_id, candidate, lie.fault or f"lie:{lie.name}")
        blocks = read_part(ResultsFolder(folder / "results"), "blocks", trial_id=trial_id, attempt=1)
        sound = blocks["suspect"].null_count if outcome.status in ("completed", "pruned") else 0
        told.append(Told(lie, outcome, sound))
    return told


def _measure(folder: Path, trial_id: str, configuration: Configuration, fault: str) -> Outcome:
    engine = SGLangEngine(
        replace(SPEC, engine=replace(SPEC.engine, env={"STUB_FAULT": fault})),
        logs=folder / "logs",
        node_folder=folder / "node",
    )
    context = TrialContext(
        sweep_id="implausible",
        folder=ResultsFolder(folder / "results"),
        blocks=plan_blocks(SPEC.workload, folder=folder),
        num_gpus=2,
    )
    trial = PlannedTrial(
        trial_id=trial_id,
        role="control" if trial_id.startswith("k") else "candidate",
        number=None,
        configuration=configuration,
        requested={},
        launch_key=trial_id,
    )
    measurement = Measurement(HeldEngine(engine), trial, context)
    try:
        while not isinstance(outcome := measurement.advance(), Outcome):
            pass
    finally:
        engine.close()
    return outcome


def main() -> int:
    """Tell every lie. Exit code 1 if one is believed or goes by another name."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specsweep-implausible-") as folder:
        told = tell(LIES, Path(folder))
    for each in told:
        print(f"{'caught' if each.is_caught else 'MISSED'}  {each.lie.name}: {each.names}")
    caught = sum(each.is_caught for each in told)
    rows = {
        each.lie.name: {"the server": each.lie.says, "caught by": each.lie.caught_by, "kind": each.outcome.kind}
        for each in told
    }
    record(
        "implausible",
        {
            "lies": len(told),
            "caught": caught,
            "believed blocks": sum(each.believed for each in told),
            "wall_s": round(time.monotonic() - started_s),
            "each lie": rows,
        },
    )
    return 0 if caught == len(told) else 1


if __name__ == "__main__":
    sys.exit(main())
