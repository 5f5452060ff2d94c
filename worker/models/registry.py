"""Finds the family of a config. A new model is one file in this folder, or in another package, that defines ``FAMILY``.

Another package names its family as an entry point of the group ``depthbatch.models``: ``name = "package.module:FAMILY"``.
"""

import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from depthbatch.common.errors import ModelError
from depthbatch.worker import models
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import ModelFamily

ENTRY_POINTS = "depthbatch.models"


@cache
def families() -> tuple[ModelFamily, ...]:
    """Other packages' families, then those of this one, each in the order of names. Raises ModelError."""
    found = [_load(point) for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)]
    for info in sorted(pkgutil.iter_modules(models.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        if hasattr(module, "FAMILY"):
            found.append(module.FAMILY)
    return tuple(found)


def _load(point: EntryPoint) -> ModelFamily:
    try:
        family: ModelFamily = point.load()
    except Exception as error:  # whatever the other package does wrong
        raise ModelError(f"entry point '{point.name}' of {ENTRY_POINTS} ({point.value}) fails: {error}") from error
    return family


def find_family(config: ConfigReader) -> ModelFamily:
    """The family that claims the config. Raises ModelError naming what the config says it is."""
    for family in families():
        if family.claims(config):
            return family
    model_type, names = config.values.get("model_type"), list(config.architectures())
    known = ", ".join(family.name for family in families())
    raise config.fail(f"unknown architecture: model_type {model_type!r}, architectures {names} (known: {known})")
