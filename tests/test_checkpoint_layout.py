"""Where bytes go: every byte of every item once, no block too large, the same for the same sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_elastic.checkpoint.layout import ALIGN_BYTES, BLOCK_BYTES, Layout, lay_out

SMALL = BLOCK_BYTES // 4 - 1
sizes = st.lists(
    st.one_of(
        st.integers(min_value=0, max_value=300),
        st.integers(min_value=0, max_value=3 * BLOCK_BYTES),
        st.sampled_from([0, 1, SMALL, SMALL + 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]),
    ),
    max_size=60,
)


@given(sizes)
def test_layout_holds_each_byte_once(items: list[int]) -> None:
    laid_out = lay_out(items)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, pieces in zip(items, laid_out.pieces, strict=True):
        assert sum(piece.length for piece in pieces) == size
        for piece in pieces:
            assert piece.length > 0
            taken.setdefault(piece.block, []).append((piece.offset, piece.offset + piece.length))
    assert sorted(taken) == list(range(len(laid_out.block_sizes)))
    for block, spans in taken.items():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert spans[-1][1] == laid_out.block_sizes[block] <= BLOCK_BYTES


@given(sizes)
def test_layout_aligns_each_item_and_repeats_itself(items: list[int]) -> None:
    laid_out = lay_out(items)
    assert all(piece.offset % ALIGN_BYTES == 0 for pieces in laid_out.pieces for piece in pieces)
    assert lay_out(tuple(items)) == laid_out


@given(sizes)
def test_layout_cuts_an_item_into_whole_blocks_of_its_own(items: list[int]) -> None:
    """A staged copy relies on it: the pieces of one item follow each other in memory."""
    for pieces in lay_out(items).pieces:
        if len(pieces) > 1:
            assert all(piece.offset == 0 for piece in pieces)
            assert all(piece.length == BLOCK_BYTES for piece in pieces[:-1])
            first = pieces[0].block
            assert [piece.block for piece in pieces] == list(range(first, first + len(pieces)))


@pytest.mark.parametrize(
    ("items", "blocks"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([0, 0], 0, id="only empty items"),
        pytest.param([64 << 10] * 3000, 24, id="3000 small tensors"),
        pytest.param([1 << 30], 128, id="one large tensor"),
        pytest.param([BLOCK_BYTES + 1], 2, id="one byte more than a block"),
    ],
)
def test_layout_needs_few_requests(items: list[int], blocks: int) -> None:
    assert len(lay_out(items).block_sizes) == blocks


def test_layout_needs_no_more_requests_for_a_tensor_of_5_terabytes_than_any_store_takes_c058() -> None:
    laid_out = lay_out([5 * 10**12])
    assert len(laid_out.block_sizes) < 10**6  # a block's name has six digits, and there are no parts
    assert max(laid_out.block_sizes) == BLOCK_BYTES


def test_layout_of_nothing_is_empty() -> None:
    assert lay_out([]) == Layout(pieces=(), block_sizes=())
