"""The worker: weights, KV memory, stages, sampling and exit gates."""
