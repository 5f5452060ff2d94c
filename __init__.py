"""depthbatch: a serving engine for looped language models with per-token depth."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "OutputDelta", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from depthbatch.frontend.async_engine import AsyncEngine
    from depthbatch.frontend.llm import LLM
    from depthbatch.frontend.output import OutputDelta, RequestOutput
    from depthbatch.frontend.params import SamplingParams

_HOMES = {
    "LLM": "depthbatch.frontend.llm",
    "AsyncEngine": "depthbatch.frontend.async_engine",
    "OutputDelta": "depthbatch.frontend.output",
    "RequestOutput": "depthbatch.frontend.output",
    "SamplingParams": "depthbatch.frontend.params",
}


def __getattr__(name: str) -> Any:
    """Public names on first use: importing a subpackage must not import the frontend (the scheduler would)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'depthbatch' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
