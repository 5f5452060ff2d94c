"""Options of an engine that its requests have too, under the same name: there, they are the defaults."""

from depthbatch.common.config import FIELDS
from depthbatch.frontend.params import SamplingParams

# --speculation is the engine's alone: how many draft lanes; a request's field of that name says whether it may have any
SHARED_OPTIONS = tuple(name for name in FIELDS if name in SamplingParams.__annotations__ and name != "speculation")
DEMOS = ("demo", "demo-huginn")  # models that ship with the package
