"""The file of an Optuna study beside the tables of its sweep: the tables are the truth, the file follows them.

A driver that opens a results folder compares the two. If the file is torn, damaged, missing, or says anything else than
the tables do, it is kept under another name and written anew from the tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import study_number
from sweeps.results.writing import naming, replace_bytes
from sweeps.search.observations import MAXIMISED, Observation, pooled
from sweeps.search.resume import Earlier
from sweeps.spec.model import Metric, SweepSpec
from sweeps.spec.names import DRAFTING
from sweeps.spec.space import Configuration, InvalidConfigurationError, Space

SPECULATIVE = frozenset(DRAFTING) - {"num_steps"}
NOT_IN_TABLES = "no table has this trial"
_REPLAY_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    optuna.exceptions.OptunaError,
)
"""What Optuna raises over lines that are JSON and no log of its."""


def open_journal(path: Path) -> BaseStorage:
    """The file storage of a study; it opens in optuna-dashboard.

    The caller has the results folder to itself, so that a lock found beside the file is a dead driver's: it is removed,
    where Optuna would wait 30 s for it.
    """
    for left in path.parent.glob(f"{path.name}.lock*"):
        left.unlink(missing_ok=True)
    return JournalStorage(_NamingBackend(str(path)))


class _NamingBackend(JournalFileBackend):
    """Optuna's, whose errors name the file."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path)
        self._path = Path(file_path)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with naming(self._path):
            super().append_logs(logs)


def open_study(path: Path, spec: SweepSpec, space: Space, earlier: Earlier) -> tuple[BaseStorage, str | None]:
    """The storage of a study that agrees with the tables, and what was wrong with its file if it had to be rebuilt.

    Raises OSError if the file cannot be written.
    """
    wrong = _torn(path) or _disagreement(path, spec, space, earlier)
    if wrong is not None and (path.exists() or earlier.names_in_use):
        kept = _keep(path)
        _write(path, spec, _trials(spec, space, earlier))
        return open_journal(path), f"{path.name} {wrong}: rebuilt from the tables" + (
            f", kept as {kept}" if kept else ""
        )
    return open_journal(path), None


def step_of(spec: SweepSpec, blocks: tuple[BlockSummary, ...]) -> tuple[int, float]:
    """Wilcoxon pairs blocks (step = block, value = the block's); others compare what a trial has so far by length.

    Args:
        blocks: of a trial up to the reported one, each with a value of the metric.
    """
    paired = spec.study.pruner.name == "wilcoxon"
    value = pooled(blocks[-1:] if paired else blocks, spec.study.metric)
    assert value is not None, "a step without a value"
    return blocks[-1].block_index if paired else len(blocks), value


def steps_of(spec: SweepSpec, observed: Observation) -> dict[int, float]:
    """What was reported of each block, by step."""
    known = observed.blocks_with(spec.study.metric)
    return dict(step_of(spec, known[:count]) for count in range(1, len(known) + 1))


def is_free(space: Space, name: str) -> bool:
    """Whether Optuna is asked for a dimension: it is in the space with more than one choice."""
    return any(dimension.name == name and len(dimension.choices) > 1 for dimension in space.dimensions)


def finished_trial(spec: SweepSpec, space: Space, observed: Observation, attributes: Mapping[str, Any]) -> FrozenTrial:
    """An ended trial as Optuna keeps it."""
    configuration = observed.trial.configuration
    distributions = _distributions(space, configuration)
    wanted = space.suggestion(configuration)
    state, mean = _state(observed, spec.study.metric)
    steps = steps_of(spec, observed)
    if state == TrialState.PRUNED:  # as `tell` does
        mean = steps[max(steps)]
    reason = observed.reason if observed.reason or state != TrialState.FAIL else f"no block had a {spec.study.metric}"
    return optuna.trial.create_trial(
        state=state,
        value=mean,
        params={name: wanted[name] for name in distributions},
        distributions=distributions,
        user_attrs={**attributes, **({} if reason is None else {"reason": reason})},
        intermediate_values=steps,
    )


def _state(observed: Observation, metric: Metric) -> tuple[TrialState, float | None]:
    mean = observed.mean(metric)
    if observed.status == "failed" or mean is None:
        return TrialState.FAIL, None
    return (TrialState.PRUNED if observed.status == "pruned" else TrialState.COMPLETE), mean


def _distributions(space: Space, configuration: Configuration) -> dict[str, BaseDistribution]:
    """Of the dimensions that a configuration has a say in: none of speculation's at 0 steps."""
    apply = [
        dimension
        for dimension in space.dimensions
        if is_free(space, dimension.name)
        and not (configuration.num_steps == 0 and dimension.name in SPECULATIVE)
        and not (configuration.eagle_topk == 1 and dimension.name == "num_draft_tokens")
    ]
    return {dimension.name: CategoricalDistribution(dimension.choices) for dimension in apply}


def _trials(spec: SweepSpec, space: Space, earlier: Earlier) -> list[FrozenTrial]:
    """The study that the tables tell of: every number that a file bears is taken, known or not."""
    known: dict[int, FrozenTrial] = {}
    for observed in earlier.observations:
        if observed.trial.number is not None:
            known[observed.trial.number] = finished_trial(spec, space, observed, _names(observed))
    for refused in earlier.refused:
        if (number := study_number(refused.trial_id)) is not None:
            known[number] = _failed({"invalid": refused.requested, "reason": refused.reason})
    taken = {number for name in earlier.names_in_use if (number := study_number(name)) is not None} | known.keys()
    trials = [known.get(number, _failed({"reason": NOT_IN_TABLES})) for number in range(max(taken, default=-1) + 1)]
    if (control := _shared_control(spec, space, earlier)) is not None:
        gaps = (number for number in range(len(trials)) if number not in taken)
        if (gap := next(gaps, None)) is None:
            trials.append(control)
        else:
            trials[gap] = control
    return trials


