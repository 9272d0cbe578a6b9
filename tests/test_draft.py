"""The draft against float64 answers that four trainers agreed with, and against NumPy.

`golden_toy.npz`: toy weights, 14 rows, four steps of the training-time unroll, four settings of the
switches. Row t of step k holds the embedding of token t + 1 + k at RoPE position t + k, and sees
the step-0 rows 0..t and its own rows of steps 1..k.
"""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_draft

from eagle3_jax.config import ConfigError, DraftConfig, LatentSizes, RopeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.layers import Rows
from eagle3_jax.ops.bits import pack_bits

TOY = Path(__file__).parent / "data" / "dialects" / "golden_toy.npz"
STEPS = 4
SETTINGS = {
    "logits": {},
    "logits_nbr": {"norm_before_residual": True},
    "logits_norm_output": {"feedback": "post_norm"},
    "logits_double_norm": {"double_norm": True},
}
NAMES = {
    "fc.weight": "fc.weight",
    "norm_final.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "embed.weight": "embed_tokens.weight",
    "layers.0.norm_embed.weight": "midlayer.input_layernorm.weight",
    "layers.0.norm_hidden.weight": "midlayer.hidden_norm.weight",
    "layers.0.norm_post.weight": "midlayer.post_attention_layernorm.weight",
    **{f"layers.0.attn.{n}.weight": f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"layers.0.mlp.{n}.weight": f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}


def toy_draft(dtype: str, **switches) -> Eagle3Draft:
    toy = np.load(TOY)
    tensors = {ours: toy[f"w/{theirs}"] for ours, theirs in NAMES.items()}
    tensors["draft_to_target"] = (np.arange(24) + toy["w/d2t"]).astype(np.int32)
    config = DraftConfig(
        hidden_size=32,
        target_hidden_size=32,
        num_aux=3,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        draft_vocab_size=24,
        rms_norm_eps=1e-5,
        embed="draft",
        **switches,
    )
    return Eagle3Draft.from_tensors(config, tensors, dtype)


def unroll(draft: Eagle3Draft, ids: np.ndarray, aux: np.ndarray, shared=None) -> np.ndarray:
    """[STEPS, T, W] logits of the training-time unroll, through `fuse`, `step` and `feedback`."""
    T = len(ids)
    config = draft.config
    hidden = draft.fuse(jnp.asarray(aux.reshape(1, T, config.num_aux, -1)))
    cache = draft.new_cache(1, STEPS * T)
    zero = jnp.zeros((1,), jnp.int32)
    result = []
    for k in range(STEPS):
        tokens = np.zeros(T, np.int32)
        tokens[: T - 1 - k] = ids[1 + k :]
        seen = np.zeros((T, STEPS * T), bool)
        seen[:, :T] = np.tril(np.ones((T, T), bool))
        for i in range(1, k + 1):
            seen[np.arange(T), i * T + np.arange(T)] = True
        rows = Rows(
            positions=jnp.arange(k, T + k, dtype=jnp.int32)[None],
            start=zero + k * T,
            lengths=zero,
            ancestors=jnp.asarray(pack_bits(seen)[None]),
        )
        out, cache = draft.step(jnp.asarray(tokens[None]), hidden, rows, cache, shared=shared)
        result.append(np.asarray(draft.logits(out, shared=shared)[0]))
        hidden = draft.feedback(out)
    return np.stack(result)


def valid_rows(values: np.ndarray) -> list[np.ndarray]:
    """Rows whose shifted token exists: t < T - 1 - k at step k."""
    return [v[: len(v) - 1 - k] for k, v in enumerate(values)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 2e-3)])
def test_toy_logits_over_four_steps(setting, dtype, tolerance):
    toy = np.load(TOY)
    with jax.enable_x64(dtype == "float64"):
        draft = toy_draft(dtype, **SETTINGS[setting])
        found = unroll(draft, toy["in/ids"], toy["in/aux"].astype(dtype))
    for k, (ours, theirs) in enumerate(
        zip(valid_rows(found), valid_rows(toy[f"out/{setting}"]), strict=True)
    ):
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=f"step {k}")


def test_settings_differ_from_one_another():
    toy = np.load(TOY)
    found = {
        name: unroll(toy_draft("float32", **switches), toy["in/ids"], toy["in/aux"])
        for name, switches in SETTINGS.items()
    }
    for a, b in itertools.combinations(found, 2):
        assert np.abs(found[a][1:] - found[b][1:]).max() > 1, (a, b)
    step0 = np.abs(found["logits"][0] - found["logits_norm_output"][0]).max()
    assert step0 == 0, "the fed-back state cannot matter before it is fed back"


