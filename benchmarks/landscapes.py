"""Machines and spaces that search policies are compared on: profiles of the simulated engine, some bent on purpose,
and recorded sweeps of a real machine, replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sweeps.engines.base import EngineError
from sweeps.engines.replay.engine import ReplayEngine
from sweeps.engines.replay.recording import Recording
from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.engines.simulated.expected_cycle import intervened
from sweeps.engines.simulated.machine_profile import Drafter, Fault, Interaction, MachineProfile, read_profile
from sweeps.engines.simulated.nccl_choice import all_reduce_us, choose
from sweeps.spec.model import SearchSpec, SweepSpec
from sweeps.spec.names import DEFAULT_NCCL_SET
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space

Values = Mapping[Configuration, float]

RECORDINGS = Path(__file__).parents[1] / "recordings"
TABLE_TOKENS = (1, 2, 3, 4, 6, 8, 16)
TURIN_SETS = """
  p2p-sys: {NCCL_P2P_LEVEL: SYS}
  ll: {NCCL_PROTO: LL}
  p2p-sys-ll: {NCCL_P2P_LEVEL: SYS, NCCL_PROTO: LL}
  p2p-sys-tree: {NCCL_P2P_LEVEL: SYS, NCCL_ALGO: "allreduce:tree"}
  graph-file: {NCCL_GRAPH_FILE: turin-graph.xml}
  no-p2p: {NCCL_P2P_DISABLE: 1}
  no-infiniband: {NCCL_IB_DISABLE: 1}
"""
INERT_SETS = """
  founding-six: {NCCL_PROTO: LL, NCCL_ALGO: Ring, NCCL_P2P_LEVEL: SYS, NCCL_BUFFSIZE: 16777216, NCCL_NTHREADS: 512}
  ll: {NCCL_PROTO: LL}
  p2p-sys: {NCCL_P2P_LEVEL: SYS}
  channels: {NCCL_MAX_NCHANNELS: 16}
  threads: {NCCL_NTHREADS: 512}
  buffer: {NCCL_BUFFSIZE: 16777216}
  no-infiniband: {NCCL_IB_DISABLE: 1}
"""
X2_SETS = """
  p2p-off: {NCCL_P2P_DISABLE: 1}
  ll-ring: {NCCL_PROTO: LL, NCCL_ALGO: Ring}
  simple: {NCCL_PROTO: Simple}
  ll128: {NCCL_PROTO: LL128}
  founding-six: {NCCL_PROTO: LL, NCCL_ALGO: Ring, NCCL_P2P_LEVEL: SYS, NCCL_BUFFSIZE: 16777216, NCCL_NTHREADS: 512}
"""
ALL_SETS = "[default, p2p-sys, ll, p2p-sys-ll, p2p-sys-tree, graph-file, no-p2p, no-infiniband]"
STEPS = "num_steps: [0, 1, 2, 3, 4, 5, 7]"
TREES = STEPS + "\n  eagle_topk: [1, 2, 4]\n  num_draft_tokens: [4, 8, 16]"

_WORKLOAD = "{prompt_tokens: 512, output_tokens: 512, warmup_blocks: 2, blocks: 12}"


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """One simulated machine, one space."""

    name: str
    machine: str
    search: str
    sets: str = ""
    drafter: str = "kimi-k2.5-eagle3"
    further_drafters: tuple[str, ...] = ()
    noise: float = 1.0
    holds: bool | None = True
    """Whether every assumption of the cycle model does; None: nobody knows."""
    bend: Callable[[MachineProfile], MachineProfile] = lambda profile: profile

    @cached_property
    def profile(self) -> MachineProfile:
        return self.bend(read_profile(self.machine))

    @cached_property
    def spec(self) -> SweepSpec:
        """The sweep without a sampler, pruner, seed or budget."""
        drafters = ", ".join(f"{name}: {name}" for name in (self.drafter, *self.further_drafters))
        text = (
            f"sweep: {self.name}\n"
            f"engine: {{kind: simulated, machine: {self.machine}, noise: {self.noise}}}\n"
            f"nccl_sets:{self.sets or ' {}'}\n"
            f"drafters: {{{drafters}}}\n"
            f"search:\n  {self.search}\n"
            f"workload: {_WORKLOAD}\n"
            "control: {every: 0, incumbent: false}\n"
        )
        return parse_spec(text, source=self.name)

    def engine(self, spec: SweepSpec, *, seed: int) -> SimulatedEngine:
        """The machine with its clock at 0. `spec` is this landscape's own, with a policy's options."""
        return SimulatedEngine(spec, seed=seed, profile=self.profile)

    def truth(self, seed: int) -> Values:
        """Noise-free tok/s on the blocks of this seed's sweep, without configurations that the machine cannot run."""
        return _simulated_truth(self, seed)

    def launch_s(self, configuration: Configuration) -> float:
        """Mean GPU seconds of a warm launch, its trace and its stop, without any block."""
        boot = self.profile.boot
        drafting = boot.drafter_load_s + boot.drafter_capture_s if configuration.speculates else 0.0
        return boot.launch_s + boot.weight_load_s + boot.capture_s + boot.stop_s + boot.trace_s + drafting

    def block_s(self, configuration: Configuration) -> float:
        """Mean seconds of one block."""
        forward, workload = self.profile.forward, self.spec.workload
        prefill_ms = forward.prefill_base_ms + forward.prefill_token_ms * workload.prompt_tokens
        tok_s = self._typical.expected(configuration).tok_s
        return prefill_ms / 1000.0 + workload.output_tokens / tok_s

    def all_reduce_table(self, seed: int) -> pa.Table | None:
        """As `ray_jobs.allreduce_table` would find this machine's NCCL; launches of a set differ as on two H200."""
        if not self.spec.nccl_sets:
            return None
        rng, rows = np.random.default_rng((seed, 0xA11)), []
        for name, variables in {DEFAULT_NCCL_SET: {}, **self.spec.nccl_sets}.items():
            settings = intervened(self.profile, {f"env.{each}": value for each, value in variables.items()})
            launch = float(np.exp(rng.normal(0.0, 0.03)))
            for tokens in TABLE_TOKENS:
                size = tokens * self.profile.forward.message_bytes_per_token
                try:
                    choice = choose(self.profile.nccl, settings, message_bytes=size)
                except EngineError:
                    break
                us = launch * all_reduce_us(self.profile.nccl, choice, message_bytes=size)
                rows.append({"set": name, "outcome": "ok", "tokens": tokens, "mode": "graph", "us_median": us})
        return pa.Table.from_pylist(rows)

    @cached_property
    def _typical(self) -> SimulatedEngine:
        return self.engine(self.spec, seed=0)