def _names(observed: Observation) -> dict[str, str]:
    configuration = observed.trial.configuration
    return {
        "trial_id": observed.trial.trial_id,
        "configuration_id": configuration.configuration_id,
        "label": configuration.label,
    }


def _failed(attributes: Mapping[str, Any]) -> FrozenTrial:
    return optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=dict(attributes))


def _shared_control(spec: SweepSpec, space: Space, earlier: Earlier) -> FrozenTrial | None:
    """The first completed control, if it is a point of the space: samplers learn from it as from a candidate."""
    controls = (seen for seen in earlier.observations if seen.trial.role == "control" and seen.status == "completed")
    first = next((seen for seen in controls if seen.mean(spec.study.metric) is not None), None)
    if first is None or first.trial.configuration not in frozenset(space.configurations()):
        return None
    return finished_trial(spec, space, first, {"control": first.trial.trial_id})


def _torn(path: Path) -> str | None:
    """What is wrong with the lines of the file; None if each is whole."""
    if not path.is_file():
        return "is missing"
    content = path.read_bytes()
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            whole = line.endswith(b"\n") and isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            return f"is damaged in line {number}"
    return None


def _disagreement(path: Path, spec: SweepSpec, space: Space, earlier: Earlier) -> str | None:
    """What the file says that the tables do not; None if they agree. An open trial is no contradiction."""
    try:
        trials = _replay(path, spec)
    except _REPLAY_ERRORS as error:
        return f"cannot be replayed ({type(error).__name__}: {error})"
    taken = max((number for name in earlier.names_in_use if (number := study_number(name)) is not None), default=-1)
    if len(trials) <= taken:
        return f"ends at trial {len(trials) - 1}, but the tables have t{taken:04d}"
    known = {seen.trial.number: seen for seen in earlier.observations if seen.trial.number is not None}
    refused = {refused.trial_id for refused in earlier.refused}
    controls = {seen.trial.trial_id: seen for seen in earlier.observations if seen.trial.role == "control"}
    for number, frozen in enumerate(trials):
        observed = known.get(number, controls.get(str(frozen.user_attrs.get("control"))))
        said = _difference(frozen, observed, spec, space) if f"t{number:04d}" not in refused else None
        if said is not None:
            return f"differs from the tables in trial {number}: {said}"
    return None


def _replay(path: Path, spec: SweepSpec) -> list[FrozenTrial]:
    storage = open_journal(path)
    names = [study.study_name for study in storage.get_all_studies()]
    if names != [spec.sweep]:
        raise ValueError(f"holds the studies {names}, wanted {spec.sweep}")
    (study,) = storage.get_all_studies()
    wanted = "MAXIMIZE" if MAXIMISED[spec.study.metric] else "MINIMIZE"
    if [direction.name for direction in study.directions] != [wanted]:
        raise ValueError(f"its direction is not {wanted}")
    trials = storage.get_all_trials(study._study_id, deepcopy=False)
    if [frozen.number for frozen in trials] != list(range(len(trials))):
        raise ValueError("its numbers have gaps")
    return trials


def _difference(frozen: FrozenTrial, observed: Observation | None, spec: SweepSpec, space: Space) -> str | None:
    if observed is None:
        told = frozen.state in (TrialState.COMPLETE, TrialState.PRUNED)
        return f"{frozen.state.name}, and no table has it" if told else None
    if not frozen.state.is_finished():
        return None
    state, mean = _state(observed, spec.study.metric)
    if frozen.state != state:
        return f"{frozen.state.name}, but {observed.status} there"
    if state == TrialState.FAIL:
        return None
    if state == TrialState.COMPLETE and not (
        mean is not None and math.isclose(frozen.value or 0.0, mean, rel_tol=1e-9)
    ):
        return f"value {frozen.value}, there {mean}"
    wanted = observed.trial.configuration
    try:
        drawn = space.resolve({**space.suggestion(wanted), **frozen.params})
    except (InvalidConfigurationError, ValueError, LookupError, TypeError) as error:
        return f"its parameters are none of the space ({error})"
    return None if drawn == wanted else f"parameters of {drawn.label}, there {wanted.label}"


def _keep(path: Path) -> str | None:
    """Put the file aside under a free name. Returns the name; None if there was no file."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside.name


def _write(path: Path, spec: SweepSpec, trials: Iterable[FrozenTrial]) -> None:
    lines = _Lines()
    study = optuna.create_study(
        storage=JournalStorage(lines),
        study_name=spec.sweep,
        direction="maximize" if MAXIMISED[spec.study.metric] else "minimize",
    )
    for trial in trials:
        study.add_trial(trial)
    replace_bytes(path, b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines.logs))


class _Lines(BaseJournalBackend):
    """A journal in memory: its lines are those of Optuna's file."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        # As read back from a file: keys are text there.
        return [json.loads(json.dumps(log)) for log in self.logs[log_number_from:]]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.logs.extend(logs)
