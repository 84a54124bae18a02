"""The parts of the engine over dump folders: which dump is taken, who is in flight, what is read and what is not."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import DumpdirConfig
from eyas.errors import ConfigError
from eyas.extract.dumpdir.content import ALTERNATIVES, Judge, alike, asked_for, read_evidence
from eyas.extract.dumpdir.desk import Desk
from eyas.extract.dumpdir.folder import DumpFolder
from eyas.extract.dumpdir.gate import LengthGate
from eyas.extract.dumpdir.layout import Layout, MarkedEarly, Misfit, Unfinished
from eyas.extract.dumpdir.loading import DumpReader
from eyas.extract.dumpdir.matching import Candidate, Fit, Sighting, Vigil, sort_out
from eyas.extract.engine import Failed

A, H = 3, 4
T = 6
AUX = torch.arange(T * A * H, dtype=torch.float32).reshape(T, A, H)
LAST = torch.arange(T * H, dtype=torch.float32).reshape(T, H)


# --- matching ---------------------------------------------------------------------------------------------------------


def test_sightings_are_sorted_by_count_and_marker() -> None:
    seen = [
        Sighting("ours", True, 9),
        Sighting("decode", True, 1),
        Sighting("other", False, 8),
        Sighting("begun", False, None),
        Sighting("nearly", False, 9),
        Sighting("no-count", True, None),
    ]
    assert sort_out(9, seen) == (["ours"], {"begun", "nearly", "no-count"})
    assert sort_out(1, seen) == (["decode"], {"begun", "no-count"})


CANDIDATES = st.lists(st.tuples(st.sampled_from(Fit), st.integers(0, 1)), max_size=4).map(
    lambda drawn: [Candidate(f"req_{n}", fit, digest) for n, (fit, digest) in enumerate(drawn)]
)


@settings(deadline=None)
@given(CANDIDATES, st.sets(st.sampled_from(["req_7", "req_8"])), st.booleans(), st.booleans())
def test_what_is_taken_is_right_and_nothing_else_could_be(
    candidates: list[Candidate], unfinished: set[str], alone: bool, late: bool
) -> None:
    decision = Vigil(alone).decide(candidates, unfinished, late)
    if late:
        assert decision is not None
    if isinstance(decision, str):
        right = [one for one in candidates if one.fit is Fit.RIGHT]
        assert decision in {one.name for one in right}
        assert not unfinished
        if not alone:
            assert len(candidates) == 1
        assert len({one.digest for one in right}) == 1
        assert all(one.fit is not Fit.UNCLEAR for one in candidates)


def test_only_dumps_begun_before_the_match_are_waited_for() -> None:
    vigil, ours = Vigil(alone=False), [Candidate("req_3", Fit.RIGHT)]
    assert vigil.decide([], {"req_2"}, late=False) is None
    assert vigil.decide(ours, {"req_4"}, late=False) is None
    assert vigil.decide(ours, {"req_4", "req_5"}, late=False) is None
    assert vigil.decide(ours, {"req_5", "req_6"}, late=False) == "req_3"


def test_one_begun_before_that_never_ends_is_a_refusal() -> None:
    vigil, ours = Vigil(alone=False), [Candidate("req_3", Fit.RIGHT)]
    assert vigil.decide(ours, {"req_4"}, late=False) is None
    failure = vigil.decide(ours, {"req_4"}, late=True)
    assert isinstance(failure, Failed)
    assert failure.reason == "dump-unfinished"


# --- the gate ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=20))
def test_no_two_of_one_length_and_alone_means_alone(rows: list[tuple[int, bool, bool]]) -> None:
    async def scenario() -> int:
        gate, inside, passed = LengthGate(), [], 0

        async def one(length: int, alone: bool, cancelled: bool) -> None:
            nonlocal passed
            async with gate.hold(length, alone=alone):
                assert length not in [other for other, _ in inside]
                assert not any(was for _, was in inside)
                assert not (alone and inside)
                inside.append((length, alone))
                await asyncio.sleep(0)
                if cancelled:
                    raise asyncio.CancelledError
                await asyncio.sleep(0)
                inside.remove((length, alone))
                passed += 1

        async def guarded(length: int, alone: bool, cancelled: bool) -> None:
            try:
                await one(length, alone, cancelled)
            except asyncio.CancelledError:
                inside.remove((length, alone))

        await asyncio.wait_for(asyncio.gather(*(guarded(*row) for row in rows)), 5)
        assert not gate.lengths
        return passed

    assert asyncio.run(scenario()) == sum(not cancelled for _, _, cancelled in rows)


def test_a_waiter_that_is_cancelled_leaves_no_trace() -> None:
    async def scenario() -> None:
        gate = LengthGate()
        async with gate.hold(5):
            tasks = [asyncio.create_task(_through(gate, 5)), asyncio.create_task(_through(gate, 6, alone=True))]
            blocked = asyncio.create_task(_through(gate, 7))
            await asyncio.sleep(0)
            assert gate.lengths == {5}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait_for(blocked, 5)  # nobody waits to be alone any more
        assert not gate.lengths

    asyncio.run(scenario())


async def _through(gate: LengthGate, length: int, *, alone: bool = False) -> None:
    async with gate.hold(length, alone=alone):
        pass


# --- layouts ----------------------------------------------------------------------------------------------------------

LAYERS_OF = {f"layer_{layer}.pt": AUX[:, column] for column, layer in enumerate((2, 5, 9))}
LAYOUTS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {"aux.pt": AUX, "last.pt": LAST}),
    ({}, {"aux.pt": AUX.flatten(1), "last.pt": LAST[None]}),
    ({}, {"aux.pt": AUX.flatten(1)[None], "last.pt": [LAST[:2], LAST[2:]]}),
    ({}, {"aux.pt": AUX[None], "last.pt": LAST}),
    ({}, {"aux.pt": [AUX[:, 0], AUX[:, 1], AUX[:, 2]], "last.pt": LAST}),
    ({}, {"aux.pt": tuple(AUX[None, :, i] for i in range(A)), "last.pt": LAST}),
    ({}, {"aux.pt": [AUX[:2], AUX[2:].flatten(1)], "last.pt": LAST}),
    ({}, {"aux.pt": [AUX[:2], AUX[2:4], AUX[4:]], "last.pt": LAST}),  # as many chunks as layers
    ({}, {"aux.pt": [AUX[:1], AUX[1:5], AUX[5:]], "last.pt": LAST}),
    ({}, {"aux.pt": AUX.bfloat16(), "last.pt": LAST.bfloat16()}),
    ({"aux_file": "layer_{layer}.pt"}, {**LAYERS_OF, "last.pt": LAST}),
    (
        {"aux_file": "s.pt:aux", "last_file": "s.pt:last", "num_tokens": "s.pt:n"},
        {"s.pt": {"aux": AUX, "last": LAST, "n": torch.tensor(T)}},
    ),
    (
        {"aux_file": "s.pt:layer_{layer}", "last_file": "s.pt:last", "num_tokens": "s.pt:n"},
        {"s.pt": {"layer_2": AUX[:, 0], "layer_5": AUX[:, 1], "layer_9": AUX[:, 2], "last": LAST, "n": T}},
    ),
    (
        {"aux_file": "c_*.pt:aux", "last_file": "c_*.pt:last", "num_tokens": "c_*.pt:n"},
        {
            f"c_{n}.pt": {"aux": AUX[i : i + 1], "last": LAST[i : i + 1], "n": 1}
            for i, n in enumerate((0, 1, 2, 9, 10, 11))
        },
    ),
    ({"num_tokens": "num_tokens"}, {"aux.pt": AUX, "last.pt": LAST, "num_tokens": f"{T}\n"}),
    ({"num_tokens": "done:n", "done": "done"}, {"aux.pt": AUX, "last.pt": LAST, "done": json.dumps({"n": T})}),
]


def write(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"meta.json": json.dumps({"num_tokens": T}), **files}
    done = files.pop("done", "")
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            torch.save(content, folder / name)
    (folder / "done").write_text(done)


def reader_of(folder: Path, max_bytes: int = 1 << 20, **settings: Any) -> DumpReader:
    dumps = DumpFolder(folder, "req_*")
    dumps.look_now()
    (fresh,) = dumps.since(0)
    return DumpReader(folder, fresh, layout_of(**settings), max_bytes)


def layout_of(**settings: Any) -> Layout:
    return Layout.of(DumpdirConfig(**settings), (2, 5, 9), H)


@pytest.mark.parametrize(("settings", "files"), LAYOUTS)
def test_layouts_of_dumps(tmp_path: Path, settings: dict[str, str], files: dict[str, Any]) -> None:
    write(tmp_path / "req_0", files)
    reader = reader_of(tmp_path, **settings)
    assert reader.count() == T
    dump = reader.dump(T)
    assert torch.equal(dump.aux.float(), AUX)
    assert torch.equal(dump.last.float(), LAST)


@pytest.mark.parametrize(
    "aux",
    [
        AUX[:, :2],
        AUX.transpose(0, 1),
        AUX.flatten(),
        AUX.long(),
        AUX[:, :, :3],
        torch.cat([AUX, AUX]),
        [AUX[:, 0], AUX[:, 1]],
        [AUX[:, 0], AUX[:, 1], AUX[:4, 2]],
        [AUX[:2], AUX[2:].bfloat16()],
        [],
        "text",
        {"aux": AUX},
        torch.zeros(1).expand(10**7, A * H),
    ],
    ids=lambda aux: str(list(aux.shape) if isinstance(aux, torch.Tensor) else type(aux).__name__),
)
def test_what_does_not_fit_is_named(tmp_path: Path, aux: Any) -> None:
    write(tmp_path / "req_0", {"aux.pt": {"aux": AUX} if isinstance(aux, dict) else aux, "last.pt": LAST})
    if isinstance(aux, str):
        torch.save(aux, tmp_path / "req_0" / "aux.pt")
        (tmp_path / "req_0" / "done").write_text("")
    with pytest.raises(Misfit):
        reader_of(tmp_path).dump(T)


def test_a_list_that_may_be_layers_or_chunks_is_refused(tmp_path: Path) -> None:
    """As many tokens as layers, in states [1, 3, H]: three layers of three tokens, or three tokens of three layers."""
    files = {"aux.pt": [AUX[:1], AUX[1:2], AUX[2:3]], "last.pt": LAST[:A], "meta.json": json.dumps({"num_tokens": A})}
    write(tmp_path / "req_0", files)
    with pytest.raises(Misfit, match="layers, or chunks"):
        reader_of(tmp_path).dump(A)


@pytest.mark.parametrize(
    "settings",
    [
        {"aux_file": "../aux.pt"},
        {"aux_file": "aux.json"},
        {"aux_file": ""},
        {"aux_file": "a_*_*.pt"},
        {"last_file": "layer_{layer}.pt"},
        {"num_tokens": "sub/meta.json"},
        {"done": ""},
        {"done": "a/done"},
    ],
)
def test_places_that_cannot_be(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        layout_of(**settings)


# --- reading ----------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/must-not-be-made-by-a-dump",)


def test_code_in_a_dump_does_not_run(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    torch.save(Evil(), tmp_path / "req_0" / "aux.pt")
    (tmp_path / "req_0" / "done").write_text("")
    with pytest.raises(Misfit, match="more than tensors"):
        reader_of(tmp_path).dump(T)
    assert not Path("/tmp/must-not-be-made-by-a-dump").exists()


def test_a_plain_pickle_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"last.pt": LAST, "aux.pt": AUX})
    (tmp_path / "req_0" / "aux.pt").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "req_0" / "done").write_text("")
    with pytest.raises(Unfinished, match="no complete archive"):
        reader_of(tmp_path).dump(T)


def test_an_archive_that_unpacks_to_more_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"last.pt": LAST, "aux.pt": AUX})
    with zipfile.ZipFile(tmp_path / "req_0" / "aux.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("aux/data.pkl", b"0" * 100_000)
    (tmp_path / "req_0" / "done").write_text("")
    with pytest.raises(Misfit, match="no archive as torch"):
        reader_of(tmp_path).dump(T)


def test_files_larger_than_agreed_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"aux.pt": torch.zeros(1000, A, H), "last.pt": LAST})
    with pytest.raises(Misfit, match="at most 10,000 are read"):
        reader_of(tmp_path, max_bytes=10_000).dump(T)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_half_a_file_is_waited_for(tmp_path: Path, kept: int) -> None:
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    path = tmp_path / "req_0" / "aux.pt"
    path.write_bytes(path.read_bytes()[:kept])
    (tmp_path / "req_0" / "done").write_text("")
    with pytest.raises(Unfinished):
        reader_of(tmp_path).dump(T)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "req_0").symlink_to(tmp_path / "elsewhere" / "req_0")
    dumps = DumpFolder(tmp_path / "dumps", "req_*")
    dumps.look_now()
    assert dumps.since(0) == []
    write(tmp_path / "more" / "req_0", {"last.pt": LAST})
    (tmp_path / "more" / "req_0" / "aux.pt").symlink_to(tmp_path / "elsewhere" / "req_0" / "aux.pt")
    with pytest.raises(Unfinished, match=r"no aux\.pt"):
        reader_of(tmp_path / "more").dump(T)
    (tmp_path / "more" / "req_0" / "aux.pt").unlink()
    os.mkfifo(tmp_path / "more" / "req_0" / "aux.pt")
    with pytest.raises(Unfinished, match=r"no aux\.pt"):
        reader_of(tmp_path / "more").dump(T)


def test_states_younger_than_the_marker_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    os.utime(tmp_path / "req_0" / "done", (1, 1))
    with pytest.raises(MarkedEarly):
        reader_of(tmp_path).dump(T)


@pytest.mark.parametrize("name", ["aux.pt", "last.pt", "done"])
def test_a_dump_that_is_written_over_while_it_is_read_is_not_taken(tmp_path: Path, name: str) -> None:
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    reader = reader_of(tmp_path)
    assert reader.count() == T
    path = tmp_path / "req_0" / name
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(Unfinished, match="changed"):
        reader.dump(T)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    write(tmp_path / "req_1", {"aux.pt": AUX, "last.pt": LAST})
    (tmp_path / "logs").mkdir()
    dumps = DumpFolder(tmp_path, "req_*")
    before = dumps.look_now()
    dumps.look_now()
    assert dumps.since(before) == []
    (tmp_path / "req_0" / "aux.pt").write_bytes(b"other")
    write(tmp_path / "req_2", {"aux.pt": AUX, "last.pt": LAST})
    middle = dumps.look_now()
    fresh = {one.name: set(one.files) for one in dumps.since(before)}
    assert fresh == {"req_0": {"aux.pt"}, "req_2": {"meta.json", "aux.pt", "last.pt", "done"}}
    assert dumps.since(middle) == []


def test_a_name_that_is_used_again_is_new(tmp_path: Path) -> None:
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    dumps = DumpFolder(tmp_path, "req_*")
    before = dumps.look_now()
    write(tmp_path / "req_0", {"aux.pt": AUX + 1, "last.pt": LAST + 1})  # in place, as after a restart
    dumps.look_now()
    (fresh,) = dumps.since(before)
    assert set(fresh.files) == {"meta.json", "aux.pt", "last.pt", "done"}
    again = dumps.look_now()
    for path in (tmp_path / "req_0").iterdir():
        path.unlink()
    (tmp_path / "req_0").rmdir()
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    dumps.look_now()
    assert [one.name for one in dumps.since(again)] == ["req_0"]


def test_removal_takes_what_was_read_and_nothing_else(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path, "req_*")
    before = dumps.look_now()
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    dumps.look_now()
    (fresh,) = dumps.since(before)
    (tmp_path / "req_0" / "aux.pt").write_bytes(b"the next dump's")
    (tmp_path / "req_0" / "note").write_text("not ours")
    dumps.remove(fresh)
    assert sorted(path.name for path in (tmp_path / "req_0").iterdir()) == ["aux.pt", "note"]
    (tmp_path / "req_0").rename(tmp_path / "moved")
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})
    dumps.remove(fresh)
    assert len(list((tmp_path / "req_0").iterdir())) == 4


def test_a_dump_that_was_half_written_when_the_row_was_sent_is_neither_taken_nor_awaited(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path, "req_*")
    (tmp_path / "req_0").mkdir()
    (tmp_path / "req_0" / "meta.json").write_text(json.dumps({"num_tokens": T}))
    before = dumps.look_now()
    desk = Desk(tmp_path, layout_of(), Judge(None, None, pre_norm=False), {})
    torch.save(AUX, tmp_path / "req_0" / "aux.pt")
    dumps.look_now()
    assert desk.read(dumps.since(before), T, None) == ([], set())
    torch.save(LAST, tmp_path / "req_0" / "last.pt")
    (tmp_path / "req_0" / "done").write_text("")
    dumps.look_now()
    assert desk.read(dumps.since(before), T, None) == ([], set())
    write(tmp_path / "req_0", {"aux.pt": AUX, "last.pt": LAST})  # another takes the name over: that one may be ours
    dumps.look_now()
    (candidate,), unfinished = desk.read(dumps.since(before), T, None)
    assert (candidate.fit, unfinished) == (Fit.RIGHT, set())


# --- evidence ---------------------------------------------------------------------------------------------------------

ENTRIES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.lists(st.one_of(st.none(), st.floats(), st.integers()), max_size=3),
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["input_token_logprobs", "output_token_logprobs", "output_top_logprobs"]),
        st.one_of(ENTRIES, st.lists(ENTRIES, max_size=3), st.lists(st.lists(ENTRIES, max_size=2), max_size=2)),
    )
)
def test_any_reply_is_evidence_or_a_reason(meta: dict[str, Any]) -> None:
    result = read_evidence(meta, [5, 6, 7], 10, 0)
    if not isinstance(result, str):
        assert len(result.positions) == len(result.ids) == len(result.log_probs) > 0
        assert all(0 <= position < 3 for position in result.positions)


TOP = [[-0.5, 3, None], [-2.0, 9, None], *[[-3.0, 4, None]] * (ALTERNATIVES - 2)]
META = {
    "input_token_logprobs": [[None, 6, None], [-1.0, 7, None]],
    "output_token_logprobs": [[-0.5, 3, None]],
    "output_top_logprobs": [TOP],
}


def test_evidence_of_a_reply() -> None:
    evidence = read_evidence(META, [5, 6, 7], 100, 1)
    assert not isinstance(evidence, str)
    assert list(zip(evidence.positions, evidence.ids, evidence.log_probs, strict=True))[:4] == [
        (1, 7, -1.0),
        (2, 3, -0.5),
        (2, 3, -0.5),
        (2, 9, -2.0),
    ]
    assert "not the row's" in str(read_evidence(META, [5, 6, 8], 100, 1))
    assert "vocabulary" in str(read_evidence(META, [5, 6, 7], 9, 1))
    assert asked_for(3, 1) == {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": ALTERNATIVES}
    assert asked_for(1, 16)["logprob_start_len"] == 0
    assert asked_for(9, 0)["logprob_start_len"] == -1


@pytest.mark.parametrize(
    "lacking",
    [
        {"input_token_logprobs": None},
        {"input_token_logprobs": []},
        {"input_token_logprobs": [[None, 7, None]]},
        {"input_token_logprobs": [[None, 6, None], [None, 7, None]]},
        {"output_top_logprobs": None},
        {"output_top_logprobs": []},
        {"output_top_logprobs": [TOP[:-1]]},
        {"output_top_logprobs": [[*TOP[:-1], [None, 4, None]]]},
        {"output_token_logprobs": []},
        {"output_token_logprobs": [[None, 3, None]]},
    ],
)
def test_a_reply_with_less_than_was_asked_for_is_no_evidence(lacking: dict[str, Any]) -> None:
    assert isinstance(read_evidence({**META, **lacking}, [5, 6, 7], 100, 1), str)


def test_rows_are_alike_by_the_tokens_that_are_compared() -> None:
    row = list(range(10))
    assert alike(row, [*row[:6], 90, 91, 8, 9], 4)
    assert not alike(row, [*row[:6], 90, 91, 92, 9], 4)
    assert alike(row, [90] * 10, 0)  # nothing is compared
    assert not alike(row, [*[90] * 6, *row[6:]], 100)
    assert alike([1], [1], 16)
