"""TokenLoop: the executor one would write first. The baseline of every plate, and the fallback.

It shares the weights and the formulas with Decode V2 and nothing of its step: the position is a
Python int, keys and values grow by concatenation, every matrix is its own call, and each id is read
back before the next step starts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .arena import panel_size
from .embed import embed_rows
from .linear import PackedLinear, nf4_linear
from .load import ModelWeights
from .rope import rope_tables
from .runner import OnToken, Result, check_prompt, run_loop
from .state import NO_TOKEN


class TokenLoop:
    """One sequence. `feed(id)` takes one token and returns the next greedy id, NO_TOKEN if none is
    finite."""

    def __init__(self, weights: ModelWeights):
        self.weights = weights
        spec = weights.spec
        self.cos, self.sin = (torch.from_numpy(table) for table in rope_tables(spec))
        self.panel = torch.empty(panel_size(spec, 1))
        self.position = 0
        self.keys: list[torch.Tensor | None] = [None] * spec.n_layers  # [n_kv, length, head_dim]
        self.values: list[torch.Tensor | None] = [None] * spec.n_layers
        self.logits: torch.Tensor | None = None

    def feed(self, token_id: int) -> int:
        spec, weights = self.weights.spec, self.weights
        x = torch.empty(1, spec.hidden)
        embed_rows(weights.embed, torch.tensor([token_id]), x)
        for i, layer in enumerate(weights.layers):
            h = self._norm(x, layer.attn_norm)
            q, k, v = (
                self._linear(h, w) + (0 if b is None else b)
                for w, b in zip(layer.qkv, layer.qkv_bias, strict=True)
            )
            q, k = self._rotate(q.view(spec.n_q, 1, -1)), self._rotate(k.view(spec.n_kv, 1, -1))
            v = v.view(spec.n_kv, 1, -1)
            if self.position:
                k = torch.cat([self.keys[i], k], dim=1)
                v = torch.cat([self.values[i], v], dim=1)
            self.keys[i], self.values[i] = k, v
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)
            x = x + self._linear(mixed.reshape(1, -1), layer.o)
            h = self._norm(x, layer.mlp_norm)
            gate, up = layer.gate_up
            act = F.silu(self._linear(h, gate)) * self._linear(h, up)
            x = x + self._linear(act, layer.down)
        self.position += 1
        self.logits = self._linear(self._norm(x, weights.norm), weights.lm_head)
        ranked = self.logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = int(ranked.argmax())  # torch lets a NaN win
        return best if ranked[0, best] > -torch.inf else NO_TOKEN

    def _linear(self, x: torch.Tensor, w: PackedLinear) -> torch.Tensor:
        y = torch.empty(1, w.rows)
        nf4_linear(x, w, y, self.panel)
        return y

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.weights.spec.rms_eps) * weight
        )

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[self.position] + torch.cat([-b, a], -1) * self.sin[self.position]


def generate(
    weights: ModelWeights,
    prompt_ids: list[int],
    max_new_tokens: int,
    eos_ids: tuple[int, ...] = (),
    on_token: OnToken | None = None,
) -> Result:
    """Greedy tokens after `prompt_ids`, one step per prompt token too. As `runner.generate`."""
    check_prompt(weights.spec, prompt_ids, max_new_tokens)
    loop = TokenLoop(weights)
    last = 0

    def first() -> int:
        nonlocal last
        for token_id in prompt_ids:
            last = loop.feed(token_id)
        return last

    def following() -> int:
        nonlocal last
        last = loop.feed(last)
        return last

    return run_loop(
        first, following, weights.spec, len(prompt_ids), max_new_tokens, eos_ids, on_token
    )
