"""The draft vocabulary: what is in it, the maps it is published with, and what refuses a stale one."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyas.data.corpus import Corpus, CorpusMeta, CorpusWriter
from eyas.errors import ConfigError, IntegrityError
from eyas.target.checkpoint import Target
from eyas.train import vocab as vocab_module
from eyas.train.vocab import ROUND_TO, DraftVocab, count_trained
from tiny_models import llama

Row = tuple[list[int], list[int]]
META = CorpusMeta(model="m", tokenizer_hash="a" * 32, template_hash="b" * 32, vocab_size=300)


def corpus(path: Path, rows: list[Row], meta: CorpusMeta = META) -> Corpus:
    with CorpusWriter(path, meta) as writer:
        for number, (tokens, mask) in enumerate(rows):
            writer.add(f"r{number}", tokens, mask)
    return Corpus.open(path)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """300 tokens; 290 and 291 end answers, 292 and 293 are other added tokens."""
    folder = tmp_path / "target"
    llama(eos_token_id=290).config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [290, 291]}))
    added = {"added_tokens": [{"id": i, "content": f"<{i}>"} for i in (290, 291, 292, 293)]}
    (folder / "tokenizer.json").write_text(json.dumps(added))
    return Target.load(str(folder))


# --- what is in it ----------------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    """Counts with many ties, tokens to keep, and a size or a coverage that can be had."""
    size = draw(st.integers(1, 400))
    counts = np.array(draw(st.lists(st.integers(0, 6), min_size=size, max_size=size)), dtype=np.int64)
    counts[draw(st.integers(0, size - 1))] += 1
    keep = draw(st.sets(st.integers(0, size - 1), max_size=min(size, 5)))
    if draw(st.booleans()):
        return counts, {"keep": keep, "size": draw(st.integers(max(1, len(keep)), size))}
    return counts, {"keep": keep, "coverage": draw(st.floats(0, 1, exclude_min=True))}


@given(requests())
def test_what_always_holds(request: tuple[np.ndarray, dict[str, Any]]) -> None:
    counts, options = request
    before = counts.copy()
    vocab = DraftVocab.from_counts(counts, **options)
    assert np.array_equal(counts, before)
    ids, total = vocab.target_ids.numpy(), int(counts.sum())
    inside, keep = set(ids.tolist()), options["keep"]
    # Ascending ids of the target, each once, and those to be kept among them.
    assert ids.tolist() == sorted(inside)
    assert inside >= keep
    # No token is left out that is more frequent than one that is in, or as frequent with a smaller id.
    chosen = [(-counts[i], i) for i in inside - keep]
    left = [(-counts[i], i) for i in set(range(len(counts))) - inside]
    assert not chosen or not left or max(chosen) < min(left)
    assert vocab.coverage == counts[ids].sum() / total
    if "size" in options:
        assert len(vocab) == options["size"]
    else:
        assert counts[ids].sum() >= options["coverage"] * total - 1e-9
        assert len(vocab) % ROUND_TO == 0 or len(vocab) == len(counts)
        # A whole step smaller would not have been enough.
        fewer = len(vocab) - ROUND_TO if len(vocab) % ROUND_TO == 0 else len(vocab) // ROUND_TO * ROUND_TO
        if fewer >= max(1, len(keep)):
            covered = DraftVocab.from_counts(counts, size=fewer, keep=keep).coverage
            assert covered is not None
            assert covered * total < options["coverage"] * total
    # The maps, as published.
    assert torch.equal(vocab.d2t + torch.arange(len(vocab)), vocab.target_ids)
    assert vocab.t2d.dtype == torch.bool
    assert vocab.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    draft_ids = vocab.draft_ids
    assert torch.equal(draft_ids >= 0, vocab.t2d)
    assert torch.equal(draft_ids[vocab.target_ids], torch.arange(len(vocab)))
    assert vocab.is_full == (len(vocab) == len(counts))
    again = DraftVocab.from_maps(vocab.d2t, vocab.t2d, len(counts))
    assert torch.equal(again.target_ids, vocab.target_ids)


@given(st.lists(st.integers(0, 299), min_size=1, max_size=200), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(tokens: list[int], random: Any) -> None:
    shuffled = random.sample(tokens, len(tokens))
    first, second = (
        DraftVocab.from_counts(np.bincount(some, minlength=300), coverage=0.9, keep=[7]) for some in (tokens, shuffled)
    )
    assert torch.equal(first.target_ids, second.target_ids)


def test_frequency_then_id() -> None:
    counts = np.array([1, 5, 3, 3, 0, 3])
    assert DraftVocab.from_counts(counts, size=3).target_ids.tolist() == [1, 2, 3]
    assert DraftVocab.from_counts(counts, size=3, keep=[4]).target_ids.tolist() == [1, 2, 4]
    assert DraftVocab.from_counts(counts, size=2, keep=[4, 0]).target_ids.tolist() == [0, 4]


@pytest.mark.parametrize("coverage", [0.5, 0.995, 1.0])
def test_coverage_counts_occurrences_not_tokens(coverage: float) -> None:
    """1,000 tokens by a law of 1 / rank: the fewest that reach it, to the next multiple of 64."""
    counts = (1_000_000 / np.arange(1, 1001)).astype(np.int64)
    vocab = DraftVocab.from_counts(counts, coverage=coverage)
    needed = int(np.searchsorted(np.cumsum(counts), coverage * counts.sum())) + 1
    assert len(vocab) == min(-(-needed // 64) * 64, 1000)
    assert len(vocab) == {0.5: 64, 0.995: 1000, 1.0: 1000}[coverage]
    assert vocab.coverage is not None
    assert vocab.coverage >= coverage


def test_only_tokens_that_occur_are_needed_for_all_of_it() -> None:
    counts = np.zeros(5000, dtype=np.int64)
    counts[100:200] = 3
    vocab = DraftVocab.from_counts(counts, coverage=1.0)
    assert len(vocab) == 128
    assert set(vocab.target_ids.tolist()) == set(range(100, 200)) | set(range(28))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"size": 7}, "a draft vocabulary of 7 tokens"),
        ({"size": 0}, "a draft vocabulary of 0 tokens"),
        ({"size": 1, "keep": [0, 1]}, r"from 2 \(tokens that must be in it\) to 6"),
    ],
)
def test_a_size_that_cannot_be(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        DraftVocab.from_counts(np.ones(6, dtype=np.int64), **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "either"),
        ({"size": 1, "coverage": 0.5}, "either"),
        ({"coverage": 0.0}, "within"),
        ({"coverage": 1.1}, "within"),
        ({"size": 2, "keep": [6]}, "outside"),
        ({"size": 2, "keep": [-1]}, "outside"),
    ],
)
def test_mistakes_of_the_caller(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        DraftVocab.from_counts(np.ones(6, dtype=np.int64), **options)


# --- of a corpus ------------------------------------------------------------------------------------------------------


def test_trained_tokens_alone_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several row groups, against a count by hand."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 300, 50).tolist(), rng.integers(0, 2, 50).tolist()) for _ in range(30)]
    monkeypatch.setattr("eyas.data.corpus.GROUP_ROWS", 7)
    opened = corpus(tmp_path / "c.parquet", rows)
    assert len(list(opened.row_groups())) == 5
    expected = Counter(token for tokens, mask in rows for token, m in zip(tokens, mask, strict=True) if m)
    assert count_trained(opened, 300).tolist() == [expected[i] for i in range(300)]


def test_what_ends_a_turn_is_always_in_it(tmp_path: Path, target: Target) -> None:
    """Ends even if the corpus lacks them; other added tokens if they are trained, however rarely."""
    plain = list(range(40)) * 3
    rows = [([*plain, 292], [1] * 121), ([293, *plain], [0] + [1] * 120)]
    opened = corpus(tmp_path / "c.parquet", rows)
    vocab = DraftVocab.of_corpus(opened, target, size=10)
    assert vocab.target_ids.tolist() == [*range(7), 290, 291, 292]
    assert (vocab.corpus_digest, vocab.tokenizer_hash) == (opened.digest, "a" * 32)
    assert vocab.coverage == pytest.approx((7 * 6 + 1) / 241)


def test_a_corpus_for_another_target_is_refused(tmp_path: Path, target: Target) -> None:
    meta = dataclasses.replace(META, vocab_size=1000)
    opened = corpus(tmp_path / "c.parquet", [([1, 300], [1, 1])], meta)
    with pytest.raises(ConfigError, match="token 300 of a target that has 300"):
        DraftVocab.of_corpus(opened, target, size=10)


def test_a_corpus_that_trains_nothing_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match="no token of the corpus is trained"):
        DraftVocab.of_corpus(corpus(tmp_path / "c.parquet", [([1, 2], [0, 0])]), target, size=10)


def test_smollm2(smollm2_dir: Path, tmp_path: Path) -> None:
    """The real tokenizer's end of turn is there though nothing ends here."""
    smollm2 = Target.load(str(smollm2_dir))
    meta = dataclasses.replace(META, vocab_size=smollm2.vocab_size)
    vocab = DraftVocab.of_corpus(corpus(tmp_path / "c.parquet", [([500, 501, 500], [1, 1, 1])], meta), smollm2, size=2)
    assert vocab.target_ids.tolist() == [2, 500]


