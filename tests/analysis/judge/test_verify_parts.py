"""Verify against a plain decode step, by kind of kernel, on recorded traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.data.load import Results, load
from analysis.judge.verdict import SweepVerdict, verdict
from analysis.judge.verify_parts import verify_parts

RECORDINGS = Path(__file__).parents[3] / "recordings"
FULL_SHARE = RECORDINGS / "kimi_k25_one_of_eight_h200_v1"


@pytest.fixture(scope="module")
def share() -> Results:
    return load(FULL_SHARE)


@pytest.fixture(scope="module")
def judged(share: Results) -> SweepVerdict:
    return verdict(share)


def test_another_attention_kernel_makes_verify_dear_at_full_size(judged: SweepVerdict) -> None:
    found = judged.verify_parts

    assert found is not None
    assert found.parts[0].kind == "attention"
    assert found.parts[0].kernel == "_fwd_kernel"
    assert found.parts[0].decode_kernel.startswith("_fwd_kernel_stage")
    assert found.parts[0].extra_ms > 0.7 * found.extra_ms


def test_the_parts_add_up_to_the_measured_times(judged: SweepVerdict) -> None:
    found = judged.verify_parts

    assert found is not None
    assert sum(part.verify_ms for part in found.parts) == pytest.approx(found.verify_ms)
    assert sum(part.decode_ms for part in found.parts) == pytest.approx(found.decode_ms)
    assert found.extra_ms == pytest.approx(sum(part.extra_ms for part in found.parts))


def test_a_part_is_worth_what_the_cycle_would_lose(judged: SweepVerdict) -> None:
    found = judged.verify_parts

    assert found is not None
    for part in found.parts:
        if part.extra_ms > 0:
            assert part.tok_s == pytest.approx(found.tok_s * found.cycle_ms / (found.cycle_ms - part.extra_ms))
        else:
            assert part.tok_s is None
            assert part.break_even_accept_length is None


def test_without_a_trace_of_both_nothing_is_said(share: Results, judged: SweepVerdict) -> None:
    plain = next(each for each in judged.phases if not each.speculates)
    chains = [each for each in judged.phases if each.speculates]
    controls = share.trials.filter(share.trials["role"] == "control")["trial_id"]
    untraced = replace(share, kernels=share.kernels.filter(~share.kernels["trial_id"].is_in(controls.implode())))

    assert verify_parts(untraced, plain, chains) is None
    assert verify_parts(share, None, chains) is None
    assert verify_parts(share, plain, []) is None


def test_all_reduces_are_compared_as_served_alike() -> None:
    found = verdict(load(RECORDINGS / "h200_x2_nccl_v1")).verify_parts

    assert found is not None
    assert "nccl default" in found.label
    assert {"attention", "communication", "moe", "gemm"} <= {part.kind for part in found.parts}
