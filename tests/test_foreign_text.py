"""Text of others neither commands a terminal nor forges lines nor is taken for markup."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table

from sweeps.foreign_text import cell, console, one_line, printable, unprintable

NASTY = "\x1b]8;;http://x\x07a\x1b[2J[/x][red]:smile:\r\u202e\x9b2J\ud800"


@given(st.text())
def test_one_line_is_printable_and_keeps_what_was(text: str) -> None:
    assert one_line(text).isprintable()
    assert all(line.isprintable() for line in printable(text).split("\n"))
    if text.isprintable():
        assert one_line(text) == text


@given(st.text())
def test_a_console_writes_no_control_character_whatever_it_is_given(text: str) -> None:
    sink = io.StringIO()
    made = console(file=sink)
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    table.add_row(cell(text))
    made.print(text)
    made.print(table)
    made.print(Panel(text, title=cell(text)))
    assert all(letter.isprintable() or letter == "\n" for letter in sink.getvalue())


def test_a_console_takes_no_markup_and_no_emoji() -> None:
    sink = io.StringIO()
    console(file=sink).print(NASTY)
    assert "[/x][red]:smile:" in sink.getvalue()


def test_the_first_character_that_is_not_printable() -> None:
    assert unprintable("a b") is None
    assert unprintable("a\nb", allowed="\n") is None
    assert unprintable("a\x1bb\0") == "\\x1b"
