"""The mixed model: against closed forms, against its own gradient, and against known truths."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.judge.covariance import Cell
from analysis.judge.mixed_model import Posterior, _Model, fit
from analysis.judge.priors import CENTRE, Array
from analysis.judge.spreads import scored


def cell(
    launch: int,
    *,
    kind: str = "plain",
    drafting: str = "none",
    nccl: str = "default",
    at_s: float = 0.0,
    node: str = "a",
) -> Cell:
    return Cell(
        configuration=f"{drafting}/{nccl}",
        settings={"drafting": drafting, "nccl": nccl},
        kind=kind,
        launch=f"t{launch}",
        communicator=nccl,
        node=node,
        at_s=at_s,
        variance=1e-8,
    )


def difference(found: Posterior, first: str, second: str) -> tuple[float, float]:
    """Mean and standard deviation of the mixture."""
    weights = np.zeros(len(found.configurations) + 1)
    weights[found.configurations.index(first)], weights[found.configurations.index(second)] = 1.0, -1.0
    means = found.means @ weights
    variances = np.einsum("i,gij,j->g", weights, found.covariances, weights)
    mean = float(found.weights @ means)
    return mean, float(np.sqrt(found.weights @ (variances + (means - mean) ** 2)))


def sweep(
    rng: np.random.Generator, *, plain: float, chain: float, sets: int = 5, controls: int = 5
) -> tuple[list[Cell], Array]:
    """Each set in a plain and a chain server (steps 1 to 4 in one), controls between; no effect of any set."""
    cells: list[Cell] = []
    values: list[float] = []
    launch = 0
    for number in range(sets):
        name = f"set-{number}"
        cells.append(cell(launch, nccl=name, at_s=len(cells) * 300.0))
        values.append(rng.normal(0, plain))
        launch += 1
        shared = rng.normal(0, chain)
        for steps in range(1, 5):
            cells.append(cell(launch, kind="chain", drafting=f"{steps}", nccl=name, at_s=len(cells) * 300.0))
            values.append(-0.3 + 0.02 * steps + shared)
        launch += 1
    for _ in range(controls):
        cells.append(cell(launch, at_s=len(cells) * 300.0))
        values.append(rng.normal(0, plain))
        launch += 1
    return cells, np.array(values)


def test_the_gradient_is_that_of_the_loss() -> None:
    cells, values = sweep(np.random.default_rng(0), plain=0.01, chain=0.03)
    model = _Model(cells, values)
    free = CENTRE[model.covariance.active] + 0.3

    def loss(at: Array) -> float:
        return scored(model.covariance, model.values, at)[0]

    numbers = [(loss(free + 1e-5 * unit) - loss(free - 1e-5 * unit)) / 2e-5 for unit in np.eye(len(free))]
    assert scored(model.covariance, model.values, free)[1] == pytest.approx(np.array(numbers), abs=1e-3)


def test_many_launches_of_two_configurations_agree_with_their_means() -> None:
    rng = np.random.default_rng(1)
    cells = [cell(number, nccl="a" if number % 2 else "default", at_s=number * 60.0) for number in range(60)]
    values = np.array([0.02 * (each.settings["nccl"] == "a") + rng.normal(0, 0.01) for each in cells])
    mean, error = difference(fit(cells, values), "none/a", "none/default")
    own = np.array([each.settings["nccl"] == "a" for each in cells])
    assert mean == pytest.approx(values[own].mean() - values[~own].mean(), abs=5e-4)
    assert error == pytest.approx(np.sqrt(values[own].var(ddof=1) / 30 + values[~own].var(ddof=1) / 30), rel=0.25)


def test_noisy_chains_do_not_borrow_the_quiet_of_plain_servers() -> None:
    rng = np.random.default_rng(2)
    errors, ratios = [], []
    for _ in range(10):
        found = fit(*sweep(rng, plain=0.002, chain=0.05))
        errors.append(difference(found, "2/set-1", "2/set-0")[0] / difference(found, "2/set-1", "2/set-0")[1])
        ratios.append(found.scales["chain"] / found.scales["plain"])
    assert np.median(ratios) > 4
    assert sum(abs(error) > 3 for error in errors) <= 1


def test_a_step_of_the_drift_is_found_as_one() -> None:
    rng = np.random.default_rng(3)
    cells = [cell(number, nccl=f"set-{number % 4}", at_s=number * 300.0) for number in range(32)]
    values = rng.normal(0, 0.003, 32) - 0.08 * (np.arange(32) >= 20)
    found = fit(cells, values)
    assert np.ptp(found.drift) == pytest.approx(0.08, abs=0.01)
    assert abs(difference(found, "none/set-1", "none/set-0")[0]) < 0.006


def test_a_launch_that_no_other_predicts_is_far_off() -> None:
    rng = np.random.default_rng(4)
    cells, values = sweep(rng, plain=0.003, chain=0.003, sets=8)
    odd = [place for place, each in enumerate(cells) if each.launch == "t3"]
    values[odd] += 0.10
    found = fit(cells, values)
    assert {"t2", "t3"} & set(found.outliers), "one of the two launches of the set that contradict each other"


def test_what_a_server_does_to_all_of_its_states_cancels() -> None:
    rng = np.random.default_rng(5)
    cells = [
        cell(launch, kind="chain", drafting=steps, nccl=name, at_s=launch * 600.0)
        for launch in range(3)
        for steps in ("1", "3")
        for name in ("default", "simple")
    ]
    luck = {each.launch: rng.normal(0, 0.10) for each in cells}
    values = np.array(
        [luck[each.launch] - 0.05 * (each.settings["nccl"] == "simple") + rng.normal(0, 0.002) for each in cells]
    )
    mean, error = difference(fit(cells, values), "3/simple", "3/default")
    assert mean == pytest.approx(-0.05, abs=0.01)
    assert error < 0.02


def test_one_cell_is_known_as_well_as_the_prior_knows_launches() -> None:
    found = fit([cell(0)], np.array([1.0]))
    assert found.means[:, 0] == pytest.approx(np.ones(len(found.weights)), abs=1e-3)
    assert found.doubts.launches == ()
