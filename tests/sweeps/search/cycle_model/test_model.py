from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.measure.records import Outcome
from sweeps.search.cycle_model.acceptance_curve import ChainModel
from sweeps.search.cycle_model.model import CycleModel
from sweeps.search.cycle_model.random_effects import FactorModel, Measurements
from sweeps.search.cycle_model.terms import Term, design
from sweeps.search.observations import Observations
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import plan
from tests.sweeps.worlds import NCCL_MS, SPEC, blocks_of, observed, row, survival, truth


def test_factors_add_up_to_configurations_never_measured() -> None:
    space = Space(parse_spec(SPEC, source="model"))
    wanted = [(0, "default"), (7, "default"), (3, "default"), (1, "default"), (3, "a"), (3, "b"), (3, "c"), (3, "d")]
    posterior = CycleModel(space).posterior(observed(space, wanted))
    assert posterior is not None
    for member, draws in zip(posterior.members, posterior.tok_s, strict=True):
        if member.speculates:
            assert draws.mean() == pytest.approx(truth(member), rel=0.03), member.label


def test_an_nccl_set_not_yet_tried_stays_uncertain_where_others_differ_and_not_where_they_do_not() -> None:
    space = Space(parse_spec(SPEC, source="model"))
    wanted = [(0, "default"), (3, "default"), (3, "a"), (3, "b"), (3, "c")]
    spread = {}
    for name, nccl_ms in (("wide", NCCL_MS), ("null", dict.fromkeys(NCCL_MS, 0.0))):
        posterior = CycleModel(space).posterior(observed(space, wanted, nccl_ms=nccl_ms))
        assert posterior is not None
        spread[name] = np.log(posterior.verify_ms[row(space, 3, "d")]).std()
    assert spread["wide"] > 0.03
    assert spread["null"] < 0.5 * spread["wide"]


def test_an_accept_length_that_depends_on_nccl_is_found_and_said() -> None:
    space = Space(parse_spec(SPEC, source="model"))
    wanted = [(0, "default"), (7, "default"), (7, "a"), (5, "a")]
    model = CycleModel(space)
    posterior = model.posterior(observed(space, wanted, scale=lambda c: 0.9 if c.nccl_set == "a" else 1.0))
    assert posterior is not None
    (finding,) = model.findings
    assert finding.event == "assumption_dropped"
    assert "accept_length differs between values of nccl" in finding.detail
    assert finding.numbers["p"] < 1e-4
    again = model.posterior(observed(space, wanted, scale=lambda c: 0.9 if c.nccl_set == "a" else 1.0))
    assert again is not None
    expected = 1.0 + sum(survival(7, 0.9))
    assert again.accept_length[row(space, 7, "a")].mean() == pytest.approx(expected, rel=0.04)


def test_no_finding_where_every_assumption_holds() -> None:
    space = Space(parse_spec(SPEC, source="model"))
    model = CycleModel(space)
    model.posterior(observed(space, [(0, "default"), (7, "default"), (3, "a"), (5, "b"), (2, "c"), (7, "d")]))
    assert model.findings == []


def test_nothing_measured_is_no_posterior() -> None:
    space = Space(parse_spec(SPEC, source="model"))
    assert CycleModel(space).posterior(Observations()) is None


SPACE = Space(parse_spec(SPEC, source="model"))
TEMPLATE = blocks_of(SPACE.configurations()[row(SPACE, 3, "default")], np.random.default_rng(0), count=1)[0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=4, max_size=4).filter(lambda counts: sum(counts) > 0))
def test_accept_length_grows_with_steps_and_stays_below_steps_plus_one(counts: list[int]) -> None:
    chain = ChainModel(positions=5, blocks=2)
    cycles = sum(counts)
    length = 1 + sum(i * count for i, count in enumerate(counts)) / cycles
    block = replace(TEMPLATE, num_cycles=cycles, accept_length=length, accept_histogram=(0, *counts))
    chain.fit([(3, [block])])
    lengths = chain.draw(np.random.default_rng(1).standard_normal((7, 50)))
    assert (np.diff(lengths, axis=0) > 0).all()
    assert (lengths < np.arange(2, 7)[:, None]).all()
    assert (lengths > 1).all()


