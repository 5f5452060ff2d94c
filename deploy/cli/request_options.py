"""Options of an engine that its requests have too, under the same name: there, they are the defaults."""

from depthbatch.common.config import FIELDS
from depthbatch.frontend.params import SamplingParams

SHARED_OPTIONS = tuple(name for name in FIELDS if name in SamplingParams.__annotations__)
