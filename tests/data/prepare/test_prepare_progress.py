from __future__ import annotations

import io
import time
from pathlib import Path

from rich.console import Console

from eyas.data.prepare.progress import Progress
from eyas.data.prepare.report import PrepareReport
from eyas.data.sources import open_sources


def test_a_bar_on_a_terminal_counts_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n' * 10)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, _environ={})
    (one,) = open_sources([path])
    raws = list(one.rows_raw())
    with Progress(console, PrepareReport(Path("o"), "m", read=5), [one]) as progress:
        progress.advance(0, raws[4])
        progress.print("a line that stays")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "50%" in text
    assert "5 rows" in text
    assert "a line that stays" in text


def test_elsewhere_a_line_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n' * 10)
    console = Console(file=io.StringIO(), width=100)
    (one,) = open_sources([path])
    raws = list(one.rows_raw())
    assert isinstance(console.file, io.StringIO)
    with Progress(console, PrepareReport(Path("o"), "m", read=5), [one]) as progress:
        progress.advance(0, raws[0])
        time.sleep(1.1)  # so that some is left at this pace
        progress.advance(0, raws[3])
        assert console.file.getvalue() == "", "a short run says nothing"
        progress.said_s = time.monotonic() - 11
        progress.advance(0, raws[4])
        progress.advance(0, raws[5])
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("prepare: 50%, 5 rows")
    assert "left" in line
