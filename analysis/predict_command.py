"""`python -m analysis predict RESULTS`: a node of many GPUs from the share of one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from analysis.data.load import Results, load
from analysis.judge.node import Latency, NotPredictableError, Shape, predict_node
from analysis.judge.verdict import verdict
from analysis.show.node import node_document, node_markdown

_PROJECT = Path(__file__).parents[1]
"""Recorded commands name models below the project's folder by relative paths."""


def add_predict_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The options of the command."""
    parser = commands.add_parser("predict", help="a node of many GPUs, from a sweep of one GPU's share of it")
    parser.add_argument("results", type=Path, help="a results folder whose model is the share of one GPU")
    parser.add_argument("--gpus", type=int, default=8, help="of the node (8)")
    latency = parser.add_mutually_exclusive_group(required=True)
    latency.add_argument(
        "--all-reduce-us", type=float, nargs="+", metavar="US", help="microseconds of one all-reduce, or LOW HIGH"
    )
    latency.add_argument("--all-reduce-table", type=Path, metavar="DIR", help="what `allreduce` wrote on such a node")
    parser.add_argument("--nccl-set", default="default", help="of the table (default)")
    parser.add_argument(
        "--accept-length",
        type=float,
        nargs="+",
        metavar="TOKENS",
        help="tokens a cycle at 1, 2, 3, ... steps; the recorded ones if absent",
    )
    parser.add_argument("--layers", type=int, help="of the target, if its config.json is not at hand")
    parser.add_argument("--hidden", type=int, help="hidden size, likewise")
    parser.add_argument("--format", choices=("md", "json"), default="md")


def run_predict(options: argparse.Namespace) -> int:
    """Print the prediction. Returns 0; raises ValueError, one line."""
    results = load(options.results)
    judged = verdict(results)
    shape = _shape(results, options.layers, options.hidden)
    latency = (
        stated_latency(options.all_reduce_us)
        if options.all_reduce_us is not None
        else table_latency(options.all_reduce_table, options.nccl_set, options.gpus)
    )
    lengths = _accept_lengths(options.accept_length) if options.accept_length else _recorded_lengths(results)
    rates = predict_node(results, judged, shape=shape, latency=latency, accept_lengths=lengths)
    if options.format == "json":
        print(json.dumps(node_document(results, rates, latency, shape), indent=2, allow_nan=False))
    else:
        print(node_markdown(results, rates, latency, shape, options.gpus), end="")
    return 0


def stated_latency(us: list[float]) -> Latency:
    """One figure or a range, for every message size. Raises ValueError for anything else."""
    if len(us) > 2 or us != sorted(us) or not us[0] > 0:
        raise ValueError(f"--all-reduce-us: wanted one positive figure, or LOW HIGH, got {' '.join(map(str, us))}")
    low, high = us[0], us[-1]
    told = f"{low:g} us" if low == high else f"{low:g} to {high:g} us"
    return Latency(nbytes=(0.0,), low_us=(low,), high_us=(high,), source=f"{told}, as stated, whatever its size")


def table_latency(folder: Path, nccl_set: str, num_gpus: int) -> Latency:
    """Of one set, replayed as a CUDA graph: its 10th to 90th percentile by size. Raises ValueError, one line."""
    path = folder / "allreduce.parquet"
    if not path.is_file():
        raise ValueError(f"--all-reduce-table: wanted a folder of `specsweep allreduce`, but {path} does not exist")
    table = pl.read_parquet(path)
    wanted = {"set", "mode", "bytes", "world_size", "us_p10", "us_p90"}
    if missing := wanted - set(table.columns):
        raise ValueError(f"--all-reduce-table: {path} lacks the columns {', '.join(sorted(missing))}")
    own = table.filter((pl.col("set") == nccl_set) & (pl.col("mode") == "graph")).drop_nulls(["us_p10", "us_p90"])
    if own.is_empty():
        sets = ", ".join(sorted(table["set"].unique()))
        raise ValueError(f"--nccl-set: {nccl_set} was not timed as a graph in {path}; the sets are {sets}")
    ranks = {int(each) for each in own["world_size"]}
    if ranks != {num_gpus}:
        timed = ", ".join(map(str, sorted(ranks)))
        raise ValueError(f"--all-reduce-table: {path} was timed with {timed} GPUs, but --gpus is {num_gpus}")
    sizes = own.group_by("bytes").agg(low=pl.col("us_p10").min(), high=pl.col("us_p90").max()).sort("bytes")
    return Latency(
        nbytes=tuple(map(float, sizes["bytes"])),
        low_us=tuple(sizes["low"]),
        high_us=tuple(sizes["high"]),
        source=f"what {nccl_set} took in {path} as a graph, 10th to 90th percentile by size",
    )


def _accept_lengths(tokens: list[float]) -> Mapping[int, float]:
    for steps, length in enumerate(tokens, start=1):
        if not 1 <= length <= steps + 1:
            raise ValueError(f"--accept-length: {steps} steps give 1 to {steps + 1} tokens a cycle, got {length:g}")
    return dict(enumerate(tokens, start=1))


def _recorded_lengths(results: Results) -> Mapping[int, float]:
    if results.pinned:
        raise ValueError("--accept-length: needed, because the recorded accept length was pinned")
    chains = results.trials.filter(pl.col("eagle_topk") == 1).select("trial_id", "num_steps")
    means = results.blocks.join(chains, on="trial_id").group_by("num_steps").agg(pl.col("accept_length").mean())
    return {int(steps): float(length) for steps, length in means.drop_nulls().iter_rows()}


def _shape(results: Results, layers: int | None, hidden: int | None) -> Shape:
    config = _config(results) if layers is None or hidden is None else {}
    found = {"num_hidden_layers": layers, "hidden_size": hidden}
    for name, given in found.items():
        value = config.get(name) if given is None else given
        if not isinstance(value, int) or value < 1:
            option = "--layers" if name == "num_hidden_layers" else "--hidden"
            raise ValueError(f"{option}: needed, because the recorded model's config.json is not here ({name})")
        found[name] = value
    assert found["num_hidden_layers"] is not None, "checked above"
    assert found["hidden_size"] is not None, "checked above"
    return Shape(layers=found["num_hidden_layers"], hidden=found["hidden_size"])


def _config(results: Results) -> Mapping[str, object]:
    """The target's config.json by the recorded command; empty if it is not here."""
    for command in results.trials["command"].drop_nulls().to_list():
        words = list(command)
        if "--model-path" not in words[:-1]:
            continue
        folder = Path(words[words.index("--model-path") + 1])
        for place in (folder, _PROJECT / folder):
            if (path := place / "config.json").is_file():
                try:
                    found = json.loads(path.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise NotPredictableError(f"{path}: wanted JSON: {error}") from error
                return found if isinstance(found, dict) else {}
    return {}
