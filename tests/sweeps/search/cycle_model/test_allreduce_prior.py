from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweeps.engines.base import KernelTime
from sweeps.search.cycle_model.allreduce_prior import LAUNCH_NOISE, AllReducePrior, all_reduces, read_prior
from sweeps.spec.document import SpecError

RECORDED = Path(__file__).parents[4] / "recordings" / "nccl_allreduce_h200_x2" / "allreduce.parquet"


def row(nccl_set: str, tokens: int, us: float | None, mode: str = "graph", outcome: str = "ok") -> dict[str, object]:
    return {"set": nccl_set, "outcome": outcome, "tokens": tokens, "mode": mode, "us_median": us}


def written(path: Path, *rows: Mapping[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def kernel(name: str, calls: float, phase: str = "verify") -> KernelTime:
    return KernelTime(phase=phase, kind="communication", kernel=name, us_per_cycle=1.0, calls_per_cycle=calls)  # type: ignore[arg-type]


def test_of_the_recorded_table_only_what_exceeds_the_noise_is_expected() -> None:
    prior = read_prior(RECORDED)
    expected = {name: prior.difference_us(name, 3) for name in ("misspelt", "LL", "Ring", "founding-six", "ll-ring")}
    assert set(expected.values()) == {0.0}
    assert prior.difference_us("simple", 3) == pytest.approx(11.4, abs=0.5)
    assert 0.0 < prior.difference_us("ll128", 3) < prior.difference_us("p2p-off", 16)


def test_between_measured_sizes_it_is_linear_and_beyond_them_flat() -> None:
    prior = AllReducePrior(us={"default": {2: 10.0, 4: 10.0}, "slow": {2: 20.0, 4: 40.0}})
    assert [prior.difference_us("slow", tokens) for tokens in (1, 2, 3, 4, 9)] == [10.0, 10.0, 20.0, 30.0, 30.0]
    assert prior.difference_us("never timed", 3) == 0.0


@pytest.mark.parametrize(("share", "counts"), [(LAUNCH_NOISE - 0.01, False), (LAUNCH_NOISE + 0.01, True)])
def test_launch_noise_is_no_expectation(share: float, counts: bool) -> None:
    prior = AllReducePrior(us={"default": {1: 100.0}, "other": {1: 100.0 * (1.0 - share)}})
    assert (prior.difference_us("other", 1) < 0.0) is counts


def test_eager_figures_serve_where_no_graph_was_replayed(tmp_path: Path) -> None:
    eager = [row("default", 1, 30.0, "eager"), row("ll", 1, 15.0, "eager"), row("hung", 1, None, "eager", "hang")]
    assert read_prior(written(tmp_path / "eager.parquet", *eager)).difference_us("ll", 1) == -15.0
    both = [*eager, row("default", 1, 20.0), row("ll", 1, 10.0)]
    assert read_prior(written(tmp_path / "both.parquet", *both)).difference_us("ll", 1) == -10.0


def test_the_communicators_of_a_set_are_averaged(tmp_path: Path) -> None:
    rows = [row("default", 1, 20.0), row("default", 1, 30.0), row("ll", 1, 10.0)]
    assert read_prior(written(tmp_path / "copies.parquet", *rows)).difference_us("ll", 1) == -15.0


@pytest.mark.parametrize("content", [b"", b"no parquet"])
def test_what_is_no_table_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"allreduce: wanted allreduce\.parquet .*x\.parquet"):
        read_prior(path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_prior(tmp_path / "absent.parquet")


def test_a_table_without_the_default_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="wanted figures of the set default, got ll"):
        read_prior(written(tmp_path / "t.parquet", row("ll", 1, 10.0)))


def test_all_reduces_are_those_of_nccl_inside_the_target_forward() -> None:
    traced = [
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 49.0),
        kernel("ncclDevKernel_AllGather_RING_LL", 1.0),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 3.0, "extend"),
        kernel("cross_device_reduce_1stage", 49.0),
    ]
    assert all_reduces(traced) == 49.0
    assert all_reduces(traced[3:]) == 0
