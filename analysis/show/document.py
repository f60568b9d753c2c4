"""A verdict as JSON: what `python -m analysis verdict RESULTS --json` gives to programs. Missing is null, never 0."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.judge.claims import CONFIDENCE, Effect
from analysis.judge.factors import Factor
from analysis.judge.pays import Pays
from analysis.judge.phases import Phases
from analysis.judge.sides import Side
from analysis.judge.verdict import AtConcurrency, SweepVerdict
from analysis.judge.verify_parts import VerifyParts


def document(verdict: SweepVerdict) -> dict[str, Any]:
    """Plain values only; intervals are [low, high]."""
    return {
        "sweep_id": verdict.sweep_id,
        "engine": verdict.engine,
        "machine": verdict.machine,
        "about": {fact.name: fact.value for fact in verdict.about},
        "acceptance": "pinned" if verdict.pinned else "measured",
        "confidence": CONFIDENCE,
        "control": _side(verdict.control),
        "best": _side(verdict.best),
        "best_reason": verdict.best_reason,
        "speculation_pays": _pays(verdict.speculation_pays),
        "concurrency": verdict.concurrency,
        "by_concurrency": [_at(each) for each in verdict.by_concurrency],
        "configurations": [_side(side) for side in verdict.sides],
        "phases": [_phases(each) for each in verdict.phases],
        "factors": [_factor(factor) for factor in verdict.factors],
        "break_even": None if verdict.break_even is None else asdict(verdict.break_even),
        "communication": None
        if verdict.communication is None
        else {**asdict(verdict.communication), "most_tok_s": verdict.communication.most_tok_s},
        "verify_parts": None if verdict.verify_parts is None else _verify_parts(verdict.verify_parts),
        "winner_alone": None if verdict.confirmation is None else asdict(verdict.confirmation),
        "drift": verdict.drift,
        "drift_inside_servers": None
        if verdict.server_drift is None
        else {
            "per_hour": verdict.server_drift.per_hour,
            "interval": list(verdict.server_drift.interval),
            "num_anchors": verdict.server_drift.num_anchors,
            "num_servers": verdict.server_drift.num_servers,
            "spread": verdict.server_drift.spread,
        },
        "control_runs": [asdict(each) for each in verdict.control_runs],
        "excluded": [asdict(each) for each in verdict.excluded],
        "warnings": list(verdict.warnings),
        "gpu_seconds": dict(verdict.cost.gpu_seconds),
        "cost": {
            "total_gpu_seconds": verdict.cost.total,
            "exhaustive_grid_gpu_seconds": verdict.cost.exhaustive_grid,
            "num_configurations": verdict.cost.num_configurations,
            "num_configurations_counts": verdict.cost.counts,
            "trials_by_status": dict(verdict.cost.by_status),
        },
    }


def _pays(pays: Pays) -> dict[str, Any]:
    return {
        "verdict": pays.verdict,
        "sentence": pays.sentence,
        **_effect(pays.effect),
        "reason": pays.reason,
        "selection": pays.selection or None,
        "best_speculative": _side(pays.speculative),
        "best_without_speculation": _side(pays.plain),
    }


def _at(each: AtConcurrency) -> dict[str, Any]:
    return {
        "concurrency": each.concurrency,
        "best": _side(each.best),
        "best_reason": each.best_reason,
        "speculation_pays": _pays(each.speculation_pays),
    }


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    plain = {name: value for name, value in asdict(side).items() if name not in ("interval", "against_control")}
    return {
        "configuration": plain.pop("label"),
        **plain,
        "interval": None if side.interval is None else list(side.interval),
        "against_control": None if side.against_control is None else _effect(side.against_control),
    }


def _effect(effect: Effect | None) -> dict[str, Any]:
    if effect is None:
        return {"effect": None, "interval": None}
    return {
        "effect": effect.effect,
        "interval": list(effect.interval),
        "interval_covers": effect.covers,
        "verdict": effect.verdict,
        "reason": effect.reason,
        "assumption": effect.assumption,
        "margin": effect.margin,
        "num_launches": list(effect.num_launches),
        "num_blocks": effect.num_blocks,
    }


def _factor(factor: Factor) -> dict[str, Any]:
    reason = factor.reason if factor.effect is None else factor.effect.reason
    return {
        "dimension": factor.dimension,
        "value": factor.value,
        "reference": factor.reference,
        "metric": factor.metric,
        **_effect(factor.effect),
        "verdict": "undecided" if factor.effect is None else factor.effect.verdict,
        "reason": reason,
        "note": factor.note,
        "num_pairs": factor.num_pairs,
    }


def _verify_parts(found: VerifyParts) -> dict[str, Any]:
    parts = [{**asdict(part), "extra_ms": part.extra_ms} for part in found.parts]
    return {**asdict(found), "extra_ms": found.extra_ms, "parts": parts}


def _phases(phases: Phases) -> dict[str, Any]:
    plain = asdict(phases)
    return {"configuration": plain.pop("label"), **plain}
