"""Differentiable Huginn forward whose ``state_dict`` has the public checkpoint's keys.

Source: the facts of huginn-0125's published configuration and reference forward (docs/models.md).
Backpropagation is truncated to the last loops; the module does not know about exits. ``decode`` is what a KV cache with
one plane for all loops does to the tokens of an answer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthbatch.training.layers import (
    RMSNorm,
    attention,
    causal_mask,
    init_weights,
    rope_angles,
    rotate_pairs,
    split_heads,
)

STATE_STD = 0.4**0.5
STATE_CUT = 3.0


@dataclass(frozen=True)
class HuginnSize:
    """The fields of a Huginn ``config.json`` that fix its shapes and arithmetic."""

    vocab_size: int
    n_embd: int
    n_heads: int
    intermediate_size: int
    n_layers_in_prelude: int
    n_layers_in_recurrent_block: int
    n_layers_in_coda: int
    block_size: int
    mean_recurrence: int = 8
    rope_base: float = 50000.0
    norm_eps: float = 1e-6


class KeysValues(NamedTuple):
    """Keys, rotated, and values of one layer, each [B, H, T, d]."""

    keys: Tensor
    values: Tensor


class HuginnOutput(NamedTuple):
    """A pass over whole rows.

    ``states``: raw states after loops 1..R, [R, B, T, D]; no norm and no coda applied.
    ``injection``: what every loop gets from the prelude, [B, T, D].
    ``cache``: K/V of each core layer in the last loop: what a cache with one plane for all loops holds.
    """

    states: Tensor
    injection: Tensor
    cache: list[KeysValues]


class _Past(NamedTuple):
    """Where a block's queries look: the rotary angles of its rows, the mask, and K/V in front of their own."""

    cos: Tensor
    sin: Tensor
    mask: Tensor
    cache: KeysValues | None = None