def test_draws_of_an_accept_length_are_tokens_over_cycles() -> None:
    """Blocks that accept nothing and all: each has as many tokens, not as many cycles."""
    chain = ChainModel(positions=2, blocks=2)
    hard = replace(TEMPLATE, block_index=0, num_cycles=90_000, accept_length=1.0, accept_histogram=(0, 90_000))
    easy = replace(TEMPLATE, block_index=1, num_cycles=30_000, accept_length=3.0, accept_histogram=(0, 0, 0, 30_000))
    chain.fit([(2, [hard, easy])])
    of_steps = chain.draw(np.zeros((4, 1)))[:, 0]
    assert of_steps == pytest.approx([chain.expected(1, (0, 1)), chain.expected(2, (0, 1))])
    assert of_steps[1] == pytest.approx(1.5, rel=0.03), "two blocks of 3 tokens: 6 over 3 + 1 cycles"


def test_draws_of_a_factor_cover_what_they_do_not_know() -> None:
    """Nominal 90 % intervals hold the truth in about that share of random effects never measured."""
    space = Space(parse_spec(SPEC, source="model"))
    members = space.configurations()
    own = design([Term(), Term(levels=("nccl",), scales=(0.01, 0.05, 0.2))], members)
    rng, inside, tries = np.random.default_rng(3), 0, 60
    for _ in range(tries):
        effects = {name: 0.05 * rng.standard_normal() for name in NCCL_MS}
        values = np.array([10.0 * (1.0 + effects[c.nccl_set]) for c in members])
        rows = np.array([row(space, 3, name) for name in ("default", "a", "b", "c")])
        noisy = values[rows] * (1.0 + 0.001 * rng.standard_normal(4))
        model = FactorModel(own)
        model.fit(
            Measurements(
                rows=rows,
                values=noisy,
                errors=np.full(4, 0.001),
                launches=np.arange(4),
                hours=np.zeros(4),
                noisy=np.zeros(4, dtype=np.bool_),
            ),
            rng,
            sweeps=6,
        )
        draws = model.draw(256, rng)[row(space, 3, "d")]
        low, high = np.quantile(draws, (0.05, 0.95))
        inside += bool(low <= values[row(space, 3, "d")] <= high)
    assert inside / tries > 0.8


def test_where_another_kernel_all_reduces_one_set_tells_of_all() -> None:
    space = Space(parse_spec(SPEC, source="model"))
    wanted = [(0, "default"), (7, "default"), (3, "default"), (1, "default")]
    spreads = {}
    for all_reduce in ("nccl", "custom"):
        model = CycleModel(space)
        posterior = model.posterior(observed(space, wanted, all_reduce=all_reduce))
        assert posterior is not None
        own, other = (posterior.tok_s[row(space, 3, name)] for name in ("default", "d"))
        spreads[all_reduce] = float(np.std(other / own))
        assert (model.representative(space.configurations()[row(space, 3, "d")]).nccl_set == "default") == (
            all_reduce == "custom"
        )
    assert spreads["custom"] == 0.0
    assert spreads["nccl"] > 0.01


def restless(space: Space, *, block: float, launch: float, seed: int) -> Observations:
    """Four launches of 3 steps with NCCL sets that do nothing, after a quiet control."""
    rng, quiet = np.random.default_rng(seed), observed(space, [(0, "default")])
    for number, nccl in enumerate(("default", "a", "b", "c"), start=1):
        configuration = space.configurations()[row(space, 3, nccl)]
        trial = plan(configuration, space, f"t{number:04d}")
        quiet.start(trial)
        luck = np.exp(launch * rng.standard_normal())
        for each in blocks_of(configuration, rng, nccl_ms=dict.fromkeys(NCCL_MS, 0.0)):
            slow = luck * np.exp(block * rng.standard_normal())
            times = ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
            changed = {name: slow * getattr(each, name) for name in times}
            quiet.add_block(
                trial.trial_id, replace(each, decode_s=each.decode_s * slow, **changed), seconds={"launch": 400.0}
            )
        quiet.finish(trial.trial_id, Outcome(status="completed", relaunched=True, seconds={"launch": 400.0}))
    return quiet


def test_launches_may_differ_as_much_as_blocks_within_one_do() -> None:
    """The control's quiet launches and blocks say nothing of servers that draft, and wait for their host."""
    space = Space(parse_spec(SPEC, source="model"))
    learnt = {}
    for name, (block, launch) in {"restless": (0.08, 0.1), "quiet": (0.001, 0.001)}.items():
        spreads = []
        for seed in range(6):
            model = CycleModel(space, seed=seed)
            model.posterior(restless(space, block=block, launch=launch, seed=seed))
            spreads.append(model.launch_spread(drafts=True))
            assert model.launch_spread(drafts=False) < 0.011
        learnt[name] = float(np.median(spreads))
    assert 0.02 < learnt["restless"] < 0.15
    assert learnt["quiet"] < 0.01