# --- stale maps -------------------------------------------------------------------------------------------------------


def test_a_stale_map_is_refused(tmp_path: Path, target: Target) -> None:
    rows = [([1, 2, 3], [1, 1, 1])]
    mine = corpus(tmp_path / "mine.parquet", rows)
    vocab = DraftVocab.of_corpus(mine, target, size=5)
    vocab.check(mine)
    vocab.check(corpus(tmp_path / "copy.parquet", rows))  # the content counts, not the file
    other_rows = corpus(tmp_path / "rows.parquet", [*rows, ([4], [1])])
    with pytest.raises(ConfigError, match=f"made for corpus {mine.digest[:8]}, not for {other_rows.digest[:8]}"):
        vocab.check(other_rows)
    other_tokenizer = corpus(tmp_path / "t.parquet", rows, dataclasses.replace(META, tokenizer_hash="c" * 32))
    with pytest.raises(ConfigError, match="tokenizer aaaaaaaa, the corpus of another") as error:
        vocab.check(other_tokenizer, "runs/1/vocab.safetensors")
    assert error.value.where == "runs/1/vocab.safetensors"


def test_a_map_that_knows_no_corpus_is_not_checked_against_one(tmp_path: Path) -> None:
    """A peer's; the tokenizer still counts where it is known."""
    opened = corpus(tmp_path / "c.parquet", [([1, 2], [1, 1])])
    DraftVocab(torch.arange(5), 300).check(opened)
    with pytest.raises(ConfigError, match="tokenizer"):
        DraftVocab(torch.arange(5), 300, tokenizer_hash="d" * 32).check(opened)


