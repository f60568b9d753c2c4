"""What the evidence of a launch says of the configuration: whether its settings arrived, and whether NCCL read them."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.engines.base import EngineError, Evidence, LaunchReport
from sweeps.results.nccl_acts import is_unread, variables_read
from sweeps.spec.space import Configuration


def refuse_not_effective(evidence: Sequence[Evidence]) -> None:
    """Raise EngineError (`not_effective`) if a requested setting did not arrive or was overridden.

    Measuring it would report "no effect" of something that was never there.
    """
    lost = [seen for seen in evidence if seen.requested is not None and _is_lost(seen)]
    if lost:
        first = lost[0]
        raise EngineError(
            f"{first.setting}: wanted {first.requested} in rank {first.rank}, seen {first.seen}, "
            f"effective {first.effective} ({first.grade}{f', {first.detail}' if first.detail else ''}); "
            f"in ranks {sorted({each.rank for each in lost if each.setting == first.setting})}, "
            f"settings {', '.join(sorted({each.setting for each in lost}))}",
            stage="first_request",
            kind="not_effective",
        )


def reads_none_of(configuration: Configuration, report: LaunchReport) -> bool:
    """Whether NCCL, by the evidence of a launch, read no variable of the configuration's NCCL set."""
    read = variables_read((each.setting, each.read_by_nccl) for each in report.evidence)
    return is_unread(dict(configuration.nccl_env), read)


def _is_lost(setting: Evidence) -> bool:
    """It did not arrive, or not as asked. A variable that arrived and that nothing reads is swept on purpose."""
    return setting.grade == "overridden" or (setting.grade == "not_seen" and setting.seen != setting.requested)
