"""Layouts as tensor arithmetic equal the layouts as plain functions, for every loop, r_max and layout."""

import pytest
import torch

from depthbatch.benchmarks.gpu.shapes import bucket_for
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.runner.stage_input import bucket_sizes, uncaptured_sizes
from depthbatch.worker.runner.stages import fill_of, needs_fill, planes_of


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("r_max", [1, 2, 4, 7])
def test_planes_equal_the_plain_layout(layout: KVLayout, r_max: int) -> None:
    """Guards the plane a row reads: one off and a sequence reads another loop's K/V. Every loop is compared."""
    loops = torch.arange(1, r_max + 1, dtype=torch.int32)
    planes = planes_of(layout, loops, r_max, out=torch.empty_like(loops))
    assert planes.tolist() == [layout.plane(loop) for loop in range(1, r_max + 1)]


@pytest.mark.parametrize("layout", [KVLayout.SINGLE, KVLayout.FIRST_THEN_SHARED, KVLayout.LAST_EXITED])
@pytest.mark.parametrize("r_max", [1, 2, 4, 7])
def test_fills_equal_the_plain_layout(layout: KVLayout, r_max: int) -> None:
    """Guards holes after an early exit: the set of copies is compared for every exit loop."""
    loops = torch.arange(1, r_max + 1, dtype=torch.int32)
    fill = fill_of(layout, loops, r_max)
    for index, loop in enumerate(range(1, r_max + 1)):
        copies = list(range(int(fill.first[index]), int(fill.end[index])))
        assert copies == list(layout.planes_to_fill(loop, r_max))
        if copies:
            assert int(fill.source[index]) == layout.plane(loop)
    assert needs_fill(layout, r_max) == any(layout.planes_to_fill(loop, r_max) for loop in range(1, r_max + 1))


@pytest.mark.parametrize("layout", list(KVLayout))
def test_padding_rows_use_plane_0_and_fill_nothing(layout: KVLayout) -> None:
    """A padding row has loop 0; plane -1 would be the last block of the cache's previous neighbour."""
    zero = torch.zeros(3, dtype=torch.int32)
    assert planes_of(layout, zero, 4, out=torch.empty_like(zero)).tolist() == [0, 0, 0]
    fill = fill_of(layout, zero, 4)
    assert bool((fill.first >= fill.end).all())


@pytest.mark.parametrize("max_rows", [*range(1, 30), 64, 100, 512])
def test_buckets(max_rows: int) -> None:
    """Ascending, end at W, never more than 7 padding rows; any other list would fail one of the three."""
    buckets = bucket_sizes(max_rows)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == max_rows
    for rows in range(1, max_rows + 1):
        bucket = bucket_for(buckets, rows)
        assert bucket in buckets and 0 <= bucket - rows < 8
    if max_rows >= 16:
        assert buckets[:5] == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("max_rows", [1, 2, 64, 127, 128, 129, 136, 137, 512])
def test_no_row_is_padded_where_nothing_is_captured(max_rows: int) -> None:
    """Bug: on the CPU 27 rows took the time of 32, an eighth of a refill core step, though no graph asks for buckets."""
    sizes = uncaptured_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        assert bucket_for(sizes, rows) - rows < (1 if rows <= 128 else 8)
