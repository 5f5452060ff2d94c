"""Strict reading of a model's config.json: every field is asked for by name and type, nothing has a hidden default.

Knows nothing of any model. All failures are one-line ModelErrors that name the file and the field.
"""

from typing import Any

from depthbatch.common.errors import ModelError
from depthbatch.worker.layers.rotary import Llama3Scaling, Rope

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class ConfigReader:
    """A parsed config.json with typed access.

    Args:
        values: the JSON object.
        path: what error messages call it.
    """

    def __init__(self, values: dict[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def has(self, name: str) -> bool:
        """True when the field is there and not null."""
        return self.values.get(name) is not None

    def fail(self, message: str) -> ModelError:
        """A ModelError that starts with the file's name, to be raised by the caller."""
        return ModelError(f"{self.path}: {message}")

    def _get(self, name: str, kind: str, types: tuple[type, ...]) -> Any:
        if not self.has(name):
            raise self.fail(f"missing field '{name}'")
        value = self.values[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.fail(f"field '{name}' must be {kind}, got {value!r}")
        return value

    def integer(self, name: str, minimum: int = 1) -> int:
        """An integer field of at least ``minimum``."""
        value = int(self._get(name, "an integer", (int,)))
        if value < minimum:
            raise self.fail(f"field '{name}' must be at least {minimum}, got {value}")
        return value

    def number(self, name: str) -> float:
        """A positive, finite number."""
        value = float(self._get(name, "a number", (int, float)))
        if not 0.0 < value < float("inf"):
            raise self.fail(f"field '{name}' must be positive and finite, got {value}")
        return value

    def boolean(self, name: str) -> bool:
        """A true or false field."""
        return bool(self._get(name, "true or false", (bool,)))

    def text(self, name: str) -> str:
        """A string field."""
        return str(self._get(name, "a string", (str,)))

    def expect(self, name: str, supported: tuple[Any, ...], optional: bool = False) -> None:
        """Refuses values of ``name`` that would change the forward pass in a way that is not built."""
        if optional and not self.has(name):
            return
        value = self._get(name, "a string, number or boolean", (str, bool, int, float))
        if value not in supported:
            wanted = " or ".join(repr(v) for v in supported)
            raise self.fail(f"'{name}' = {value!r} is not supported (only {wanted})")

    def architectures(self) -> tuple[str, ...]:
        """Class names the checkpoint was saved from; empty when not given."""
        names = self.values.get("architectures") or ()
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise self.fail(f"field 'architectures' must be a list of strings, got {names!r}")
        return tuple(names)

    def tied_head(self, names: tuple[str, ...]) -> bool:
        """Whether the head is the embedding: the first of the spellings ``names`` that is present decides."""
        for name in names:
            if self.has(name):
                return self.boolean(name)
        raise self.fail("missing field " + " or ".join(f"'{name}'" for name in names))

    def is_named(self, model_type: str, architecture: str) -> bool:
        """Whether the config calls itself by either name."""
        return self.values.get("model_type") == model_type or architecture in self.architectures()

    def refuse(self, *names: str) -> None:
        """Refuses fields that are set to anything but null, false, zero or nothing."""
        for name in names:
            if value := self.values.get(name):
                raise self.fail(f"'{name}' = {value!r} is not supported (only absent or off)")

    def rope(self, base: str, interleaved: bool, scaled: bool = False) -> Rope:
        """The rotary embedding: ``base`` names the field of its base, at the top level or, which wins, in
        ``rope_parameters``. Refuses fields there that are not honoured; ``scaled`` families honour llama3's."""
        self.expect("partial_rotary_factor", (1.0,), optional=True)
        rope, scaling = None, None
        for name in ("rope_scaling", "rope_parameters"):
            inner = ConfigReader(self.values.get(name) or {}, f"{self.path}: {name}")
            if not isinstance(inner.values, dict):
                raise self.fail(f"field '{name}' must be an object, got {inner.values!r}")
            kind = inner.values.get("rope_type", inner.values.get("type")) or "default"
            if kind != "default" and not (scaled and kind == "llama3"):
                supported = "'default' or 'llama3'" if scaled else "'default'"
                raise self.fail(f"'{name}' of type {kind!r} is not supported (only {supported})")
            inner.expect("partial_rotary_factor", (1.0,), optional=True)
            known = {base, "rope_type", "type", "partial_rotary_factor", *(_LLAMA3 if kind == "llama3" else ())}
            inner.refuse(*sorted(inner.values.keys() - known))
            rope = inner.number(base) if inner.has(base) else rope
            scaling = Llama3Scaling(*map(inner.number, _LLAMA3)) if kind == "llama3" else scaling
        return Rope(self.number(base) if rope is None else rope, interleaved, scaling)

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """End-of-sequence ids: ``eos_token_id`` as a number or list; none when it is absent."""
        value = self.values.get("eos_token_id")
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise self.fail(f"field 'eos_token_id' must hold token ids below {vocab_size}, got {value!r}")
        return ids
