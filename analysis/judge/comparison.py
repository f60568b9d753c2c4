"""Two sweeps of the same work side by side: before and after an upgrade, another drafter, another node.

Configurations are matched by their id, the rest by everything but the drafter. Blocks are paired, because the prompts
are the same. One model is fitted to both sweeps, and the sweep is one more dimension of it. Drift is not removed: it
widens the spread instead. One sweep is one session of a machine, so a difference may also be the session's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.data.load import Results
from analysis.judge.cells import Array, Cells, cells
from analysis.judge.claims import Effect, Verdict, judge
from analysis.judge.effects import compare_all
from analysis.judge.fitted import fit_cells
from analysis.judge.points import Point, points
from sweeps.results.tables import ResultsFolder, TableError

METRICS = ("tok_s", "cycle_ms", "draft_ms", "verify_ms", "extend_ms", "accept_length")
_CHANGES = ("engine_version", "machine", "node", "drafter", "all_reduce")
_SAMPLING = {
    "temperature": re.compile(r"\btemperature:\s*(?P<value>[\d.]+)"),
    "ignore_eos": re.compile(r"\bignore_eos:\s*(?P<value>true|false)"),
}
_DEFAULTS = {"temperature": "0.0", "ignore_eos": "true"}


class NotComparableError(TableError):
    """Two sweeps that did not do the same work, or that measured it in different units. Names every reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One configuration in both sweeps: what B is against A."""

    label: str
    other_label: str | None
    """In B, if it is called otherwise there (another drafter)."""
    effects: Mapping[str, Effect | None]
    """By metric; None where one side has no such blocks."""
    values: Mapping[str, tuple[float | None, float | None]]
    """Of A and B."""

    @property
    def verdict(self) -> Verdict:
        """Of the throughput."""
        effect = self.effects["tok_s"]
        return "undecided" if effect is None else effect.verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All pairs, and what else is different."""

    sweeps: tuple[str, str]
    concurrency: int
    pairs: tuple[Pair, ...]
    changes: Mapping[str, tuple[str, str]]
    """What differs between the sweeps, by column of `trials`."""
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    """Labels of configurations that the other sweep does not have."""
    notes: tuple[str, ...]


def compare_sweeps(a: Results, b: Results) -> Comparison:
    """B against A. Raises NotComparableError with every reason."""
    common = [each for each in a.concurrencies if each in b.concurrencies]
    notes: list[str] = []
    if reasons := [*_refusals(a, b, common, notes)]:
        raise NotComparableError(f"{a.sweep_id} and {b.sweep_id} are not comparable: {'; '.join(reasons)}")
    concurrency = common[0]
    a, b = a.at(concurrency), b.at(concurrency)
    matched, only_in = _matched(points(a), points(b))
    if not matched:
        raise NotComparableError(f"{a.sweep_id} and {b.sweep_id} have no configuration in common")
    joined = {metric: _joined(cells(a, metric), cells(b, metric)) for metric in METRICS}
    found = {metric: _effects(joined[metric], matched) for metric in METRICS}
    pairs = tuple(
        Pair(
            label=one.label,
            other_label=None if one.label == two.label else two.label,
            effects={metric: found[metric][index] for metric in METRICS},
            values={
                metric: (joined[metric].total(_key("A", one)), joined[metric].total(_key("B", two)))
                for metric in METRICS
            },
        )
        for index, (one, two) in enumerate(matched)
    )
    notes.append("each sweep is one session: what the machine did otherwise on another day is in the difference")
    return Comparison(
        sweeps=(a.sweep_id, b.sweep_id),
        concurrency=concurrency,
        pairs=pairs,
        changes=_changes(a, b),
        only_in=only_in,
        notes=tuple(notes),
    )


def _refusals(a: Results, b: Results, common: list[int], notes: list[str]) -> Iterator[str]:
    for what, one, two in (
        ("engine kind (units)", _kind(a), _kind(b)),
        ("acceptance", _values(a, "acceptance"), _values(b, "acceptance")),
        ("number of GPUs", _values(a, "num_gpus"), _values(b, "num_gpus")),
        ("throughput", _manifest(a).get("throughput"), _manifest(b).get("throughput")),
    ):
        if one != two:
            yield f"{what}: {one} and {two}"
    timers = [{*each.all_blocks["timer_kind"].drop_nulls()} for each in (a, b)]
    if all(timers) and timers[0] != timers[1]:
        yield f"timer of the phases (units): {', '.join(sorted(timers[0]))} and {', '.join(sorted(timers[1]))}"
    if not common:
        listed = (", ".join(map(str, each.concurrencies)) or "none" for each in (a, b))
        yield f"concurrency: {' and '.join(listed)} requests at a time"
        return
    yield from _of_workload(a.at(common[0]), b.at(common[0]), notes)
    for name, default in _DEFAULTS.items():
        values = [_sampling(each, name, default) for each in (a, b)]
        if None in values:
            notes.append(f"sampling: {name} is not known of both sweeps")
        elif values[0] != values[1]:
            yield f"sampling: {name} {values[0]} and {values[1]}"


def _of_workload(a: Results, b: Results, notes: list[str]) -> Iterator[str]:
    """Prompts block by block, where both folders have their requests; then the tokens that were asked for."""
    asked = [{*each.blocks["asked_tokens"].drop_nulls()} for each in (a, b)]
    if all(asked) and asked[0] != asked[1]:
        yield f"workload: {sorted(asked[0])} and {sorted(asked[1])} output tokens per request"
    prompts = [_prompts(each) for each in (a, b)]
    if not all(prompts):
        notes.append("workload: the prompts of both sweeps are not known")
        return
    if any(prompts[0][block] != prompts[1][block] for block in prompts[0].keys() & prompts[1].keys()):
        yield "workload: the prompts of the blocks differ"
    elif not prompts[0].keys() & prompts[1].keys():
        yield "workload: no block in common"


