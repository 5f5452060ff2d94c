"""The frontend's metrics: counters that cost little for every token say what prometheus_client's own would."""

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from depthbatch.frontend.metrics import PROCESS, FrontendMetrics, TokenCounter, TokenHistogram


def test_the_text_is_that_of_the_library() -> None:
    """Names, labels, bounds on a bucket's edge, values beyond the last bucket, nothing observed yet: byte for byte."""
    draw = random.Random(3)
    bounds = (0.001, 0.25, 1, 4)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter, histogram = TokenCounter("a:tokens", "Tokens.", ours), TokenHistogram("a:times", "Times.", bounds, ours)
    library_counter = Counter("a:tokens", "Tokens.", ["process"], registry=theirs).labels(PROCESS)
    library = Histogram("a:times", "Times.", ["process"], buckets=bounds, registry=theirs).labels(PROCESS)
    for count in (0, 1, 200):
        for _ in range(count):
            value = draw.choice([*bounds, 0.0, 9.5, draw.random()])
            histogram.observe(value)
            library.observe(value)
            counter.value += 3
            library_counter.inc(3)
        assert generate_latest(ours) == generate_latest(theirs)
    assert b'a:times_bucket{le="+Inf",process="frontend"} 201.0' in generate_latest(ours)


def test_every_token_is_counted_once() -> None:
    """Tokens that come together: each in the counter and at its depth, their gap shared among them."""
    metrics = FrontendMetrics(r_max=4)
    with metrics.sequence(prompt_tokens=7) as timer:
        timer.tokens([4], None, 10.0)
        timer.tokens([1, 2, 3], None, 10.6)
        timer.tokens([], "length", 11.0)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'prompt_tokens_total{process="frontend"} 7.0',
        'generation_tokens_total{process="frontend"} 4.0',
        'exit_depth_sum{process="frontend"} 10.0',
        'time_to_first_token_seconds_count{process="frontend"} 1.0',
        'inter_token_latency_seconds_bucket{le="0.15",process="frontend"} 0.0',
        'inter_token_latency_seconds_bucket{le="0.2",process="frontend"} 1.0',
        'request_success_total{finished_reason="length",process="frontend"} 1.0',
    ):
        assert f"depthbatch:{line}\n" in text
