"""What imported files say, in lines for a person and as a document: rates, cycles, break-even, accuracy needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from analysis.importing.folder import configuration_label
from analysis.importing.records import CONVENTION, ForeignRun, Reading, VerifyCycle
from analysis.judge.break_even import DEFAULT_NUM_STEPS, Accuracy, BreakEven, accuracy_for, break_even

NO_CLAIM = "numbers of others, without repeated launches of both sides: a computation, no claim and no certificate"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyTime:
    """Verify lines of one log, summed up."""

    num_cycles: int
    mean_ms: float
    spread_ms: float
    """Largest less smallest, and the rounding of one last digit."""
    share: float | None
    cycle_ms: float | None
    """Mean verify divided by its mean share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One run, at the concurrency that most of its readings have."""

    origin: str
    label: str
    speculates: bool | None
    num_steps: int | None
    concurrency: int | None
    tok_s: float | None
    num_readings: int
    accept_length: float | None
    cycle_ms: float | None
    verify: VerifyTime | None
    baseline_tok_s: float | None
    """Of all requests together, at this concurrency."""
    break_even: BreakEven | None

    @property
    def against_baseline(self) -> float | None:
        """Relative difference of throughput; None if either is not known."""
        return None if self.tok_s is None or self.baseline_tok_s is None else self.tok_s / self.baseline_tok_s - 1.0


def verify_time(cycles: Sequence[VerifyCycle]) -> VerifyTime | None:
    """Sum up verify lines; None without any."""
    if not cycles:
        return None
    values = [each.verify_ms for each in cycles]
    shares = [each.share for each in cycles if each.share is not None]
    share = fmean(shares) if len(shares) == len(cycles) else None
    return VerifyTime(
        num_cycles=len(values),
        mean_ms=fmean(values),
        spread_ms=max(values) - min(values) + max(each.unit_ms for each in cycles),
        share=share,
        cycle_ms=None if share is None else fmean(values) / share,
    )


def summaries(
    readings: Sequence[Reading],
    *,
    baseline_tok_s: float | None = None,
    target_tok_s: float | None = None,
    tok_s: float | None = None,
) -> list[Summary]:
    """Every run with what it needs to break even.

    Args:
        baseline_tok_s: without speculation; the runs without speculation tell it if it is None.
        target_tok_s: throughput to reach.
        tok_s: of runs whose file tells none, at one request at a time.
    """
    runs = [run for reading in readings for run in reading.runs]
    bases: dict[int, list[float]] = {}
    for run in runs:
        if run.drafting.steps == 0 and (base := _usual(run)) is not None:
            bases.setdefault(base[0], []).append(base[1])
    known = {concurrency: median(rates) for concurrency, rates in bases.items()}
    return [_summary(run, known, baseline_tok_s, target_tok_s, tok_s) for run in runs]


def _summary(
    run: ForeignRun, bases: dict[int, float], baseline: float | None, target: float | None, given_tok_s: float | None
) -> Summary:
    usual = _usual(run)
    verify = verify_time(run.verify)
    concurrency = usual[0] if usual is not None else (1 if verify is not None else None)
    rate = usual[1] if usual is not None else (given_tok_s if verify is not None else None)
    timed = [each.cycle_ms for each in run.blocks if each.concurrency == concurrency and each.cycle_ms is not None]
    cycle_ms = verify.cycle_ms if verify is not None and verify.cycle_ms else (median(timed) if timed else None)
    accepted = run.accept_length
    if accepted is None and rate is not None and cycle_ms is not None and usual is None:
        accepted = rate * cycle_ms / 1000
    own = baseline if baseline is not None else bases.get(concurrency or 0)
    needed = None
    if run.drafting.speculates is not False and own is not None and cycle_ms is not None and concurrency:
        needed = break_even(
            cycle_ms=cycle_ms,
            baseline_tok_s=own / concurrency,
            num_steps=run.drafting.num_steps or DEFAULT_NUM_STEPS,
            target_tok_s=None if target is None else target / concurrency,
        )
    return Summary(
        origin=run.origin,
        label=configuration_label(run),
        speculates=run.drafting.speculates,
        num_steps=run.drafting.steps,
        concurrency=concurrency,
        tok_s=rate,
        num_readings=sum(each.concurrency == concurrency for each in run.blocks),
        accept_length=accepted,
        cycle_ms=cycle_ms,
        verify=verify,
        baseline_tok_s=None if run.drafting.steps == 0 else own,
        break_even=needed,
    )


def _usual(run: ForeignRun) -> tuple[int, float] | None:
    """The concurrency of most readings, and their median tok/s."""
    if not run.blocks:
        return None
    concurrency = run.blocks[0].concurrency
    return concurrency, median(each.tok_s for each in run.blocks if each.concurrency == concurrency)


def import_lines(readings: Sequence[Reading], found: Sequence[Summary]) -> Iterator[str]:
    """For a person: each file, each run, then what speculation needs."""
    for reading in readings:
        lost = f", {reading.unparsed} lines not understood" if reading.unparsed else ""
        yield f"{reading.source}: {reading.format}, {reading.understood} lines{lost}"
        yield from (f"  {note}" for note in reading.notes)
        if reading.all_reduces:
            sizes = [each.num_bytes for each in reading.all_reduces]
            yield f"  all-reduces of {min(sizes)} to {max(sizes)} bytes, imported for the search's prior"
    for each in found:
        yield from _run_lines(each)
    yield f"({CONVENTION}; {NO_CLAIM})"


def _run_lines(each: Summary) -> Iterator[str]:
    if each.tok_s is None and each.accept_length is None and each.verify is None:
        return
    yield f"{each.origin}: {each.label}"
    if each.tok_s is not None:
        crowd = "" if each.concurrency in (None, 1) else f", {each.concurrency} requests at a time"
        source = f"median of {each.num_readings} readings" if each.num_readings > 1 else "one reading"
        yield f"  throughput: {each.tok_s:.1f} tok/s ({source}{crowd})"
    if each.speculates is not False:
        yield "  accept length: " + ("not known" if each.accept_length is None else f"{each.accept_length:.2f}")
    if (verify := each.verify) is not None:
        share = "" if verify.share is None else f", {verify.share:.1%} of the cycle"
        yield (
            f"  verify: mean {verify.mean_ms:.3f} ms, spread {verify.spread_ms:.2f} ms over {verify.num_cycles} "
            f"cycles{share}"
        )
    if each.cycle_ms is not None:
        yield f"  cycle: {each.cycle_ms:.2f} ms"
    yield from _need_lines(each)


def _need_lines(each: Summary) -> Iterator[str]:
    needed = each.break_even
    if needed is None:
        if each.speculates is not False and each.cycle_ms is not None:
            per_ten = 10 * each.cycle_ms / 1000 / (each.concurrency or 1)
            pays = (
                ""
                if each.tok_s is None
                else f"it pays if the server without it is slower than {each.tok_s:.1f} tok/s; "
            )
            yield (
                f"  break-even: {pays}each 10 tok/s without speculation ask for {per_ten:.2f} tokens per cycle "
                "(give --baseline-tok-s, or the log of a server without speculation)"
            )
        return
    yield f"  break-even accept length: {needed.accept_length:.2f} against {each.baseline_tok_s:.1f} tok/s"
    yield f"  accuracy needed to break even: {_accuracy(needed.accuracy)}"
    if needed.target_accuracy is not None:
        yield (
            f"  accept length for the target: {needed.target_accept_length:.2f}; accuracy needed: "
            f"{_accuracy(needed.target_accuracy)}"
        )
    if (against := each.against_baseline) is not None:
        words = "does not pay" if against < 0 else "pays"
        yield (
            f"  by these numbers speculation {words}: {abs(against):.1%} {'slower' if against < 0 else 'faster'} "
            f"than {each.baseline_tok_s:.1f} tok/s without it"
        )


def _accuracy(needed: Accuracy) -> str:
    """With the draft steps that the run has; if they cannot reach it, with many steps at the same cycle time too."""
    if needed.conditional_accuracy is not None:
        return f"{needed.conditional_accuracy:.0%} with {needed.num_steps} draft steps"
    deep = accuracy_for(needed.accept_length, num_steps=DEFAULT_NUM_STEPS)
    if deep.conditional_accuracy is None:
        return f"none ({needed.reason})"
    return f"none ({needed.reason}); {deep.conditional_accuracy:.0%} with {deep.num_steps} at this cycle time"


def import_document(readings: Sequence[Reading], found: Sequence[Summary]) -> dict[str, Any]:
    """For programs. Missing is null."""
    return {
        "imported": True,
        "convention": CONVENTION,
        "claim": None,
        "note": NO_CLAIM,
        "files": [
            {
                "file": each.source,
                "format": each.format,
                "understood": each.understood,
                "unparsed": each.unparsed,
                "notes": list(each.notes),
                "all_reduces": [asdict(time) for time in each.all_reduces],
            }
            for each in readings
        ],
        "runs": [{**asdict(each), "against_baseline": each.against_baseline} for each in found],
    }
