"""Clocks, power, temperature and memory of exactly a trial's GPUs, through NVML; nothing if there is none.

A sampler thread reads while a block runs and not after it: a sample of the idle GPU behind the block would say that
clocks are high and power is low.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

import pynvml

Readings = dict[str, float | str]

THROTTLE_REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of NVML's clock event reasons; an idle GPU (0x1) is none."""


class GpuUser(NamedTuple):
    """A process that holds memory of a GPU."""

    gpu: str
    pid: int
    used_bytes: int | None


class GpuTelemetry:
    """NVML over some GPUs. Open once, close at the end; not for use from several threads at once."""

    def __init__(self, gpu_ids: Sequence[str], nvml: Any) -> None:
        self._nvml = nvml
        self._handles = {gpu: self._handle(gpu) for gpu in gpu_ids}

    @classmethod
    def open(cls, gpu_ids: Sequence[str], *, nvml: ModuleType | Any = pynvml) -> GpuTelemetry | None:
        """None without NVML or without GPUs. Ids as in CUDA_VISIBLE_DEVICES: indices or UUIDs."""
        if not gpu_ids:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
        return cls(gpu_ids, nvml)

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def used_bytes(self) -> dict[str, int]:
        """Memory in use per GPU, by all processes together."""
        return {gpu: int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for gpu, handle in self._handles.items()}

    def users(self) -> tuple[GpuUser, ...]:
        """Compute processes on these GPUs. Inside a container NVML may show none, or pids of the host."""
        found = []
        for gpu, handle in self._handles.items():
            try:
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self._nvml.NVMLError:  # not offered by this GPU
                continue
            found += [GpuUser(gpu, process.pid, process.usedGpuMemory) for process in processes]
        return tuple(found)

    @contextmanager
    def window(self, *, period_s: float = 0.5) -> Iterator[Readings]:
        """Sample while the body runs; the dict that it yields is filled when the body has ended.

        `sm_clock_mhz` of the slowest GPU (it sets the pace), `power_w` and `memory_used_bytes` of all together,
        `temperature_c` of the hottest: each from per-GPU medians over time. `throttle_reasons`: all that occurred,
        `none` if none did. A reading that these GPUs do not offer is absent.
        """
        samples: dict[str, list[dict[str, float]]] = {gpu: [] for gpu in self._handles}
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(samples, stop, period_s), name="telemetry", daemon=True)
        readings: Readings = {}
        thread.start()
        try:
            yield readings
        finally:
            stop.set()
            thread.join()
            readings.update(_summary(samples))

    def _sample(self, samples: dict[str, list[dict[str, float]]], stop: threading.Event, period_s: float) -> None:
        while True:
            for gpu, handle in self._handles.items():
                samples[gpu].append(self._read(handle))
            if stop.wait(period_s):
                return

    def _read(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        readers: dict[str, Callable[[], float]] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "throttle_bits": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        values = {}
        for name, read in readers.items():
            try:
                values[name] = float(read())
            except nvml.NVMLError:  # not offered by this GPU
                continue
        return values

    def _handle(self, gpu: str) -> Any:
        if gpu.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(gpu))
        return self._nvml.nvmlDeviceGetHandleByUUID(gpu)


def _summary(samples: dict[str, list[dict[str, float]]]) -> Readings:
    over_gpus: dict[str, Callable[[list[float]], float]] = {
        "sm_clock_mhz": min,
        "power_w": sum,
        "temperature_c": max,
        "memory_used_bytes": sum,
    }
    readings: Readings = {}
    for name, combine in over_gpus.items():
        medians = [
            median(values) for rows in samples.values() if (values := [row[name] for row in rows if name in row])
        ]
        if len(medians) == len(samples):
            readings[name] = combine(medians)
    bits = [int(row["throttle_bits"]) for rows in samples.values() for row in rows if "throttle_bits" in row]
    if bits:
        occurred = [reason for bit, reason in THROTTLE_REASONS.items() if any(each & bit for each in bits)]
        readings["throttle_reasons"] = ",".join(occurred) or "none"
    return readings
