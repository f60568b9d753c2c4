"""Write `benchmarks/RESULTS.md` from the records in `benchmarks/results/`: `python -m benchmarks.results_page`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.policies import POLICIES
from benchmarks.record import RESULTS
from benchmarks.verdict_scenes.page import tables

PAGE = Path(__file__).parent / "RESULTS.md"
_HEAD = """# Results

Made by `python -m benchmarks.results_page` from `results/*.json`; change the benchmarks, not this page. Each record
names its machine and date; figures of different records were taken under different load and are not to be compared.
"""
_ARGUMENTS = {
    "search_rules": "search_cost --without all --renew",
    "verdicts": "verdicts --record",
    "verdicts_paired": "verdicts --sweeps 60 --processes 1",
} | {
    f"probe_overhead_{where}": f"probe_overhead benchmarks/specs/probe_{where}.yaml --name probe_overhead_{where}"
    for where in ("cpu", "h200")
}
"""Command of a record that is not named like its module."""
_ABOUT = {
    "overhead": """What the framework itself costs per trial, beside bare Ray Tune in the same run. Simulated engine, so
the engine's own seconds are near nothing; targets stand beside.""",
    "load": """Many trials and several nodes: raylets of this machine with 8 logical GPUs each, beside a head without
GPUs. Throughput is with the simulated engine that sleeps (2 s a launch, 0.5 s a block), counted after every node has
measured its control: eight nodes measure 6.8 times as much as one here, where 8 raylets, 8 actors and other work share
two cores. `trials` is without sleep, so more nodes are not faster: it says what the driver takes. The second run shares
the process of the first, so its memory grows less. `month` (`--month 5000`) is a folder of trials written under new
names in memory, opened as `--resume` and the report do: 21 and 35 ms a trial, so 20,000 trials would take 7 and 12
minutes. `report` is the verdict and the page: twice the trials take six times as long, so the folder of a month cannot
be reported as one sweep. Other work ran on the machine.""",
    "cut_network": """Three raylets in network namespaces, simulated engine that sleeps: the link of the first is taken
down after a quarter of the trials, the raylet of the second killed after half. Seconds are since the start; `lost`
names the trials that ended with their node. The sweep ends once the trial on the node that was cut off is given up, so
`end` less `cut` bounds how long Ray takes to notice.""",
    "copy_cost": """A copy at a URL: sweeps of 100 simulated trials without sleep, by turns with a plain folder and with
a copy on an S3 server of this machine, medians of 3. Server, driver, trials and other work share two cores. A trial's 6
files, study and lock are some 10 requests; the difference is their CPU in driver and server. Real trials take
minutes.""",
    "chaos": "Trials on the stub server with a random fault each, the driver killed in between: what was kept.",
    "implausible": """Lies of the stub server, each told to one trial of the real engine. Caught: the trial failed, and
the rule ([plausible.py](../sweeps/results/plausible.py)) or kind of failure named here says why. A believed block is
one that may be compared although its server lied. The control told the truth and was believed.""",
    "recorded_h200": """Measured on H200s (SGLang 0.5.17, shrunk Kimi-K2.5 backbones, random weights), reduced here
from the recorded sweeps in `recordings/`; the machine in the next line only did the reducing. In pinned sweeps
the server simulates acceptance: cycle times are measured, rates are not. One launch or several, the winner is the
same: no speculation with the miniature, where nothing is accepted; two steps with the large model at a pinned
accept length of 3. Its step counts rank 2, 3, 5, 1 both switched and launched alone on another host, with rates within
3.6 % of the switched ones. The miniature waits for its host, so which step count drafts fastest there is
chance. `h200_x2_nccl_v1` is one model at tensor parallel 2. `nccl_reduces` false: the traces show SGLang's own
kernel doing every all-reduce of the target's forward, so the sets of those rows are one thing launched seven times;
so is `misspelt`, which NCCL does not read. ll-ring's +10.4 % at 1 step over the default is more than all of the
communication there (348 us of a cycle of 6.9 ms, 5.3 %): it is the host's waiting, and the forward, where NCCL
acts, differs by 1.1 %.""",
    "what_if": """What-if claims of the report against recorded measurements; `error` is predicted over measured, less
1. The claim is 2 %. At one request at a time it stands for two thirds of the blocks and falls for the rest: cycles in
which more is accepted take up to 5 % less. At 4 requests at a time it falls: requests of a wave end at different times,
so fewer than 4 are in flight on average. Across two launches of a model that waits for its host it falls, too. A
chain's histogram tells the accept lengths of shorter chains. The good drafter's throughput from the poor drafter's
cycles is within 2 % for chains up to 5 steps at one request at a time, and 7.5 % too low at 7; cycles beyond 2
steps are extrapolated. In `h200_miniature_v1` acceptance is real. Accept lengths pinned at 1.5 to 3.5 in one server
(`benchmarks.miniature.pinned_lengths`) have not been recorded on a GPU.""",
    "predict_node": """Kimi-K2.5 on eight H200 predicted by `specsweep predict` from one GPU's share
(`recordings/kimi_k25_one_of_eight_h200_v1`): measured cycles plus collective operations of 8 to 13.5 us. Accept lengths
are published ones; with them speculation is predicted to pay from 1 step on. Without speculation the published
throughput is below the predicted interval, and nothing here explains the rest: contexts were 1,000 to 2,000 tokens
there and 130 to 260 here, SGLang was 0.5.6 there and 0.5.17 here, and all-reduces of eight ranks were not timed. The
predictions for chains may be too high for the same reasons.""",
    "probe_overhead_cpu": """The cycle probe on and off, interleaved request by request in one real SGLang server on two
CPU cores with a tiny model: decode throughput with it over throughput without. Here the probe shares the interpreter
and the core with the model itself. Then its cycles against two other clocks, and its phases against the spans of
SGLang's own profiler over the same cycles.""",
    "probe_overhead_h200": """The same on one H200, with a model large enough that the GPU sets the pace: the marks
are CUDA events, and the profiler's time is between the passing of the same events, rebuilt from its trace.
`kernels` is from a phase's first kernel to its last, `gpu_idle_before` what the GPU waited for its host before that
(the profiler slows hosts). Over a whole request of 47 cycles the host's clock is short by the part of a cycle that
it runs ahead; the settled figure leaves out the cycles in which it gets there. A day earlier, on another H200, the
ratio was 0.9967 (0.9963 to 0.9972), and no phase was further off than 0.06 %.""",
    "nccl_log_cost": """What the evidence costs: microseconds per all-reduce with NCCL's log on as a server has it, over
the same without, by start. `of_graphs` has the lines per operation, as where CUDA graphs decode; `without_operations`
is what a server without graphs gets. In a graph the log is silent after capture, and no cost shows within what starts
of one set differ by anyway. Eager calls of two ranks that wait for each other's host vary too much to say.""",
    "verdicts": """How often the analysis is right: simulated sweeps of known truth, judged by `analysis` itself.
Unless a scene says otherwise the grid is 6 NCCL sets x 0 to 4 steps: 29 candidates of 12 blocks, a control after every
8, the best launched again beside it; launches differ by 0.5 %, blocks by 1 %. False: an NCCL set, step count or side
without effect is called better or worse, in percent of sweeps. Errors are two standard errors over sweeps. A goal is
missed if the figure lies beyond it by more than that. Phases are timed in a quarter of the sweeps. Levels are true at
the mean of the drift over all trials.
`oracle found`: by least squares that knows every spread and the drift; nothing that must learn these finds more.
`pays denied`: a sweep that was stopped early says that speculation does not pay. Each scene was run
20 times only, so two standard errors are 10 to 22 points for shares of sweeps. `verdicts_paired` below is the analysis
before.""",
    "verdicts_paired": """The same bench over the analysis of pairs and pooled repeats, as it was until 1 December 2026:
what a model of launches has to beat. Phases were timed in every sweep; the oracle and six later scenes are missing. The
record was made from the printed figures of that run.""",
    "search_rules": """What each special case of the search wins: 40 sweeps on each landscape with all rules and with
one of them switched off, steps switched in place. `right s`: median GPU seconds until right within 1 %, or until the
end of sweeps that never were; `ended s`: until the search stopped. Ratios are without over with, 99 % intervals over
seeds. Errors are sweeps with the rule, then without it: a certificate although the incumbent was more than 1 % below
the best, the best one pruned, not right at the end. A rule is kept if an interval lies above 1, or an error is more
frequent without it (Fisher's exact test, 5 %). Every rule runs on the founding case, the H200 landscapes and the
recorded sweeps, and on those it was made for. Rules marked as deleted are no longer in the code; all were measured
before any was deleted. In a recorded sweep the truth is what few launches reached, so an error there may be noise of
the recording.""",
    "search_cost": """GPU seconds until the incumbent is, and stays, within 1 % of the best configuration, by policy and
landscape. Virtual clock; simulated numbers, and recorded ones where a landscape is a replay. The oracle knows the best
configuration and measures only the control and that one: no search can do better. `-`: the policy was not run on that
landscape, or most of its sweeps were never right within the budget. `cycle_model+table` starts from an all-reduce
table, whose seconds count (10 for each NCCL set and launch, as measured on two H200). In a replay the truth is what
one launch of each configuration happened to reach: in `h200-replay-nccl` the best is one of four sets that are one
choice to NCCL. In `h200-replay-real`, the one replay of real acceptance, the longest chain is the best and is what
`cycle_model` measures first.
`h200-x2-restless` is simulated with what launches of drafting servers differed by on two H200 (10 %), which is more
than most configurations do: few of our sweeps end as certain there. The columns of other policies are a day older than
ours, which were measured again after rules were deleted (`search_rules`); nothing that the others use has changed.""",
}


