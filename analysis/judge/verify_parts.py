"""What makes verify dear: a verify against a plain decode step of the same model, by kind of kernel.

Both are traced. A profiler stretches kernels, and kernels of a graph may overlap, so the kernels of a phase do not add
up to its measured time: each kind gets its share of the kernel time, times the measured time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.data.load import Results
from analysis.judge.phases import Phases

_VERIFY = "verify"
"""The phase of a trace that holds the target's forward, in a plain server too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPart:
    """One kind of kernel (`attention`, `moe`, `gemm`, `communication`, `sampling`, `other`)."""

    kind: str
    decode_ms: float
    """Of a decode step."""
    verify_ms: float
    kernel: str
    """The longest one in verify."""
    decode_kernel: str
    """The longest one in a decode step; empty if the kind is not there."""
    tok_s: float | None
    """Throughput at today's accept length if the part took no longer in verify than in a decode step. None for a part
    that is no longer."""
    break_even_accept_length: float | None
    """The accept length needed then; None likewise."""

    @property
    def extra_ms(self) -> float:
        """What verify takes longer than decode."""
        return self.verify_ms - self.decode_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyParts:
    """One speculative configuration against no speculation."""

    label: str
    decode_ms: float
    verify_ms: float
    cycle_ms: float
    tok_s: float
    parts: tuple[VerifyPart, ...]
    """The largest difference first."""

    @property
    def extra_ms(self) -> float:
        """Verify minus decode: the sum over the parts."""
        return self.verify_ms - self.decode_ms


def verify_parts(results: Results, plain: Phases | None, chains: Iterable[Phases]) -> VerifyParts | None:
    """Of the first of `chains` that was timed and traced, those first whose all-reduces are served as `plain`'s are.

    None if no chain or no decode step was traced.
    """
    if plain is None or plain.decode_ms is None or plain.tok_s is None:
        return None
    decode = _kernels(results, plain.configuration_id)
    served = _communicates(results, plain)
    for each in sorted(chains, key=lambda chain: _communicates(results, chain) != served) if decode else ():
        verify = _kernels(results, each.configuration_id)
        if verify and each.verify_ms is not None and each.cycle_ms is not None and each.tok_s is not None:
            return VerifyParts(
                label=each.label,
                decode_ms=plain.decode_ms,
                verify_ms=each.verify_ms,
                cycle_ms=each.cycle_ms,
                tok_s=each.tok_s,
                parts=_parts(
                    _shares(decode, plain.decode_ms), _shares(verify, each.verify_ms), each.cycle_ms, each.tok_s, plain
                ),
            )
    return None


def _communicates(results: Results, shown: Phases) -> set[tuple[str | None, str | None]]:
    """What serves the all-reduces of a configuration's trials, and under which NCCL set."""
    own = results.trials.filter(pl.col("configuration_id") == shown.configuration_id)
    return set(own.select("all_reduce", "nccl_set").iter_rows())


@dataclass(frozen=True, slots=True)
class _Share:
    ms: float
    kernel: str


_Kernels = Sequence[tuple[str, str, float]]
"""(kind, kernel, microseconds), the longest first."""


def _kernels(results: Results, configuration_id: str) -> _Kernels:
    """Of the target's forward, over the traces of one configuration."""
    own = results.trials.filter(pl.col("configuration_id") == configuration_id)["trial_id"]
    forward = results.kernels.filter(pl.col("trial_id").is_in(own.implode()) & (pl.col("phase") == _VERIFY))
    summed = forward.group_by("kind", "kernel").agg(us=pl.col("us_per_cycle").sum())
    return summed.sort(["us", "kernel"], descending=[True, False]).rows()


def _shares(kernels: _Kernels, measured_ms: float) -> dict[str, _Share]:
    """Milliseconds by kind, which add up to `measured_ms`, with the longest kernel of each."""
    whole_us = sum(us for *_, us in kernels)
    found: dict[str, _Share] = {}
    for kind, kernel, us in kernels:
        known = found.get(kind, _Share(0.0, kernel))
        found[kind] = _Share(known.ms + measured_ms * us / whole_us, known.kernel)
    return found


def _parts(
    decode: Mapping[str, _Share], verify: Mapping[str, _Share], cycle_ms: float, tok_s: float, plain: Phases
) -> tuple[VerifyPart, ...]:
    assert plain.tok_s is not None, "a decode step without a throughput"
    found = []
    for kind in {**verify, **decode}:
        before, after = decode.get(kind, _Share(0.0, "")), verify.get(kind, _Share(0.0, ""))
        left_ms = cycle_ms - (after.ms - before.ms)
        is_longer = after.ms > before.ms
        found.append(
            VerifyPart(
                kind=kind,
                decode_ms=before.ms,
                verify_ms=after.ms,
                kernel=after.kernel,
                decode_kernel=before.kernel,
                tok_s=tok_s * cycle_ms / left_ms if is_longer else None,
                break_even_accept_length=plain.tok_s * left_ms / 1000 if is_longer else None,
            )
        )
    return tuple(sorted(found, key=lambda part: (-part.extra_ms, part.kind)))
