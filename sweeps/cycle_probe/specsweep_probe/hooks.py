"""The wrapped calls. Each does as little as it can: a mark before, a mark after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specsweep_probe.control import FOLDER_VARIABLE, start_control
from specsweep_probe.recorder import Recorder
from specsweep_probe.states import PlainStates, StateKeeper, States, read_plan
from specsweep_probe.targets import Targets, targets_for

_recorder: Recorder | None = None
"""None until the scheduler is initialised: nothing before that is a cycle."""
_states: States | None = None
"""None if the server holds one state alone."""


def install() -> None:
    """Register every hook with SGLang's registry; SGLang applies them."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    targets, warning = targets_for(sglang.__version__)
    hooks = {
        targets.cycle: _cycle,
        targets.draft: _draft,
        targets.verify: _verify,
        targets.extend: _extend,
        targets.accepted: _accepted,
        targets.forward: _forward,
        targets.worker_graphs: _worker_graphs,
        targets.runner_graphs: _runner_graphs,
        targets.scheduler_init: _with_handshake(targets, warning),
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _with_handshake(targets: Targets, warning: str | None) -> Any:
    def scheduler_init(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        global _recorder
        original(scheduler, *args, **kwargs)
        if isinstance(_states, StateKeeper):
            _states.relay = scheduler.future_map
        from specsweep_probe.clocks import pick_clock

        recorder = Recorder(pick_clock())
        start_control(recorder, _states, targets, warning)
        _recorder = recorder

    return scheduler_init


def _cycle(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = _recorder
    mode = batch.forward_mode
    if _states is not None and recorder is not None:
        _states.activate()  # before prefill: its draft-extend hands top-k values to the first cycle
    if recorder is None or not recorder.recording or mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
        return original(worker, batch, *args, **kwargs)
    cycle = recorder.begin(batch.batch_size())
    result = original(worker, batch, *args, **kwargs)
    recorder.end(cycle, num_steps=worker.speculative_num_steps, tokens=None, state=_active())
    return result


def _draft(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if _recorder is not None and _recorder.open is not None:
        _recorder.open.draft_end = _recorder.clock.mark()
    return result


def _verify(original: Any, *args: Any, **kwargs: Any) -> Any:
    if _recorder is None or (cycle := _recorder.open) is None:
        return original(*args, **kwargs)
    mark = _recorder.clock.mark
    cycle.verify_start = mark()
    result = original(*args, **kwargs)
    cycle.verify_end = mark()
    return result


def _extend(original: Any, *args: Any, **kwargs: Any) -> Any:
    if _recorder is None or (cycle := _recorder.open) is None:
        return original(*args, **kwargs)
    mark = _recorder.clock.mark
    cycle.extend_start = mark()
    result = original(*args, **kwargs)
    cycle.extend_end = cycle.end = mark()
    return result


def _accepted(original: Any, worker: Any, correct_drafts: list[int], *args: Any, **kwargs: Any) -> Any:
    if _recorder is not None:
        _recorder.tell(sum(correct_drafts) + len(correct_drafts))
    return original(worker, correct_drafts, *args, **kwargs)


def _forward(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    recorder = _recorder
    if _states is not None and batch is not None and _is_plain_decode(batch):
        _states.activate()
    if recorder is None or not recorder.recording:
        return original(worker, batch, *args, **kwargs)
    cycle = recorder.open
    mark = recorder.clock.mark
    if cycle is not None:
        if not kwargs.get("is_verify"):
            return original(worker, batch, *args, **kwargs)
        cycle.forward_start = mark()
        result = original(worker, batch, *args, **kwargs)
        cycle.forward_end = mark()
        return result
    if batch is None or not _is_plain_decode(batch):
        recorder.interrupt()
        return original(worker, batch, *args, **kwargs)
    size = batch.batch_size()
    cycle = recorder.begin(size)
    cycle.forward_start = cycle.start
    result = original(worker, batch, *args, **kwargs)
    cycle.forward_end = cycle.end = mark()
    recorder.end(cycle, num_steps=0, tokens=size, state=_active())
    return result


def _is_plain_decode(batch: Any) -> bool:
    return batch.forward_mode.is_decode() and batch.spec_algorithm.is_none()


def _active() -> str | None:
    return None if _states is None else _states.active


def _worker_graphs(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """A server that speculates captures its graphs: our states are built where SGLang builds its adaptive ones."""
    global _states
    folder = Path(os.environ[FOLDER_VARIABLE])
    if (plan := read_plan(folder)) is not None:
        _states = worker.adaptive_controller = StateKeeper(plan, folder, worker)
    return original(worker, *args, **kwargs)


def _runner_graphs(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """A server without speculation has captured its graphs: build the further states."""
    global _states
    result = original(runner, *args, **kwargs)
    folder = Path(os.environ[FOLDER_VARIABLE])
    if not runner.spec_algorithm.is_none() or _states is not None or (plan := read_plan(folder)) is None:
        return result
    _states = PlainStates(plan, folder, runner)
    _states.build_all()
    return result
