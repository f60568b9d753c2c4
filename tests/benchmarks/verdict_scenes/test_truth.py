"""True numbers of a grid."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.verdict_scenes.scenes import SCENES
from benchmarks.verdict_scenes.truth import DEFAULT_SET, Configuration, Gain, Truth


def test_a_gain_is_one_of_throughput_and_acts_on_its_phase_alone() -> None:
    truth = Truth(gains=(Gain("set-1", 0.02), Gain("set-2", 0.5, phase="draft")))
    usual = Configuration(DEFAULT_SET, 3)
    faster, drafting = Configuration("set-1", 3), Configuration("set-2", 3)
    assert truth.value("tok_s", faster) / truth.value("tok_s", usual) == pytest.approx(1.02)
    assert truth.value("draft_ms", drafting) / truth.value("draft_ms", usual) == pytest.approx(0.5)
    assert truth.value("tok_s", drafting) / truth.value("tok_s", usual) == pytest.approx(1 + truth.gain(drafting))
    assert truth.value("draft_ms", faster) == truth.value("draft_ms", usual)
    assert truth.value("verify_ms", drafting) == pytest.approx(truth.value("verify_ms", usual))
    assert truth.gain(Configuration("set-2", 0)) == 0.0, "nothing is drafted without speculation"


def test_a_gain_at_one_topk_is_nothing_elsewhere() -> None:
    truth = Truth(topks=(1, 4), gains=(Gain("set-1", 0.06, topk=4),))
    assert truth.gain(Configuration("set-1", 2, 4)) == 0.06
    assert truth.gain(Configuration("set-1", 2, 1)) == truth.gain(Configuration("set-1", 0)) == 0.0


def test_speculation_changes_throughput_by_the_same_share_at_every_step_count() -> None:
    truth = Truth(speculation=-0.25, prompt_sd=0.5)
    plain, *chains = [member for member in truth.configurations() if member.nccl == DEFAULT_SET]
    assert [truth.difference("tok_s", chain, plain) for chain in chains] == pytest.approx([np.log(0.75)] * 4)


def test_the_accept_length_is_the_ratio_of_sums_over_many_prompts() -> None:
    truth, chain = Truth(prompt_sd=0.5), Configuration(DEFAULT_SET, 4)
    cycles = truth.cycles(chain, np.random.default_rng(0).standard_normal(200_000))
    assert truth.accept_length(chain) == pytest.approx(1000 / cycles.mean(), rel=2e-3)


def test_every_phase_of_every_scene_takes_time() -> None:
    for scene in SCENES:
        for member in scene.truth.configurations():
            phases = scene.truth.phases_ms(member)
            drafts = [phases["draft"], phases["extend"]] if member.speculates else []
            assert min(phases["verify"], *drafts, phases["cycle"]) > 0, (scene.name, member)
            assert phases["draft"] + phases["verify"] + phases["extend"] == pytest.approx(phases["cycle"])
