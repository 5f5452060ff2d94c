"""Differentiable forward of retrofitted models with Llama blocks; ``state_dict`` has the checkpoint's keys.

Source: docs/models.md, section 5. What a loop may learn is small: the half of the adapter that reads the state, and the core's
matrices, whole or by a low-rank change (LoRA) that is merged when the model is written. The module does not know about KV
caches or exits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from depthbatch.training.layers import RMSNorm, causal_attention, rotate_halves, split_heads
from depthbatch.worker.models.llama_like import Plan


class Trained(NamedTuple):
    """What is trained beside the half of the adapter that reads the state.

    ``rank``: of the low-rank change of the core's matrices; 0: the core itself.
    ``one_loop_stays``: not the core. The state is zero before the first loop, so that one loop gives what it gave.
    """

    rank: int
    one_loop_stays: bool


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
        self.one_loop_stays = False
        self.transformer = _Transformer(plan)
        self.lm_head = nn.Linear(plan.hidden, plan.vocab, bias=False)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        frequencies = torch.from_numpy(self.plan.rope.frequencies(self.plan.head_dim))
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def injection(self, ids: Tensor) -> Tensor:
        """What every loop starts from, of whole rows [B, T]: [B, T, D]. What is before the loop is not trained."""
        cos, sin = self._angles(ids.shape[1])
        x: Tensor = self.transformer.wte(ids) * self.embed_scale
        for block in self.transformer.prelude:
            x = block(x, cos, sin)
        return x

    def forward(self, injection: Tensor, loops: int) -> Tensor:
        """States after loops 1..R of whole rows [B, T, D], a KV plane a loop: [R, B, T, D]."""
        cos, sin = self._angles(injection.shape[1])
        state, states = torch.zeros_like(injection), []
        for loop in range(loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (self.one_loop_stays and loop == 0)):
                state = self.transformer.adapter(torch.cat((state, injection), -1))
                for block in self.transformer.core_block:
                    state = block(state, cos, sin)
            states.append(state)
        return torch.stack(states)

    def logits(self, state: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Coda, ln_f and the head on states [B, T, D]; fp32, [B, T, V], or [N, V] of the N ``chosen`` positions, bool [B, T]."""
        cos, sin = self._angles(state.shape[1])
        for block in self.transformer.coda:
            state = block(state, cos, sin)
        out: Tensor = self.lm_head(self.transformer.ln_f(state if chosen is None else state[chosen])).float()
        return out

    @torch.no_grad()
    def train_loop(self, trained: Trained, seed: int, sample: Tensor) -> list[nn.Parameter]:
        """The parameters that are to be trained; all others are frozen. Changes start at nothing.

        ``sample``: ids [B, T], from whose states the adapter's change gets its scale: a step of the optimiser is the same
        for every weight, while some features of a language model's states are a thousand times others.
        """
        self.requires_grad_(False)
        self.one_loop_stays = trained.one_loop_stays
        scale = self(self.injection(sample), 1)[0].flatten(0, 1).square().mean(0).sqrt().clamp_min(1e-6)
        if not trained.one_loop_stays:
            self.transformer.core_block.requires_grad_(not trained.rank)
            generator = torch.Generator().manual_seed(seed)
            for module in list(self.transformer.core_block.modules()) if trained.rank else ():
                if isinstance(module, nn.Linear):
                    low_rank = _LowRank(module.weight, trained.rank, generator)
                    parametrize.register_parametrization(module, "weight", low_rank)
        parametrize.register_parametrization(self.transformer.adapter, "weight", _StateHalf(scale))
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def merge(self) -> None:
        """Changes become part of the matrices, which then have their own names again."""
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


class _StateHalf(nn.Module):
    """The adapter's weight [D, 2D] with a change of its first D columns, each over the ``scale`` [D] of what it reads."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.change = nn.Parameter(torch.zeros(len(scale), len(scale)))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + F.pad(self.change / self.scale, (0, weight.shape[1] - len(self.scale)))
