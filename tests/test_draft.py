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

from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.layers import Rows, pack_bits

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

    def rope(self, x, position):
        half = self.config.head_dim // 2
        rope = self.config.rope
        out = np.empty_like(x)
        for i in range(half):
            frequency = rope.theta ** (-2 * i / self.config.head_dim)
            if rope.kind == "llama3":
                wavelength = 2 * np.pi / frequency
                original = rope.original_max_position_embeddings
                if wavelength > original / rope.low_freq_factor:
                    frequency /= rope.factor
                elif wavelength >= original / rope.high_freq_factor:
                    smooth = (original / wavelength - rope.low_freq_factor) / (
                        rope.high_freq_factor - rope.low_freq_factor
                    )
                    frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
            c, s = np.cos(position * frequency), np.sin(position * frequency)
            out[:, i] = x[:, i] * c - x[:, i + half] * s
            out[:, i + half] = x[:, i + half] * c + x[:, i] * s
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

    def run(self, ids, aux, embedding, head):
        c = self.config
        T = len(ids)
        keys = [[None] * T for _ in range(STEPS)]
        values = [[None] * T for _ in range(STEPS)]
        hidden = [self.fuse(a) for a in aux]
        result = np.zeros((STEPS, T, c.draft_vocab_size))
        for k in range(STEPS):
            states, queries = [], []
            for t in range(T):
                token = ids[t + 1 + k] if t + 1 + k < T else 0
                e = self.norm(embedding[token], self.w["layers.0.norm_embed.weight"])
                g = hidden[t]
                inner = self.norm(g, self.w["layers.0.norm_embed.weight"]) if c.double_norm else g
                normed = self.norm(inner, self.w["layers.0.norm_hidden.weight"])
                x = np.concatenate((e, normed))
                q, key, value = (
                    self.linear(f"layers.0.attn.{n}", x).reshape(-1, c.head_dim) for n in "qkv"
                )
                queries.append(self.rope(q, t + k))
                keys[k][t], values[k][t] = self.rope(key, t + k), value
                states.append(normed if c.norm_before_residual else g)
            for t in range(T):
                seen = [(0, j) for j in range(t + 1)] + [(i, t) for i in range(1, k + 1)]
                heads = []
                for n in range(c.num_heads):
                    group = n // (c.num_heads // c.num_kv_heads)
                    s = np.array([queries[t][n] @ keys[i][j][group] for i, j in seen])
                    p = np.exp((s - s.max()) / np.sqrt(c.head_dim))
                    heads.append(
                        sum(
                            w * values[i][j][group]
                            for w, (i, j) in zip(p / p.sum(), seen, strict=True)
                        )
                    )
                a = states[t] + self.linear("layers.0.attn.o", np.concatenate(heads))
                y = self.norm(a, self.w["layers.0.norm_post.weight"])
                gate = self.linear("layers.0.mlp.gate", y)
                mlp = gate / (1 + np.exp(-gate)) * self.linear("layers.0.mlp.up", y)
                out = a + self.linear("layers.0.mlp.down", mlp)
                final = self.norm(out, self.w["norm_final.weight"]) if c.final_norm else out
                result[k, t] = head @ final
                hidden[t] = final if c.feedback == "post_norm" else out
        return result


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
    if name not in ("base", "target_embedding", "no_fc"):
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
