"""A record in a spool, written as writers do it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from eyas.capture.spool import Spool


@contextlib.contextmanager
def record_file(to: Spool, rid: str) -> Iterator[int]:
    """A descriptor to write a record's bytes with; published and counted at the end, its room free after an error."""
    try:
        with to.files.record(rid) as descriptor:
            yield descriptor
    except BaseException:
        to.release(rid)
        raise
    to.published(rid)