def main() -> None:
    """Write the page."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text("\n".join([_HEAD, *(_section(record) for record in records)]), encoding="utf-8")
    print(PAGE)


def _section(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    where = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    lines = [f"## {record['benchmark']}", "", _ABOUT.get(record["benchmark"], ""), ""]
    command = _ARGUMENTS.get(record["benchmark"], record["benchmark"])
    lines += [f"`python -m benchmarks.{command}` on {record['date']}: {where}; {versions}.", ""]
    page = _PAGES.get(record["benchmark"])
    return "\n".join([*lines, *(page(record["figures"]) if page else _blocks(record["figures"], depth=3))])


def _search_page(figures: Mapping[str, Any]) -> list[str]:
    """All of the search benchmark: medians of every policy, ours in detail, the targets, how often it is right."""
    lines = []
    for arm, title in _ARMS.items():
        head, rows = _medians(figures["landscapes"], arm)
        lines += [f"### {title}: median GPU seconds until right", "", *_table(head, rows)]
    for arm, title in _ARMS.items():
        lines += [f"### {title}: ours in detail", "", *_table(*_ours(figures["landscapes"], arm))]
    plain = {name: value for name, value in figures.items() if name not in ("landscapes", "targets")}
    return [*lines, *_search_targets(figures), *_blocks(plain, depth=3)]


_ARMS = {"switch_in_place": "Steps switched in place", "relaunch": "A launch for every step count"}


def _medians(landscapes: Mapping[str, Any], arm: str) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Head and rows: one column for each policy that any landscape has."""
    policies = tuple(dict.fromkeys(name for each in landscapes.values() for name in each["policies"][arm]))
    policies = tuple(name for name in POLICIES if name in policies)
    rows = [
        (
            name,
            landscape["configurations"],
            landscape["oracle_s"],
            landscape["grid_relaunch_s"],
            *(landscape["policies"][arm].get(policy, {}).get("median_s") for policy in policies),
        )
        for name, landscape in landscapes.items()
    ]
    return ("landscape", "configurations", "oracle", "exhaustive grid, relaunching", *policies), rows


