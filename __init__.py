"""depthbatch: a serving engine for looped language models with per-token depth."""

__version__ = "0.1.0"
