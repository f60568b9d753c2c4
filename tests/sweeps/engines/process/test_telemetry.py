import threading
from types import SimpleNamespace

import pytest

from sweeps.engines.process.telemetry import GpuTelemetry, GpuUser


class NVMLError(Exception):
    pass


class FakeNvml:
    """Two GPUs; each clock reading takes the next of a list and stays at the last."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, clocks: dict[int, list[int]], *, absent: bool = False, power: bool = True) -> None:
        self.clocks, self.absent, self.power = clocks, absent, power
        self.open = 0
        self.enough = threading.Event()
        self.bits = {0: 0x1, 1: 0x4 | 0x20}

    def nvmlInit(self) -> None:  # noqa: N802
        if self.absent:
            raise NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-aa": 1}[uuid]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_CLOCK_SM
        clocks = self.clocks[handle]
        if all(len(each) == 1 for each in self.clocks.values()):
            self.enough.set()
        return clocks.pop(0) if len(clocks) > 1 else clocks[0]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if not self.power:
            raise NVMLError("not supported")
        return 300_000 + 1000 * handle

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        return 60 + handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=1000 * (handle + 1))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return self.bits[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=41, usedGpuMemory=None)] if handle else []


def window(nvml: FakeNvml, *gpu_ids: str) -> dict[str, float | str]:
    telemetry = GpuTelemetry.open(gpu_ids, nvml=nvml)
    assert telemetry is not None
    with telemetry.window(period_s=0.001) as readings:
        assert nvml.enough.wait(10)
    telemetry.close()
    assert nvml.open == 0
    return readings


def test_medians_over_time_and_the_right_reduction_over_gpus() -> None:
    readings = window(FakeNvml({0: [1980], 1: [9000, 1700, 1700, 1700]}), "0", "GPU-aa")
    assert readings == {
        "sm_clock_mhz": 1700,
        "power_w": pytest.approx(601.0),
        "temperature_c": 61,
        "memory_used_bytes": 3000,
        "throttle_reasons": "sw_power_cap,sw_thermal_slowdown",
    }


def test_only_the_trials_gpus_are_read() -> None:
    readings = window(FakeNvml({0: [1980]}), "0")
    assert readings["sm_clock_mhz"] == 1980
    assert readings["throttle_reasons"] == "none"


def test_a_reading_that_the_gpu_lacks_is_absent_not_zero() -> None:
    assert "power_w" not in window(FakeNvml({0: [1980]}, power=False), "0")


def test_without_nvml_or_gpus_there_is_no_telemetry() -> None:
    assert GpuTelemetry.open(["0"], nvml=FakeNvml({}, absent=True)) is None
    assert GpuTelemetry.open([], nvml=FakeNvml({})) is None


def test_readings_are_there_although_the_body_failed() -> None:
    nvml = FakeNvml({0: [1980]})
    telemetry = GpuTelemetry.open(["0"], nvml=nvml)
    assert telemetry is not None
    with pytest.raises(RuntimeError), telemetry.window(period_s=0.001) as kept:
        raise RuntimeError
    assert kept["sm_clock_mhz"] == 1980
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


def test_who_holds_memory() -> None:
    telemetry = GpuTelemetry.open(["0", "1"], nvml=FakeNvml({}))
    assert telemetry is not None
    assert telemetry.used_bytes() == {"0": 1000, "1": 2000}
    assert telemetry.users() == (GpuUser("1", 41, None),)
