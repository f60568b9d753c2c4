"""Text of others on this terminal: names of a spec, lines of a server's log, cells of a results folder, paths.

Such text may hold escape sequences (a title, a cleared screen, a link), line breaks that forge a line of a log, and
square brackets that rich takes for markup. What is printed goes through here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STAND_IN = "\N{REPLACEMENT CHARACTER}"
"""One column wide, as a table that is already laid out needs it."""


def printable(text: str) -> str:
    r"""`text` with its line breaks, and everything else that is not printable as an escape (`\x1b`)."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    r"""`text` with everything that is not printable as an escape (`\x1b`, `\n`, `\u202e`)."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else repr(letter)[1:-1]


def unprintable(text: str, *, allowed: str = "") -> str | None:
    """The first character of `text` that is neither printable nor `allowed`, as an escape; None if there is none."""
    return next((_escaped(each) for each in text if not each.isprintable() and each not in allowed), None)


def cell(text: object, *, style: str = "") -> Text:
    """For rich: exactly these characters on one line, no markup."""
    from rich.text import Text

    return Text(one_line(str(text)), style=style)


def console(*, file: IO[str] | None = None, log_width: int = 160) -> Console:
    """A console that takes no markup and lets no character through that moves the cursor or commands the terminal.

    Args:
        log_width: columns where the output is no terminal.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **options):
                if segment.control or segment.text.isprintable() or segment.text == "\n":
                    yield segment
                else:
                    yield Segment("".join(map(_stand_in, segment.text)), segment.style)

    options: dict[str, Any] = {"file": file, "markup": False, "emoji": False, "highlight": False}
    made = PlainConsole(**options)
    return made if made.is_terminal else PlainConsole(**options, width=log_width, no_color=True)


def _stand_in(letter: str) -> str:
    return letter if letter.isprintable() or letter == "\n" else _STAND_IN


def print_error(error: object) -> None:
    """`error: ...` on standard error: the end of a command that a person can mend."""
    sys.stderr.write(f"error: {printable(str(error))}\n")
