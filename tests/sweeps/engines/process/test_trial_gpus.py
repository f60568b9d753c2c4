"""GPUs that a stopped server does not let go of, over a fake NVML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.process.telemetry import GpuUser, Readings
from sweeps.engines.process.trial_gpus import TrialGpus, visible_gpus

GIB = 1 << 30


class FakeTelemetry:
    """Each reading of a GPU's memory takes the next of a list and stays at the last."""

    def __init__(self, **used: list[int]) -> None:
        self.used = {gpu.removeprefix("gpu"): values for gpu, values in used.items()}
        self.open = True
        self.holders: list[dict[int, int | None]] = [{4711: None}]
        """Pid -> bytes, one for each time it is asked, then the last."""

    def used_bytes(self) -> dict[str, int]:
        return {gpu: values.pop(0) if len(values) > 1 else values[0] for gpu, values in self.used.items()}

    def users(self) -> Sequence[GpuUser]:
        now = self.holders.pop(0) if len(self.holders) > 1 else self.holders[0]
        return tuple(GpuUser("0", pid, size) for pid, size in now.items())

    @contextmanager
    def window(self) -> Iterator[Readings]:
        yield {"power_w": 300.0}

    def close(self) -> None:
        self.open = False


def gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, **used: list[int]) -> TrialGpus:
    monkeypatch.setattr("sweeps.engines.process.trial_gpus.GpuTelemetry.open", lambda _: FakeTelemetry(**used))
    return TrialGpus(len(used), folder)


def test_memory_that_comes_back_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(tmp_path, monkeypatch, gpu0=[GIB, 70 * GIB, 30 * GIB, GIB]).prove_free(timeout_s=20)
    assert not list(tmp_path.iterdir())


def test_a_little_more_than_before_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(tmp_path, monkeypatch, gpu0=[GIB, GIB + (300 << 20)]).prove_free(timeout_s=0)
    assert not list(tmp_path.iterdir()), "a note of a leftover"


def test_memory_that_stays_in_use_names_gpu_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unclean = gpus(tmp_path, monkeypatch, gpu0=[GIB, 4 * GIB], gpu1=[GIB])
    with pytest.raises(EngineError, match=r"'0': '3072 MiB'.*\[4711\]") as raised:
        unclean.prove_free(timeout_s=0)
    assert raised.value.kind == "gpu_not_clean"


def test_a_later_launch_is_refused_until_the_leftover_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own first reading would call the leftover normal."""
    with pytest.raises(EngineError):
        gpus(tmp_path, monkeypatch, gpu0=[GIB, 4 * GIB]).prove_free(timeout_s=0)
    with pytest.raises(EngineError):
        gpus(tmp_path, monkeypatch, gpu0=[4 * GIB]).prove_free(timeout_s=0)
    gpus(tmp_path, monkeypatch, gpu1=[4 * GIB]).prove_free(timeout_s=0)
    gpus(tmp_path, monkeypatch, gpu0=[4 * GIB, GIB]).prove_free(timeout_s=20)
    gpus(tmp_path, monkeypatch, gpu0=[4 * GIB]).prove_free(timeout_s=0)


def test_without_nvml_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.engines.process.trial_gpus.GpuTelemetry.open", lambda _: None)
    absent = TrialGpus(8, tmp_path)
    absent.prove_free(timeout_s=0)
    absent.close()
    with absent.window() as readings:
        assert readings == {}


@pytest.mark.parametrize(("visible", "ids"), [(None, ("0", "1")), ("", ()), ("3,GPU-aa", ("3", "GPU-aa"))])
def test_the_gpus_of_a_trial(monkeypatch: pytest.MonkeyPatch, visible: str | None, ids: tuple[str, ...]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(2) == ids


def foreign(folder: Path, monkeypatch: pytest.MonkeyPatch, *holders: dict[int, int | None]) -> list[object]:
    """`foreign_pids` of each window, for what NVML says before the launch and at both ends of each window."""
    telemetry = FakeTelemetry(gpu0=[GIB])
    telemetry.holders = list(holders)
    monkeypatch.setattr("sweeps.engines.process.trial_gpus.GpuTelemetry.open", lambda _: telemetry)
    trial = TrialGpus(1, folder)
    found: list[object] = []
    for _ in range((len(holders) - 1) // 2):
        with trial.window(lambda: [8, 9]) as readings:
            pass
        found.append(readings.get("foreign_pids"))
    return found


def test_the_servers_own_processes_are_not_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server: dict[int, int | None] = {7: 70 * GIB, 8: 70 * GIB}
    assert foreign(tmp_path, monkeypatch, {}, server, server, server, {**server, 9: GIB}) == [None, None]


def test_a_process_that_comes_later_is_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server: dict[int, int | None] = {7: 70 * GIB}
    found = foreign(tmp_path, monkeypatch, {}, server, server, server, {**server, 66: GIB}, {**server, 66: GIB}, server)
    assert found == [None, "66", "66"]


def test_a_process_from_before_the_launch_is_foreign_unless_it_holds_a_context_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[int, int | None] = {5: 20 * GIB, 6: 100 << 20}
    assert foreign(tmp_path, monkeypatch, before, {**before, 7: GIB}, {**before, 7: GIB}) == ["5"]
