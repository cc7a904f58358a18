"""TokenLoop: the executor one would write first. The baseline of every plate, and the fallback.

It shares the weights and the formulas with Decode V2 and nothing of its step: the position is a
Python int, keys and values grow by concatenation, every matrix is its own call, and each id is read
back before the next step starts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .embed import embed_rows
from .linear import Linear, nf4_linear
from .load import LayerWeights, ModelWeights
from .panels import TILE_ROWS, plain_rows
from .rope import rope_tables
from .runner import OnToken, Result, check_prompt, run_loop
from .state import NO_TOKEN, product_scratch


class TokenLoop:
    """One sequence. `feed(id)` takes one token and returns the next greedy id, NO_TOKEN if none is
    finite."""

    def __init__(self, weights: ModelWeights):
        self.weights = weights
        spec = weights.spec
        self.device = weights.norm.device
        self.cos, self.sin = (torch.from_numpy(t).to(self.device) for t in rope_tables(spec))
        self.panel = product_scratch(spec, 1, self.device)
        self.position = 0
        self.keys: list[torch.Tensor | None] = [None] * spec.n_layers  # [n_kv, length, head_dim]
        self.values: list[torch.Tensor | None] = [None] * spec.n_layers
        self.logits: torch.Tensor | None = None

    def feed(self, token_id: int) -> int:
        spec, weights = self.weights.spec, self.weights
        x = torch.empty(1, spec.hidden, device=self.device)
        embed_rows(weights.embed, torch.tensor([token_id], device=self.device), x)
        for i, layer in enumerate(weights.layers):
            h = self._norm(x, layer.attn_norm)
            q, k, v = self._qkv(h, layer)
            q, k = self._rotate(q.view(spec.n_q, 1, -1)), self._rotate(k.view(spec.n_kv, 1, -1))
            v = v.view(spec.n_kv, 1, -1)
            if self.position:
                k = torch.cat([self.keys[i], k], dim=1)
                v = torch.cat([self.values[i], v], dim=1)
            self.keys[i], self.values[i] = k, v
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)
            x = x + self._linear(mixed.reshape(1, -1), layer.o)
            h = self._norm(x, layer.mlp_norm)
            gate, up = self._gate_up(h, layer)
            x = x + self._linear(F.silu(gate) * up, layer.down)
        self.position += 1
        self.logits = self._linear(self._norm(x, weights.norm), weights.lm_head)
        ranked = self.logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = int(ranked.argmax())  # torch lets a NaN win
        return best if ranked[0, best] > -torch.inf else NO_TOKEN

    def _linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        y = torch.empty(1, w.rows, device=self.device)
        nf4_linear(x, w, y, self.panel)
        return y

    def _qkv(self, h: torch.Tensor, layer: LayerWeights) -> list[torch.Tensor]:
        if isinstance(layer.qkv, tuple):
            return [
                self._linear(h, w) + (0 if b is None else b)
                for w, b in zip(layer.qkv, layer.qkv_bias, strict=True)
            ]
        y = self._linear(h, layer.qkv)
        y = y if layer.qkv_bias is None else y + layer.qkv_bias
        spec = self.weights.spec
        return [part.contiguous() for part in y.split([spec.q_dim, spec.kv_dim, spec.kv_dim], 1)]

    def _gate_up(self, h: torch.Tensor, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(layer.gate_up, tuple):
            gate, up = layer.gate_up
            return self._linear(h, gate), self._linear(h, up)
        rows = self._linear(h, plain_rows(layer.gate_up)).view(-1, 2, TILE_ROWS // 2)
        gate, up = (rows[:, i].reshape(1, -1)[:, : layer.gate_up.rows] for i in (0, 1))
        return gate, up

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
