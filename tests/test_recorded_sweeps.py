"""The sweeps recorded on a GPU stay readable: by the analysis, and as something to replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from sweeps.engines.replay.engine import ReplayEngine
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space
from sweeps.spec.workload import plan_blocks

RECORDINGS = Path(__file__).parents[1] / "recordings"
MEASURED = RECORDINGS / "h200_kimi_mini_v1"
PINNED = RECORDINGS / "h200_kimi_mini_pinned_v1"
RELAUNCHED = RECORDINGS / "h200_kimi_mini_relaunch_v1"
LARGE = ("h200_kimi_large_switch_v1", "h200_kimi_large_relaunch_v2")
TWO_GPUS = RECORDINGS / "h200_x2_nccl_v1"
SEARCHED = RECORDINGS / "h200_x2_search_v1"


def verdict(results: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["verdict", str(results), "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_the_report_of_the_measured_sweep(tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    assert main(["report", str(MEASURED), "--out", str(page)]) == 0
    assert "engine: sglang" in page.read_text(encoding="utf-8")


def test_a_random_drafter_is_never_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    phases = verdict(MEASURED, capsys)["phases"]

    lengths = {row["accept_length"] for row in phases if row["verify_ms"] is not None}
    assert lengths == {1.0}


def test_pinned_acceptance_recommends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    content = verdict(PINNED, capsys)

    assert content["acceptance"] == "pinned"
    assert content["speculation_pays"]["verdict"] == "undecided"


def test_the_pinned_sweep_measured_eight_configurations_between_two_controls() -> None:
    trials = read_table(ResultsFolder(PINNED), "trials").to_pylist()
    served = [row for row in trials if row["status"] in ("completed", "pruned")]

    assert {(row["num_steps"], row["eagle_topk"]) for row in served if row["role"] == "candidate"} == {
        (steps, topk) for steps in (1, 2, 3, 5) for topk in (1, 4)
    }
    assert [row["role"] for row in served if row["num_steps"] == 0] == ["control", "control"]


def test_relaunching_finds_the_winner_that_switching_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = [verdict(sweep, capsys) for sweep in (MEASURED, RELAUNCHED)]

    assert [one["speculation_pays"]["verdict"] for one in found] == ["worse", "worse"]
    assert {one["best"]["configuration"] for one in found} == {"no speculation, nccl default"}


@pytest.mark.parametrize("name", LARGE)
def test_where_the_gpu_sets_the_pace_steps_rank_alike_switched_and_launched(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {
        row["configuration"].split(",")[0]: row["tok_s"] for row in verdict(RECORDINGS / name, capsys)["configurations"]
    }
    launched_alone = {"steps 2": 439.2, "steps 3": 433.0, "steps 1": 311.9, "no speculation": 225.7}

    assert [each for each in rates if each != "steps 5"] == list(launched_alone)
    for steps, tok_s in launched_alone.items():
        assert rates[steps] == pytest.approx(tok_s, rel=0.03)


def test_all_four_step_counts_rank_alike_switched_and_launched(capsys: pytest.CaptureFixture[str]) -> None:
    switched, launched = (
        {
            row["configuration"].split(",")[0]: row["tok_s"]
            for row in verdict(RECORDINGS / name, capsys)["configurations"]
        }
        for name in LARGE
    )

    assert list(switched) == list(launched) == ["steps 2", "steps 3", "steps 5", "steps 1", "no speculation"]
    for steps, tok_s in launched.items():
        assert switched[steps] == pytest.approx(tok_s, rel=0.04)


def test_chains_and_trees_were_states_of_one_server_for_each_top_k() -> None:
    trials = read_table(ResultsFolder(RECORDINGS / "h200_kimi_large_states_v1"), "trials").to_pylist()
    measured = [row for row in trials if row["status"] == "completed"]
    launched = [row for row in measured if row["relaunched"]]
    states = {dict(row["effective"]).get("state") for row in measured if not row["relaunched"]}

    assert [row["role"] for row in sorted(launched, key=lambda row: row["started_s"])] == [
        "control",
        "candidate",
        "candidate",
        "incumbent",
    ]
    assert {"2x3-custom-default", "2x16-custom-default", "3x8-custom-default", "5x16-custom-default"} <= states
    assert {row["eagle_topk"] for row in measured if not row["relaunched"]} == {1, 4}


def test_a_winner_launched_by_itself_runs_as_its_state_did() -> None:
    blocks = read_table(ResultsFolder(RECORDINGS / "h200_kimi_large_states_v1"), "blocks").to_pylist()
    rates = {
        trial: sorted(row["tok_s"] for row in blocks if row["trial_id"] == trial)[3] for trial in ("t0004", "i0000")
    }

    assert rates["i0000"] == pytest.approx(rates["t0004"], rel=0.005)


def test_a_single_gpu_has_nothing_for_nccl_to_win(tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    assert main(["report", str(RECORDINGS / LARGE[0]), "--out", str(page)]) == 0
    assert "No cycle has communication" in page.read_text(encoding="utf-8")


def test_anchors_at_no_steps_stand_around_every_step_count_of_the_switched_chain() -> None:
    anchors = read_table(ResultsFolder(RECORDINGS / LARGE[0]), "anchors").to_pylist()

    assert [(row["trial_id"], row["place"]) for row in anchors] == [
        ("t0001", "before"),
        *[(f"t000{number}", "after") for number in (1, 2, 3, 4)],
    ]
    assert {row["accept_length"] for row in anchors} == {1.0}


def test_on_two_gpus_nccl_read_all_but_the_misspelt_variable() -> None:
    folder = ResultsFolder(TWO_GPUS)
    rows = [row for row in read_table(folder, "evidence").to_pylist() if row["setting"].startswith("env.NCCL_")]
    unread = {row["setting"] for row in rows if row["requested"] is not None and row["read_by_nccl"] is None}

    assert unread == {"env.NCCL_MAX_NCHANELS"}
    moved = {row["effective"] for row in rows if row["setting"] == "env.NCCL_P2P_DISABLE"}
    assert all(path.startswith("SHM") for path in moved)
    assert {row["setting"] for row in rows if row["grade"] == "extra"} == {"env.NCCL_CUMEM_ENABLE"}


def test_on_two_gpus_every_configuration_was_measured_between_controls() -> None:
    served = [row for row in read_table(ResultsFolder(TWO_GPUS), "trials").to_pylist() if row["status"] == "completed"]
    measured = [
        (dict(row["args"])["disable-custom-all-reduce"], row["nccl_set"], row["num_steps"])
        for row in served
        if row["role"] == "candidate"
    ]

    assert len(measured) == len(set(measured)) == 2 * 7 * 3
    assert [row["role"] for row in served].count("control") == 4


def test_on_two_gpus_nccl_settings_are_not_exercised_where_custom_all_reduce_serves() -> None:
    """Of the launch that ran with code that tells a communicator's warm-up from a decode."""
    folder = ResultsFolder(TWO_GPUS)
    served = {row["trial_id"]: row["all_reduce"] for row in read_table(folder, "trials").to_pylist()}
    custom = {trial for trial, name in served.items() if name == "custom"}
    asked = [
        row
        for row in read_table(folder, "evidence").to_pylist()
        if row["trial_id"] in custom and row["setting"].startswith("env.NCCL_") and row["requested"] is not None
    ]

    assert custom == {"t0044", "t0045"}
    assert {row["rank"] for row in asked} == {0, 1}
    assert {row["setting"] for row in asked} >= {"env.NCCL_PROTO", "env.NCCL_ALGO", "env.NCCL_BUFFSIZE"}
    assert {row["grade"] for row in asked} == {"not_exercised"}


