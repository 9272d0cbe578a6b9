"""A Llama step in plain PyTorch: fused projections, SDPA over a static cache, a CUDA graph.

Written for this comparison; the sizes come from the same config as ours.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812

from eagle3_jax.config import TargetConfig


class TorchTarget:
    """Random weights and a cache of `slots` per sequence, `context` of them filled."""

    def __init__(
        self, config: TargetConfig, batch: int, slots: int, context: int, device: str, dtype
    ):
        self.config, self.context, self.device, self.dtype = config, context, device, dtype
        D, I = config.hidden_size, config.intermediate_size  # noqa: E741
        N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
        self.embed = self._random(config.vocab_size, D)
        self.head = self._random(config.vocab_size, D)
        self.norm = torch.ones(D, device=device, dtype=dtype)
        self.layers = [
            {
                "norm_in": self.norm,
                "norm_post": self.norm,
                "qkv": self._random((N + 2 * K) * H, D),
                "o": self._random(D, N * H),
                "gate_up": self._random(2 * I, D),
                "down": self._random(D, I),
                "k": self._random(batch, K, slots, H),
                "v": self._random(batch, K, slots, H),
            }
            for _ in range(config.num_layers)
        ]

    def _random(self, *shape: int) -> torch.Tensor:
        scale = 1.0 / math.sqrt(min(shape[-2:])) if len(shape) == 2 else 1.0
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * scale

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots [T], cos and sin [T, H] of rows after the context; frequencies unscaled."""
        at = torch.arange(self.context, self.context + count, device=self.device)
        H = self.config.head_dim
        frequency = self.config.rope.theta ** (
            -torch.arange(0, H, 2, device=self.device, dtype=torch.float32) / H
        )
        angles = torch.cat([at[:, None] * frequency] * 2, dim=-1)
        return at, angles.cos(), angles.sin()

    def step(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Tokens [B, T] -> the argmax after each. The mask [T, context + T] is None for one row."""
        config = self.config
        B, T = tokens.shape
        N, K, H, D = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        at, cos, sin = self.rows_at
        seen = self.context + T
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            normed = F.rms_norm(x, (D,), layer["norm_in"], config.rms_norm_eps)
            q, k, v = F.linear(normed, layer["qkv"]).split([N * H, K * H, K * H], dim=-1)
            q = _rotate(q.view(B, T, N, H).transpose(1, 2), cos, sin)
            k = _rotate(k.view(B, T, K, H).transpose(1, 2), cos, sin)
            layer["k"].index_copy_(2, at, k)
            layer["v"].index_copy_(2, at, v.view(B, T, K, H).transpose(1, 2))
            out = F.scaled_dot_product_attention(
                q,
                layer["k"][:, :, :seen],
                layer["v"][:, :, :seen],
                attn_mask=mask,
                enable_gqa=True,
            )
            x = x + F.linear(out.transpose(1, 2).reshape(B, T, N * H), layer["o"])
            normed = F.rms_norm(x, (D,), layer["norm_post"], config.rms_norm_eps)
            gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        normed = F.rms_norm(x, (D,), self.norm, config.rms_norm_eps)
        return F.linear(normed, self.head).argmax(dim=-1)

    def graphed(self, batch: int, rows: int):
        """A call of no arguments that runs one step: a replayed CUDA graph on a GPU."""
        self.rows_at = self.rows(rows)
        tokens = torch.zeros(batch, rows, dtype=torch.long, device=self.device)
        mask = None
        if rows > 1:
            slot = torch.arange(self.context + rows, device=self.device)[None]
            row = torch.arange(rows, device=self.device)[:, None]
            mask = slot <= self.context + row
        if self.device == "cpu":
            return lambda: self.step(tokens, mask)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(tokens, mask)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.result = self.step(tokens, mask)
        return graph.replay


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def wait(device: str):
    """Until the device has done all that was queued."""
    if device != "cpu":
        torch.cuda.synchronize()
