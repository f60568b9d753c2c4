"""The mode of the posterior of the model's parameters, by Fisher scoring, and points around it to integrate over."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm, qmc

from analysis.judge.covariance import Covariance, inverse_of
from analysis.judge.priors import CENTRE, WIDTH, Array

_DRAWS = 32
"""Points of the integral; a guess, not tuned."""
_WIDER = 1.2
"""Of the normal that is sampled from: parameters have longer tails than the normal at their mode."""
_MOST_STEPS = 30
_CLOSE = 0.02
"""Step of a logarithm at which the mode is taken as found."""


def mode(covariance: Covariance, values: Array, free: Array) -> tuple[Array, Array, float]:
    """The active parameters at the mode of their posterior, their precision there, and the loss."""
    loss, gradient, information = scored(covariance, values, free)
    for _ in range(_MOST_STEPS):
        step = np.clip(np.linalg.solve(information, -gradient), -1.5, 1.5)
        length = 1.0
        while (found := scored(covariance, values, free + length * step))[0] > loss and length > 0.05:
            length /= 2
        free, (loss, gradient, information) = free + length * step, found
        if np.abs(length * step).max() < _CLOSE:
            break
    return free, information, loss


def scored(covariance: Covariance, values: Array, free: Array) -> tuple[float, Array, Array]:
    """Negative log posterior less a constant, its gradient, and the expected information with the prior's."""
    theta = covariance.whole(free)
    factor = np.linalg.cholesky(covariance.total(theta))
    halved = np.linalg.inv(factor)
    inverse = halved.T @ halved
    solved = inverse @ values
    width = WIDTH[covariance.active]
    away = (free - CENTRE[covariance.active]) / width
    slopes = covariance.derivatives(theta)
    num = len(slopes)
    gradient = 0.5 * (slopes.reshape(num, -1) @ (inverse - np.outer(solved, solved)).ravel())
    turned = inverse @ slopes
    information = 0.5 * turned.reshape(num, -1) @ turned.transpose(0, 2, 1).reshape(num, -1).T + np.diag(width**-2.0)
    value = float(np.log(np.diag(factor)).sum() + 0.5 * values @ solved + 0.5 * away @ away)
    return value, gradient + away / width, information


def losses(covariance: Covariance, values: Array, points: Array) -> tuple[Array, Array]:
    """(G,) negative log posterior at (G, active) points, and (G, n, n) inverse covariances there."""
    totals = covariance.totals(covariance.whole(points))
    inverses = inverse_of(totals)
    away = (points - CENTRE[covariance.active]) / WIDTH[covariance.active]
    found: Array = (
        0.5 * np.linalg.slogdet(totals)[1] + 0.5 * values @ (inverses @ values).T + 0.5 * (away**2).sum(axis=1)
    )
    return found, inverses


def around(covariance: Covariance, values: Array, found: Array, information: Array) -> tuple[Array, Array, Array]:
    """Points of the parameter space, their weights, and inverse covariances: sampling from a normal around the mode."""
    spread = np.linalg.cholesky(np.linalg.inv(information))
    draws = _WIDER * norm.ppf(qmc.Sobol(len(found), scramble=True, rng=0).random(_DRAWS) * (1 - 2e-6) + 1e-6)
    points = found + draws @ spread.T
    log_proposal = -0.5 * ((draws / _WIDER) ** 2).sum(axis=1)
    lost, inverses = losses(covariance, values, points)
    log_weights = -lost - log_proposal
    weights = np.exp(log_weights - log_weights.max())
    return points, weights / weights.sum(), inverses
