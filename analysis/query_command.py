"""`python -m analysis query RESULTS "SELECT ..."`: SQL over the tables of a results folder."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import polars as pl
from rich.table import Table

from sweeps.foreign_text import cell, console, print_error, printable

_NO_DUCKDB = (
    "query: wanted the package duckdb, which is not installed: pip install -r requirements-analysis.txt "
    "(or pip install 'specsweep[analysis]')"
)
_WIDTH = 140


def add_query_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The options of the command."""
    parser = commands.add_parser("query", help="SQL over the tables of a results folder (docs/tables.md)")
    parser.add_argument("results", type=Path, help="a results folder")
    parser.add_argument("sql", help="one SELECT; it can read the tables and nothing else")
    parser.add_argument("--format", choices=("table", "csv", "json", "md"), default="table")
    parser.add_argument("--strict", action="store_true", help="a damaged file is an error, not an exclusion")


def run_query(options: argparse.Namespace) -> int:
    """Print the rows. Returns 0; raises ValueError, one line. Damaged files are named on stderr."""
    try:
        from analysis.query.run_sql import run_sql
    except ModuleNotFoundError as error:
        if error.name != "duckdb":
            raise
        raise ValueError(_NO_DUCKDB) from error
    rows, damaged = run_sql(options.results, options.sql)
    if damaged and options.strict:
        raise ValueError(f"--strict: {len(damaged)} files are damaged; the first: {damaged[0]}")
    for damage in damaged:
        print_error(f"left out: {damage}")
    _print(rows, options.format)
    return 0


def _print(rows: pl.DataFrame, form: str) -> None:
    if form == "csv":
        flat = [pl.Series(column.name, list(map(_text, column.to_list())), pl.String) for column in rows]
        sys.stdout.write(pl.DataFrame(flat).write_csv())
    elif form == "json":
        listed = [dict(zip(rows.columns, map(_plain, row), strict=True)) for row in rows.rows()]
        print(json.dumps(listed, indent=2, default=str, allow_nan=False))
    elif form == "md":
        print(f"| {' | '.join(map(_in_table, rows.columns))} |")
        print(f"|{'---|' * rows.width}")
        for row in rows.rows():
            print(f"| {' | '.join(_in_table('' if value is None else _short(value)) for value in row)} |")
    else:
        table = Table()
        for name in rows.columns:
            table.add_column(cell(name))
        for row in rows.rows():
            table.add_row(*(cell("-" if value is None else _short(value)) for value in row))
        console(log_width=_WIDTH).print(table)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(_plain(value))


def _text(value: object) -> str | None:
    """For CSV: nested values as JSON."""
    plain = _plain(value)
    return json.dumps(plain, default=str) if isinstance(plain, dict | list) else None if plain is None else str(plain)


def _plain(value: object) -> object:
    """A map as a dict; no NaN, which JSON does not know."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if not isinstance(value, list):
        return value
    if value and all(isinstance(each, dict) and each.keys() == {"key", "value"} for each in value):
        return {str(each["key"]): _plain(each["value"]) for each in value}
    return list(map(_plain, value))


def _in_table(text: str) -> str:
    return printable(text).replace("|", "\\|")
