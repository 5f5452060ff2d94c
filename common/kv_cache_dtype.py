"""How K and V are stored: in the model's type, or in a byte a number with a scale a token, KV head and plane.

vLLM's name (``--kv-cache-dtype``). Knows sizes, nothing of tensors.
"""

from enum import StrEnum

SCALE_BYTES = 2  # a bfloat16


class KVCacheDtype(StrEnum):
    """The values of the option."""

    AUTO = "auto"  # the model's type
    INT8 = "int8"  # whole numbers from -127 to 127
    FP8 = "fp8"  # e4m3: 4 bits of exponent, 3 of mantissa, no infinities (OCP 8-bit floating point, FP8 E4M3)

    @property
    def is_quantized(self) -> bool:
        return self is not KVCacheDtype.AUTO

    def bytes_per_vector(self, head_dim: int, itemsize: int) -> int:
        """Bytes of one K or V of one token and head, its scale included; ``itemsize``: bytes of a number of the model."""
        return head_dim + SCALE_BYTES if self.is_quantized else head_dim * itemsize
