"""SGLang plugin: the accept length that a live server simulates stands in a file, and can change between requests.

SGLang reads SGLANG_SIMULATE_ACC_LEN once, when it starts, and cycles of two launches differ by some percent.
Runs in the server's interpreter.
"""

import os
from pathlib import Path

FILE_VARIABLE = "SPECSWEEP_PINNED_LENGTH_FILE"
"""Holds tokens per cycle; empty: acceptance is real."""


def register():
    """Read the file before each verify."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import spec_utils

    path = Path(os.environ[FILE_VARIABLE])

    def pin(original, *args, **kwargs):
        spec_utils.SIMULATE_ACC_LEN = float(path.read_text() or -1)
        return original(*args, **kwargs)

    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", pin, HookType.AROUND)