@dataclasses.dataclass
class Reference:
    """A draft in float64 NumPy, one row at a time, written from the maths alone."""

    config: DraftConfig
    w: dict[str, np.ndarray]

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps) * weight

    def frequency(self, i, width, position):
        """Of pair i, written from the papers; the file's test compares with transformers."""
        rope = self.config.rope
        frequency = rope.theta ** (-2 * i / width)
        original = rope.original_max_position_embeddings
        if rope.kind == "linear":
            return frequency / rope.factor
        if rope.kind == "dynamic" and position + 1 > original:
            stretch = rope.factor * (position + 1) / original - (rope.factor - 1)
            return (rope.theta * stretch ** (width / (width - 2))) ** (-2 * i / width)
        if rope.kind == "llama3":
            wavelength = 2 * np.pi / frequency
            if wavelength > original / rope.low_freq_factor:
                return frequency / rope.factor
            if wavelength >= original / rope.high_freq_factor:
                smooth = (original / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                return (1 - smooth) * frequency / rope.factor + smooth * frequency
        if rope.kind == "yarn":
            low, high = (
                width * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(rope.theta))
                for turns in (rope.beta_fast, rope.beta_slow)
            )
            low, high = max(np.floor(low), 0), min(np.ceil(high), width - 1)
            slowed = min(max((i - low) / (high - low), 0), 1)
            return frequency * (1 - slowed) + frequency / rope.factor * slowed
        return frequency

    def rope(self, x, position, interleaved=False):
        """Each pair of x [heads, width] as one complex number."""
        width = x.shape[1]
        half = width // 2
        out = np.empty_like(x)
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = position * self.frequency(i, width, position)
            turned = (x[:, a] + 1j * x[:, b]) * np.exp(1j * angle) * self.config.rope.amplitude
            out[:, a], out[:, b] = turned.real, turned.imag
        return out

    def linear(self, name, x):
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def fuse(self, aux):  # [A, E]
        if self.config.fuse == "none":
            return aux.reshape(-1)
        if self.config.fc_norm:
            aux = self.norm(aux, self.w["fc_norm.weight"])
        x = aux.reshape(-1)
        if self.config.norm_before_fc:
            x = self.norm(x, self.w["input_norm.weight"])
        return self.linear("fc", x)

    def heads(self, layer, x, position):
        """Queries, keys and values [heads, width] of one row, every head its own."""
        c, attn = self.config, f"layers.{layer}.attn"
        if c.latent is None:
            q, k, v = (self.linear(f"{attn}.{n}", x).reshape(-1, c.head_dim) for n in "qkv")
            if c.qk_norm:
                q = self.norm(q, self.w[f"{attn}.q_norm.weight"])
                k = self.norm(k, self.w[f"{attn}.k_norm.weight"])
            group = c.num_heads // c.num_kv_heads
            k, v = (np.repeat(part, group, axis=0) for part in (k, v))
            return self.rope(q, position), self.rope(k, position), v
        s, N = c.latent, c.num_heads
        if s.q_lora_rank is None:
            q = self.linear(f"{attn}.q", x)
        else:
            q = self.norm(self.linear(f"{attn}.q_a", x), self.w[f"{attn}.q_a_norm.weight"])
            q = self.linear(f"{attn}.q_b", q)
        q = q.reshape(N, -1)
        down = self.linear(f"{attn}.kv_a", x)
        latent = self.norm(down[: s.kv_lora_rank], self.w[f"{attn}.kv_a_norm.weight"])
        up = self.linear(f"{attn}.kv_b", latent).reshape(N, -1)
        nope = s.qk_nope_head_dim
        turned = self.rope(down[None, s.kv_lora_rank :], position, s.interleaved)
        key = np.concatenate((up[:, :nope], np.repeat(turned, N, axis=0)), axis=1)
        turned = self.rope(q[:, nope:], position, s.interleaved)
        return np.concatenate((q[:, :nope], turned), axis=1), key, up[:, nope:]

    def inputs(self, layer, e, g):
        """What attention reads, and the residual."""
        c, w = self.config, lambda name: self.w[f"layers.{layer}.{name}.weight"]
        if layer and c.next_layers != "wide":
            names = {"input_layernorm": "norm_embed", "hidden_norm": "norm_hidden"}
            return self.norm(g, w(names[c.next_layers])), g
        normed = self.norm(g, w("norm_embed")) if c.double_norm else g
        if c.hidden_norm or layer:
            normed = self.norm(normed, w("norm_hidden"))
        x = np.concatenate((self.norm(e, w("norm_embed")), normed))
        return x, normed if c.norm_before_residual else g

    def run(self, ids, aux, embedding, head):
        c = self.config
        T = len(ids)
        scale = 1 / np.sqrt(c.head_dim) * (c.rope.latent_sharpness if c.latent else 1)
        kept = {}
        hidden = [self.fuse(a) for a in aux]
        result = np.zeros((STEPS, T, c.draft_vocab_size))
        for k in range(STEPS):
            tokens = [ids[t + 1 + k] if t + 1 + k < T else 0 for t in range(T)]
            for layer in range(c.num_layers):
                rows = [self.inputs(layer, embedding[tokens[t]], hidden[t]) for t in range(T)]
                queries = []
                for t, (x, _) in enumerate(rows):
                    q, key, value = self.heads(layer, x, t + k)
                    queries.append(q)
                    kept[layer, k, t] = key, value
                for t in range(T):
                    seen = [(0, j) for j in range(t + 1)] + [(i, t) for i in range(1, k + 1)]
                    window = c.windows[layer] if c.windows else None
                    if window is not None:
                        seen = [(i, j) for i, j in seen if t + k - (i + j) < window]
                    keys, values = (
                        np.stack(part)
                        for part in zip(*(kept[layer, *at] for at in seen), strict=True)
                    )
                    scores = np.einsum("nh,snh->ns", queries[t], keys) * scale
                    p = np.exp(scores - scores.max(axis=1, keepdims=True))
                    p /= p.sum(axis=1, keepdims=True)
                    mixed = np.einsum("ns,snh->nh", p, values).reshape(-1)
                    hidden[t] = self.rest(layer, rows[t][1], mixed)
            for t in range(T):
                out = hidden[t]
                final = self.norm(out, self.w["norm_final.weight"]) if c.final_norm else out
                result[k, t] = head @ final
                hidden[t] = final if c.feedback == "post_norm" else out
        return result

    def rest(self, layer, residual, mixed):
        a = residual + self.linear(f"layers.{layer}.attn.o", mixed)
        y = self.norm(a, self.w[f"layers.{layer}.norm_post.weight"])
        gate = self.linear(f"layers.{layer}.mlp.gate", y)
        mlp = gate / (1 + np.exp(-gate)) * self.linear(f"layers.{layer}.mlp.up", y)
        return a + self.linear(f"layers.{layer}.mlp.down", mlp)


