"""Samplers and pruners by the name that a spec gives them; options go to the constructors, checked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from sweeps.search.observations import Observations
from sweeps.spec.document import SpecError
from sweeps.spec.model import Choice
from sweeps.spec.space import Space

# `grid` is the study's own enumeration (Optuna's grid does not know the conditions); its sampler only fills in.
_SAMPLERS: Mapping[str, Callable[..., BaseSampler]] = {
    "grid": optuna.samplers.RandomSampler,
    "random": optuna.samplers.RandomSampler,
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
}
_PRUNERS: Mapping[str, Callable[..., BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
}
_NEEDS = {"gp": ("torch", "scipy"), "wilcoxon": ("scipy",)}


def build_sampler(choice: Choice, *, seed: int, space: Space, observations: Observations) -> BaseSampler:
    """The sampler that a spec names. Raises SpecError with the choices, or the options its constructor takes."""
    if choice.name == "cycle_model":
        make = _cycle_search("CycleModelSampler", space, observations)
    else:
        make = _by_name("study.sampler", choice.name, _SAMPLERS)
    quiet = {"warn_independent_sampling": False} if choice.name == "gp" else {}
    sampler: BaseSampler = _construct("study.sampler", make, {"seed": seed, **quiet, **choice.options}, choice)
    return sampler


def build_pruner(choice: Choice, *, num_blocks: int, space: Space, observations: Observations) -> BasePruner:
    """The pruner that a spec names; its resource is measured blocks. Raises SpecError as `build_sampler`."""
    if choice.name == "cycle_bound":
        make = _cycle_search("CycleBoundPruner", space, observations)
    else:
        make = _by_name("study.pruner", choice.name, _PRUNERS)
    known = {"max_resource": num_blocks} if choice.name == "hyperband" else {}
    pruner: BasePruner = _construct("study.pruner", make, {**known, **choice.options}, choice)
    return pruner


def _by_name(key: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in known:
        raise SpecError(f"{key}: wanted one of {', '.join(known)}, got {name!r}")
    missing = [module for module in _NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    if missing:
        needed = " ".join(missing)
        raise SpecError(f"{key}: {name} needs {', '.join(missing)}, not installed here (pip install {needed})")
    return known[name]


def _cycle_search(class_name: str, space: Space, observations: Observations) -> Callable[..., Any]:
    # Imported late: the model needs scipy's linear algebra, which the yardstick samplers do not.
    made: Callable[..., Any] = getattr(importlib.import_module("sweeps.search.cycle_model.optuna_plugins"), class_name)

    def make(**options: Any) -> Any:
        return made(space, observations, **options)

    make.__signature__ = _without_first_two(made)  # type: ignore[attr-defined]
    return make


def _without_first_two(made: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(made)
    return signature.replace(parameters=list(signature.parameters.values())[2:])


def _construct(key: str, make: Callable[..., Any], options: Mapping[str, Any], choice: Choice) -> Any:
    allowed = [name for name in inspect.signature(make).parameters if name not in ("args", "kwargs")]
    unknown = sorted(set(choice.options) - set(allowed))
    if unknown:
        raise SpecError(
            f"{key}.options: {choice.name} takes {', '.join(allowed) or 'no options'}, got {', '.join(unknown)}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return make(**{name: value for name, value in options.items() if name in allowed})
    except (TypeError, ValueError) as error:
        raise SpecError(f"{key}.options: {choice.name} refuses {dict(choice.options)}: {error}") from error