def test_a_recorded_search_took_back_what_it_had_been_certain_of(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ResultsFolder(SEARCHED)
    stops = [row for row in read_table(folder, "events").to_pylist() if row["event"] == "search_stopped"]
    winners = [row for row in read_table(folder, "trials").to_pylist() if row["all_reduce"] == "custom"]
    blocks = read_table(folder, "blocks").to_pylist()
    rates = {
        row["trial_id"]: max(block["tok_s"] for block in blocks if block["trial_id"] == row["trial_id"])
        for row in winners
    }

    reasons = [row["detail"] for row in sorted(stops, key=lambda row: row["at_s"])]
    assert reasons[0].startswith("P(incumbent within 1.0% of the best) = 0.996")
    assert reasons[-1].startswith("budget.gpu_hours")
    assert {row["nccl_set"] for row in winners} == {"p2p-off"}, "a set that cannot act was launched"
    assert rates["i0001"] < 0.95 * rates["t0003"]
    assert verdict(SEARCHED, capsys)["speculation_pays"]["verdict"] == "undecided"


def test_phases_of_recorded_cycles_add_up() -> None:
    cycles = read_table(ResultsFolder(MEASURED), "cycles").to_pandas()
    verified = cycles[cycles["verify_ms"].notna()]
    parts = verified[["draft_ms", "verify_ms", "extend_ms", "gap_ms"]].sum(axis=1)

    assert len(verified) > 10_000
    assert parts.to_numpy() == pytest.approx(verified["cycle_ms"].to_numpy())
    assert (verified["verify_forward_ms"] < verified["verify_ms"]).all()


def test_steps_were_switched_in_place_in_one_server() -> None:
    trials = read_table(ResultsFolder(MEASURED), "trials").to_pylist()
    chain = [row for row in trials if row["eagle_topk"] == 1]

    assert [row["num_steps"] for row in chain] == [1, 2, 3, 5]
    assert [row["relaunched"] for row in chain] == [True, False, False, False]
    assert len({row["launch_key"] for row in chain}) == 1


def test_the_recorded_sweep_can_be_replayed() -> None:
    text = (MEASURED / "spec.yaml").read_text(encoding="utf-8")
    head, _, tail = text.partition("engine:")
    search = tail[tail.index("drafters:") :]
    spec = parse_spec(f"{head}engine: {{kind: replay, recording: {MEASURED}}}\n\n{search}", source="replay")
    space, blocks = Space(spec), plan_blocks(spec.workload, folder=MEASURED)
    recorded = read_table(ResultsFolder(MEASURED), "blocks").to_pylist()
    engine = ReplayEngine(spec)

    report = engine.launch(space.control)
    record = engine.run_block(blocks[-1])

    rates = [row["tok_s"] for row in recorded if row["trial_id"] == "k0000"]
    assert sum(report.boot_s.values()) > 0
    assert min(rates) <= record.decode_tokens / record.decode_s <= max(rates)
