"""Finds the family of a config. A new model is one file in this folder that defines ``FAMILY``."""

import importlib
import pkgutil
from functools import cache

from depthbatch.worker import models
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.family import ModelFamily


@cache
def families() -> tuple[ModelFamily, ...]:
    """Every family this package knows, in the order of file names."""
    found = []
    for info in sorted(pkgutil.iter_modules(models.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        if hasattr(module, "FAMILY"):
            found.append(module.FAMILY)
    return tuple(found)


def find_family(config: ConfigReader) -> ModelFamily:
    """The family that claims the config. Raises ModelError naming what the config says it is."""
    for family in families():
        if family.claims(config):
            return family
    model_type, names = config.values.get("model_type"), list(config.architectures())
    known = ", ".join(family.name for family in families())
    raise config.fail(f"unknown architecture: model_type {model_type!r}, architectures {names} (known: {known})")
