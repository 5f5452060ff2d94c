"""The linear layer, with its weight reordered once for the processor where that pays.

oneDNN's blocked bf16 weights save the reordering that F.linear does on every call. The operators are private to
torch, so F.linear stays as the fallback; both give the same bits.
"""

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x @ weight.T without bias; weight [out, in].

    The weight may be stored reordered, so it is not readable back.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], in the type of the weight."""
        return F.linear(x, self._weight)