def test_a_draft_that_is_trained_further_keeps_its_vocabulary(tmp_path: Path) -> None:
    vocab = DraftVocab(torch.tensor([1, 2, 9]), 300, "f" * 32, "a" * 32, 0.99)
    opened = corpus(tmp_path / "c.parquet", [([1, 2, 2, 5, 1], [0, 1, 1, 1, 1])])
    bound = vocab.bound_to(opened)
    bound.check(opened)
    assert torch.equal(bound.target_ids, vocab.target_ids)
    assert bound.made_for == {"corpus_digest": opened.digest, "tokenizer_hash": "a" * 32, "coverage": 0.75}
    with pytest.raises(ConfigError, match="tokenizer dddddddd, the corpus of another"):
        DraftVocab(torch.arange(5), 300, tokenizer_hash="d" * 32).bound_to(opened)


# --- maps and files ---------------------------------------------------------------------------------------------------


def test_full() -> None:
    vocab = DraftVocab.full(300)
    assert vocab.is_full
    assert len(vocab) == 300
    assert not vocab.d2t.any()
    assert vocab.t2d.all()
    assert not DraftVocab(torch.arange(299), 300).is_full
    assert not DraftVocab(torch.arange(300).flip(0), 300).is_full  # all of them, but not in place


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (torch.tensor([0, 300]), "outside"),
        (torch.tensor([-1, 3]), "outside"),
        (torch.tensor([3, 3]), "two draft tokens"),
        (torch.tensor([[3]]), "must be int64"),
        (torch.tensor([3.0]), "must be int64"),
        (torch.tensor([], dtype=torch.int64), "must be int64"),
    ],
)
def test_ids_that_are_none(ids: torch.Tensor, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        DraftVocab(ids, 300)


def test_a_peers_map_may_be_in_any_order() -> None:
    ids = torch.tensor([9, 2, 5])
    vocab = DraftVocab.from_maps((ids - torch.arange(3)).int(), None, 10)
    assert vocab.target_ids.tolist() == [9, 2, 5]
    assert vocab.draft_ids.tolist() == [-1, -1, 1, -1, -1, 2, -1, -1, -1, 0]


def test_absolute_ids_in_place_of_offsets_are_noticed() -> None:
    vocab = DraftVocab(torch.tensor([0, 3, 4, 8]), 12)
    with pytest.raises(ConfigError, match="disagree"):
        DraftVocab.from_maps(vocab.target_ids, vocab.t2d, 12, "x")
    with pytest.raises(ConfigError, match="d2t is no map"):
        DraftVocab.from_maps(vocab.target_ids, vocab.t2d, 9, "x")
    for d2t in (vocab.d2t.float(), vocab.t2d, vocab.d2t[None]):
        with pytest.raises(ConfigError, match="d2t is torch"):
            DraftVocab.from_maps(d2t, None, 12)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    vocab = DraftVocab(torch.tensor([1, 4, 250]), 300, "c" * 32, "d" * 32, 0.75)
    path = tmp_path / "vocab.safetensors"
    vocab.save(path)
    again = DraftVocab.load(path)
    assert torch.equal(again.target_ids, vocab.target_ids)
    assert (again.vocab_size, again.made_for) == (300, vocab.made_for)
    held = load_file(path)
    assert (held["d2t"].dtype, held["t2d"].dtype) == (torch.int64, torch.bool)
    DraftVocab.full(7).save(path)  # in place of the other
    assert DraftVocab.load(path).is_full
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.safetensors"]


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(ConfigError, match="no draft vocabulary"):
        DraftVocab.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(IntegrityError, match="cannot be read"):
        DraftVocab.load(path)
    save_file({"d2t": torch.zeros(3, dtype=torch.int64)}, path)
    with pytest.raises(ConfigError, match="not a draft vocabulary"):
        DraftVocab.load(path)
    maps = {"d2t": torch.zeros(3, dtype=torch.int64), "t2d": torch.ones(3, dtype=torch.bool)}
    for text in ("[]", "{}", '{"vocab_size": "3"}'):
        save_file(maps, path, {vocab_module.METADATA_KEY: text})
        with pytest.raises(ConfigError, match="does not say of how many"):
            DraftVocab.load(path)
    save_file(maps, path, {vocab_module.METADATA_KEY: '{"vocab_size": 4}'})
    with pytest.raises(ConfigError, match="disagree"):
        DraftVocab.load(path)
