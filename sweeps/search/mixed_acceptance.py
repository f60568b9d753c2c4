"""A mixed sweep (`acceptance: mixed`): which of its trials are pinned, and whether what they predict holds. Pure."""

from __future__ import annotations

from sweeps.measure.records import Acceptance, Finding, Role
from sweeps.search.observations import Observation, Observations
from sweeps.spec.model import Metric
from sweeps.spec.space import Configuration, Space


def acceptance_of(space: Space, observations: Observations, configuration: Configuration, *, role: Role) -> Acceptance:
    """How a trial started now would run.

    In a mixed sweep a candidate is only timed once another trial has told the accept length of its drafting. Where a
    live server measures it without a launch, it measures: that is cheaper and says more.
    """
    stated = space.spec.acceptance
    if stated != "mixed":
        return stated
    if role != "candidate" or not configuration.speculates or configuration.drafting not in observations.known_drafting:
        return "measured"
    return "measured" if observations.live_launch_key == space.launch_key(configuration) else "pinned"


def checked_prediction(observations: Observations, ended: Observation, metric: Metric) -> Finding | None:
    """What pinned trials predicted against the first trial that measured it; None for any other trial."""
    whole = [each for each in observations.of_configuration(ended.trial.configuration) if each.status == "completed"]
    pinned = [mean for each in whole if each.trial.acceptance == "pinned" and (mean := each.mean(metric)) is not None]
    first = next((each for each in whole if each.trial.acceptance == "measured"), None)
    measured = ended.mean(metric)
    if first is None or first.trial.trial_id != ended.trial.trial_id or not pinned or measured is None:
        return None
    predicted = sum(pinned) / len(pinned)
    share = measured / predicted - 1.0
    detail = (
        f"{ended.trial.configuration.label}: {metric} {predicted:.2f} predicted from pinned cycles and measured accept "
        f"length, {measured:.2f} measured as {ended.trial.trial_id} ({share:+.1%})"
    )
    numbers = {"predicted": predicted, "measured": measured, "share": share}
    return Finding(event="prediction_checked", detail=detail, numbers=numbers)
