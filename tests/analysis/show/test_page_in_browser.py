"""The page in a browser, on a phone and on a wide screen, light and dark: nothing cut, no error, a table that works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from analysis.data.load import load
from analysis.judge.verdict import verdict
from analysis.show.report import write_report

RECORDING = Path(__file__).parents[3] / "recordings" / "h200_x2_nccl_v1"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DARK = "--blink-settings=preferredColorScheme=0"
LOOK = """
<!doctype html><iframe id=page width=WIDTH height=900 src="page.html" style="border:0"></iframe><pre id=seen></pre>
<script>
addEventListener("load", () => setTimeout(() => {
  const page = document.getElementById("page").contentDocument, root = page.documentElement;
  const outside = [...page.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBoundingClientRect(), figure = text.closest("div.figure").getBoundingClientRect();
    return box.width > 0 && (box.right > figure.right + 1 || box.left < figure.left - 1);
  });
  const rows = () => [...page.querySelectorAll("#configurations tbody tr")];
  const rates = () => rows().map((row) => Number(row.cells[1].dataset.value));
  const heading = [...page.querySelectorAll("th[data-sort]")].find((each) => each.textContent === "tok/s");
  heading.click();
  const falling = rates();
  heading.click();
  const rising = rates();
  const field = page.querySelector("input[type=search]");
  field.value = "simple steps 2";
  field.dispatchEvent(new Event("input"));
  document.getElementById("seen").textContent = JSON.stringify({
    width: root.scrollWidth, outside: outside.map((text) => text.textContent), falling, rising,
    left: rows().filter((row) => !row.hidden).map((row) => row.cells[0].textContent),
    background: getComputedStyle(page.body).backgroundColor,
    drawn: page.querySelectorAll(".main-svg").length,
  });
}, 1500));
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page")
    write_report(verdict(load(RECORDING)), made / "page.html")
    return made


def seen(folder: Path, *, width: int, flags: tuple[str, ...] = ()) -> tuple[dict[str, Any], list[str]]:
    """What a page in a frame of this width looks like, and what the browser's console said."""
    assert CHROMIUM is not None
    look = folder / f"look-{width}.html"
    look.write_text(LOOK.replace("WIDTH", str(width)), encoding="utf-8")
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--allow-file-access-from-files", "--enable-logging=stderr", "--window-size=1500,1000"),
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", *flags),
        *("--dump-dom", look.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(found[1])), console


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize(("width", "dark"), [(420, False), (1440, True)], ids=["phone, light", "wide, dark"])
def test_nothing_is_cut_and_the_table_works(folder: Path, width: int, dark: bool) -> None:
    found, console = seen(folder, width=width, flags=(DARK,) if dark else ())

    assert console == []
    assert found["drawn"] > 4
    assert found["width"] <= width
    assert found["outside"] == []
    assert found["falling"] == sorted(found["falling"], reverse=True)
    assert found["rising"] == sorted(found["rising"])
    assert len(found["left"]) == 2
    assert all("simple" in each and "steps 2" in each for each in found["left"])
    shade = sum(map(int, re.findall(r"\d+", found["background"])[:3])) / 3
    assert shade < 60 if dark else shade > 200
