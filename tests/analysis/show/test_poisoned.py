"""A results folder that somebody else prepared: it is data, on the page, in the terminal and on the disk."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from analysis.__main__ import main
from analysis.data.load import load
from analysis.judge.verdict import SweepVerdict, verdict
from analysis.show.closing_sections import shell_lines
from analysis.show.report import page, write_report
from analysis.show.short_form import print_short_form
from sweeps.foreign_text import console
from tests.analysis.synthetic import FOUNDING_CONTROL, QUIET, STEPS, Run, write_sweep

OWN = "document.body.dataset.owned=1"
POISON = (
    f"<img src=x onerror={OWN}>"
    f"</script><script>{OWN}</script>"
    f"\"'><svg onload={OWN}>"
    f'<a href="javascript:{OWN}">x</a><b style="background:url(http://127.0.0.1:1/x)">'
    "[/x][red]${body}\x1b]0;owned\x07\x1b[2J\u202e\nfaked: line"
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """Every text of the folder that no code compares with anything: names, reasons, commands, machines."""
    columns = {
        "machine": POISON,
        "command": ["python", "-m", POISON, "--a", f"--b={POISON}"],
        "environment": [("X", POISON)],
        "removed_env": [POISON],
        "drafter": POISON,
    }
    failed = {**columns, "reason": POISON, "kind": "crash", "stage": "load", "log_tail": POISON}
    arms = [replace(arm, nccl=f"{POISON}{number}") for number, arm in enumerate((*STEPS, FOUNDING_CONTROL))]
    runs = [
        Run(arm=FOUNDING_CONTROL, role="control", columns=columns),
        *(Run(arm=arm, columns=columns) for arm in arms),
        Run(arm=replace(STEPS[0], nccl="late"), status="failed", columns=failed, num_blocks=0),
        Run(arm=FOUNDING_CONTROL, role="control", columns=columns),
    ]
    return write_sweep(tmp_path / "results", runs, QUIET, engine="sglang", machine=POISON)


class Elements(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_holds_no_element_of_the_folder(poisoned: Path) -> None:
    elements = Elements()
    elements.feed(page(verdict(load(poisoned))))
    assert not set(elements.tags) & {"img", "svg", "a", "iframe"}
    assert elements.tags.count("script") == 2
    assert not [name for name in elements.attributes if name.startswith("on")]
    assert "href" not in elements.attributes


def dumped(path: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what was said on the console."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [CHROMIUM, *flags, profile, "--virtual-time-budget=20000", "--dump-dom", path.as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return seen.stdout, [line for line in seen.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
class TestInChromium:
    """The page as a browser sees it."""

    def test_nothing_of_the_folder_runs_and_the_figures_are_drawn(self, poisoned: Path, tmp_path: Path) -> None:
        write_report(verdict(load(poisoned)), tmp_path / "page.html")
        document, said = dumped(tmp_path / "page.html")
        assert "data-owned" not in document
        assert said == []
        assert document.count('class="main-svg"') > 2
        assert "<img" not in document
        assert not re.search(r"<[^>]*\son\w+=", document.split("</script>")[-1])

    def test_what_gets_past_the_escapes_does_not_run_either(self, poisoned: Path, tmp_path: Path) -> None:
        """The policy of the page allows its own two scripts, by their content."""
        text = page(verdict(load(poisoned)))
        injected = f"<script>{OWN}</script><img src=x onerror={OWN}><a id=a href='javascript:{OWN}'>x</a>"
        (tmp_path / "page.html").write_text(text.replace("</header>", f"</header>{injected}", 1), encoding="utf-8")
        document, said = dumped(tmp_path / "page.html")
        assert "data-owned" not in document
        assert any("Content Security Policy" in line for line in said)
        assert document.count('class="main-svg"') > 2


def judged(poisoned: Path) -> SweepVerdict:
    return verdict(load(poisoned))


@pytest.fixture(params=["ours", "rich"])
def written(request: pytest.FixtureRequest, poisoned: Path) -> str:
    sink = io.StringIO()
    own = console(file=sink) if request.param == "ours" else Console(file=sink, width=160)
    print_short_form(judged(poisoned), own)
    return sink.getvalue()


def test_the_terminal_gets_no_command_and_no_line_of_the_folder(written: str) -> None:
    assert all(letter.isprintable() or letter == "\n" for letter in written)
    assert not [line for line in written.splitlines() if line.startswith("faked")]
    assert "[/x][red]" in written.replace("\n", "")


def test_the_commands_print_the_poisoned_folder(poisoned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verdict", str(poisoned)], ["verdict", str(poisoned), "--json"], ["report", str(poisoned)]):
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert all(letter.isprintable() or letter == "\n" for letter in out + err)


def test_an_error_about_a_path_is_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdict", f"{tmp_path}/\x1b[2J\udc80"]) == 2
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def test_the_report_is_not_written_through_a_link(poisoned: Path, tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("precious")
    (poisoned / "report.html").symlink_to(victim)
    assert main(["report", str(poisoned)]) == 0
    assert victim.read_text() == "precious"
    assert not (poisoned / "report.html").is_symlink()
    assert (poisoned / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(poisoned.glob(".report*"))


def test_a_report_on_standard_output_stays_possible(poisoned: Path) -> None:
    write = "from analysis.__main__ import main; import sys; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", write, "report", str(poisoned), "--out", "/dev/stdout"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert "<!doctype html>" in ran.stdout
    assert Path("/dev/stdout").is_symlink()


def test_the_folder_that_holds_the_report_must_be_writable(poisoned: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert main(["report", str(poisoned), "--out", str(blocked / "page.html")]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-m", "sglang.launch_server", "--json-model-override-args", '{"a": "x --y"}', "--flag"],
        ["env", "-u", "X", "A=b -m c", "python", "-m", "m -m n", "--a", "$(id)", "--b=`id`; rm", "it's", "\\", ""],
        ["--x", "a\nb --c", "-m"],
    ],
)
def test_a_shell_reads_the_broken_command_as_the_same_words(words: list[str]) -> None:
    text = f"printf '%s\\0' {shell_lines(shlex.join(words))}"
    ran = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True, env={"PATH": os.environ["PATH"]})
    assert ran.stdout.decode().split("\0")[:-1] == words