BASE = DraftConfig(
    hidden_size=12,
    target_hidden_size=12,
    num_aux=3,
    intermediate_size=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,  # not D / N
    vocab_size=20,
    draft_vocab_size=9,
    rms_norm_eps=1e-5,
    embed="draft",
)
LLAMA3 = RopeConfig(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = RopeConfig(
    theta=100.0, kind="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0
)
LATENT = {
    "latent": LatentSizes(8, 5, 4, 3, q_lora_rank=7),
    "num_kv_heads": 4,
    "head_dim": 9,
    "rope": dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=0.5),
}
DYNAMIC = RopeConfig(kind="dynamic", factor=3.0, original_max_position_embeddings=20)
SWITCHES = {
    "base": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "post_norm": {"feedback": "post_norm"},
    "no_final_norm": {"final_norm": False},
    "double_norm": {"double_norm": True},
    "fc_bias": {"fc_bias": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "other_target_width": {"target_hidden_size": 7},
    "five_states": {"num_aux": 5, "aux_boundaries": (0, 1, 2, 3, 5)},
    "no_fc": {"num_aux": 2, "target_hidden_size": 6, "aux_boundaries": (0, 1), "fuse": "none"},
    "target_embedding": {"embed": "target"},
    "target_head": {"head": "target", "draft_vocab_size": 20},
    "llama3_rope": {"rope": LLAMA3},
    "theta": {"rope": RopeConfig(theta=500.0)},
    "one_kv_head": {"num_kv_heads": 1},
    "linear_rope": {"rope": RopeConfig(kind="linear", factor=4.0)},
    "dynamic_rope": {"rope": DYNAMIC},
    "yarn_rope": {"rope": YARN},
    "qk_norm": {"qk_norm": True},
    "no_hidden_norm": {
        "num_aux": 1,
        "aux_boundaries": ("final_norm",),
        "fuse": "none",
        "hidden_norm": False,
    },
    "window": {"windows": (5,)},
    "two_layers": {"num_layers": 2},
    "two_layers_sglang": {"num_layers": 2, "next_layers": "hidden_norm", "next_spare_norm": True},
    "two_layers_wide": {"num_layers": 2, "next_layers": "wide", "windows": (None, 7)},
    "latent": LATENT,
    "latent_direct": LATENT
    | {"latent": LatentSizes(8, 5, 4, 3, interleaved=False), "windows": (6,)},
    "all": {
        "norm_before_residual": True,
        "fc_norm": True,
        "feedback": "post_norm",
        "double_norm": True,
        "fc_bias": True,
        "qkv_bias": True,
        "target_hidden_size": 5,
        "rope": LLAMA3,
    },
}


def random_case(config: DraftConfig, seed: int):
    """Random non-unit tensors, tokens, states and the target's matrices."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        if name == "draft_to_target":
            tensors[name] = rng.permutation(config.vocab_size)[: shape[0]].astype(np.int32)
        elif "norm" in name:
            tensors[name] = 1 + 0.3 * rng.normal(size=shape)
        else:
            tensors[name] = rng.normal(size=shape) / np.sqrt(shape[-1])
    ids = rng.integers(0, config.vocab_size, 40)
    aux = rng.normal(size=(40, config.num_aux, config.target_hidden_size))
    width = (config.vocab_size, config.target_hidden_size)
    return tensors, ids, aux, rng.normal(size=width), rng.normal(size=width)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_against_numpy(name):
    config = dataclasses.replace(BASE, **SWITCHES[name])
    tensors, ids, aux, embedding, head = random_case(config, seed=sorted(SWITCHES).index(name))
    expected = Reference(config, tensors).run(
        ids,
        aux,
        tensors.get("embed.weight", embedding),
        tensors.get("lm_head.weight", head),
    )
    with jax.enable_x64(True):
        draft = Eagle3Draft.from_tensors(config, tensors, "float64")
        shared = Shared(jnp.asarray(embedding), jnp.asarray(head))
        found = unroll(draft, ids, aux, shared)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    if name not in ("base", "target_embedding", "no_fc", "no_hidden_norm"):
        plain = {k: v for k, v in tensors.items() if k in BASE.tensor_shapes()}
        if all(plain[k].shape == s for k, s in BASE.tensor_shapes().items() if k in plain):
            other = Reference(BASE, {**random_case(BASE, 0)[0], **plain}).run(
                ids, aux, tensors.get("embed.weight", embedding), tensors["lm_head.weight"]
            )
            assert np.abs(other - expected).max() > 1e-3, "the switch changes nothing"


def test_d2t_is_an_offset():
    draft = toy_draft("float32")
    d2t = np.load(TOY)["w/d2t"]
    ids = jnp.arange(24, dtype=jnp.int32)
    np.testing.assert_array_equal(draft.to_target(ids), np.arange(24) + d2t)
    assert not np.array_equal(draft.to_target(ids), d2t)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "fc.weight"}, "tensor fc.weight is missing"),
        (
            {"layers.0.attn.q.weight": (32, 63)},
            r"attn.q.weight has shape \[32, 63\], expected \[32, 64\]",
        ),
        ({"draft_to_target": [0] * 24}, "names a target id twice"),
        ({"draft_to_target": list(range(41, 65))}, "outside the target vocabulary 0..63"),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    draft = toy_draft("float32")
    tensors = {k: np.zeros(s, np.float32) for k, s in draft.config.tensor_shapes().items()}
    tensors["draft_to_target"] = np.arange(24, dtype=np.int32)
    for key, value in change.items():
        if key == "drop":
            del tensors[value]
        elif isinstance(value, tuple):
            tensors[key] = np.zeros(value, np.float32)
        else:
            tensors[key] = np.asarray(value, np.int32)
    with pytest.raises(ConfigError, match=message):
        Eagle3Draft.from_tensors(draft.config, tensors, "float32")


def test_fuse_and_step_never_guess():
    draft = toy_draft("float32")
    with pytest.raises(ConfigError, match=r"expected \[B, T, A, E\] with A, E = \[3, 32\]"):
        draft.fuse(jnp.zeros((1, 2, 3, 31)))
    with pytest.raises(ConfigError, match="target states go through fuse first"):
        draft.step(
            jnp.zeros((1, 2), jnp.int32),
            jnp.zeros((1, 2, 96)),
            Rows.prefill(1, 2),
            draft.new_cache(1, 2),
        )
    borrowed = random_draft(dataclasses.replace(BASE, embed="target"), seed=0, dtype=np.float32)
    with pytest.raises(ConfigError, match="uses the target's embedding"):
        borrowed.step(
            jnp.zeros((1, 2), jnp.int32),
            jnp.zeros((1, 2, 12)),
            Rows.prefill(1, 2),
            borrowed.new_cache(1, 2),
        )
