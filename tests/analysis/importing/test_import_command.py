"""`specsweep import`: one command from what people have to a folder, break-even and the accuracy needed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.__main__ import main
from analysis.data.load import load
from analysis.importing.folder import write_folder
from analysis.importing.formats import read_any
from analysis.importing.records import ImportFileError
from analysis.judge.verdict import verdict
from analysis.show.imported import import_document, import_lines, summaries
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.cycle_model.allreduce_prior import read_prior
from tests.analysis.importing.samples import (
    FOUNDING,
    NCCL_DEBUG,
    NCCL_TESTS,
    VLLM,
    bench_serving,
    bench_speculative,
    decode,
    server_log,
    start,
)


def written(folder: Path, **files: str) -> list[str]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / name) for name in files]


def test_the_founding_case_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, founding=FOUNDING)
    out = str(tmp_path / "results")
    options = ["--baseline-tok-s", "82.2", "--target-tok-s", "150", "--tok-s", "60", "--out", out]
    assert main(["import", *files, *options]) == 0
    printed = capsys.readouterr().out
    assert "verify: mean 29.014 ms, spread 0.02 ms over 5 cycles, 96.9% of the cycle" in printed
    assert "break-even accept length: 2.46 against 82.2 tok/s" in printed
    assert "accept length: 1.80" in printed
    assert "accuracy needed: 78% with 16 draft steps" in printed
    assert "speculation does not pay: 27.0% slower" in printed
    assert "bonus token included" in printed
    assert "no claim and no certificate" in printed


def test_two_logs_are_break_even_and_the_accuracy_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, eagle=server_log(60.0, 61.0, 60.5), plain=server_log(82.0, 82.4, speculative=False))
    assert main(["import", *files]) == 0
    printed = capsys.readouterr().out
    assert "break-even accept length: 2.45 against 82.2 tok/s" in printed
    assert "accuracy needed to break even: 68% with 3 draft steps" in printed
    assert "26.4% slower" in printed


def test_a_log_alone_says_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *written(tmp_path, eagle=server_log(60.0, 60.0))]) == 0
    printed = capsys.readouterr().out
    assert "it pays if the server without it is slower than 60.0 tok/s" in printed
    assert "each 10 tok/s without speculation ask for 0.30 tokens per cycle" in printed


def test_as_json_missing_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *written(tmp_path, eagle=server_log(60.0), nccl=NCCL_DEBUG), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["claim"] is None
    assert found["imported"] is True
    assert found["runs"][0]["break_even"] is None
    assert found["runs"][1]["tok_s"] is None


def test_the_folder_is_read_by_every_report_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One launch of each side: a difference of 27 % over many windows is no claim."""
    rates = [60.0 + index / 100 for index in range(40)]
    files = written(
        tmp_path, eagle=server_log(*rates), plain=server_log(*[82.0 + each / 50 for each in rates], speculative=False)
    )
    assert main(["import", *files, "--out", str(tmp_path / "r")]) == 0
    judged = verdict(load(tmp_path / "r"))
    assert judged.engine == "imported"
    assert judged.speculation_pays.verdict == "undecided"
    assert "nothing is claimed without repeats" in judged.speculation_pays.sentence
    assert any("no certificate" in warning for warning in judged.warnings)
    assert [side.num_blocks for side in judged.sides] == [40, 40]
    assert {side.label for side in judged.sides} == {"no speculation", "steps 3, top-k 1, draft tokens 4, head"}
    for command in ("report", "verdict"):
        assert main([command, str(tmp_path / "r")]) == 0
    assert "imported from eagle, plain" in capsys.readouterr().out.replace("\n", " ")


def test_repeated_launches_may_claim(tmp_path: Path) -> None:
    files = {}
    for launch in range(3):
        files[f"eagle{launch}"] = server_log(*[60.0 + launch / 10 + each / 100 for each in range(10)])
        files[f"plain{launch}"] = server_log(
            *[82.0 + launch / 10 + each / 100 for each in range(10)], speculative=False
        )
    assert main(["import", *written(tmp_path, **files), "--out", str(tmp_path / "r")]) == 0
    judged = verdict(load(tmp_path / "r"))
    assert judged.speculation_pays.verdict == "worse"
    assert [side.num_launches for side in judged.sides] == [3, 3]


