"""What the corpus knows of a shard's rows, packed into flat tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.store.format import pack_contents
from eyas.store.plan import Shard

GOOD = st.integers(1, 4).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.just(tokens), st.sets(st.integers(0, tokens - 1)).map(sorted))
)
ANY = st.tuples(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(-1, 4), max_size=3))


@given(st.lists(GOOD, min_size=1) | st.lists(GOOD | ANY, min_size=1))
def test_rows_are_packed_only_if_each_fits_and_the_first_that_does_not_is_named(rows):
    """A row: counts of tokens and mask, kept positions. The rule, row by row here, is checked all at once there."""
    shard = Shard(0, 10, 10 + len(rows), sum(t for t, _, _ in rows), sum(len(p) for _, _, p in rows))
    given_ = [(range(tokens), [1] * mask, np.array(positions, "i4")) for tokens, mask, positions in rows]
    wrong = [
        number
        for number, (tokens, mask, positions) in enumerate(rows, 10)
        if mask != tokens or positions != sorted(set(positions)) or not set(positions) <= set(range(tokens))
    ]
    if wrong:
        with pytest.raises(ValueError, match=f"row {wrong[0]}: "):
            pack_contents(shard, given_)
    else:
        packed = pack_contents(shard, given_)
        starts = packed.row_offsets.tolist()
        expected = [start + p for start, (_, _, positions) in zip(starts, rows, strict=False) for p in positions]
        assert packed.last_index.tolist() == expected
        assert packed.last_index.dtype == np.dtype("<i4")
