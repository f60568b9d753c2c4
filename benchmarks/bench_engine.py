"""The real engine, with what only benchmarks and tests of the probe ask of it."""

from __future__ import annotations

from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.engines.sglang.load_client import Load
from sweeps.spec.workload import Block


class BenchEngine(SGLangEngine):
    """`SGLangEngine` whose probe can be turned off while its server runs."""

    def record_cycles(self, *, on: bool) -> None:
        """Turn the probe's marks on or off in the live server, to measure what the probe itself costs."""
        self._require_live().command({"do": "record", "on": on})

    def generate(self, block: Block) -> Load:
        """Run one block without asking the probe for anything; the answers keep their token ids."""
        return self._require_live().generate(block, "measure", timeout_s=self._spec.engine.deadlines_s.block)
