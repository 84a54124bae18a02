from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eyas.store.journal import (
    RowFailed,
    RowOk,
    Session,
    decode_journal,
    encode_journal,
    merged_provenance,
    row_line,
    session_line,
)

U64 = st.integers(0, 2**64 - 1)
ENTRIES = st.one_of(
    st.builds(RowOk, st.integers(0, 10**8), U64, U64),
    st.builds(RowFailed, st.integers(0, 10**8), st.text(max_size=8), st.text(max_size=30)),
)
SESSIONS = st.builds(
    Session,
    st.text("0123456789abcdef", min_size=4, max_size=4),
    st.just("spec"),
    st.just("corpus"),
    st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2), max_size=2),
)


@st.composite
def journals(draw: st.DrawFn) -> list[Session]:
    """Sessions that own disjoint rows."""
    sessions = draw(st.lists(SESSIONS, min_size=1, max_size=3))
    for entry in draw(st.lists(ENTRIES, max_size=12, unique_by=lambda e: e.row)):
        draw(st.sampled_from(sessions)).rows[entry.row] = entry
    return sessions


@given(journals())
def test_round_trip(sessions):
    data = encode_journal(sessions)
    journal = decode_journal(data)
    assert (journal.sessions, journal.trusted_bytes, journal.damage) == (sessions, len(data), "")


@given(journals(), st.data())
def test_any_cut_keeps_exactly_the_whole_lines_before_it(sessions, data):
    text = encode_journal(sessions)
    cut = data.draw(st.integers(0, len(text)))
    journal = decode_journal(text[:cut])
    assert journal.damage == ""
    assert journal.trusted_bytes == text.rfind(b"\n", 0, cut) + 1
    assert encode_journal(journal.sessions) == text[: journal.trusted_bytes]


@given(journals(), st.data())
def test_any_flipped_byte_ends_the_trust_at_its_line(sessions, data):
    text = encode_journal(sessions)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = bytearray(text)
    damaged[at] ^= data.draw(st.integers(1, 255))
    journal = decode_journal(bytes(damaged))
    line = text.rfind(b"\n", 0, at) + 1
    assert journal.trusted_bytes == line
    # A damaged last line end is a torn tail, every other damage is reported.
    assert journal.damage or at == len(text) - 1
    assert encode_journal(journal.sessions) == text[:line]


@given(st.binary(max_size=200))
def test_noise_is_never_trusted_and_never_raises(data):
    assert decode_journal(data).sessions == []


def test_the_last_word_about_a_row_counts_and_moves_it_to_that_session():
    first = Session("p", "s", "c", [{"engine": "a"}])
    second = Session("p", "s", "c", [{"engine": "b"}])
    text = (
        session_line(first)
        + row_line(RowFailed(3, "aborted"))
        + row_line(RowOk(4, 1, 2))
        + session_line(second)
        + row_line(RowOk(3, 5, 6))
    )
    sessions = decode_journal(text).sessions
    assert [s.rows for s in sessions] == [{4: RowOk(4, 1, 2)}, {3: RowOk(3, 5, 6)}]


@pytest.mark.parametrize("line", [row_line(RowOk(1, 2, 3)), b"0123 {}\n"])
def test_a_row_without_a_session_is_damage(line):
    assert decode_journal(line).damage


def test_provenance_is_of_those_who_wrote_and_independent_of_their_order():
    a, b, idle = (Session("p", "s", "c", [{"engine": name}]) for name in "abc")
    a.rows[1], b.rows[2] = RowOk(1, 0, 0), RowOk(2, 0, 0)
    assert merged_provenance([a, b, idle]) == merged_provenance([b, idle, a]) == [{"engine": "a"}, {"engine": "b"}]


@given(st.integers(0, 2**63 - 1), U64, U64, st.booleans())
def test_a_stored_rows_line_says_the_same_to_any_json_parser(row, aux, last, spaced):
    """It is written and read without one."""
    line = row_line(RowOk(row, aux, last))
    fields = json.loads(line[17:])
    assert fields == {"row": row, "aux": f"{aux:016x}", "last": f"{last:016x}"}
    text = json.dumps(fields, sort_keys=True, separators=(", ", ": ") if spaced else (",", ":")).encode()
    again = b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)
    assert spaced or again == line
    opening = session_line(Session("plan", "spec", "corpus", []))
    journal = decode_journal(opening + again)
    assert (journal.sessions[0].rows, journal.damage) == ({row: RowOk(row, aux, last)}, "")


@pytest.mark.parametrize("number", ["007", "-7", "7.0", "true", str(2**63), "1e3", ""])
def test_a_row_that_is_no_count_is_damage_whatever_its_checksum(number):
    text = b'{"aux":"%016x","last":"%016x","row":%s}' % (1, 2, number.encode())
    line = b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)
    opening = session_line(Session("plan", "spec", "corpus", []))
    journal = decode_journal(opening + line)
    assert journal.damage
    assert journal.trusted_bytes == len(opening)
