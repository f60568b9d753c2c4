"""A Gaussian random-effects model of one factor, its scales weighed by the data. Numpy only.

y = columns @ effects + deviation(configuration) + launch + drift * hours + noise. Each group of effects has one scale
out of a short list; so have launches, noisy ones another. Scales are sampled (Gibbs over the lists, a few
particles), so that few levels seen do not make the model sure about the rest. Joint draws for every configuration come
by Matheron's rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.search.cycle_model.terms import Design

Floats = NDArray[np.float64]

_DEVIATION = (0.0003, 0.001, 0.003, 0.01, 0.04)
"""Scales of what a configuration deviates from its terms by, as a share of the value.

All scale lists are a choice of sizes about a factor of 3 apart, from less than any noise to more than any effect seen.
Not tuned: the data weigh them, so only their ends matter."""
_PRIOR_OF_DEVIATION = (4.0, 4.0, 2.0, 0.5, 0.1)
"""Odds of _DEVIATION: the terms are believed until a measurement contradicts them. Not tuned: a guess."""
_LAUNCH = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Scales of what launches of one configuration differ by, as a share of the value; two H200 reach the largest."""
MAX_STEADY_BLOCK_SPREAD = 0.01
"""Relative standard deviation of blocks above which launches are noisy.

Source: two H200. With drafts, blocks differ by 8 % and launches by 10 %; without, by 0.1 % and 0.23 %. No machine in
between was measured."""
_ODDS_OUTSIDE = 0.001
"""Odds of a launch scale above MAX_STEADY_BLOCK_SPREAD, or for noisy launches of one below 1/4 or above 2 times what
blocks differ by. Not tuned: a guess that rules them out unless the data insist."""
_DRIFT_PER_HOUR = (0.0003, 0.002, 0.006, 0.02)
"""Scales of drift, as a share of the value per hour. Not tuned: steady to thermal throttling."""
_LARGE = 1e30
"""More than any value's square over its variance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Trials of one factor."""

    rows: NDArray[np.int64]
    """Index of each trial's configuration."""
    values: Floats
    errors: Floats
    """Standard error of each value from its own blocks, in units of the value if `multiplies`."""
    launches: NDArray[np.int64]
    hours: Floats
    noisy: NDArray[np.bool_]
    """Trials in whose launches blocks differ by more than MAX_STEADY_BLOCK_SPREAD."""
    block_spread: float = 0.0
    """What blocks of the noisy differ by, relative."""