@lru_cache(maxsize=32)
def _simulated_truth(landscape: Landscape, seed: int) -> Values:
    engine, values = landscape.engine(landscape.spec, seed=seed), {}
    for member in Space(landscape.spec).configurations():
        try:
            values[member] = engine.expected_tok_s(member, num_blocks=landscape.spec.workload.blocks)
        except EngineError:
            continue
    return values


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One recorded sweep and its space, or a part of it."""

    name: str
    recording: str
    """A folder of `recordings`."""
    part: Callable[[SearchSpec], SearchSpec] = lambda search: search
    replicates: int = 1
    holds: bool | None = None
    table: str | None = None
    """A folder of `recordings` with an all-reduce table."""

    @cached_property
    def spec(self) -> SweepSpec:
        """As `Landscape.spec`. Simulated acceptance was part of what a server was told: here it is the machine's."""
        folder = RECORDINGS / self.recording
        recorded = parse_spec((folder / "spec.yaml").read_text(encoding="utf-8"), source=self.recording)
        text = (
            f"sweep: {self.name}\n"
            f"engine: {{kind: replay, recording: {folder}}}\n"
            "search: {num_steps: [0]}\n"
            f"study: {{max_replicates: {self.replicates}}}\n"
            "control: {every: 0, incumbent: false}\n"
        )
        replayed = parse_spec(text, source=self.name)
        return replace(
            replayed,
            search=self.part(recorded.search),
            nccl_sets=recorded.nccl_sets,
            drafters=recorded.drafters,
            workload=replace(recorded.workload, prompts="synthetic"),  # a replay sends none
        )

    def engine(self, spec: SweepSpec, *, seed: int) -> ReplayEngine:
        """See `Landscape`."""
        return ReplayEngine(spec, seed=seed, recording=self._read)

    def truth(self, seed: int) -> Values:
        """What each configuration was recorded at; the same for every seed."""
        return self._recorded

    @cached_property
    def _read(self) -> Recording:
        return Recording(RECORDINGS / self.recording, self.spec.workload.concurrency)

    def all_reduce_table(self, seed: int) -> pa.Table | None:
        """As recorded on the same host, where it was."""
        if self.table is None:
            return None
        return pq.read_table(RECORDINGS / self.table / "allreduce.parquet")

    def launch_s(self, configuration: Configuration) -> float:
        """Median GPU seconds of a recorded launch and stop; a replayed trace takes no time."""
        return sum(self._read.boot_s.values()) + self._read.stop_s

    def block_s(self, configuration: Configuration) -> float:
        """Mean seconds of a recorded block."""
        return fmean(row["wall_s"] for row in self._read.configurations[configuration.configuration_id].blocks)

    @cached_property
    def _recorded(self) -> Values:
        engine, values = self.engine(self.spec, seed=0), {}
        for member in Space(self.spec).configurations():
            try:
                values[member] = engine.tok_s(member)
            except EngineError:
                continue
        return values


