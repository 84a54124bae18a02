"""Attention over rows in any order: the block tables say what the mask says, and both paths give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from eyas.train.attention import RowSpans, attend, row_spans
from eyas.train.batch import Batch, Sample, pack
from eyas.train.blocks import BLOCK, BlockTables


def made_batch(lengths: list[int], share: float, steps: int, budget: int | None = None, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    samples = []
    for row, n in enumerate(lengths):
        mask = torch.rand(n, generator=g) < share
        every = torch.arange(n)
        samples.append(Sample(row, every, mask, torch.zeros(n, 1), torch.zeros(n, 1), every))
    return pack(samples, steps=steps, budget=budget)


def tables(batch: Batch) -> list[BlockTables]:
    assert batch.index is not None
    return [step.tables for step in batch.index.open().steps]


def blocks(number: Tensor, at: Tensor) -> Tensor:
    """Table of lists -> [lines, columns] bool."""
    number, at = number[0, 0], at[0, 0]
    dense = torch.zeros(at.shape[0], int(at.max()) + 1 if at.numel() else 0, dtype=torch.bool)
    for line, (count, columns) in enumerate(zip(number.tolist(), at.tolist(), strict=True)):
        assert count <= len(columns) and columns[:count] == sorted(columns[:count]), "ascending, and all there"
        dense[line, columns[:count]] = True
    return dense


def allowed(batch: Batch, count: int) -> Tensor:
    """[count, N] the mask itself, by documents and positions."""
    rows = batch.rows[:count]
    same = batch.document[rows][:, None] == batch.document[None]
    return same & (torch.arange(len(batch.tokens))[None] <= rows[:, None])


@settings(max_examples=25, deadline=None)
@example([5] * 100, 1.0, 0, 0)  # fewer blocks of rows at each step
@given(
    st.lists(st.integers(2, 400), min_size=1, max_size=5), st.floats(0.5, 1), st.integers(0, 200), st.integers(0, 99)
)
def test_tables_name_every_block_with_something_to_see(lengths: list[int], share: float, spare: int, seed: int) -> None:
    batch = made_batch(lengths, share, 3, sum(lengths) + spare, seed)
    counts = [n for n in batch.counts if n]
    if not counts:
        return
    n_keys = len(batch.tokens)
    for count, table in zip(counts, tables(batch), strict=True):
        mask = allowed(batch, count)
        used, width = -(-count // BLOCK), -(-n_keys // BLOCK)
        part, whole = blocks(table.kv_number, table.kv_at), blocks(table.kv_whole_number, table.kv_whole_at)
        assert part.shape == whole.shape == (used, width)
        assert not (part & whole).any()
        for q in range(used):
            for k in range(width):
                block = mask[q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK]
                assert not block.any() or part[q, k] or whole[q, k], "something is seen that no table names"
                assert not whole[q, k] or block.all(), "whole, but not all of it is seen"
        by_key = blocks(table.q_number, table.q_at), blocks(table.q_whole_number, table.q_whole_at)
        assert torch.equal(by_key[0][:, :used], part.T) and torch.equal(by_key[1][:, :used], whole.T)
        inside = table.block_mask(count, n_keys).mask_mod
        query, key = torch.meshgrid(torch.arange(count), torch.arange(n_keys), indexing="ij")
        assert torch.equal(inside(query, query, query, key), mask)


def test_most_blocks_of_long_documents_are_left_out_or_whole() -> None:
    batch = made_batch([1024, 1024], 1.0, 1)
    (table,) = tables(batch)
    assert int(table.kv_number.sum()) <= 2 * 16 + 2 and int(table.kv_whole_number.sum()) >= 2 * 21


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("past", [0, 1, 3])
def test_both_paths_give_the_same_numbers_and_gradients(monkeypatch, heads: tuple[int, int], past: int) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    batch = made_batch([150, 2, 90, 137], 0.93, past + 1, 512)
    n, dim = batch.counts[past], 4
    assert n > BLOCK and n % BLOCK
    g = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    inputs = (
        made(n, heads[0], dim),
        *(made(512, heads[1], dim) for _ in "kv"),
        *(made(past, n, heads[1], dim) for _ in "kv"),
    )
    weights = made(n, heads[0] * dim).detach()
    results = []
    for kind in ("sdpa", "flex"):
        mask: BlockTables | RowSpans = tables(batch)[past] if kind == "flex" else row_spans(batch)[past]
        out = attend(*inputs, mask)
        results.append((out, *torch.autograd.grad((out * weights).sum(), inputs if past else inputs[:3])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_row_reads_its_document_up_to_itself_and_its_own_later_keys() -> None:
    batch = made_batch([5, 6], 1.0, 2)
    n = batch.counts[1]
    rows = batch.rows[:n].tolist()
    query = torch.zeros(n, 1, 2, dtype=torch.float64)
    keys = torch.zeros(11, 1, 2, dtype=torch.float64)
    values = torch.arange(11, dtype=torch.float64)[:, None, None].repeat(1, 1, 2)
    own = torch.full((1, n, 1, 2), 100.0, dtype=torch.float64) * torch.arange(1, n + 1)[None, :, None, None]
    out = attend(query, keys, values, torch.zeros_like(own), own, row_spans(batch)[1])
    for i, t in enumerate(rows):  # equal scores: the plain mean of what is read
        seen = [*range(0 if t < 5 else 5, t + 1), 100.0 * (i + 1)]
        assert out[i, 0].item() == pytest.approx(np.mean(seen))
