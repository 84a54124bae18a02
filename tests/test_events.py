from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from eyas.events import EventLog, is_open


def test_events_are_lines_of_json_appended(tmp_path: Path) -> None:
    path = tmp_path / "events" / "a.jsonl"
    for n in range(2):
        log = EventLog(path)
        log.emit("start", n=n)
        log.close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1]


def test_a_living_session_is_told_from_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert not is_open(path)
    code = (
        "import sys, time; from pathlib import Path; from eyas.events import EventLog; "
        "log = EventLog(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert is_open(path)
    process.kill()
    process.communicate()
    assert not is_open(path)


def test_a_log_that_cannot_be_written_fails_nobody(tmp_path: Path) -> None:
    log = EventLog(Path("/dev/full"))
    log.emit("start")
    log.emit("end")
    log.close()
    EventLog(None).emit("nothing")
    assert not list(tmp_path.iterdir())
