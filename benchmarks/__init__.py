"""Measurement: traces, simulator, throughput, latency."""
