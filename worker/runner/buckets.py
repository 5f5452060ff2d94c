"""Row counts of decode stages: few enough to capture each, close enough to waste little padding."""

from bisect import bisect_left


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 up to ``max_rows``, which is always the last; ascending."""
    small = [size for size in (1, 2, 4) if size < max_rows]
    return (*small, *range(8, max_rows, 8), max_rows)


EXACT_ROWS = 128  # beyond, a step of 8 is at most 6 % of padding


def uncaptured_sizes(max_rows: int) -> tuple[int, ...]:
    """Every size up to EXACT_ROWS, then steps of 8: nothing is captured on the CPU, where arithmetic bounds a step from
    about 10 rows on and a padded row costs what a real one does."""
    return (*range(1, min(max_rows, EXACT_ROWS + 1)), *range(EXACT_ROWS + 8, max_rows, 8), max_rows)


def power_of_two_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, ... and ``max_rows``: the paper's buckets, to compare with."""
    return (*(1 << e for e in range(max_rows.bit_length()) if 1 << e < max_rows), max_rows)


def bucket_for(buckets: tuple[int, ...], rows: int) -> int:
    """The smallest bucket that holds ``rows``."""
    return buckets[bisect_left(buckets, rows)]
