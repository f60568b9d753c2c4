"""The noise-free cycle of a configuration on a profiled machine: the simulated engine's mean, and a benchmark's truth.

Model: forward(m tokens) = other + experts touched x ms per expert + all-reduces x us(message bytes x m), where m tokens
touch E (1 - (1 - k/E)^m) of E experts (uniform routing); verify = forward + verify path + prepare; draft and extend are
the drafter's own small forwards; accept length = 1 + sum over positions of P(accepted that far).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

from sweeps.engines.base import EngineError
from sweeps.engines.simulated.machine_profile import AllReduceBackend, Drafter, Factor, MachineProfile
from sweeps.engines.simulated.nccl_choice import NcclChoice, all_reduce_us, choose, fits
from sweeps.spec.model import EngineSpec, Scalar
from sweeps.spec.names import DRAFTING
from sweeps.spec.space import Configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedCycle:
    """Milliseconds of one cycle at one batch size; None where the phase does not exist (no speculation)."""

    batch_size: int
    draft_ms: float | None
    verify_ms: float | None
    verify_forward_ms: float
    """The target forward inside verify, or the plain decode step."""
    extend_ms: float | None
    gap_ms: float
    accept_length: float | None
    survival: tuple[float, ...]
    """[i]: P(the first i + 1 drafted tokens are accepted); () without speculation."""
    communication_ms: float
    """All-reduces inside the target forward."""
    moe_ms: float
    draft_communication_ms: float
    extend_communication_ms: float
    all_reduce: str
    """Backend that serves them."""
    nccl: NcclChoice | None
    """None where NCCL does not serve them."""

    @property
    def cycle_ms(self) -> float:
        if self.verify_ms is None or self.draft_ms is None or self.extend_ms is None:
            return self.verify_forward_ms + self.gap_ms
        return self.draft_ms + self.verify_ms + self.extend_ms + self.gap_ms

    @property
    def tok_s(self) -> float:
        """Tokens per second over the batch."""
        return 1000.0 * self.batch_size * (self.accept_length or 1.0) / self.cycle_ms


def settings_of(configuration: Configuration, engine: EngineSpec | None = None) -> dict[str, str]:
    """Every setting as text (`env.NAME`, `args.NAME`, `num_steps`); what is searched wins over what the spec fixes."""
    fixed = {f"env.{name}": value for name, value in engine.env.items()} if engine else {}
    fixed |= {f"args.{name}": _text(value) for name, value in engine.args.items()} if engine else {}
    drafting = dict(zip(DRAFTING, configuration.drafting, strict=True))
    return {
        **fixed,
        **{f"env.{name}": value for name, value in (*configuration.nccl_env, *configuration.env)},
        **{f"args.{name}": _text(value) for name, value in configuration.args},
        **{name: _text(value) for name, value in drafting.items() if value is not None},
    }


def intervened(profile: MachineProfile, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that the engine acts on, after whoever else sets some."""
    effective = dict(settings)
    for intervention in profile.interventions:
        if not (intervention.only_if_unset and intervention.setting in effective):
            effective[intervention.setting] = intervention.value
    return effective


def expected(
    profile: MachineProfile,
    configuration: Configuration,
    *,
    batch_size: int = 1,
    settings: Mapping[str, str] | None = None,
) -> ExpectedCycle:
    """The mean cycle.

    Args:
        settings: of `settings_of`, where the spec fixes more than the configuration says.

    Raises:
        EngineError: NCCL has no algorithm for what is set, or the profile says nothing about a batch of this size.
        SpecError: the profile has no such drafter.
    """
    tokens = batch_size * (configuration.num_draft_tokens or 1)
    if tokens > profile.forward.max_tokens:
        raise EngineError(
            f"{configuration.label}, {batch_size} requests at a time: a forward of {tokens} tokens, but the profile "
            f"{profile.name} says nothing beyond {profile.forward.max_tokens} (forward.max_tokens)",
            stage="plan",
            kind="invalid_config",
        )
    effective = intervened(profile, settings_of(configuration) if settings is None else settings)
    backend = next(backend for backend in profile.all_reduce if fits(backend.when, effective))
    forward, scale = profile.forward, _scales(profile, effective)
    target_us, choice = _all_reduce_us(profile, backend, effective, tokens)
    communication_ms = forward.all_reduces * target_us / 1000.0
    moe_ms = forward.moe_ms_per_expert * distinct_experts(tokens, forward.experts, forward.experts_per_token)
    plain = ExpectedCycle(
        batch_size=batch_size,
        draft_ms=None,
        verify_ms=None,
        verify_forward_ms=(forward.other_ms + moe_ms + communication_ms) * scale["verify_ms"],
        extend_ms=None,
        gap_ms=forward.decode_gap_ms * scale["gap_ms"],
        accept_length=None,
        survival=(),
        communication_ms=communication_ms,
        moe_ms=moe_ms,
        draft_communication_ms=0.0,
        extend_communication_ms=0.0,
        all_reduce=backend.backend,
        nccl=choice,
    )
    if not configuration.speculates:
        return plain
    draft_us, _ = _all_reduce_us(profile, backend, effective, batch_size * (configuration.eagle_topk or 1))
    return _speculative(profile, configuration, plain, draft_us, target_us, scale)


