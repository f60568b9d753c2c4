"""Which configuration to measure next for the sweep's GPU seconds, and how sure it is of its incumbent. No Optuna."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sweeps.search.cycle_model.beliefs import Beliefs
from sweeps.search.cycle_model.launch_cost import trial_seconds
from sweeps.search.cycle_model.terms import Floats
from sweeps.search.observations import Certainty
from sweeps.spec.space import Configuration

_ENOUGH = 0.95
"""P(incumbent within `stop_within`) that counts as certain if the spec states no `stop_probability`."""
_SETTLING = 0.5
"""Once P(the incumbent loses) is below this, only draws in which it does are scored.

Not flat: at half of it a sweep stops up to 2.5 times later, at 1.5 times within 9 % (docs/search.md, constants). How it
was chosen is not recorded."""
_FAR_OFF = 0.08
"""An untested top-k is left untested if it is predicted to be slower than the incumbent by more than this share. A
guess: half or 1.5 times of it changes no median by more than 9 % (docs/search.md, constants)."""
_FAILED_LAUNCHES = 2
"""Failures after which an NCCL set counts as launched. A guess: one may be due to the rest of the configuration."""
_NEAR_BEST = 0.98
"""Sets whose expected gain is at least this share of the largest count as equally good first launches."""
_LONG_SHOT = 0.999
"""Quantile of the gain that ranks candidates if no draw expects any of them to win."""


class Chooser:
    """Decides on the beliefs of one sweep. Stateless: the same beliefs lead to the same choice."""

    def __init__(self, beliefs: Beliefs) -> None:
        self._beliefs = beliefs
        self._space = beliefs.space
        members = self._space.configurations()
        self._launch_keys = np.array([self._space.launch_key(member) for member in members])
        self._with_same_settings: dict[object, list[Configuration]] = {}
        for member in members:
            if member.speculates:
                self._with_same_settings.setdefault(member.nccl_and_server_settings, []).append(member)

    def certainty(self, within: float) -> Certainty:
        """P(the incumbent is within this share of the best), or what has to be measured before it can be told."""
        beliefs = self._beliefs
        if beliefs.posterior() is None or beliefs.incumbent() is None:
            return Certainty(lacks="no candidate has been measured to its end")
        if (challenger := self._unlaunched_set()) is not None:
            return Certainty(lacks=f"the NCCL set {challenger.nccl_set} was never launched")
        if (challenger := self._untested_topk()) is not None:
            return Certainty(lacks=f"top-k {challenger.eagle_topk} was not tested with nccl {challenger.nccl_set}")
        return beliefs.certainty(within)

    def next_configuration(self) -> Configuration | None:
        """The longest chain first; then the most likely to settle the search, per GPU second of its cost.

        None: there is nothing to go by.
        """
        beliefs, study = self._beliefs, self._space.spec.study
        posterior = beliefs.posterior()
        candidates = self._open()
        if not candidates:
            return None
        if (chain := self._first_chain(candidates)) is not None:
            return chain
        if posterior is None:
            return None
        loses = beliefs.draws_where_incumbent_loses(study.stop_within)
        wanted = study.stop_probability or _ENOUGH
        if loses.mean() <= 1.0 - wanted:
            challenger = self._unlaunched_set() or self._untested_topk()
            if challenger is not None:
                return challenger
        return candidates[int(self._scores(candidates, loses).argmax())]

    def _scores(self, candidates: Sequence[Configuration], loses: NDArray[np.bool_]) -> Floats:
        """P(being within `stop_within` of the best), per GPU second, (candidates,)."""
        beliefs, rules, within = self._beliefs, self._beliefs.rules, self._space.spec.study.stop_within
        rows = np.array([beliefs.model.row(member) for member in candidates])
        values = beliefs.values[rows]
        best = values.max(axis=0)
        good = values >= best - within * np.abs(best)
        if rules.settling and loses.mean() < _SETTLING:
            good &= loses
        incumbent = beliefs.incumbent()
        own = beliefs.of(incumbent) if incumbent is not None else np.median(beliefs.values, axis=0)
        wins = good.mean(axis=1)
        cost_s = trial_seconds(beliefs.observations, self._launch_keys[rows], self._space.spec.workload.blocks)
        scores: Floats = wins / cost_s
        if not scores.any():  # nothing is expected to win: the least certain loser
            scores = np.quantile(values - own, _LONG_SHOT, axis=1)
        return scores

    def _open(self) -> list[Configuration]:
        """Members that may still be measured; of equivalent ones the representative, else the first.

        Equivalent members share their replicates, unless launches are noisy: then another launch tells more.
        """
        beliefs, model, members = self._beliefs, self._beliefs.model, self._space.configurations()
        units = np.arange(len(model.members)) if model.has_noisy_launches else model.representatives
        counts = np.zeros(len(model.members), dtype=np.int64)
        for configuration, count in beliefs.counts().items():
            counts[units[model.row(configuration)]] += count
        kept = counts[units] < self._space.spec.study.max_replicates
        kept[[model.row(member) for member in beliefs.failed()]] = False
        rows = np.flatnonzero(kept[: len(members)])
        _, firsts = np.unique(model.representatives[rows], return_index=True)
        chosen = rows[np.sort(firsts)]
        representatives = model.representatives[chosen]
        return [members[row] for row in np.where(np.isin(representatives, rows), representatives, chosen)]

    def _first_chain(self, candidates: Sequence[Configuration]) -> Configuration | None:
        """The largest step count at top-k 1 if no chain was tried.

        With the NCCL set that the all-reduce table expects most of, else with the control's settings if they are open.
        """
        beliefs, control = self._beliefs, self._space.control
        if not beliefs.rules.first_chain:
            return None
        if any((seen.trial.configuration.eagle_topk or 0) == 1 for seen in beliefs.observations):
            return None
        chains = [member for member in candidates if member.eagle_topk == 1]
        expected = beliefs.model.expected_ms(beliefs.observations)
        best_ms = 0.0
        if expected is not None:
            best_ms = min((expected[beliefs.model.row(each)] for each in chains), default=0.0)
        if expected is not None and best_ms < 0.0:
            chains = [member for member in chains if expected[beliefs.model.row(member)] <= _NEAR_BEST * best_ms]
            same = [member for member in chains if member.args == control.args]
        else:
            same = [member for member in chains if (member.nccl_env, member.args) == (control.nccl_env, control.args)]
        return max(same or chains, key=lambda member: member.num_steps, default=None)

    def _unlaunched_set(self) -> Configuration | None:
        """The most promising member of the NCCL sets that act and were never measured; None if there is none.

        Effects of sets share a scale, so a few sets that change nothing would make the model sure of all others. A set
        that failed _FAILED_LAUNCHES times in different configurations is given up.
        """
        beliefs, model = self._beliefs, self._beliefs.model
        if not beliefs.rules.unlaunched_sets:
            return None
        launched: dict[object, int] = {}
        for seen in beliefs.observations:
            if seen.kind != "interrupted":
                own = model.known_representative(seen.trial.configuration).nccl_env
                tells = _FAILED_LAUNCHES if seen.blocks else 1
                launched[own] = launched.get(own, 0) + tells
        unseen = [member for member in self._open() if launched.get(member.nccl_env, 0) < _FAILED_LAUNCHES]
        return max(unseen, key=beliefs.mean, default=None)

    def _untested_topk(self) -> Configuration | None:
        """The untested top-k value most likely to reveal an interaction with the incumbent's NCCL set and arguments.

        It is measured before the search may stop. None if all values were tested, or the others are far slower.
        """
        beliefs, incumbent = self._beliefs, self._beliefs.incumbent()
        if not beliefs.rules.untested_topk or beliefs.posterior() is None:
            return None
        if incumbent is None or not incumbent.speculates:
            return None
        incumbent = beliefs.model.representative(incumbent)
        ended = (seen.trial.configuration for seen in beliefs.observations if seen.status != "running")
        tried = {_topk_cell(beliefs.model.representative(each)) for each in ended}
        counts, failed, limit = beliefs.counts(), beliefs.failed(), self._space.spec.study.max_replicates
        untested = [
            member
            for member in self._with_same_settings.get(incumbent.nccl_and_server_settings, [])
            if member.eagle_topk != incumbent.eagle_topk
            and counts.get(member, 0) < limit
            and member not in failed
            and _topk_cell(member) not in tried
        ]
        best = max(untested, key=beliefs.mean, default=None)
        own = beliefs.mean(incumbent)
        if best is None or own - beliefs.mean(best) > _FAR_OFF * abs(own):
            return None
        return best


def _topk_cell(configuration: Configuration) -> tuple[object, ...]:
    return (configuration.eagle_topk, *configuration.nccl_and_server_settings)