def _ours(landscapes: Mapping[str, Any], arm: str) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Head and rows: each landscape with each of our policies."""
    rows = [
        (name, policy, *(numbers[figure] for figure in _OUR_FIGURES))
        for name, landscape in landscapes.items()
        for policy, numbers in landscape["policies"][arm].items()
        if policy.startswith("cycle_model")
    ]
    return ("landscape", "policy", *(figure.replace("_", " ") for figure in _OUR_FIGURES)), rows


_OUR_FIGURES = (
    "seeds",
    "median_s",
    "p95_s",
    "reached",
    "ended_median_s",
    "launches_median",
    "trials_median",
    "best_pruned",
    "certified",
    "certified_within_1_percent",
    "certified_over_2_percent",
)


def _search_targets(figures: Mapping[str, Any]) -> list[str]:
    """The targets beside the results, misses in bold; steps switched in place."""
    targets, rows = figures["targets"], []
    for name, landscape in figures["landscapes"].items():
        size = landscape["configurations"]
        grid = targets["grid_over_ours"] if size >= 200 else targets["grid_over_ours_at_48"] if size >= 48 else None
        holds = landscape["assumptions_hold"]
        others = targets["best_other_over_ours" if holds else "best_other_over_ours_where_broken"]
        rows.append(
            (
                name,
                {True: "hold", False: "broken", None: "unknown"}[holds],
                _against(landscape["grid_over_ours"], grid),
                _against(landscape["best_other_over_ours"], others),
                _against(landscape["best_other_over_ours_with_table"], others),
                landscape["best_other_over_oracle"],
                landscape["ours_over_oracle"],
            )
        )
    head = (
        "landscape",
        "assumptions",
        "grid over ours",
        "best other over ours",
        "the same, ours with the all-reduce table",
        "best other over the oracle",
        "ours over the oracle",
    )
    return ["### Against the targets", "", *_table(head, rows)]


def _against(value: float | None, wanted: float | None) -> str:
    if value is None:
        return "- (no other policy was there, or ours was not)"
    if wanted is None:
        return f"{value:.3g}"
    shown = f"{value:.3g} (wanted {wanted:.2g})"
    return shown if value >= wanted else f"**{shown}**"


def _blocks(figures: Mapping[str, Any], *, depth: int) -> list[str]:
    """Plain values as one table, then everything nested under its own heading."""
    plain = {name: value for name, value in figures.items() if not _is_nested(value)}
    lines = _table(("figure", "value"), list(plain.items())) if plain else []
    for name, value in figures.items():
        if not _is_nested(value):
            continue
        lines += [f"{'#' * min(depth, 6)} {name}", ""]
        if _is_uniform(value):
            columns = tuple(next(iter(value.values())))
            lines += _table(("", *columns), [(row, *(cells[each] for each in columns)) for row, cells in value.items()])
        elif isinstance(value, Mapping):
            lines += _blocks(value, depth=depth + 1)
        else:
            lines += _table(tuple(value[0]), [tuple(row.values()) for row in value])
    return lines


def _is_nested(value: object) -> bool:
    is_rows = (
        isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)
    )
    return isinstance(value, Mapping) or is_rows


def _is_uniform(value: object) -> bool:
    """A mapping of mappings with the same plain figures each: one table."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(each, Mapping) for each in value.values()):
        return False
    shapes = {tuple(each) for each in value.values()}
    return len(shapes) == 1 and not any(_is_nested(cell) for each in value.values() for cell in each.values())


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    assert all(len(row) == len(head) for row in rows), f"rows of other lengths than {head}"
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(_text, row)) + " |" for row in rows), ""]


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list) and all(isinstance(each, float) for each in value):
        return " to ".join(map(_text, value))
    if isinstance(value, float):
        if 0.99 < value < 1.01 and value != 1.0:
            return f"{value:.4f}"  # a ratio: what it is off by counts
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/")


