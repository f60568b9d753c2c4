"""What the probe wraps, by SGLang version. Names were read in the wheels of 0.5.16 to 0.5.23."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Targets:
    """Dotted names of the wrapped calls."""

    scheduler_init: str = "sglang.srt.managers.scheduler.Scheduler.__init__"
    cycle: str = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation"
    draft: str = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft"
    verify: str = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
    extend: str = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"
    accepted: str = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.on_verify_complete_cpu"
    forward: str = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    worker_graphs: str = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.init_cuda_graphs"
    runner_graphs: str = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"

    def names(self) -> dict[str, str]:
        """Role -> dotted name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


SPEC_V2 = Targets()

BY_VERSION: dict[str, Targets] = {
    "0.5.16": SPEC_V2,
    "0.5.17": SPEC_V2,
    "0.5.18": SPEC_V2,
    "0.5.19": SPEC_V2,
    "0.5.20": SPEC_V2,
    "0.5.21": SPEC_V2,
    "0.5.22": SPEC_V2,
    "0.5.23": SPEC_V2,
}


def targets_for(version: str) -> tuple[Targets, str | None]:
    """The targets of an SGLang version, and a warning if the version is not in the table (the newest is used)."""
    release = version.split("+", maxsplit=1)[0]
    if release in BY_VERSION:
        return BY_VERSION[release], None
    newest = list(BY_VERSION)[-1]
    return BY_VERSION[newest], f"SGLang {version} is not in the probe's table; the names of {newest} are tried"
