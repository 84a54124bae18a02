"""The pipe to the browser, by programs that only say that they are one."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chromium_pipe import FLAGS, NAMES, Chromium, NoChromium, first_that_works

#: Answers every call, and tells beforehand and afterwards that another document has loaded.
SPEAKING = """#!{python} -IS
import json, os

def say(**message):
    os.write(4, json.dumps(message).encode() + b"\\0")

def loaded(session, loader, name="load"):
    say(method="Page.loadEventFired", sessionId=session, params={{}})
    say(method="Page.lifecycleEvent", sessionId=session, params={{"name": name, "loaderId": loader, "frameId": "f"}})

buffer = b""
while more := os.read(3, 65536):
    *messages, buffer = (buffer + more).split(b"\\0")
    for message in map(json.loads, messages):
        session, result = message.get("sessionId"), {{"targetId": "t", "sessionId": "s"}}
        if message["method"] == "Page.enable":
            loaded(session, "blank")
        if message["method"] == "Page.navigate":
            result = {navigated}
        if message["method"] == "Runtime.evaluate":
            result = {{"result": {{"value": "another page"}}}}
        say(id=message["id"], result=result)
        if message["method"] == "Page.navigate":
            loaded(session, "blank")
            loaded(session, "wanted", "DOMContentLoaded")
            loaded("other", "wanted")
            loaded(session, "wanted")
            say(method="last", params={{}})
"""
GOES = '{"loaderId": "wanted"}'
#: What a program that is no browser, or cannot be used, does; and what is said of it.
USELESS = {
    "a stub that ends": ("#!/bin/sh\nexit 1\n", "it is gone|Broken pipe"),
    "a stub that reads and ends": ("#!/bin/sh\nhead -c 1 <&3 >/dev/null\nexit 0\n", "it is gone|Broken pipe"),
    "one that hangs": ("#!/bin/sh\nsleep 1000\n", "says nothing"),
    "one of another protocol": ("#!/bin/sh\nprintf 'hello\\0' >&4\nexec sleep 1000\n", "Expecting value"),
    "one that refuses": (
        '#!/bin/sh\nprintf \'{"id": 1, "error": "no"}\\0\' >&4\nexec sleep 1000\n',
        "createTarget: no",
    ),
    "no program": ("#!/nowhere/at/all\n", "it is gone|Broken pipe"),
    "one with a /tmp of its own": (
        SPEAKING.format(python=sys.executable, navigated='{"loaderId": "x", "errorText": "net::ERR_FILE_NOT_FOUND"}'),
        "ERR_FILE_NOT_FOUND",
    ),
    "one that shows another page": (SPEAKING.format(python=sys.executable, navigated=GOES), "another page"),
}


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    def make(text: str) -> str:
        path = tmp_path / "browser"
        path.write_text(text)
        path.chmod(stat.S_IRWXU)
        return str(path)

    return make


def opened() -> set[tuple[str, str]]:
    """This process's descriptors, and of what."""
    return {(path.name, str(path.readlink())) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@pytest.mark.parametrize("kind", USELESS)
def test_a_browser_that_cannot_be_used_is_named_and_leaves_nothing(
    kind: str, program: Callable[[str], str], tmp_path: Path
) -> None:
    text, said = USELESS[kind]
    path = program(text)
    before = opened()
    wait_s = 1.0 if "hangs" in kind else 60.0
    with pytest.raises(NoChromium, match=f"{path}: .*({said})"):
        first_that_works(tmp_path, [path], wait_s)
    assert opened() == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if path.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_no_browser_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoChromium, match="apt-get install chromium"):
        first_that_works(tmp_path)


def test_a_page_has_loaded_when_that_very_document_has(program: Callable[[str], str], tmp_path: Path) -> None:
    """Not when the empty tab before it has, of which word may come earlier or later, nor another tab."""
    browser = Chromium(program(SPEAKING.format(python=sys.executable, navigated=GOES)), tmp_path / "profile")
    browser.start()
    with browser:
        browser.open(tmp_path / "page.html")
    told = [
        (event["sessionId"], event["params"]["loaderId"], event["params"]["name"])
        for event in browser.events
        if event["method"] == "Page.lifecycleEvent"
    ]
    assert told == [("s", "blank", "load"), ("s", "blank", "load"), ("s", "wanted", "DOMContentLoaded"),
                    ("other", "wanted", "load"), ("s", "wanted", "load")]  # fmt: skip


def test_small_shared_memory_is_not_used() -> None:
    """Containers have 64 MB of it."""
    assert "--disable-dev-shm-usage" in FLAGS


# --- the browser for the tests ----------------------------------------------------------------------------------------

CI = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.parametrize("installed", [*NAMES, None])
@pytest.mark.parametrize("outcome", [0, 1])
def test_a_browser_is_installed_where_none_is_within_a_time_limit(
    installed: str | None, outcome: int, tmp_path: Path
) -> None:
    """Any of its names counts; whatever apt does, the tests are run, once it and all else is done."""
    programs = {
        "id": "echo 0",
        "make": 'echo "make $*" >>"$LOG"',
        "apt-get": f'echo "apt-get $1" >>"$LOG"; exit {outcome}',
        "timeout": 'echo "timeout $3" >>"$LOG"; shift 3; exec "$@"',
        **({installed: "exit 0"} if installed else {}),
    }
    bin_dir, log = tmp_path / "bin", tmp_path / "log"
    (tmp_path / ".ci").mkdir()
    bin_dir.mkdir()
    log.touch()
    for name, does in programs.items():
        (bin_dir / name).write_text(f"#!/bin/sh\n{does}\n")
        (bin_dir / name).chmod(stat.S_IRWXU)
    for name in ("dirname", "sh", "bash"):
        (bin_dir / name).symlink_to(shutil.which(name) or name)
    script = shutil.copy(CI, tmp_path / ".ci" / "run")
    environment = {"PATH": str(bin_dir), "LOG": str(log)}
    done = subprocess.run([bin_dir / "bash", script], env=environment, capture_output=True, text=True, check=True)
    called = log.read_text().splitlines()
    assert called[-1] == "make test"
    expected = [] if installed else ["timeout 240", "apt-get update", "apt-get install"][: 3 - outcome]
    assert [line for line in called if not line.startswith("make ")] == expected
    assert sorted(line for line in called if line.startswith("make ")) == sorted(
        ["make .venv/ready", "make -j 2 environments", "make check", "make test"]
    )  # all but the last beside apt
    assert ("no Chromium could be installed" in done.stdout) == (not installed and outcome == 1)
