"""Latent attention against transformers' own block; tests/test_draft.py has it against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.attention_config import LatentAttentionConfig, LatentSizes, RopeConfig
from eagle3_jax.attention_mla import LatentAttention, make_attention
from eagle3_jax.cache import KVCache
from eagle3_jax.layers import Attention, Rows
from eagle3_jax.modules import build
from eagle3_jax.rope import rotations

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
ROPE = RopeConfig(
    kind="yarn",
    factor=8.0,
    original_max_position_embeddings=16,
    mscale=1.0,
    mscale_all_dim=0.5,
)
NAMES = {
    "q": "q_proj",
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "o": "o_proj",
}
T, WIDE, N = 12, 24, 4


def deepseek(sizes: LatentSizes):
    """transformers' block in float64 with every weight drawn anew, and its answer for x [1, T]."""
    torch = pytest.importorskip("torch")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = DeepseekV3Config(
        hidden_size=WIDE,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=sizes.q_lora_rank,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.qk_nope_head_dim,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        v_head_dim=sizes.v_head_dim,
        rope_interleave=sizes.interleaved,
        rope_parameters=YARN,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    block = theirs.DeepseekV3Attention(config, 0).double()
    with torch.no_grad():
        for name, weight in block.named_parameters():
            weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5 + ("norm" in name))
        x = torch.randn(1, T, WIDE, dtype=torch.float64)
        at = torch.arange(T)[None]
        turning = theirs.DeepseekV3RotaryEmbedding(config)(x, at)
        mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        answer, _ = block(x, turning, mask)
    tensors = {name: weight.detach().numpy() for name, weight in block.named_parameters()}
    return tensors, x.numpy(), answer.numpy()


@pytest.mark.parametrize(
    "sizes",
    [
        LatentSizes(8, 5, 4, 3, q_lora_rank=7),
        LatentSizes(8, 5, 4, 3, q_lora_rank=None),
        LatentSizes(8, 5, 4, 3, q_lora_rank=7, interleaved=False),
    ],
    ids=["lora", "direct", "halves"],
)
def test_the_block_of_transformers(sizes):
    """All rows at once, and again row by row over the cache."""
    theirs, x, answer = deepseek(sizes)
    config = LatentAttentionConfig(WIDE, WIDE, N, sizes, 1e-6, ROPE.latent_sharpness)
    tensors = {
        f"{ours}.weight": theirs[f"{name}.weight"]
        for ours, name in NAMES.items()
        if f"{name}.weight" in theirs
    }
    assert {name: tensor.shape for name, tensor in tensors.items()} == config.tensor_shapes()
    with jax.enable_x64(True):
        block = build(
            lambda: make_attention(config, rngs=nnx.Rngs(0)), tensors.get, tensors, "float64"
        )
        rows = Rows.prefill(1, T)
        turning = rotations(ROPE, config.rotary_dim, rows.positions, jnp.float64)
        cache = KVCache.of([config.cache_shapes], 1, T + 3, jnp.float64)
        whole, _ = block(jnp.asarray(x), turning, rows, cache, 0)
        np.testing.assert_allclose(whole, answer, atol=2e-6)  # their cos and sin are float32
        found = []
        for t in range(0, T, 4):
            rows = Rows.chain(jnp.full((1,), t, jnp.int32), 4)
            turning = rotations(ROPE, config.rotary_dim, rows.positions, jnp.float64)
            part, cache = block(jnp.asarray(x[:, t : t + 4]), turning, rows, cache, 0)
            found.append(part)
        np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=1e-12)


def test_a_slot_holds_one_latent():
    sizes = LatentSizes(512, 128, 64, 128, q_lora_rank=1536)  # Kimi
    config = LatentAttentionConfig(2 * 7168, 7168, 64, sizes)
    assert config.cache_shapes == ((1, 576), (1, 0))
    small = LatentAttentionConfig(8, 4, 2, LatentSizes(4, 3, 2, 3))
    made = make_attention(small, rngs=nnx.Rngs(0))
    assert isinstance(made, LatentAttention)
    assert not isinstance(made, Attention)