def _speculative(
    profile: MachineProfile,
    configuration: Configuration,
    plain: ExpectedCycle,
    draft_us: float,
    target_us: float,
    scale: Mapping[Factor, float],
) -> ExpectedCycle:
    """`plain`, a target forward over the draft tokens, with the drafter's phases around it."""
    forward, drafting = profile.forward, profile.drafting
    tokens = plain.batch_size * (configuration.num_draft_tokens or 1)
    draft_communication_ms = configuration.num_steps * drafting.all_reduces_per_step * draft_us / 1000.0
    extend_communication_ms = drafting.all_reduces_per_step * target_us / 1000.0
    widening = 1.0 + drafting.topk_share * ((configuration.eagle_topk or 1) - 1)
    draft_ms = widening * (drafting.start_ms + configuration.num_steps * drafting.step_ms) + draft_communication_ms
    extend_ms = drafting.extend_ms + drafting.extend_token_ms * tokens + extend_communication_ms
    verify_forward_ms = plain.verify_forward_ms + forward.verify_path_ms * scale["verify_ms"]
    survival = scale_survival(acceptance(profile, configuration), scale["accept_length"])
    return replace(
        plain,
        draft_ms=draft_ms * scale["draft_ms"],
        verify_ms=verify_forward_ms + forward.verify_prepare_ms * scale["verify_ms"],
        verify_forward_ms=verify_forward_ms,
        extend_ms=extend_ms * scale["extend_ms"],
        gap_ms=forward.gap_ms * scale["gap_ms"],
        accept_length=1.0 + sum(survival),
        survival=survival,
        draft_communication_ms=draft_communication_ms,
        extend_communication_ms=extend_communication_ms,
    )


def distinct_experts(tokens: int, experts: int, experts_per_token: int) -> float:
    """Expected number of distinct experts that `tokens` tokens touch under uniform routing: E (1 - (1 - k/E)^m)."""
    return experts * (1.0 - (1.0 - experts_per_token / experts) ** tokens)


def acceptance(profile: MachineProfile, configuration: Configuration) -> tuple[float, ...]:
    """P(the first i + 1 drafted tokens are accepted), for each position that the tree can reach.

    A tree of n - 1 nodes with mean width w reaches depth min(steps, (n - 1) / w); the last level counts by the share of
    it that there is. Each level's conditional acceptance grows with its further candidates, with saturation.
    """
    drafter, drafting = profile.drafter(configuration.drafter), profile.drafting
    topk, nodes = configuration.eagle_topk or 1, (configuration.num_draft_tokens or 1) - 1
    further = drafting.tree_spread * (topk - 1)
    depth = min(float(configuration.num_steps), nodes / (1.0 + further))
    missed = (1.0 - drafting.tree_gain) ** further
    conditionals = conditional_acceptance(drafter, math.ceil(depth))
    levels = [
        (1.0 - (1.0 - conditional) * missed) * min(1.0, depth - position)
        for position, conditional in enumerate(conditionals)
    ]
    return tuple(accumulate(levels, mul))


def conditional_acceptance(drafter: Drafter, positions: int) -> tuple[float, ...]:
    """P(position i accepted | all before it were), from the published accept lengths by step count."""
    marginals = [1.0, *(longer - shorter for shorter, longer in pairwise((1.0, *drafter.accept_length)))]
    published = [later / earlier for earlier, later in pairwise(marginals)]
    return tuple((published + [drafter.tail] * positions)[:positions])


def pinned_at(mean: ExpectedCycle, length: float) -> ExpectedCycle:
    """`mean` with simulated acceptance: as many whole tokens of every cycle as `length` has, one more in the rest of
    them; no time changes."""
    survival = tuple(min(1.0, max(0.0, length - 1.0 - position)) for position in range(math.ceil(length) - 1))
    return replace(mean, accept_length=1.0 + sum(survival), survival=survival)


def scale_survival(survival: tuple[float, ...], scale: float) -> tuple[float, ...]:
    """`survival` with its accept length (1 + sum) times `scale`, as far as probabilities allow."""
    drafted = sum(survival)
    if scale == 1.0 or not drafted:
        return survival
    share = max(0.0, (scale * (1.0 + drafted) - 1.0) / drafted)
    return tuple(min(1.0, share * probability) for probability in survival)


def _all_reduce_us(
    profile: MachineProfile, backend: AllReduceBackend, settings: Mapping[str, str], tokens: int
) -> tuple[float, NcclChoice | None]:
    message_bytes = tokens * profile.forward.message_bytes_per_token
    if backend.latency_us is None or backend.bandwidth_gbs is None:
        choice = choose(profile.nccl, settings, message_bytes=message_bytes)
        return all_reduce_us(profile.nccl, choice, message_bytes=message_bytes), choice
    return backend.latency_us + message_bytes / (1000.0 * backend.bandwidth_gbs), None


def _scales(profile: MachineProfile, settings: Mapping[str, str]) -> dict[Factor, float]:
    scales: dict[Factor, float] = dict.fromkeys(("draft_ms", "verify_ms", "extend_ms", "gap_ms", "accept_length"), 1.0)
    for interaction in profile.interactions:
        if fits(interaction.when, settings):
            scales[interaction.factor] *= interaction.scale
    return scales


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