@dataclass(slots=True)
class FactorModel:
    """Terms over a fixed list of configurations; `fit`, then `draw`.

    Args:
        multiplies: deviation, launch, drift and noise are shares of the value (times), or plain (logs).
    """

    design: Design
    multiplies: bool = True
    particles: int = 8
    _scales: NDArray[np.int64] | None = None
    _fitted: _Fitted | None = None
    _pool: NDArray[np.float32] | None = None
    _columns: NDArray[np.float32] | None = None

    def fit(self, data: Measurements, rng: np.random.Generator, *, sweeps: int = 2) -> None:
        """Sample scales given the data, starting from those of the last fit."""
        groups = len(self.design.terms)
        options = [np.array(term.scales) for term in self.design.terms]
        options += [np.array(each) for each in (_DEVIATION, _LAUNCH, _LAUNCH, _DRIFT_PER_HOUR)]
        unit = float(np.median(data.values)) if self.multiplies else 1.0
        values = data.values / unit
        size = values if self.multiplies else np.ones_like(values)
        kernels = self._kernels(data, size)
        noise = np.diag((data.errors * size) ** 2 + 1e-10)
        if self._scales is None or self._scales.shape[1] != len(options):
            self._scales = np.stack([rng.integers(0, len(each), self.particles) for each in options], axis=1)
        prior: list[Floats] = [np.zeros(len(each)) for each in options]
        prior[groups] = np.asarray(np.log(_PRIOR_OF_DEVIATION), dtype=np.float64)
        launch, odds = np.array(_LAUNCH), math.log(_ODDS_OUTSIDE)
        outside = (launch < data.block_spread / 4) | (launch > 2 * data.block_spread)
        prior[groups + 1], prior[groups + 2] = (
            np.where(launch > MAX_STEADY_BLOCK_SPREAD, odds, 0.0),
            np.where(outside, odds, 0.0),
        )
        for _ in range(sweeps):
            self._gibbs(options, kernels, noise, values, prior, rng)
        chosen = np.stack([each[index] for each, index in zip(options, self._scales.T, strict=True)], axis=1)
        covariance = np.tensordot(chosen**2, kernels, axes=1) + noise
        self._fitted = _Fitted(
            data, unit, values, size, chosen, np.asarray(np.linalg.inv(covariance), dtype=float), noise.diagonal()
        )

    def scales(self) -> Mapping[str, float]:
        """Mean scale of each term and of deviation, launch, noisy launch and drift."""
        assert self._fitted is not None, "scales of a model that has not been fitted"
        names = [*(term.name for term in self.design.terms), "deviation", "launch", "noisy launch", "drift"]
        return dict(zip(names, np.sqrt((self._fitted.chosen**2).mean(axis=0)).tolist(), strict=True))

    @property
    def has_noisy_launches(self) -> bool:
        """Whether launches were fitted with a scale of their own."""
        return self._fitted is not None and bool(self._fitted.data.noisy.any())

    def launch_scale(self, *, drafts: bool) -> float:
        """What launches of one configuration differ by, with drafts or without; 0 before a fit."""
        if self._fitted is None:
            return 0.0
        place = len(self.design.terms) + 1 + (drafts and self.has_noisy_launches)
        return float(np.sqrt((self._fitted.chosen[:, place] ** 2).mean()))

    def draw(self, draws: int, rng: np.random.Generator) -> Floats:
        """Joint posterior draws, (configurations, draws)."""
        fitted = self._fitted
        assert fitted is not None, "draws of a model that has not been fitted"
        per_particle = -(-draws // self.particles)
        drawn = [
            self._conditioned(scales, inverse, per_particle, rng)
            for scales, inverse in zip(fitted.chosen, fitted.inverse, strict=True)
        ]
        effects = np.concatenate([each for each, _ in drawn], axis=1)[:, :draws]
        deviations = np.concatenate([each for _, each in drawn], axis=1)[:, :draws]
        if self._columns is None:
            self._columns = self.design.columns.astype(np.float32)
        values: Floats = (self._columns @ effects.astype(np.float32)).astype(np.float64)
        self._add_fresh_deviations(values, fitted.chosen[np.arange(draws) // per_particle, len(self.design.terms)], rng)
        values[fitted.measured] += deviations
        values *= fitted.unit  # in place here and above: allocation is most of a decision over thousands
        return values

    def _conditioned(
        self, scales: Floats, inverse: Floats, draws: int, rng: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Effects (columns, draws) and deviations of the measured (measured, draws), given the data, for one particle.

        Matheron's rule: a draw from the prior, corrected by covariance @ inverse @ (values - what the draw predicts).
        Source: Wilson et al. 2020, "Efficiently sampling functions from Gaussian process posteriors", equation 9.

        Args:
            scales: of each term, then of deviation, launch, noisy launch and drift.
            inverse: of the covariance of the data under these scales.
        """
        fitted, groups = self._fitted, len(self.design.terms)
        assert fitted is not None, "draws of a model that has not been fitted"
        data, index = fitted.data, fitted.index
        phi = self.design.columns[data.rows]
        width = scales[:groups][self.design.group]
        size = fitted.size[fitted.first][:, None]
        # A draw from the prior.
        effects = rng.standard_normal((width.size, draws)) * width[:, None]
        deviations = rng.standard_normal((fitted.first.size, draws)) * scales[groups] * size
        launch_scales = np.where(data.noisy, scales[groups + 2], scales[groups + 1])
        launches = rng.standard_normal((int(data.launches.max()) + 1, draws))
        drift = rng.standard_normal(draws) * scales[groups + 3]
        shared = launches[data.launches] * launch_scales[:, None] + data.hours[:, None] * drift
        error = rng.standard_normal((data.rows.size, draws)) * np.sqrt(fitted.noise)[:, None]
        predicted = (phi @ effects, deviations[index], shared * fitted.size[:, None], error)
        # Corrected by how far it lies from the data.
        gap = inverse @ (fitted.values[:, None] - predicted[0] - predicted[1] - predicted[2] - predicted[3])
        shift = np.zeros_like(deviations)
        np.add.at(shift, index, gap * fitted.size[:, None])
        return effects + width[:, None] ** 2 * (phi.T @ gap), deviations + scales[groups] ** 2 * size * shift

    def _add_fresh_deviations(self, values: Floats, scales: Floats, rng: np.random.Generator) -> None:
        """Add the deviations of configurations that were never measured, in place.

        Args:
            scales: of deviations, (draws,).
        """
        fitted = self._fitted
        assert fitted is not None
        fresh = self._fresh(scales.size, rng)
        fresh *= scales.astype(np.float32)
        fresh[fitted.measured] = 0.0
        if self.multiplies:
            size = np.abs(values)
            size *= fresh
            values += size
        else:
            values += fresh

    def surprise(self, data: Measurements, place: int) -> float:
        """How far trial `place` lies from what the others predict, in standard deviations (0 with fewer than three)."""
        fitted = self._fitted
        if fitted is None or data.rows.size < 3:
            return 0.0
        precision = fitted.inverse[:, place, place]
        gaps = (fitted.inverse @ fitted.values)[:, place] / precision
        return float(np.mean(gaps * np.sqrt(precision)))

    def _fresh(self, draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Standard normals for deviations never measured: drawn once and rotated, for they are most of a decision."""
        if self._pool is None or self._pool.shape[1] != draws:
            self._pool = rng.standard_normal((self.design.columns.shape[0], draws), dtype=np.float32)
        return np.roll(self._pool, int(rng.integers(draws * self._pool.shape[0])))

    def _kernels(self, data: Measurements, size: Floats) -> Floats:
        phi = self.design.columns[data.rows]
        groups = [phi[:, self.design.group == place] for place in range(len(self.design.terms))]
        both = np.outer(size, size)
        launched = (data.launches[:, None] == data.launches) * both
        return np.stack(
            [
                *(part @ part.T for part in groups),
                (data.rows[:, None] == data.rows) * both,
                launched * ~(data.noisy[:, None] | data.noisy),
                launched * (data.noisy[:, None] & data.noisy),
                np.outer(data.hours, data.hours) * both,
            ]
        )

    def _gibbs(
        self,
        options: list[Floats],
        kernels: Floats,
        noise: Floats,
        values: Floats,
        prior: list[Floats],
        rng: np.random.Generator,
    ) -> None:
        assert self._scales is not None
        squares = np.stack([each[index] ** 2 for each, index in zip(options, self._scales.T, strict=True)], axis=1)
        for group, sizes in enumerate(options):
            if sizes.size == 1:
                continue
            squares[:, group] = 0.0
            others = np.tensordot(squares, kernels, axes=1) + noise
            # With the values as one more row, the factor's last row is its inverse times them: no second solve.
            tried = np.empty((others.shape[0], sizes.size, values.size + 1, values.size + 1))
            tried[..., :-1, :-1] = others[:, None] + (sizes**2)[None, :, None, None] * kernels[group]
            tried[..., -1, :-1] = tried[..., :-1, -1] = values
            tried[..., -1, -1] = _LARGE
            factor = np.linalg.cholesky(tried)
            half = factor[..., -1, :-1]
            logs = np.log(np.diagonal(factor, axis1=-2, axis2=-1)[..., :-1]).sum(axis=-1)
            evidence = -0.5 * (half**2).sum(axis=-1) - logs + prior[group]
            noisy = evidence - np.log(-np.log(rng.random(evidence.shape)))
            self._scales[:, group] = noisy.argmax(axis=1)
            squares[:, group] = sizes[self._scales[:, group]] ** 2


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Data with the scales that were sampled for them, one row or matrix per particle."""

    data: Measurements
    unit: float
    values: Floats
    size: Floats
    chosen: Floats
    inverse: Floats
    noise: Floats

    @property
    def measured(self) -> list[int]:
        """Row of each measured configuration, in the order of its first trial."""
        return list(dict.fromkeys(self.data.rows.tolist()))

    @property
    def index(self) -> NDArray[np.int64]:
        """Place in `measured` of each trial's configuration."""
        places = {row: place for place, row in enumerate(self.measured)}
        return np.array([places[row] for row in self.data.rows.tolist()])

    @property
    def first(self) -> NDArray[np.int64]:
        """First trial of each measured configuration."""
        rows = self.data.rows.tolist()
        return np.array([rows.index(row) for row in self.measured])
