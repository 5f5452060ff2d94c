"""Random Llamas, as transformers stores them."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_llama(path: Path, **changes: Any) -> LlamaForCausalLM:
    """A random Llama with grouped heads, its norms unequal to 1, as transformers stores it."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"num_key_value_heads": 2, "vocab_size": 96} | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model.eval()
