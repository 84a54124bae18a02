from __future__ import annotations

from pathlib import Path

from eyas.data.names import shortened, visible
from eyas.data.prepare.report import NOTES, REASONS, PrepareReport
from eyas.data.rows import Dropped, DropReason
from eyas.data.template import encoder, mask, repairs


def report(**fields: object) -> PrepareReport:
    return PrepareReport(Path("out"), "m", **fields)  # type: ignore[arg-type]


def text_of(found: PrepareReport, width: int = 80) -> str:
    return "\n".join(line.plain for line in found.lines(width))


def test_read_is_kept_and_dropped() -> None:
    found = report()
    found.keep("a", ("note",))
    found.drop(Dropped(DropReason.BAD_JSON, "a.jsonl", 2, "column 3", "a"))
    found.drop(Dropped(DropReason.BAD_JSON, "b.jsonl", 7, "column 4", "b"))
    found.add("a", 10, 4)
    found.add("a", 5, 1)
    facts = found.to_json()
    assert (facts["read"], facts["kept"], facts["dropped"], facts["rows"]) == (3, 1, 2, 2)
    assert facts["dropped_by_reason"] == {"bad-json": 2}
    assert facts["by_source"]["a"] == {
        "read": 2, "kept": 1, "dropped": 1, "rows": 2, "tokens": 15, "trained_tokens": 5,
    }  # fmt: skip
    assert (facts["changed"], facts["digest"]) == ({"note": 1}, None)


def test_every_reason_and_note_is_explained() -> None:
    assert set(REASONS) == set(DropReason)
    names = {
        value
        for module in (mask, repairs, encoder)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and "-" in value
    }
    assert names == set(NOTES)


def test_each_kind_of_detail_is_named_once_and_counted() -> None:
    found = report()
    for line in range(1, 100):
        found.drop(Dropped(DropReason.UNKNOWN_ROLE, "a.jsonl", line, f"message {line} has the role 'x'"))
    found.drop(Dropped(DropReason.UNKNOWN_ROLE, "a.jsonl", 100, "message 1 has the role 'y'"))
    text = text_of(found)
    assert "99 x a.jsonl:1  message 1 has the role 'x'" in text
    assert "1 x a.jsonl:100  message 1 has the role 'y'" in text
    assert "a.jsonl:2 " not in text


def test_kinds_are_bounded() -> None:
    found = report()
    for line in range(10_000):
        found.drop(Dropped(DropReason.BAD_JSON, "a.jsonl", line, "x" * line))
    assert len(found.examples["bad-json"]) <= 100
    assert found.dropped["bad-json"] == 10_000


def test_lines_fit_the_screen() -> None:
    found = report(seconds=2.0, digest="d" * 32)
    for reason in DropReason:
        found.drop(Dropped(reason, "deep/" * 30 + "file.jsonl", 12_345, "a detail\nof two lines " * 9, "label " * 20))
    for note in NOTES:
        found.keep("b", (note,))
    found.add("b", 10**9, 10**8)
    found.renamed.update({("human", "user"): 5, ("very long " * 20, "assistant"): 3})
    found.filters = {
        "dedupe": {"by": "prompt", "dropped": 3},
        "decontaminate": {"rows": 80, "unread": 2, "dropped": 4},
        "max_tokens": {"limit": 4096, "cut": 7, "dropped": 1},
        "max_rows": {"reached": {"a": 1}},
        "weights": {"a": {"weight": 0.5, "left_out": 3, "copies": 0}},
        "shuffle": {"seed": 3},
        "holdout": {"share": 0.01, "rows": 3, "tokens": 44},
    }
    for width in (80, 100):
        assert max(len(line.plain) for line in found.lines(width)) <= width
    text = text_of(found)
    for part in (
        "…/file.jsonl:12345",
        "by prompt: 3",
        "4 rows dropped; 80",
        "left out",
        "seed 3",
        "set aside",
        "'human' is user: 5",
    ):
        assert part in text
    assert "eyas extract out STORE" in text


def test_prompts_have_a_next_step() -> None:
    found = report()
    found.drop(Dropped(DropReason.PROMPT_ONLY, "a.jsonl", 1))
    found.prompts = 1
    assert "eyas regenerate out/prompts.jsonl" in text_of(found)
    assert "eyas extract" not in text_of(found)


def test_many_sources_are_not_all_shown() -> None:
    found = report()
    for number in range(40):
        found.keep(f"source {number}", ())
    assert "and 28 more in summary.json" in text_of(found)


def test_nothing_drives_the_terminal() -> None:
    assert visible("a\x1b[2J\u202eb\nc") == r"a\x1b[2J\u202eb" + "\nc"
    assert shortened("one\n  two", 20) == "one two"
    assert shortened("abcdef", 4) == "abc…"
