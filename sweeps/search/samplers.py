"""Sampler and pruner of a study by the names that a spec gives them; options go to the constructors, checked."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from sweeps.search.observations import Observations
from sweeps.spec.document import SpecError
from sweeps.spec.model import Choice, StudySpec
from sweeps.spec.names import CYCLE_BOUND, CYCLE_MODEL, OPTUNA_PRUNERS, OPTUNA_SAMPLERS, FromOptuna
from sweeps.spec.space import Space

if TYPE_CHECKING:
    from sweeps.search.cycle_model.beliefs import Beliefs
    from sweeps.search.cycle_model.rules import Rules

Search = tuple[BaseSampler, BasePruner]


def build_search(
    study: StudySpec, *, num_blocks: int, space: Space, observations: Observations, rules: Rules | None = None
) -> Search:
    """The sampler and the pruner that a study names. `cycle_model` and `cycle_bound` share their beliefs.

    Args:
        num_blocks: of a trial: what pruners call the resource.
        rules: special cases of the cycle model; None: all.

    Raises SpecError with the choices, the options that a constructor takes, or the packages that are missing.
    """
    seed = study.seed + len(observations)
    sampler = _sampler(study.sampler, seed, space, observations, rules)
    if study.pruner.name != CYCLE_BOUND:
        return sampler, _pruner(study.pruner, num_blocks)
    # Imported late, as below: the model needs scipy's linear algebra, which Optuna's samplers do not.
    from sweeps.search.cycle_model.optuna_plugins import CycleBoundPruner, CycleModelSampler

    beliefs = sampler.beliefs if isinstance(sampler, CycleModelSampler) else _beliefs(study, space, observations, rules)
    return sampler, _construct("study.pruner", partial(CycleBoundPruner, beliefs), {}, study.pruner)


def _sampler(choice: Choice, seed: int, space: Space, observations: Observations, rules: Rules | None) -> BaseSampler:
    make: Callable[..., BaseSampler]
    if choice.name == CYCLE_MODEL:
        from sweeps.search.cycle_model.optuna_plugins import CycleModelSampler

        make = partial(CycleModelSampler, space, observations, rules)
    else:
        make = _from_optuna("study.sampler", choice.name, OPTUNA_SAMPLERS, optuna.samplers)
    sampler: BaseSampler = _construct("study.sampler", make, {"seed": seed}, choice)
    return sampler


def _pruner(choice: Choice, num_blocks: int) -> BasePruner:
    make = _from_optuna("study.pruner", choice.name, OPTUNA_PRUNERS, optuna.pruners)
    known = {"max_resource": num_blocks} if choice.name == "hyperband" else {}
    pruner: BasePruner = _construct("study.pruner", make, known, choice)
    return pruner


def _beliefs(study: StudySpec, space: Space, observations: Observations, rules: Rules | None) -> Beliefs:
    from sweeps.search.cycle_model.beliefs import Beliefs

    return Beliefs(space, observations, seed=study.seed, rules=rules)


def _from_optuna(key: str, name: str, known: Mapping[str, FromOptuna], module: Any) -> Callable[..., Any]:
    if name not in known:
        raise SpecError(f"{key}: wanted one of {', '.join(known)}, got {name!r}")
    missing = [each for each in known[name].needs if importlib.util.find_spec(each) is None]
    if missing:
        needed = " ".join(missing)
        raise SpecError(f"{key}: {name} needs {', '.join(missing)}, not installed here (pip install {needed})")
    return partial(getattr(module, known[name].class_name), **known[name].options)


def _construct(key: str, make: Callable[..., Any], known: Mapping[str, Any], choice: Choice) -> Any:
    """Call a constructor with the options of a spec, and with what is known of `known` if it takes it."""
    allowed = [name for name in inspect.signature(make).parameters if name not in ("args", "kwargs")]
    unknown = sorted(set(choice.options) - set(allowed))
    if unknown:
        raise SpecError(
            f"{key}.options: {choice.name} takes {', '.join(allowed) or 'no options'}, got {', '.join(unknown)}"
        )
    options = {**{name: value for name, value in known.items() if name in allowed}, **choice.options}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return make(**options)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{key}.options: {choice.name} refuses {dict(choice.options)}: {error}") from error
