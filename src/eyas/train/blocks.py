"""Which blocks of keys a block of rows can see: the tables of flex attention's block mask. Pure, on the CPU.

The query of row t reads the keys of its own document up to position t. Rows come in any order; blocks of them are seen
against blocks of keys, `BLOCK` each, without the [R, N] mask behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

#: Rows whose keys are looked up together, and keys that are.
BLOCK: Final = 128

_Ints = npt.NDArray[np.int64]
_Shorts = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]


class BlockTables(NamedTuple):
    """What the rows of one step may read: the tables of a `BlockMask`, and what decides inside.

    Attributes:
        kv_number, kv_at, kv_whole_number, kv_whole_at: int32, for each block of queries the blocks of keys seen in
            part, and those seen whole.
        q_number, q_at, q_whole_number, q_whole_at: the same the other way round.
        rows, starts: [N] int64 or longer, each query's position and its document's first; -1 and N after the last.
    """

    kv_number: Tensor
    kv_at: Tensor
    kv_whole_number: Tensor
    kv_whole_at: Tensor
    q_number: Tensor
    q_at: Tensor
    q_whole_number: Tensor
    q_whole_at: Tensor
    rows: Tensor
    starts: Tensor

    def block_mask(self, queries: int, keys: int) -> BlockMask:
        """As flex attention takes it. Made inside what is compiled, so that the sizes stay open."""
        rows, starts = self.rows, self.starts

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= rows[query]) & (key >= starts[query])

        return BlockMask(
            seq_lengths=(queries, keys),
            kv_num_blocks=self.kv_number,
            kv_indices=self.kv_at,
            full_kv_num_blocks=self.kv_whole_number,
            full_kv_indices=self.kv_whole_at,
            q_num_blocks=self.q_number,
            q_indices=self.q_at,
            full_q_num_blocks=self.q_whole_number,
            full_q_indices=self.q_whole_at,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=sees,
        )


def padded_rows(rows_R: _Ints, starts_R: _Ints, length: int) -> tuple[_Ints, _Ints]:
    """`BlockTables.rows` and `starts`: for as many queries as keys at least, in whole blocks of queries."""
    size = max(length, -(-len(rows_R) // BLOCK) * BLOCK)
    rows, starts = np.full(size, -1, dtype=np.int64), np.full(size, length, dtype=np.int64)
    rows[: len(rows_R)], starts[: len(rows_R)] = rows_R, starts_R
    return rows, starts


def block_tables(rows: _Ints, starts: _Ints, counts: Sequence[int], length: int) -> list[list[_Shorts]]:
    """The eight tables of the prefixes `rows[:count]` over `length` keys, in the order of `BlockTables`.

    A block of keys counts as seen in part, or whole, by all rows; a prefix of the rows drops whole blocks of queries,
    and its last block may name keys that none of its own rows sees: the mask inside decides.

    Args:
        rows, starts: as `padded_rows` gives them.
        counts: sizes of the prefixes, falling, none of them 0.
        length: N.
    """
    queries, keys = -(-counts[0] // BLOCK), -(-length // BLOCK)
    first_B = np.arange(keys, dtype=np.int64) * BLOCK
    last_B = np.minimum(first_B + BLOCK, length) - 1
    last_R, first_R = rows[: queries * BLOCK, None], starts[: queries * BLOCK, None]
    seen_QB = ((last_R >= first_B) & (first_R <= last_B)).reshape(queries, BLOCK, keys).any(1)
    whole_RB = ((last_R >= last_B) & (first_R <= first_B)) | (first_R == length)  # padding is not in the way
    whole_QB = whole_RB.reshape(queries, BLOCK, keys).all(1)
    part_QB = seen_QB & ~whole_QB
    made: dict[int, list[_Shorts]] = {}
    for count in counts:
        used = -(-count // BLOCK)
        if used not in made:
            part, whole = part_QB[:used], whole_QB[:used]
            made[used] = [table for of in (part, whole, part.T, whole.T) for table in _lists(of)]
    return [made[-(-count // BLOCK)] for count in counts]


def _lists(table: _Bools) -> tuple[_Shorts, _Shorts]:
    """For each line how many are true, [1, 1, lines], and where, those first and ascending, [1, 1, lines, columns]."""
    order = np.argsort(~table, axis=-1, kind="stable")
    return table.sum(-1).astype(np.int32)[None, None], order.astype(np.int32)[None, None]
