"""Which format a file has, told by what it holds and not by its name; then its reading."""

from __future__ import annotations

from pathlib import Path

from analysis.importing.bench_speculative import is_bench_speculative, read_bench_speculative
from analysis.importing.client_benchmarks import SGLANG, VLLM, is_sglang, is_vllm, read_client_benchmark
from analysis.importing.json_rows import json_rows
from analysis.importing.nccl_debug import is_nccl_line, read_nccl_debug
from analysis.importing.nccl_tests import is_nccl_tests, read_nccl_tests
from analysis.importing.records import ImportFileError, Reading
from analysis.importing.sglang_log import read_sglang_log

MOST_BYTES = 1 << 30
KNOWN = (
    "an SGLang server's log, `Target verify` lines, JSON of sglang.bench_serving, bench_speculative or vLLM, "
    "a log of NCCL_DEBUG, a table of nccl-tests"
)


def read_file(path: Path) -> Reading:
    """Read one file. Raises ImportFileError, one line, for what cannot be read or is in no known form."""
    try:
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise ImportFileError(f"{path}: larger than {MOST_BYTES >> 30} GiB")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ImportFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return read_any(text, source=path.name)
    except ImportFileError as error:
        raise ImportFileError(f"{path}: {error}") from error


def read_any(text: str, *, source: str) -> Reading:
    """As `read_file`, from text. `source` names it in tables."""
    rows, broken = json_rows(text) if text.lstrip()[:1] in ("{", "[") else ([], 0)
    if rows:
        first = rows[0][1]
        if is_bench_speculative(first):
            return read_bench_speculative(rows, broken, source=source)
        for told, format_ in ((is_vllm, VLLM), (is_sglang, SGLANG)):
            if told(first):
                fitting = [(line, row) for line, row in rows if told(row)]
                lost = broken + len(rows) - len(fitting)
                return read_client_benchmark(fitting, lost, source=source, format=format_)
    if any(mark in text for mark in ("Decode batch", "server_args=")) or "target verify:" in text.lower():
        return read_sglang_log(text.splitlines(), source=source)
    if is_nccl_tests(text):
        return read_nccl_tests(text.splitlines(), source=source)
    if any(is_nccl_line(line) for line in text.splitlines()):
        return read_nccl_debug(text.splitlines(), source=source)
    raise ImportFileError(f"in no known form; wanted {KNOWN}")