def _drifting(profile: MachineProfile) -> MachineProfile:
    return replace(profile, noise=replace(profile.noise, cold=0.02, drift_per_hour=0.01))


def _interaction(profile: MachineProfile) -> MachineProfile:
    """Speculation with trees gains from a set that chains do not gain from."""
    bends = tuple(
        Interaction(when={"env.NCCL_PROTO": "LL", "eagle_topk": topk}, factor="verify_ms", scale=0.94)
        for topk in ("2", "4")
    )
    return replace(profile, interactions=(*profile.interactions, *bends))


def _accept_by_nccl(profile: MachineProfile) -> MachineProfile:
    bend = Interaction(when={"env.NCCL_PROTO": "LL"}, factor="accept_length", scale=0.92)
    return replace(profile, interactions=(*profile.interactions, bend))


def _verify_by_steps(profile: MachineProfile) -> MachineProfile:
    """The drafter's depth changes verify time, beyond the number of tokens."""
    bends = tuple(
        Interaction(when={"num_steps": steps, "eagle_topk": "2"}, factor="verify_ms", scale=scale)
        for steps, scale in (("2", 1.05), ("3", 0.92), ("4", 1.04), ("5", 0.97))
    )
    return replace(profile, interactions=(*profile.interactions, *bends))


def _draft_by_nccl(profile: MachineProfile) -> MachineProfile:
    bend = Interaction(when={"env.NCCL_P2P_LEVEL": "SYS", "eagle_topk": "1"}, factor="draft_ms", scale=2.5)
    return replace(profile, interactions=(*profile.interactions, bend))


def _saturating(profile: MachineProfile) -> MachineProfile:
    short = Drafter(accept_length=(1.72, 2.05, 2.16, 2.20), tail=0.3, prompt_spread=0.25)
    return replace(profile, drafters={"kimi-k2.5-eagle3": short})


def _uneven_launches(profile: MachineProfile) -> MachineProfile:
    return replace(profile, noise=replace(profile.noise, launch=0.01, block=0.005))


def _restless(profile: MachineProfile) -> MachineProfile:
    """Quiet blocks, launches 3 % apart."""
    return replace(profile, noise=replace(profile.noise, launch=0.03, block=0.002))


def _two_branches(profile: MachineProfile) -> MachineProfile:
    return replace(profile, noise=replace(profile.noise, launch=0.002, block=0.002, launch_branches=0.05))


def _slow_first_blocks(profile: MachineProfile) -> MachineProfile:
    return replace(profile, noise=replace(profile.noise, warmup=0.3))


def _one_set_matters(profile: MachineProfile) -> MachineProfile:
    """By 3 %, among seven that change nothing."""
    bend = Interaction(when={"env.NCCL_MAX_NCHANNELS": "16"}, factor="verify_ms", scale=0.97)
    return replace(profile, interactions=(*profile.interactions, bend))


def _uneven_topk(profile: MachineProfile) -> MachineProfile:
    bends = tuple(
        Interaction(when={"eagle_topk": topk}, factor="accept_length", scale=scale)
        for topk, scale in (("2", 0.93), ("4", 1.06))
    )
    return replace(profile, interactions=(*profile.interactions, *bends))


def _hanging(profile: MachineProfile) -> MachineProfile:
    """A third of the configurations hang at their launch."""
    faults = tuple(
        Fault(when=when, kind="hang_nccl_init", stage="nccl_init", message="NCCL does not come up", source="landscape")
        for when in ({"env.NCCL_PROTO": "LL", "eagle_topk": "2"}, {"env.NCCL_P2P_LEVEL": "SYS", "eagle_topk": "4"})
    )
    return replace(profile, faults=(*profile.faults, *faults))


def _three_drafters(profile: MachineProfile) -> MachineProfile:
    first = profile.drafters["kimi-k2.5-eagle3"]
    others = {
        name: replace(first, accept_length=tuple(1.0 + scale * (each - 1.0) for each in first.accept_length))
        for name, scale in (("shorter", 0.94), ("longer", 1.03))
    }
    return replace(profile, drafters={**profile.drafters, **others})


def _drafting(search: SearchSpec) -> SearchSpec:
    return replace(search, num_steps=tuple(each for each in search.num_steps if each))


def _well_trained(search: SearchSpec) -> SearchSpec:
    """The drafter that was measured with every step count and top-k, and no speculation."""
    return replace(search, num_steps=(0, *search.num_steps), drafter=("trained",))


def _by_nccl_alone(search: SearchSpec) -> SearchSpec:
    """SGLang's own all-reduce, which no NCCL set can change, was recorded with few of the sets."""
    return replace(search, args={"disable-custom-all-reduce": (True,)})


