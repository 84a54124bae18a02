"""What a person is told when a dump folder, or a server, is not what the settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from eyas.errors import EngineError
from eyas.extract.dumpdir.matching import NO_DUMP
from eyas.extract.engine import Failed
from eyas.extract.sglang_client import OTHER_VOCABULARY, ServerAway

COUNT_HINT: Final = (
    "or add --set dumpdir.check=count, which takes the token count's word: a foreign dump of equal length is then a "
    "wrong row"
)
_AWAY: Final = ("connection-lost", "reply-late", "server-busy", "server-error", "aborted", "dump-folder-gone")

#: Reason of a failed probe -> what happened, and what to look at.
_WHAT: Final = {
    "last-differs": ("the dumped states are not what --last says", ""),
    "rows-shifted": ("the dumped rows are shifted", "the server's patch is at fault"),
    "content-differs": (
        "the dumped states do not give the server's log-probabilities",
        "is this the target that is served, and this its dump folder?",
    ),
    "dump-layout": (
        "the dumps are not as the settings say",
        "docs/dumpdir.md has the dumpdir settings that describe a dump",
    ),
    "dump-marked-early": (
        "the server sets a dump's marker before its states are written",
        "the marker must come last: the patch must write it after all files are closed",
    ),
    "dump-late": (
        "the server answered the probe, but no dump of its token count came",
        "is this that server's dump folder, and dumpdir.pattern right?",
    ),
    "dump-unfinished": ("the probe's dump was never finished", "are dumpdir.done and the other names right?"),
}


def probe_error(failure: Failed, where: str, folder: Path) -> EngineError:
    """Why the probe failed, for a person."""
    reason, detail = failure.reason, failure.detail
    if reason in _AWAY:
        return ServerAway(f"the probe failed: {reason}", where, detail)
    if reason == OTHER_VOCABULARY:
        return EngineError("the server runs another model", where, detail)
    if reason == "no-logprobs":
        return EngineError(f"dumps cannot be told apart by content: {detail}", where, COUNT_HINT.removeprefix("or "))
    if reason in _WHAT:
        what, advice = _WHAT[reason]
        detail = detail.removeprefix(NO_DUMP).strip()
        return EngineError(what, folder, "; ".join(text for text in (detail, advice) if text))
    return EngineError(f"the probe failed: {reason}", where, detail)