def _rules_page(figures: Mapping[str, Any]) -> list[str]:
    """Verdicts of all rules, then each rule's landscapes; those where it changed no sweep are named."""
    head = ("rule", "verdict", "because")
    verdicts = [
        (rule, "kept" if found["pays"] else "deleted", "; ".join(found["because"]) or "nothing got worse without it")
        for rule, found in figures.items()
    ]
    lines = _table(head, verdicts)
    for rule, found in figures.items():
        rows = [[_of_rule(row[name]) for name in _RULE_FIGURES] for row in found["rows"] if row["changed"]]
        idle = [row["landscape"] for row in found["rows"] if not row["changed"]]
        lines += [f"### {rule}", "", *_table([name.replace("_", " ") for name in _RULE_FIGURES], rows)]
        lines += [f"No sweep changed: {', '.join(idle)}.", ""] if idle else []
    return lines


_RULE_FIGURES = (
    "landscape",
    "seeds",
    "changed",
    "right_s_with",
    "right_s_without",
    "right_s_ratio",
    "ended_s_with",
    "ended_s_without",
    "ended_s_ratio",
    "wrong_certificate",
    "best_pruned",
    "not_right",
)


def _of_rule(value: object) -> object:
    """Counts of an error as `with, without`."""
    counts = isinstance(value, list) and all(isinstance(each, int) for each in value)
    return ", ".join(map(str, value)) if isinstance(value, list) and counts else value


def _verdicts_page(figures: Mapping[str, Any]) -> list[str]:
    """Each scene with its claims and intervals, then how often each goal was reached."""
    lines = []
    for title, (head, rows) in tables(figures["scenes"]).items():
        lines += [f"### {title}", "", *_table(head, rows)]
    return lines


_PAGES: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "search_cost": _search_page,
    "search_rules": _rules_page,
    "verdicts": _verdicts_page,
    "verdicts_paired": _verdicts_page,
}
"""Records with a page of their own; of the others everything is shown."""

if __name__ == "__main__":
    main()
