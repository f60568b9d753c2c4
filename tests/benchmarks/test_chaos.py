import socket
from pathlib import Path

import yaml

from benchmarks.chaos import FAULTS, chaos_spec, check_rows, listening_ports
from sweeps.results.tables import TABLES, ResultsFolder, write_part
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space
from tests import stub_server

BLANK = {field.name: None for field in TABLES["trials"] if field.nullable}
ROW: dict[str, object] = {
    **BLANK,
    **{name: 0.0 for name in TABLES["trials"].names if name.endswith("_s")},
    "sweep_id": "s",
    "role": "candidate",
    "engine": "sglang",
    "num_gpus": 2,
    "acceptance": "measured",
    "label": "any",
    "requested": {},
    "started_at": 0,
    "num_blocks": 0,
}


def write(folder: ResultsFolder, trial_id: str, attempt: int, status: str) -> None:
    row = {**ROW, "trial_id": trial_id, "attempt": attempt, "status": status}
    write_part(folder, "trials", [row], trial_id=trial_id, attempt=attempt)


def kept(folder: ResultsFolder, trials: int) -> dict[str, bool]:
    return {finding.promise: finding.kept for finding in check_rows(folder, trials)}


def test_the_spec_is_valid_and_has_room_for_the_trials() -> None:
    spec = parse_spec(yaml.safe_dump(chaos_spec(200, 0)), source="chaos")
    space = Space(spec)
    assert len(space.configurations()) >= 200
    assert {name.partition(":")[0] for fault in FAULTS for name in fault.split(",")} - {"none"} <= set(
        stub_server.FAULTS
    )


def test_rows_that_keep_the_promises(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    write(folder, "t0000", 1, "completed")
    write(folder, "t0001", 1, "failed")
    write(folder, "t0001", 2, "failed")
    assert all(kept(folder, 2).values())
    assert not kept(folder, 3)["all trials ran"]


def test_rows_that_do_not(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    write(folder, "t0000", 1, "running")
    assert not kept(folder, 1)["every last attempt is final"]
    part = folder.part("trials", "t0000", 1)
    part.with_name("t0000-a1b.parquet").write_bytes(part.read_bytes())
    assert not kept(folder, 1)["one row per attempt"]


def test_listening_ports_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert port in listening_ports()
    assert port not in listening_ports()