def _prompts(results: Results) -> dict[int, frozenset[tuple[str, int]]]:
    """Prompt ids and lengths by block; nothing if the folder has no requests."""
    found: dict[int, set[tuple[str, int]]] = {}
    chosen = set(results.blocks["block_index"])
    for row in results.requests.iter_rows(named=True):
        if row["block_index"] in chosen and (row["concurrency"] or 1) in set(results.blocks["concurrency"]):
            found.setdefault(row["block_index"], set()).add((row["prompt_id"], row["prompt_tokens"]))
    return {block: frozenset(prompts) for block, prompts in found.items()}


def _kind(results: Results) -> str:
    return results.engine if results.engine in ("simulated", "imported") else "measured"


def _values(results: Results, column: str) -> str:
    return ", ".join(sorted(map(str, results.trials[column].drop_nulls().unique())))


def _manifest(results: Results) -> Mapping[str, Any]:
    return ResultsFolder(results.root).read_manifest() if results.imported else {}


def _sampling(results: Results, name: str, default: str) -> str | None:
    """What the folder's own spec says; None without a spec. Read as text: a foreign folder's YAML is not built."""
    path = ResultsFolder(results.root).spec
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError:
        return None
    if text is None:
        return None
    bare = "\n".join(line.split(" #")[0] for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = _SAMPLING[name].search(bare)
    value = default if found is None else found["value"]
    return value if name == "ignore_eos" else f"{float(value):g}" if value.count(".") < 2 and value != "." else None


def _matched(
    a: tuple[Point, ...], b: tuple[Point, ...]
) -> tuple[list[tuple[Point, Point]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Pairs, and the labels that only one sweep has."""
    theirs = {point.configuration_id: point for point in b}
    pairs = [(point, theirs[point.configuration_id]) for point in a if point.configuration_id in theirs]
    taken = {point.configuration_id for pair in pairs for point in pair}
    rest_a, rest_b = ([each for each in side if each.configuration_id not in taken] for side in (a, b))
    for point in rest_a:
        alike = [each for each in rest_b if _without_drafter(each) == _without_drafter(point)]
        rivals = [each for each in rest_a if _without_drafter(each) == _without_drafter(point)]
        if len(alike) == len(rivals) == 1:
            pairs.append((point, alike[0]))
            taken |= {point.configuration_id, alike[0].configuration_id}
    left = tuple(tuple(each.label for each in side if each.configuration_id not in taken) for side in (a, b))
    return pairs, (left[0], left[1])


def _without_drafter(point: Point) -> Mapping[str, str | None]:
    return {name: value for name, value in point.settings.items() if name != "drafter"}


def _changes(a: Results, b: Results) -> dict[str, tuple[str, str]]:
    values = {column: (_values(a, column), _values(b, column)) for column in _CHANGES}
    return {column: pair for column, pair in values.items() if pair[0] != pair[1]}


def _key(sweep: str, point: Point) -> str:
    return f"{sweep}/{point.configuration_id}"


def _joined(a: Cells, b: Cells) -> Cells:
    """The cells of both sweeps; names say which sweep, all on one node at one time (drift is not fitted)."""
    width = max(a.numerators.shape[1], b.numerators.shape[1])

    def both(one: tuple[str, ...], two: tuple[str, ...]) -> tuple[str, ...]:
        return (*(f"A/{name}" for name in one), *(f"B/{name}" for name in two))

    return Cells(
        metric=a.metric,
        keys=both(a.keys, b.keys),
        twins=both(a.twins, b.twins),
        launches=both(a.launches, b.launches),
        nodes=("",) * (len(a) + len(b)),
        at_s=np.zeros(len(a) + len(b)),
        speculates=np.concatenate([a.speculates, b.speculates]),
        numerators=np.vstack([_wide(a.numerators, width), _wide(b.numerators, width)]),
        denominators=np.vstack([_wide(a.denominators, width), _wide(b.denominators, width)]),
        imported=a.imported or b.imported,
    ).positive()


def _wide(values: Array, width: int) -> Array:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=np.nan)


def _effects(joined: Cells, matched: list[tuple[Point, Point]]) -> list[Effect | None]:
    """B against A for every pair; verdicts with Holm's correction over the pairs.

    The sweep is one more dimension of the model, so that all pairs together tell what they have in common.
    """
    settings = {
        _key(sweep, pair[place]): {**pair[place].settings, "sweep": sweep}
        for pair in matched
        for place, sweep in enumerate("AB")
    }
    fitted = fit_cells(_of(joined, settings), settings, launches_matter=joined.metric != "accept_length")
    found = compare_all(fitted, [{_key("B", two): 1.0, _key("A", one): -1.0} for one, two in matched])
    judged = iter(judge([effect for effect in found if effect is not None]))
    return [None if effect is None else next(judged) for effect in found]


def _of(joined: Cells, keys: Collection[str]) -> Cells:
    chosen = [row for row, key in enumerate(joined.keys) if key in keys]
    return replace(
        joined,
        keys=tuple(joined.keys[row] for row in chosen),
        twins=tuple(joined.twins[row] for row in chosen),
        launches=tuple(joined.launches[row] for row in chosen),
        nodes=tuple(joined.nodes[row] for row in chosen),
        at_s=joined.at_s[chosen],
        speculates=joined.speculates[chosen],
        numerators=joined.numerators[chosen],
        denominators=joined.denominators[chosen],
    )
