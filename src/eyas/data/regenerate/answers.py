"""What a regeneration leaves on disk, and how the next session goes on from it.

    answers.jsonl            one finished row a line, in the order they were finished; in input order once all are
    answers.jsonl.journal    one line per answered turn, per sum charged, per request whose cost is not known yet
    answers.failed.jsonl     rows that failed, and why

The journal is written first: a row whose turns are all in it is never asked again. When all is done it is shortened to
what was spent. Lines of the journal (sealed by a checksum each):

    {"settings": {...}}                                              what the answers were made with; first line
    {"session": 3}
    {"ask": "3.17", "reserve": "0.0041"}                             sent; what it may cost at most
    {"turn": <key>, "index": 0, "message": {...}, "usage": [p, c, "0.0012"], "of": "3.17"}
    {"charge": [p, c, "0.0007"], "of": "3.18"}                       a reply that is no answer, but costs
    {"unknown": "0.0041", "of": "3.19"}                              nobody knows what it cost
    {"totals": [p, c, cost, unknown, tries]}                         of the sessions before, once it was shortened
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

from eyas.data.regenerate.answer_files import AppendFile, good_lines, json_line, open_sealed, sealed_line
from eyas.data.regenerate.budget import ZERO, Totals, Usage
from eyas.data.regenerate.conversation import KEY_BYTES
from eyas.data.rows import Chat, Message
from eyas.errors import ConfigError

_HINT: Final = "take that line out, or begin anew under another name"


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn: its message, and tokens where the server told them."""

    message: Message
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer, at which turn (from 1), after how many tries."""

    reason: str
    detail: str
    turn: int
    tries: int


def paths_of(out: Path) -> tuple[Path, Path, Path, Path]:
    """Answers, journal, failed rows and summary."""
    names = (out.name, f"{out.name}.journal", f"{out.stem}.failed.jsonl", f"{out.stem}.summary.json")
    answers, journal, failed, summary = (out.with_name(name) for name in names)
    return answers, journal, failed, summary


class Answers:
    """The files of one output, locked while it is open.

    Attributes:
        settings: what the answers there were made with; empty for new ones.
        totals: charged so far, all sessions; the `Budget` that shares it adds this session's.
        failed: key -> line of the failed rows.

    Raises:
        StoreError: another process writes there, or the disk refuses.
        IntegrityError: a line in the middle of a file is damaged.
        ConfigError: the output exists and is not ours.
    """

    def __init__(self, out: Path) -> None:
        answers, journal, failed, _ = paths_of(out)
        self._files: list[AppendFile] = []
        self._loaded = False  # until then nothing is known of what is there
        try:
            self._rows = self._open(answers, lock=True)
            self._journal = self._open(journal)
            self._failed_file = self._open(failed)
            self._done: dict[bytes, int] = {}  # key -> offset of its row
            self._turns: dict[bytes, list[Turn]] = {}
            self.settings: dict[str, Any] = {}
            self.totals = Totals()
            self.failed: dict[bytes, dict[str, Any]] = {}
            self._session, self._asked = 0, 0
            self._load()
            self._loaded = True
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, *, lock: bool = False) -> AppendFile:
        file = AppendFile(path, lock=lock)
        self._files.append(file)
        return file

    # --- reading what is there ---

    def _load(self) -> None:
        if not self._journal.size:
            if self._rows.size:
                hint = "name another; to begin anew, remove it and its journal"
                raise ConfigError("the output exists, and was not written by this command", self._rows.path, hint)
            self._failed_file.cut(0)  # of answers that were removed
        for at, key in good_lines(self._rows, _row_key, _HINT):
            self._done[key] = at
        open_asks: dict[str, Decimal] = {}
        for _, entry in good_lines(self._journal, open_sealed, _HINT):
            self._read(entry, open_asks)
        if self._done and not self.settings:
            raise ConfigError("the journal of these answers is gone", self._rows.path, "begin anew under another name")
        for reserve in open_asks.values():  # the session was killed before it learned the cost
            self.totals.add(None, reserve)
        for _, (key, entry) in good_lines(self._failed_file, _failed_key, _HINT):
            if key not in self._done:
                self.failed[key] = entry
        self._session += 1
        if self.settings:
            self._journal.append(sealed_line({"session": self._session}))
            for name, reserve in open_asks.items():
                self._journal.append(sealed_line({"unknown": str(reserve), "of": name}))

    def _read(self, entry: dict[str, Any], open_asks: dict[str, Decimal]) -> None:
        match entry:
            case {"settings": settings}:
                self.settings = settings
            case {"session": number}:
                self._session = number
            case {"ask": name, "reserve": reserve}:
                open_asks[name] = Decimal(reserve)
                return
            case {"turn": key, "message": message, "usage": usage}:
                if not entry.get("counted"):
                    self.totals.add(*_spent(usage))
                if (named := bytes.fromhex(key)) not in self._done:
                    self._turns.setdefault(named, []).append(Turn(message, _spent(usage)[0]))
            case {"charge": usage}:
                self.totals.add(*_spent(usage))
            case {"unknown": most}:
                self.totals.add(None, Decimal(most))
            case {"totals": [prompt, completion, cost, unknown, tries]}:
                self.totals = Totals(prompt, completion, Decimal(cost), Decimal(unknown), tries)
        open_asks.pop(entry.get("of", ""), None)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Go on only with the settings that the answers there were made with; where there are none, with any.

        Raises:
            ConfigError: one differs, by name.
        """
        now: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        if not self._done and not self._turns and now != self.settings:
            self._journal.append(sealed_line({"settings": now}))
            self._journal.append(sealed_line({"session": self._session}))
            self.settings = now
            return
        for name, value in now.items():
            if (before := self.settings.get(name)) != value:
                told = f"{name}: {json.dumps(before, ensure_ascii=False)}, now {json.dumps(value, ensure_ascii=False)}"
                hint = "give the same again, or another --out"
                raise ConfigError(f"the answers there were made with another {told}", self._rows.path, hint)

    def __contains__(self, key: bytes) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self._done)

    @property
    def worthless(self) -> bool:
        """Nothing is there that another session could use, nor has anything been paid for."""
        return not (self._done or self._turns or self.failed) and self.totals == Totals()

    def turns(self, key: bytes) -> list[Turn]:
        """The answered turns of a row that is not finished."""
        return list(self._turns.get(key, ()))

    # --- writing ---

    def asked(self, reserve: Decimal) -> str:
        """A request is about to be sent that may cost `reserve`; returns the name to settle it by."""
        if not reserve:
            return ""
        self._asked += 1
        name = f"{self._session}.{self._asked}"
        self._journal.append(sealed_line({"ask": name, "reserve": str(reserve)}))
        return name

    def charged(self, of: str, usage: Usage | None, cost: Decimal) -> None:
        """A try that brought no answer: what it cost, or without `usage` the most it may have cost."""
        if usage is not None:
            self._journal.append(sealed_line({"charge": _usage_list(usage, cost), "of": of}))
        elif of or cost:
            self._journal.append(sealed_line({"unknown": str(cost), "of": of}))

    def answered(self, key: bytes, turn: Turn, of: str, cost: Decimal) -> None:
        """One more turn of a row; `cost` as for `charged`. Durable after `synced`."""
        turns = self._turns.setdefault(key, [])
        entry: dict[str, Any] = {"turn": key.hex(), "index": len(turns), "message": turn.message}
        spent = _usage_list(turn.usage, cost) if turn.usage else None
        if spent is None and cost:
            self._journal.append(sealed_line({"unknown": str(cost), "of": of}))
        self._journal.append(sealed_line(entry | {"usage": spent, "of": of}))
        turns.append(turn)

    def finished(self, key: bytes, row: Mapping[str, Any]) -> None:
        """The row is whole. Durable after `synced`."""
        self._done[key] = self._rows.append(json_line(dict(row)))
        self._turns.pop(key, None)
        self.failed.pop(key, None)

    def fail(self, key: bytes, chat: Chat, failure: Failure) -> None:
        """The row will not come."""
        entry: dict[str, Any] = {"key": key.hex(), "id": chat.id, "file": chat.file, "line": chat.line}
        entry |= {"reason": failure.reason, "detail": failure.detail, "turn": failure.turn, "attempts": failure.tries}
        self._failed_file.append(json_line(entry))
        self.failed[key] = entry

    async def synced(self) -> None:
        """Returns once all that was written survives a power loss."""
        for file in self._files:
            await file.synced()

    # --- the end ---

    def arrange(self, order: bytes) -> int:
        """Put the rows into the order of the keys in `order`, and shorten the journal; rows of other inputs follow.

        Returns:
            how many those are.
        """
        keys = [order[at : at + KEY_BYTES] for at in range(0, len(order), KEY_BYTES)]
        wanted = [self._done[key] for key in keys if key in self._done]
        known = set(wanted)
        others = [at for at in self._done.values() if at not in known]
        offsets = wanted + sorted(others)
        if any(a > b for a, b in pairwise(offsets)):
            self._rows.replace(self._lines_at(offsets))
        self._tidy_failed(keys)
        self._journal.replace(self._short_journal())
        return len(others)

    def _lines_at(self, offsets: list[int]) -> Iterator[bytes]:
        with self._rows.path.open("rb") as file:
            for at in offsets:
                file.seek(at)
                yield file.readline()

    def _tidy_failed(self, keys: list[bytes]) -> None:
        ordered = [self.failed[key] for key in keys if key in self.failed]
        named = set(keys)
        ordered += [entry for key, entry in self.failed.items() if key not in named]
        self._failed_file.replace(map(json_line, ordered))

    def _short_journal(self) -> Iterator[bytes]:
        yield sealed_line({"settings": self.settings})
        yield sealed_line({"session": self._session})
        sums = self.totals
        money = [str(sums.cost), str(sums.unknown)]
        yield sealed_line({"totals": [sums.prompt_tokens, sums.completion_tokens, *money, sums.unknown_tries]})
        # Turns of rows that failed later on are kept for --retry-failed; what they cost is in the totals.
        for key, turns in self._turns.items():
            for index, turn in enumerate(turns):
                usage = _usage_list(turn.usage, turn.usage.cost or ZERO) if turn.usage else None
                entry = {"turn": key.hex(), "index": index, "message": turn.message, "usage": usage}
                yield sealed_line(entry | {"counted": True})

    def close(self) -> None:
        """Give the files and the lock up; files that hold nothing go, the locked one last."""
        worthless = self._loaded and self.worthless
        for file in reversed(self._files):
            if worthless or (file is not self._files[0] and not file.size):
                file.remove()
            else:
                file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _usage_list(usage: Usage, cost: Decimal) -> list[Any]:
    return [usage.prompt_tokens, usage.completion_tokens, str(cost)]


def _spent(usage: list[Any] | None) -> tuple[Usage | None, Decimal]:
    if usage is None:
        return None, ZERO
    cost = Decimal(usage[2])
    return Usage(usage[0], usage[1], cost), cost


def _row_key(line: bytes) -> bytes:
    key, _ = _failed_key(line)
    return key


def _failed_key(line: bytes) -> tuple[bytes, dict[str, Any]]:
    """(key, row) of a line that this module wrote; ValueError otherwise."""
    if not line.endswith(b"\n"):
        raise ValueError("torn")
    row = json.loads(line)
    key = bytes.fromhex(row["key"]) if isinstance(row, dict) and isinstance(row.get("key"), str) else b""
    if len(key) != KEY_BYTES:
        raise ValueError("no key")
    return key, row
