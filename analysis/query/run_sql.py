"""Runs one SELECT over the sound rows of a results folder, in a DuckDB that can reach nothing else.

The tables are registered before DuckDB is locked: no file, no network, no extension, no setting can be reached by the
query. Only SELECT is allowed, so nothing can be written either.
"""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import polars as pl

from analysis.data.load import open_folder
from analysis.data.sound import read_sound
from sweeps.results.schemas import TABLES
from sweeps.results.tables import Damage, TableError

_LOCK = (
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class QueryError(TableError):
    """A query that is no single SELECT, or that DuckDB refuses: one line."""


def run_sql(root: Path, sql: str) -> tuple[pl.DataFrame, tuple[Damage, ...]]:
    """The rows that a SELECT gives, and the damaged parts whose rows it did not see.

    Tables: those of `sweeps.results.schemas.TABLES`; only the tables that `sql` names are read.

    Raises TableError for a folder that cannot be read, QueryError for the query.
    """
    folder, sweep_id = open_folder(root)
    named = tuple(name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE))
    read = read_sound(folder, tuple(dict.fromkeys((*named, "trials", "blocks"))), sweep_id=sweep_id)
    with duckdb.connect(":memory:") as connection:
        for name, frame in read.frames.items():
            connection.register(name, frame.to_arrow())
        for setting in _LOCK:
            connection.execute(setting)
        return _select(connection, sql), read.damaged


def _select(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame:
    try:
        statements = connection.extract_statements(sql)
        kinds = [statement.type.name for statement in statements]
        if kinds != ["SELECT"]:
            got = " and ".join(kinds) if kinds else "nothing"
            raise QueryError(f"wanted one SELECT over {', '.join(TABLES)}, got {got}")
        found = pl.from_arrow(connection.sql(statements[0]).to_arrow_table())
        assert isinstance(found, pl.DataFrame)
        return found
    except duckdb.Error as error:
        raise QueryError(" ".join(str(error).split())) from error
