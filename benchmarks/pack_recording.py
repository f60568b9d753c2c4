"""Pack a finished results folder as a recording: `python -m benchmarks.pack_recording FOLDER OUT`.

A sweep writes one Parquet part per trial and table; a packed recording has one part per table, `tables/TABLE/
sweep.parquet`, with the same rows in the same order. It is for reading: the analysis and the replay engine take it as
any results folder, a sweep refuses to resume it. Only resuming needs the study's journal, which is therefore left out,
as are server logs and Ray's own folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sweeps.results.tables import SCHEMA_VERSION, TABLES, ResultsFolder, TableError, read_table

README = "README.md"


def pack(source: Path, out: Path) -> None:
    """Write the packed recording of one results folder.

    Args:
        source: a results folder whose sweep has ended, packed or not. It is not changed.
        out: a folder that does not exist yet. It gets the tables that have rows, `spec.yaml` and `sweep.json` byte for
            byte, and the README where `source` has one.

    Raises TableError where `source` is no results folder, holds what no part has taken up yet, or `out` exists.
    """
    folder, packed = ResultsFolder(source), ResultsFolder(out)
    folder.read_manifest()
    if out.exists():
        raise TableError(f"{out}: wanted a new folder, but it exists")
    if left := sorted(path.name for path in (source / "journal").glob("*.jsonl")):
        raise TableError(f"{source}: trials have not been turned into parts: {', '.join(left)}; resume the sweep first")
    tables = {name: read_table(folder, name) for name in TABLES}
    out.mkdir(parents=True)
    for path in (folder.spec, folder.manifest, source / README):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    for name, rows in tables.items():
        if rows.num_rows:
            _write(packed.packed(name), name, rows)


def _write(path: Path, table: str, rows: pa.Table) -> None:
    metadata = {"specsweep.table": table, "specsweep.schema_version": str(SCHEMA_VERSION)}
    measured = [field.name for field in rows.schema if pa.types.is_floating(field.type)]
    path.parent.mkdir(parents=True)
    pq.write_table(
        rows.replace_schema_metadata(metadata),
        path,
        compression="zstd",
        compression_level=19,
        # measured times hardly repeat: their bytes compress to three quarters when those of one place stand together
        use_byte_stream_split=measured,
        use_dictionary=[name for name in rows.column_names if name not in measured],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack one folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pack_recording", description=__doc__)
    parser.add_argument("folder", type=Path, help="the results folder of a sweep that has ended")
    parser.add_argument("out", type=Path, help="the recording, a new folder")
    options = parser.parse_args(arguments)
    try:
        pack(options.folder, options.out)
    except TableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