class _Attention(nn.Module):
    def __init__(self, size: HuginnSize) -> None:
        super().__init__()
        self.heads = size.n_heads
        self.Wqkv = nn.Linear(size.n_embd, 3 * size.n_embd, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, size.n_heads, size.n_embd // size.n_heads))
        self.proj = nn.Linear(size.n_embd, size.n_embd, bias=False)

    def forward(self, x: Tensor, past: _Past) -> tuple[Tensor, KeysValues]:
        q, k, v = (split_heads(part, self.heads) for part in self.Wqkv(x).chunk(3, -1))
        bias_q, bias_k = self.qk_bias.transpose(1, 2)  # [H, 1, d] each
        q = rotate_pairs((q + bias_q).to(q.dtype), past.cos, past.sin)
        own = seen = KeysValues(rotate_pairs((k + bias_k).to(k.dtype), past.cos, past.sin), v)
        if past.cache is not None:
            seen = KeysValues(*(torch.cat(pair, -2) for pair in zip(past.cache, own, strict=True)))
        return self.proj(attention(q, *seen, past.mask)), own


class _Mlp(nn.Module):
    def __init__(self, size: HuginnSize) -> None:
        super().__init__()
        self.fc = nn.Linear(size.n_embd, 2 * size.intermediate_size, bias=False)
        self.proj = nn.Linear(size.intermediate_size, size.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        out: Tensor = self.proj(F.silu(gate) * up)
        return out


class _Block(nn.Module):
    """One block; each branch is normed on its input, and the SUM is normed after the add."""

    def __init__(self, size: HuginnSize) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(size.n_embd, size.norm_eps)
        self.norm_2 = RMSNorm(size.n_embd, size.norm_eps)
        self.norm_3 = RMSNorm(size.n_embd, size.norm_eps)
        self.norm_4 = RMSNorm(size.n_embd, size.norm_eps)
        self.attn = _Attention(size)
        self.mlp = _Mlp(size)

    def forward(self, x: Tensor, past: _Past) -> tuple[Tensor, KeysValues]:
        mixed, own = self.attn(self.norm_1(x), past)
        x = self.norm_2(x + mixed)
        return self.norm_4(x + self.mlp(self.norm_3(x))), own


class _Transformer(nn.Module):
    def __init__(self, size: HuginnSize) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocab_size, size.n_embd)
        self.prelude = nn.ModuleList(_Block(size) for _ in range(size.n_layers_in_prelude))
        self.adapter = nn.Linear(2 * size.n_embd, size.n_embd, bias=False)
        self.core_block = nn.ModuleList(_Block(size) for _ in range(size.n_layers_in_recurrent_block))
        self.coda = nn.ModuleList(_Block(size) for _ in range(size.n_layers_in_coda))
        self.ln_f = RMSNorm(size.n_embd, size.norm_eps)


class HuginnTrainer(nn.Module):
    """A Huginn model for training with a tied head; parameter names equal the public checkpoint keys.

    ``size``: shapes and constants.
    ``seed``: seed of the initial weights.
    """

    def __init__(self, size: HuginnSize, seed: int = 0) -> None:
        super().__init__()
        self.size = size
        self.transformer = _Transformer(size)
        init_weights(self, seed)
        with torch.no_grad():
            # Starts as s + e / 2: whatever a step can do with what is injected, it can then do with its own result,
            # which is how the second look-up is learned from the first. From a random adapter it appeared in one run
            # of 3,000 batches and not in another of the same seed, whose rounding was another machine's.
            identity = torch.eye(size.n_embd)
            self.transformer.adapter.weight.copy_(torch.cat((identity, identity / 2), 1))

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        return rope_angles(length, self.size.n_embd // self.size.n_heads, self.size.rope_base)

    def forward(
        self, ids: Tensor, loops: int, state: Tensor | None = None, gradient_loops: int | None = None
    ) -> HuginnOutput:
        """Run prelude and ``loops`` core steps over whole rows, a KV plane a loop.

        ``ids``: token ids [B, T], padded on the right.
        ``loops``: core steps R.
        ``state``: initial state [B, T, D]; zeros when None.
        ``gradient_loops``: only the last so many steps keep their graph; all when None.
        """
        past = _Past(*self._angles(ids.shape[1]), causal_mask(ids.shape[1]))
        injection = self.transformer.wte(ids) * self.size.n_embd**0.5
        for block in self.transformer.prelude:
            injection, _ = block(injection, past)
        s = torch.zeros_like(injection) if state is None else state
        pasts = [past] * len(self.transformer.core_block)
        states, cache = self._loops(s, injection, pasts, loops, gradient_loops)
        return HuginnOutput(states, injection, cache)

    def decode(
        self,
        whole: HuginnOutput,
        positions: Tensor,
        loops: int,
        state: Tensor | None = None,
        gradient_loops: int | None = None,
    ) -> Tensor:
        """Run the tokens at ``positions`` [B, A] again, as one shared KV plane shows them what is before them: every
        loop of theirs sees the last loop of ``whole``. Returns their raw states after loops 1..R, [R, B, A, D].

        That the tokens of an answer see each other as ``whole`` has them, not as this pass does, is the only
        difference from decoding one after the other.
        """
        length, count = whole.injection.shape[1], positions.shape[1]
        cos, sin = (angle[positions].unsqueeze(1) for angle in self._angles(length))
        before = torch.arange(length) < positions.unsqueeze(-1)  # [B, A, T]
        seen = torch.cat((before, torch.eye(count, dtype=torch.bool).expand(len(positions), -1, -1)), -1)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(1)
        pasts = [_Past(cos, sin, mask, cache) for cache in whole.cache]
        injection = at(whole.injection, positions)
        s = torch.zeros_like(injection) if state is None else state
        return self._loops(s, injection, pasts, loops, gradient_loops)[0]

    def _loops(
        self, s: Tensor, injection: Tensor, pasts: list[_Past], loops: int, gradient_loops: int | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """States after every core step, and K/V of the last; ``pasts`` has a layer's view each."""
        states = []
        cache: list[KeysValues] = []
        for step in range(loops):
            tracked = torch.is_grad_enabled() and (gradient_loops is None or step >= loops - gradient_loops)
            with torch.set_grad_enabled(tracked):
                s = self.transformer.adapter(torch.cat((s, injection), -1))
                cache = []
                for block, past in zip(self.transformer.core_block, pasts, strict=True):
                    s, own = block(s, past)
                    cache.append(own)
            states.append(s)
        return torch.stack(states), cache

    def logits(self, states: Tensor) -> Tensor:
        """ln_f, coda, ln_f and the tied head on raw states [..., T, D]; fp32, [..., T, V]."""
        past = _Past(*self._angles(states.shape[-2]), causal_mask(states.shape[-2]))
        x = self.transformer.ln_f(states.reshape(-1, *states.shape[-2:]))
        for block in self.transformer.coda:
            x, _ = block(x, past)
        return self.head(x).reshape(*states.shape[:-1], -1)

    def head(self, x: Tensor) -> Tensor:
        """ln_f and the tied head on ``x`` [..., D]; fp32, [..., V]."""
        return F.linear(self.transformer.ln_f(x), self.transformer.wte.weight).float()


def initial_state(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random state: truncated normal, standard deviation sqrt(0.4) cut at three deviations, fp32."""
    state = torch.empty(shape)
    nn.init.trunc_normal_(state, 0.0, STATE_STD, -STATE_CUT * STATE_STD, STATE_CUT * STATE_STD, generator=generator)
    return state


def at(rows: Tensor, positions: Tensor) -> Tensor:
    """The entries of rows [B, T, D] at positions [B, A]: [B, A, D]."""
    return rows.gather(1, positions.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
