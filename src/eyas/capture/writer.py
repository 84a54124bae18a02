"""The writer process: `python -m eyas.capture.writer SOCKET ARENA`, descriptors it inherits from the server's process.

Lines of JSON both ways. In: first `WriterSettings`, then lists of jobs; an empty list says that no more will come. Out:
`["freed", block]`, `["done", key, rid, reason, detail]`. When its server is gone, so is it: the socket ends.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.capture.contract import CaptureSpec, Refused
from eyas.capture.spool_files import SpoolFiles
from eyas.capture.writing import JOBS, Job, ThreadWriters


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """What the process is told first."""

    spec: dict[str, Any]
    folder: str
    mode: int
    group: int | None
    threads: int

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def jobs_to_line(jobs: list[Job]) -> bytes:
    return json.dumps(jobs, separators=(",", ":")).encode() + b"\n"


def jobs_from_line(line: bytes) -> list[Job]:
    return [JOBS[fields[-1]](*fields) for fields in json.loads(line)]


def main(arguments: list[str]) -> None:
    """Write until the socket ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which may have records to finish
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
    channel, arena = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    lines = channel.makefile("rb")
    settings = WriterSettings(**json.loads(lines.readline()))
    speaking = threading.Lock()

    def say(*words: Any) -> None:
        with speaking:
            channel.sendall(json.dumps(words).encode() + b"\n")

    def done(key: int, rid: str, refused: Refused | None) -> None:
        say("done", key, rid, *(("", "") if refused is None else (str(refused.reason), refused.detail)))

    size = os.fstat(arena).st_size
    memory = mmap.mmap(arena, size, mmap.MAP_SHARED, mmap.PROT_READ)
    writers = ThreadWriters(
        memoryview(memory),
        CaptureSpec.from_dict(settings.spec),
        SpoolFiles(Path(settings.folder), settings.mode, settings.group),
        lambda block: say("freed", block),
        done,
        settings.threads,
    )
    for line in lines:
        jobs = jobs_from_line(line)
        if not jobs:
            writers.close()
            break
        writers.submit(jobs)
    os._exit(0)  # whatever its threads are writing: nobody waits for it any more


if __name__ == "__main__":
    main(sys.argv[1:])