_INERT = "[default, founding-six, ll, p2p-sys, channels, threads, buffer, no-infiniband]"
_PCIE, _TURIN = "rtx-pro-6000-pcie-x8", "rtx-pro-6000-turin-x8"
_H200, _H200_X2 = "h200-nvlink-x8", "h200-nvlink-x2"
_H200_SEARCH = """num_steps: [0, 1, 2, 3, 4, 5, 6, 7]
  nccl: [default, founding-six, ll]
  args: {disable-custom-all-reduce: [false, true]}"""
_H200_SETS = f"""num_steps: [0, 1, 2, 3, 4, 5, 6, 7]
  nccl: {_INERT}"""
_X2_SEARCH = """num_steps: [1, 2, 3]
  nccl: [default, p2p-off, ll-ring, simple, ll128, founding-six]
  args: {disable-custom-all-reduce: [true, false]}"""
_LARGE = f"""num_steps: [0, 1, 2, 3, 4, 5, 6, 7, 8]
  eagle_topk: [1, 2, 4, 8]
  num_draft_tokens: [4, 6, 8, 10, 12, 16, 24, 32]
  nccl: {ALL_SETS}
  args: {{schedule-conservativeness: ["0.5", "1.0"]}}"""


def _turin(name: str, *, reverse_sets: bool = False, **options: object) -> Landscape:
    sets = (
        "[no-p2p, no-infiniband, graph-file, p2p-sys-tree, p2p-sys-ll, ll, p2p-sys, default]"
        if reverse_sets
        else ALL_SETS
    )
    return Landscape(name=name, machine=_TURIN, sets=TURIN_SETS, search=f"{TREES}\n  nccl: {sets}", **options)  # type: ignore[arg-type]


LANDSCAPES: Mapping[str, Landscape | Replay] = {
    each.name: each
    for each in (
        Landscape(
            name="founding", machine=_PCIE, drafter="founding", sets=INERT_SETS, search=f"{TREES}\n  nccl: {_INERT}"
        ),
        Landscape(name="pcie-eagle3", machine=_PCIE, sets=INERT_SETS, search=f"{TREES}\n  nccl: {_INERT}"),
        Landscape(name="h200-48", machine=_H200, sets=INERT_SETS, search=_H200_SEARCH),
        Landscape(name="h200-sets", machine=_H200, sets=INERT_SETS, search=_H200_SETS),
        _turin("turin"),
        _turin("turin-noise-x4", noise=4.0),
        _turin("turin-drift", bend=_drifting),
        _turin("turin-saturating", bend=_saturating),
        _turin("broken-nccl-topk", holds=False, bend=_interaction),
        _turin("broken-accept-nccl", holds=False, bend=_accept_by_nccl),
        _turin("broken-verify-steps", holds=False, bend=_verify_by_steps),
        _turin("broken-draft-nccl", holds=False, bend=_draft_by_nccl),
        _turin("broken-launches", holds=False, bend=_uneven_launches),
        Landscape(
            name="h200-x2-restless", machine=_H200_X2, drafter="mini", sets=X2_SETS, search=_X2_SEARCH, holds=False
        ),
        _turin("launches-3", holds=False, bend=_restless),
        _turin("two-branches", holds=False, bend=_two_branches),
        _turin("slow-first-blocks", bend=_slow_first_blocks),
        _turin("uneven-topk", bend=_uneven_topk),
        _turin("hanging", bend=_hanging),
        _turin("default-last", reverse_sets=True),
        Landscape(
            name="sparse",
            machine=_PCIE,
            sets=INERT_SETS,
            search=f"{TREES}\n  nccl: {_INERT}",
            bend=_one_set_matters,
        ),
        Landscape(
            name="three-drafters",
            machine=_H200,
            further_drafters=("shorter", "longer"),
            search="num_steps: [0, 1, 2, 3, 5, 7]\n  drafter: [kimi-k2.5-eagle3, shorter, longer]",
            bend=_three_drafters,
        ),
        Landscape(name="turin-2000", machine=_TURIN, sets=TURIN_SETS, search=_LARGE),
        Replay(name="h200-replay", recording="h200_kimi_mini_v1"),
        Replay(name="h200-replay-drafting", recording="h200_kimi_mini_v1", part=_drafting, replicates=4),
        Replay(name="h200-replay-pinned", recording="h200_kimi_mini_pinned_v1", replicates=4),
        Replay(name="h200-replay-real", recording="h200_miniature_v1", part=_well_trained),
        Replay(
            name="h200-replay-nccl",
            recording="h200_x2_nccl_v1",
            part=_by_nccl_alone,
            replicates=2,
            table="nccl_allreduce_h200_x2",
        ),
    )
}
