"""The device worker: weights, KV memory, stages, gates, sampling."""
