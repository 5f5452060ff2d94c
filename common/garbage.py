"""Python's garbage collector in a process that holds thousands of open requests."""

import gc

_THRESHOLDS = (2_000, 10, 1_000)  # container objects made and not freed, then collections of the younger generation


def rarely_collect() -> None:
    """Once start-up is over: what it made is never gone through again, and what requests made only rarely.

    By default the collector goes through every object each time a quarter more have come: with 5,000 open requests in
    the frontend, half a second in which nothing is streamed. Counted references free what a request leaves behind;
    the collections of the young, which stay, get its cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