def test_events_evidence_and_nothing_invented(tmp_path: Path) -> None:
    files = written(tmp_path, founding=FOUNDING, nccl=NCCL_DEBUG)
    assert main(["import", *files, "--out", str(tmp_path / "r")]) == 0
    folder = ResultsFolder(tmp_path / "r")
    events = read_table(folder, "events").to_pylist()
    assert [dict(row["numbers"])["verify_ms"] for row in events if row["event"] == "verify_cycle"][:2] == [29.01, 29.02]
    assert len(read_table(folder, "blocks")) == 0
    evidence = read_table(folder, "evidence").to_pylist()
    assert {(row["rank"], row["setting"], row["read_by_nccl"]) for row in evidence} == {
        (0, "env.NCCL_PROTO", "LL"),
        (1, "env.NCCL_PROTO", "LL"),
    }
    manifest = folder.read_manifest()
    assert [each["file"] for each in manifest["imported"]] == ["founding", "nccl"]
    assert folder.root.stat().st_mode & 0o077 == 0


def test_a_table_of_nccl_tests_is_a_prior_of_the_search(tmp_path: Path) -> None:
    slow = NCCL_TESTS.replace("12.34", "24.68")
    files = written(tmp_path, **{"default.txt": NCCL_TESTS, "ring.txt": slow})
    assert main(["import", *files, "--out", str(tmp_path / "r")]) == 0
    prior = read_prior(tmp_path / "r" / "allreduce.parquet")
    assert prior.difference_us("ring", 1) == pytest.approx(12.34)
    assert pq.read_schema(tmp_path / "r" / "allreduce.parquet").metadata[b"specsweep.imported"] == b"nccl-tests"


def test_unknown_draft_steps_are_no_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, bench=bench_serving(60.0, 1.8))
    assert main(["import", *files, "--out", str(tmp_path / "r")]) == 0
    assert "draft steps are not known: --num-steps" in capsys.readouterr().out
    (trial,) = read_table(ResultsFolder(tmp_path / "r"), "trials").to_pylist()
    assert (trial["num_steps"], trial["num_blocks"]) == (None, 0)
    assert main(["import", *files, "--num-steps", "3", "--out", str(tmp_path / "r3")]) == 0
    (trial,) = read_table(ResultsFolder(tmp_path / "r3"), "trials").to_pylist()
    assert (trial["num_steps"], trial["num_blocks"]) == (3, 1)


def test_throughputs_of_different_kinds_are_not_put_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = written(tmp_path, log=server_log(60.0), bench=bench_speculative(3, 1.8, 0.03))
    assert main(["import", *files, "--out", str(tmp_path / "r")]) == 2
    assert "one folder holds one kind of throughput" in capsys.readouterr().err
    assert main(["import", *files]) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--baseline-tok-s", "0"], "--baseline-tok-s: wanted a positive number"),
        (["--tok-s", "nan"], "--tok-s: wanted a positive number"),
        (["--num-steps", "-1"], "--num-steps: wanted 0 to 1000"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert main(["import", *written(tmp_path, vllm=VLLM), *options]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, founding=FOUNDING)
    assert main(["import", *files, "--out", str(tmp_path)]) == 2
    assert main(["import", *files, "--out", files[0]]) == 2
    assert capsys.readouterr().err.count("is there already, and not an empty folder") == 2


_NUMBER = st.floats(allow_nan=True) | st.integers() | st.sampled_from([0, 1, 1e-300, 1e300, 2**70, 80.0, 1.8])


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(0, 1e12), max_size=4),
    accept=st.floats(0, 1e12),
    running=st.integers(0, 10**12),
    interval=st.integers(-1, 10**20),
    verify=st.lists(st.floats(0, 1e12), max_size=3),
)
def test_any_numbers_of_a_log_are_a_folder_that_can_be_read(
    rates: list[float], accept: float, running: int, interval: int, verify: list[float]
) -> None:
    words = f"accept len: {accept:.2f}, accept rate: 0.2, "
    lines = [
        start(extra=f", decode_log_interval={interval}"),
        *(decode(rate, accept=words, running=running) for rate in rates),
    ]
    _write_and_read("\n".join([*lines, *(f"Target verify: {each:.2f} ms/cyc (50%)" for each in verify)]))


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        dict.fromkeys(("batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time"), _NUMBER),
        optional={"completion_tokens": _NUMBER},
    )
    | st.fixed_dictionaries(
        dict.fromkeys(("duration", "completed", "output_throughput", "total_output_tokens", "accept_length"), _NUMBER),
        optional=dict.fromkeys(("max_concurrency", "speculative_num_steps"), _NUMBER),
    )
)
def test_any_numbers_of_a_benchmark_are_a_folder_that_can_be_read(row: dict[str, float]) -> None:
    _write_and_read(json.dumps(row))


def _write_and_read(text: str) -> None:
    try:
        reading = read_any(text, source="f")
    except ImportFileError:
        return
    found = summaries([reading], baseline_tok_s=82.2, target_tok_s=150.0)
    json.dumps(import_document([reading], found), allow_nan=False)
    assert list(import_lines([reading], found))
    with tempfile.TemporaryDirectory() as folder:
        write_folder([reading], Path(folder) / "r")
        verdict(load(Path(folder) / "r"))
