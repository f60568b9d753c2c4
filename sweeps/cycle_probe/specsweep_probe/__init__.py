"""Cycle probe: an SGLang plugin that times every speculative cycle inside the server, without a device sync.

Loaded in the server's own interpreter, from a folder with a dist-info on PYTHONPATH. Imports the standard library,
torch and sglang only, and those late: the modules below can be read without either.

Protocol, all in the folder `SPECSWEEP_PROBE_DIR`:
    states.json           written by the engine before the launch, if the server shall hold several states
    handshake-PID.json    written by each scheduler process once it is initialised: rank, versions, wrapped targets,
                          environment from C getenv
    commands-RANK         a FIFO; one JSON object per line: {"id": 1, "do": "take" | "forget" | "record" | "pin", ...}
    answer-RANK-ID.json   the answer to one command, complete when it appears
Commands are given while the server is idle. Between commands the probe does no I/O and its control thread sleeps.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

FOLDER_VARIABLE = "SPECSWEEP_PROBE_DIR"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: hook this process if it is a scheduler of a probed server."""
    is_scheduler = multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" in sys.modules
    if is_scheduler and os.environ.get(FOLDER_VARIABLE):
        from specsweep_probe.hooks import install

        install()
