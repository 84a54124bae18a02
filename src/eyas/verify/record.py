"""A verification leaves a line in the store's log, so that a report on the run can tell of it."""

from __future__ import annotations

import secrets
import time

from eyas.events import EVENTS_DIR, EventLog, versions
from eyas.verify.report import VerifyReport


def record(report: VerifyReport, against: str | None = None) -> None:
    """Append `verified` to a log of its own in STORE/events; a store that cannot be written keeps none.

    Args:
        report: what was found.
        against: the model that rows were recomputed with.
    """
    folder = report.store / EVENTS_DIR
    if folder.is_symlink():  # somebody else's store must not choose where we write
        return
    log = EventLog(folder / f"verify-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}.jsonl")
    compared, audit = report.comparison, report.audit
    log.emit(
        "verified",
        rows=report.rows,
        failed=report.failed,
        problems=len(report.problems) + (len(audit.problems) if audit else 0),
        recomputed=compared.rows if compared else 0,
        mismatches=len(compared.mismatches) if compared else 0,
        audited=len(audit.rows) if audit else 0,
        corpus=str(report.corpus) if report.corpus else None,
        against=against if compared else None,
        logits=audit.server if audit else None,
        lines=report.lines(),
        versions=versions(),
    )
    log.close()
