"""Size classes, rows and pages: every byte of a row belongs to exactly one page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Closed, ConfigError, CoreBug
from kvtier.memory.layout import Layout, PageLayout, Rows, SizeClass, plan_layout


def test_rows_are_padded_and_fill_the_budget() -> None:
    layout = plan_layout(100_000, [5000])
    assert layout == Layout(12 * 8192, 1, [SizeClass(0, 0, 8192, 12)])


@given(
    payloads=st.lists(st.integers(1, 50_000), min_size=1, max_size=5),
    extra=st.integers(0, 10_000_000),
)
def test_classes_lie_side_by_side_within_the_budget(payloads: list[int], extra: int) -> None:
    one_of_each = sum(-(-payload // 4096) * 4096 for payload in payloads)
    layout = plan_layout(one_of_each + extra, payloads)
    offset = 0
    for payload, c in zip(payloads, layout.classes, strict=True):
        assert c.offset_bytes == offset
        assert c.rows >= 1
        assert payload <= c.row_bytes < payload + 4096
        assert c.row_bytes % 4096 == 0
        offset += c.rows * c.row_bytes
    assert layout.size_bytes == offset <= one_of_each + extra
    assert one_of_each + extra - offset < one_of_each  # not one more row of each would have fitted


def test_a_budget_below_one_row_of_each_class_is_an_error_with_the_needed_bytes() -> None:
    with pytest.raises(ConfigError, match=r"12287.* 12288"):
        plan_layout(12287, [4096, 8000])
    assert [c.rows for c in plan_layout(12288, [4096, 8000]).classes] == [1, 1]


@pytest.mark.parametrize("payloads", [[], [0], [4096, -1]])
def test_a_class_without_payload_is_an_error(payloads: list[int]) -> None:
    with pytest.raises(ConfigError):
        plan_layout(1 << 20, payloads)


@pytest.mark.parametrize("engine_blocks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_pages_of_all_ranks_tile_the_payload(engine_blocks: int, ranks: int) -> None:
    layout = PageLayout(engine_blocks, ranks, [7, 100, 13])
    touched = np.zeros(layout.payload_bytes, np.uint8)
    for block in range(engine_blocks):
        for rank in range(ranks):
            for offset, size in zip(layout.offsets(rank), layout.page_bytes, strict=True):
                at = offset + block * ranks * 120
                touched[at : at + size] += 1
    assert touched.tolist() == [1] * (engine_blocks * ranks * 120)


def test_a_rank_outside_of_the_layout_is_an_error() -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        PageLayout(1, 2, [4]).offsets(2)


@pytest.mark.parametrize(("blocks", "ranks", "pages"), [(0, 1, [4]), (1, 0, [4]), (1, 1, []), (1, 1, [4, 0])])
def test_an_empty_page_layout_is_an_error(blocks: int, ranks: int, pages: list[int]) -> None:
    with pytest.raises(ConfigError):
        PageLayout(blocks, ranks, pages)


def test_descriptions_differ_exactly_where_layouts_do() -> None:
    layouts = [PageLayout(e, r, p) for e in (1, 2) for r in (1, 2) for p in ([12], [1, 2], [2, 1], [1, 2, 1])]
    assert len({layout.describe() for layout in layouts}) == len(layouts)
    assert PageLayout(2, 1, [4, 8]).describe() == "rows/1 blocks=2 ranks=1 pages=4,8"


def test_rows_are_the_regions_own_bytes() -> None:
    layout = plan_layout(9 * 4096, [4096, 5000])
    array = np.zeros(layout.size_bytes, np.uint8)
    rows = Rows(array, layout)
    for c in layout.classes:
        for slot in range(c.rows):
            rows.row(c.index, slot)[:] = bytes([10 * c.index + slot + 1]) * c.row_bytes
    for c in layout.classes:
        assert rows.table(c.index).shape == (c.rows, c.row_bytes)
        for slot in range(c.rows):
            start = c.offset_bytes + slot * c.row_bytes
            assert (array[start : start + c.row_bytes] == 10 * c.index + slot + 1).all()


@pytest.mark.parametrize(("size_class", "slot"), [(0, -1), (0, 3), (1, 0), (-1, 0)])
def test_a_row_outside_is_a_bug(size_class: int, slot: int) -> None:
    layout = plan_layout(3 * 4096, [4096])
    with pytest.raises(CoreBug):
        Rows(np.zeros(layout.size_bytes, np.uint8), layout).row(size_class, slot)


def test_a_layout_larger_than_the_region_is_a_bug() -> None:
    with pytest.raises(CoreBug):
        Rows(np.zeros(4096, np.uint8), plan_layout(8192, [4096]))
    with pytest.raises(CoreBug):
        Rows(np.zeros(4096, np.uint8), Layout(4096, 1, [SizeClass(0, 0, 4096, 2)]))


def test_closed_rows_let_go_of_the_region() -> None:
    layout = plan_layout(4096, [4096])
    rows = Rows(np.zeros(4096, np.uint8), layout)
    rows.close()
    with pytest.raises(Closed):
        rows.row(0, 0)
