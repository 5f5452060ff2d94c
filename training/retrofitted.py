"""Differentiable forward of retrofitted models with Llama blocks; ``state_dict`` has the checkpoint's keys.

Source: docs/models.md, section 5. What a loop may learn is small: the adapter, and the core's matrices, whole or by a
low-rank change (LoRA) that is merged when the model is written. The module does not know about KV caches or exits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from depthbatch.training.layers import RMSNorm, causal_attention, rotate_halves, split_heads
from depthbatch.worker.models.llama_like import Plan

LORA_NAMES = ("Wqkv", "attn.proj", "fc", "mlp.proj")


class _Attention(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.heads, self.kv_heads = plan.heads, plan.kv_heads
        self.widths = [n * plan.head_dim for n in (plan.heads, plan.kv_heads, plan.kv_heads)]
        self.Wqkv = nn.Linear(plan.hidden, sum(self.widths), bias=False)
        self.proj = nn.Linear(self.widths[0], plan.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.Wqkv(x).split(self.widths, -1)
        q, k, v = (split_heads(part, n) for part, n in zip(parts, (self.heads, *[self.kv_heads] * 2), strict=True))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (rotate_halves(k, cos, sin), v))
        out: Tensor = self.proj(causal_attention(rotate_halves(q, cos, sin), k, v))
        return out


class _Mlp(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.fc = nn.Linear(plan.hidden, 2 * plan.inner, bias=False)
        self.proj = nn.Linear(plan.inner, plan.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        out: Tensor = self.proj(F.silu(gate) * up)
        return out


class _Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(plan.hidden, plan.eps)
        self.norm_2 = RMSNorm(plan.hidden, plan.eps)
        self.attn = _Attention(plan)
        self.mlp = _Mlp(plan)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class _Transformer(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.wte = nn.Embedding(plan.vocab, plan.hidden)
        self.prelude = nn.ModuleList(_Block(plan) for _ in range(plan.prelude.layers))
        self.adapter = nn.Linear(2 * plan.hidden, plan.hidden, bias=False)
        self.core_block = nn.ModuleList(_Block(plan) for _ in range(plan.core.layers))
        self.coda = nn.ModuleList(_Block(plan) for _ in range(plan.coda.layers))
        self.ln_f = RMSNorm(plan.hidden, plan.eps)


class RetrofittedTrainer(nn.Module):
    """A retrofitted model for training, its state starting at zero; parameter names equal the checkpoint's keys.

    ``plan``: its sizes (RetrofittedFamily.plan).
    ``embed_scale``: factor of the embedding.
    """

    def __init__(self, plan: Plan, embed_scale: float) -> None:
        super().__init__()
        self.plan, self.embed_scale = plan, embed_scale
        self.transformer = _Transformer(plan)
        self.lm_head = nn.Linear(plan.hidden, plan.vocab, bias=False)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        frequencies = torch.from_numpy(self.plan.rope.frequencies(self.plan.head_dim))
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor, loops: int) -> Tensor:
        """States after loops 1..R of whole rows [B, T], a KV plane a loop: [R, B, T, D]."""
        cos, sin = self._angles(ids.shape[1])
        with torch.no_grad():  # what is before the loop is not trained
            injection = self.transformer.wte(ids) * self.embed_scale
            for block in self.transformer.prelude:
                injection = block(injection, cos, sin)
        state, states = torch.zeros_like(injection), []
        for _ in range(loops):
            state = self.transformer.adapter(torch.cat((state, injection), -1))
            for block in self.transformer.core_block:
                state = block(state, cos, sin)
            states.append(state)
        return torch.stack(states)

    def logits(self, state: Tensor) -> Tensor:
        """Coda, ln_f and the head on states [B, T, D]; fp32, [B, T, V]."""
        cos, sin = self._angles(state.shape[1])
        for block in self.transformer.coda:
            state = block(state, cos, sin)
        out: Tensor = self.lm_head(self.transformer.ln_f(state)).float()
        return out

    def train_core(self, rank: int, seed: int) -> list[nn.Parameter]:
        """The parameters that are to be trained: the adapter, and of the core all, or with ``rank`` low-rank changes of
        its matrices, which start at nothing. All others are frozen."""
        self.requires_grad_(False)
        self.transformer.adapter.requires_grad_(True)
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.transformer.core_block.named_modules():
            if not rank:
                module.requires_grad_(True)
            elif isinstance(module, nn.Linear) and name.endswith(LORA_NAMES):
                parametrize.register_parametrization(module, "weight", _LowRank(module.weight, rank, generator))
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def merge(self) -> None:
        """Low-rank changes become part of the matrices, which then have their own names again."""
        for module in self.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")


class _LowRank(nn.Module):
    """weight + up @ down, of a rank."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.empty(rank, columns).normal_(0.0, columns**-0.5, generator=generator))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down
