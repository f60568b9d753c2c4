"""The page of all tables: `python -m analysis.query.table_reference > docs/tables.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from analysis.query.questions import QUESTIONS
from sweeps.results.schemas import SCHEMA_VERSION, TABLE_SPECS, Column

_HEAD = f"""# Tables of a results folder

Written by `python -m analysis.query.table_reference`; change `sweeps/results/schemas.py` and
`analysis/query/questions.py`, not this page. Schema version {SCHEMA_VERSION}. A column without `*` may be null: not
known, or not there.

Each table is a folder `tables/TABLE` of Parquet files, one for each attempt at a trial. Rows join on `trial_id` and
`attempt`. `specsweep query FOLDER "SELECT ..."` runs one SELECT over all of them. It reads nothing else and writes
nothing; `--format csv|json|md` gives other forms. Python gets the same rows from `analysis.frames(FOLDER)`
([notebook.md](notebook.md)).
"""


def reference() -> str:
    """The whole page, in markdown."""
    return "\n".join([_HEAD, *_questions(), *_tables()])


def _questions() -> Iterator[str]:
    yield "## Ten questions\n"
    for question, sql in QUESTIONS:
        yield f"{question}\n\n```sql\n{sql}\n```\n"


def _tables() -> Iterator[str]:
    for name, table in TABLE_SPECS.items():
        yield f"## {name}\n\nA row is {table.meaning}.\n\n| column | type | unit | meaning |\n|---|---|---|---|"
        yield from map(_row, table.columns)
        yield ""


def _row(column: Column) -> str:
    star = "*" if column.required else ""
    kind = str(column.type).replace("|", "\\|")
    return f"| `{column.name}`{star} | {kind} | {column.unit} | {column.meaning} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
