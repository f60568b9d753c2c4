"""Many contrasts of one metric at a time: means, intervals and p-values, and what a single launch carries of them.

Two sources of doubt add up in every interval:

- *launches, communicators, drift*: by the posterior of the model (`analysis.judge.mixed_model`), a mixture of normals.
- *prompts*: what the paired difference varies by over blocks, beyond the noise that the model holds already. Blocks are
  the same for every trial, so what a prompt does to both sides cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import chdtri, ndtr, ndtri

from analysis.judge.fitted import Fitted
from analysis.judge.priors import Array

_BY_CHANCE = 0.1
"""Probability with which the noise of blocks alone may look like a difference between prompts that is not there."""
_TINY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixtures:
    """K normal mixtures of G components on the log scale."""

    weights: Array
    """(G,)"""
    means: Array
    """(K, G)"""
    errors: Array
    """(K, G)"""

    @property
    def mean(self) -> Array:
        """(K,)"""
        return self.means @ self.weights

    def below(self, value: float) -> Array:
        """(K,) probability of less than `value`."""
        found: Array = ndtr((value - self.means) / self.errors) @ self.weights
        return found

    def quantiles(self, shares: Array) -> Array:
        """(K, S) by (S,) or (K, S) shares: Newton steps from those of one normal, each kept between the ends that
        earlier steps have shown."""
        means, errors, mean = self.means[:, None, :], self.errors[:, None, :], self.mean[:, None]
        spread = np.sqrt((self.errors**2 + (self.means - mean) ** 2) @ self.weights)[:, None]
        at: Array = mean + spread * ndtri(shares)
        low = np.broadcast_to((self.means - 12 * self.errors).min(axis=1)[:, None], at.shape)
        high = np.broadcast_to((self.means + 12 * self.errors).max(axis=1)[:, None], at.shape)
        for _ in range(40):
            away = (at[..., None] - means) / errors
            missed = ndtr(away) @ self.weights - shares
            low, high = np.where(missed < 0, at, low), np.where(missed < 0, high, at)
            density = (np.exp(-0.5 * away**2) / errors) @ self.weights / np.sqrt(2 * np.pi)
            step = at - missed / np.maximum(density, 1e-300)
            step = np.where((step > low) & (step < high), step, (low + high) / 2)
            if (np.abs(step - at) < 1e-7 * spread).all():
                break
            at = step
        return at


def mixtures(fitted: Fitted, rows: Array, weights: Array, block_variances: Array) -> Mixtures:
    """Contrasts of configurations.

    Args:
        rows: (K, cells) weights of cells.
        weights: (K, C + 1) weights of the posterior's configurations and of its mean drift; not used without a model.
        block_variances: (K,) of prompts.
    """
    posterior = fitted.posterior
    if posterior is None:
        errors = np.sqrt(block_variances[:, None] + _TINY)
        return Mixtures(weights=np.ones(1), means=(rows @ fitted.cells.log_values())[:, None], errors=errors)
    covered = (posterior.covariances @ weights.T).transpose(0, 2, 1)  # (G, K, C + 1)
    variances = (covered * weights).sum(axis=2).T
    return Mixtures(
        weights=posterior.weights,
        means=weights @ posterior.means.T,
        errors=np.sqrt(np.maximum(variances, 0.0) + block_variances[:, None] + _TINY),
    )


def block_variances(fitted: Fitted, rows: Array) -> tuple[Array, npt.NDArray[np.int64]]:
    """(K,) variance of contrasts by their prompts, beyond the noise that the model holds; (K,) common blocks."""
    used, present = (rows != 0).astype(float), ~np.isnan(fitted.influences)
    common = used @ ~present == 0
    num_blocks = common.sum(axis=1)
    paired = np.where(common, rows @ np.where(present, fitted.influences, 0.0), 0.0)
    held = 0.0 if fitted.posterior is None else rows**2 @ fitted.noise
    df = np.maximum(num_blocks - 1, 1)
    away = np.where(common, paired - paired.sum(axis=1, keepdims=True) / np.maximum(num_blocks, 1)[:, None], 0.0)
    found = (away**2).sum(axis=1) / df / np.maximum(num_blocks, 1)
    few = np.where(num_blocks > 3, df / np.maximum(num_blocks - 3, 1), num_blocks)  # a t, as wide a normal
    beyond = np.where(found > held * chdtri(df, _BY_CHANCE) / df, found - held, 0.0)
    return np.where(num_blocks < 2, 0.0, np.maximum(0.0, beyond) * few), num_blocks


def weakest_launches(
    fitted: Fitted, rows: Array, weights: Array, block_variances: Array, means: Array
) -> list[tuple[str, float] | None]:
    """Of each contrast the launch whose doubt leaves least of it, and how many standard errors it keeps then.

    A launch that serves both sides alike is no support of either. None if no launch supports a contrast.
    """
    posterior, names = fitted.posterior, np.array(fitted.cells.launches)
    if posterior is None or not posterior.doubts.launches:
        return [None] * len(rows)
    doubted, variances = posterior.doubts.contrasts(weights)
    kept = np.sign(means)[:, None] * doubted / np.sqrt(np.maximum(variances, 0.0) + block_variances[:, None] + _TINY)
    served = (names[:, None] == np.array(posterior.doubts.launches)).astype(float)
    supports = ((rows != 0) @ served > 0) & (np.abs(rows @ served) >= 1e-9)
    kept = np.where(supports, kept, np.inf)
    places = kept.argmin(axis=1)
    return [
        (posterior.doubts.launches[place], float(kept[row, place])) if supports[row].any() else None
        for row, place in enumerate(places)
    ]
