"""What a notebook or a script asks of a results folder, in a handful of functions. `docs/notebook.md` shows them."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from analysis.data.load import Results, load, read_frames
from analysis.judge.verdict import SweepVerdict
from analysis.judge.verdict import verdict as judge
from analysis.show.report import write_report


def frames(root: str | Path) -> dict[str, pl.DataFrame]:
    """Every table as it was recorded, by name; nothing is left out. Columns: docs/tables.md.

    `trials` (one row per attempt), `blocks`, `anchors`, `requests`, `cycles` (one row per rank and cycle), `evidence`,
    `kernels`, `events`. Rows join on `trial_id` and `attempt`. Raises TableError.
    """
    return read_frames(Path(root))


def verdict(of: Results | str | Path) -> SweepVerdict:
    """Judge a sweep: what `specsweep verdict` prints. Raises TableError if a folder cannot be read."""
    return judge(of if isinstance(of, Results) else load(of))


def report(of: SweepVerdict | Results | str | Path, out: str | Path) -> Path:
    """Write the report page to `out` and return that path. Raises TableError and OSError."""
    write_report(of if isinstance(of, SweepVerdict) else verdict(of), Path(out))
    return Path(out)


def configurations(judged: SweepVerdict) -> pl.DataFrame:
    """One row per configuration with results, fastest first.

    Columns: `configuration_id`, `label`, `role` (control or candidate), `speculates`, `pruned`, `tok_s`,
    `tok_s_low`, `tok_s_high` (95 % interval), `num_launches`, `num_blocks`, `accept_length` (tokens per cycle),
    `cycle_ms`, `draft_ms`, `verify_ms` (of a plain decode step too), `extend_ms`, and against the control: `effect`
    (relative: 0.1 is 10 % faster), `effect_low`, `effect_high`, `verdict`. What is not known is null.
    """
    phases = {each.configuration_id: each for each in judged.phases}
    rows = []
    for side in judged.sides:
        cycle, effect = phases[side.configuration_id], side.against_control
        low, high = side.interval or (None, None)
        effect_low, effect_high = effect.interval if effect else (None, None)
        rows.append(
            {
                "configuration_id": side.configuration_id,
                "label": side.label,
                "role": side.role,
                "speculates": side.speculates,
                "pruned": side.pruned,
                "tok_s": side.tok_s,
                "tok_s_low": low,
                "tok_s_high": high,
                "num_launches": side.num_launches,
                "num_blocks": side.num_blocks,
                "accept_length": cycle.accept_length,
                "cycle_ms": cycle.cycle_ms,
                "draft_ms": cycle.draft_ms,
                "verify_ms": cycle.verify_ms if cycle.verify_ms is not None else cycle.decode_ms,
                "extend_ms": cycle.extend_ms,
                "effect": effect.effect if effect else None,
                "effect_low": effect_low,
                "effect_high": effect_high,
                "verdict": effect.verdict if effect else None,
            }
        )
    return pl.DataFrame(rows, schema=_CONFIGURATIONS)


_NUMBERS = ("tok_s", "tok_s_low", "tok_s_high")
_CYCLE = ("accept_length", "cycle_ms", "draft_ms", "verify_ms", "extend_ms")
_EFFECT = ("effect", "effect_low", "effect_high")
_CONFIGURATIONS = pl.Schema(
    {
        **dict.fromkeys(("configuration_id", "label", "role"), pl.String()),
        **dict.fromkeys(("speculates", "pruned"), pl.Boolean()),
        **dict.fromkeys(_NUMBERS, pl.Float64()),
        **dict.fromkeys(("num_launches", "num_blocks"), pl.Int64()),
        **dict.fromkeys((*_CYCLE, *_EFFECT), pl.Float64()),
        "verdict": pl.String(),
    }
)
