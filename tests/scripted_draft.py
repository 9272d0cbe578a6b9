"""An EAGLE-3 draft in float64 NumPy, one row at a time, with every wiring a record can hide.

Written from the maths (EAGLE-3 paper, section 3) and from what the engines document; it shares no
code with the package, so that what it drafts can be compared with what the package drafts.
"""

import dataclasses
from typing import Any

import numpy as np

from eagle3_jax.config import TreeConfig

Tensors = dict[str, np.ndarray]
Row = list[tuple[np.ndarray, np.ndarray]]
"""Key and value of one row in each layer, [K, H] each."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """TINY of the recipe."""

    hidden: int = 64
    target_hidden: int = 64
    layers: int = 8
    vocab: int = 256
    draft_vocab: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 96
    eps: float = 1e-5
    window: int = 2048  # max_position_embeddings
    latent: int = 24  # width of the latent and of the queries' own, with `Truth.latent`
    turning: int = 8  # elements of a head that turn then
    value: int = 12


@dataclasses.dataclass(frozen=True)
class Truth:
    """How the draft behind a record is wired; the same class says what a checkpoint claims.

    Attributes:
      boundaries: the states it reads, in order; numbers, or "final_norm".
      residual: what the attention is added to: `"hidden"` (or its norm), or the `"embedding"`.
      rope_pairs: `"half"` or `"interleaved"`. position_clamp: no position is above it.
      grows: factor and original length of a dynamic rope, whose base grows past that length.
      sections, interleaved: of multi-axis rope; the axes in blocks, or in turn.
      window: rows a row sees, itself included; None for all.
      table: the checkpoint's d2t as `"offset"`s, as target `"ids"`, or `"none"` at all.
      kv: committed rows are `"refresh"`ed from target states, `"keep"` what drafting wrote, or have
        a `"hole"` (zeros) at the last row of a full accept.
      shift: row t holds token t + shift. chunk: the last prompt row of each chunk holds token t.
      embed, head: `"target"` or `"draft"`: whose.
      layers: how many. next_norm: the norm of later ones, which read the state alone. fed_from:
        the layer whose state is fed back. runs: layers that run.
      latent: DeepSeek's attention; keys and values of all heads from one short latent.
    """

    boundaries: tuple[Any, ...] = (2, 4, 5)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    double_norm: bool = False
    feedback: str = "pre_norm"
    final_norm: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    residual: str = "hidden"
    theta: float = 10000.0
    scaling: dict[str, Any] | None = None
    grows: tuple[float, int] | None = None
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    rope_pairs: str = "half"
    position_clamp: int | None = None
    window: int | None = None
    table: str = "offset"
    kv: str = "refresh"
    shift: int = 1
    chunk: int | None = None
    embed: str = "target"
    head: str = "draft"
    layers: int = 1
    next_norm: str = "input_layernorm"
    fed_from: str = "last"
    runs: int = 9
    latent: bool = False


def weights(sizes: Sizes, num_aux: int, seed: int) -> Tensors:
    """Everything any wiring needs, under PyTorch's names; biases and extra norms too."""
    rng = np.random.default_rng([seed, 11])
    s, D, A = sizes, sizes.hidden, num_aux
    N, K = s.heads * s.head_dim, s.kv_heads * s.head_dim
    made: Tensors = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0):
        made[f"{name}.weight"] = gain * rng.standard_normal((rows, columns)) / np.sqrt(columns)
        made[f"{name}.bias"] = 0.3 * rng.standard_normal(rows)

    linear("fc", D, A * s.target_hidden)
    for name, rows, gain in (("q", N, 2.5), ("k", K, 2.5), ("v", K, 2.0)):
        linear(f"midlayer.self_attn.{name}_proj", rows, 2 * D, gain)
    linear("midlayer.self_attn.o_proj", D, N, 2.0)
    linear("midlayer.mlp.gate_proj", s.mlp, D, 1.5)
    linear("midlayer.mlp.up_proj", s.mlp, D, 1.5)
    linear("midlayer.mlp.down_proj", D, s.mlp, 1.5)
    norms = {f"fc_norm.{i}": s.target_hidden for i in range(A)} | {
        "input_norm": A * s.target_hidden,
        "norm": D,
        **{
            f"midlayer.{name}": D
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    for name, width in norms.items():
        made[f"{name}.weight"] = 1 + 0.2 * rng.standard_normal(width)
    made["lm_head.weight"] = rng.standard_normal((s.draft_vocab, D)) / np.sqrt(D)
    made["embed_tokens.weight"] = rng.standard_normal((s.vocab, D))
    ids = np.sort(rng.choice(s.vocab, s.draft_vocab, replace=False))
    made["d2t"] = ids - np.arange(s.draft_vocab)
    made["t2d"] = np.isin(np.arange(s.vocab), ids)
    rng = np.random.default_rng([seed, 12])
    for name, rows, columns, gain in (
        ("q_a_proj", s.latent, 2 * D, 1.0),
        ("q_b_proj", N, s.latent, 2.5),
        ("kv_a_proj_with_mqa", s.latent + s.turning, 2 * D, 1.5),
        ("kv_b_proj", s.heads * (s.head_dim - s.turning + s.value), s.latent, 2.0),
    ):
        linear(f"latent.self_attn.{name}", rows, columns, gain)
    linear("latent.self_attn.o_proj", D, s.heads * s.value, 2.0)
    made["latent.self_attn.q_a_layernorm.weight"] = 1 + 0.2 * rng.standard_normal(s.latent)
    made["latent.self_attn.kv_a_layernorm.weight"] = 1 + 0.2 * rng.standard_normal(s.latent)
    for name, rows, columns, gain in (
        ("self_attn.q_proj", N, D, 2.5),
        ("self_attn.k_proj", K, D, 2.5),
        ("self_attn.v_proj", K, D, 2.0),
        ("self_attn.o_proj", D, N, 2.0),
        ("mlp.gate_proj", s.mlp, D, 1.5),
        ("mlp.up_proj", s.mlp, D, 1.5),
        ("mlp.down_proj", D, s.mlp, 1.5),
    ):
        linear(f"layers.1.{name}", rows, columns, gain)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"layers.1.{name}.weight"] = 1 + 0.4 * rng.standard_normal(D)
    return {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in made.items()}


class ReferenceDraft:
    """One sequence's draft: committed rows by position, and drafting from the last of them."""

    def __init__(self, w: Tensors, truth: Truth, sizes: Sizes, embedding: np.ndarray, head):
        self.truth, self.sizes = truth, sizes
        self.w = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in w.items()}
        own = self.w["embed_tokens.weight"]
        self.embedding = own if truth.embed == "draft" else embedding.astype(np.float64)
        own = self.w["lm_head.weight"]
        self.head = own if truth.head == "draft" else head.astype(np.float64)
        self.rows: list[Row] = []
        self.positions: list[int] = []
        self.axes: np.ndarray | None = None  # [3, prompt] positions of an image's tokens and text
        self.out = np.zeros((2, sizes.hidden))
        index = np.arange(len(self.head))
        if len(self.head) < sizes.vocab:
            table = {"offset": index + w["d2t"], "ids": w["d2t"] % sizes.vocab, "none": index}
            index = table[truth.table]
        self.to_target = index
        self.frequency = self._frequencies()

    def _frequencies(self) -> np.ndarray:
        s = self.truth.scaling
        H = self.sizes.turning if self.truth.latent else self.sizes.head_dim
        frequency = self.truth.theta ** (-np.arange(0, H, 2) / H)
        if s is None:
            return frequency
        wave, original = 2 * np.pi / frequency, s["original_max_position_embeddings"]
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        smooth = np.clip((original / wave - low) / (high - low), 0, 1)
        return (1 - smooth) * frequency / s["factor"] + smooth * frequency

    def _growth(self, position: int) -> np.ndarray | float:
        """What each frequency is multiplied with once the text is longer than the original."""
        if self.truth.grows is None:
            return 1.0
        factor, original = self.truth.grows
        pairs = len(self.frequency)
        raised = factor * max(position + 1, original) / original - (factor - 1)
        return raised ** (-np.arange(pairs) / (pairs - 1))

    def place(self, index: int) -> np.ndarray:
        """[H/2] the position that turns each pair of a row's heads."""
        clamp, sections = self.truth.position_clamp, self.truth.sections
        if self.axes is None or sections is None:
            return np.full(len(self.frequency), index if clamp is None else min(index, clamp))
        count = self.axes.shape[1]
        at = np.full(3, self.axes.max() + 1 + index - count)
        at = self.axes[:, index] if index < count else at
        axis = np.repeat(np.arange(3), sections)
        if self.truth.interleaved:
            turn = np.arange(len(axis)) % 3
            axis = np.where(np.arange(len(axis)) < 3 * np.array(sections)[turn], turn, 0)
        return at[axis]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.sizes.eps)
        return x / scale * self.w[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str, bias: bool = False) -> np.ndarray:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if bias else y

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        angle = self.place(position) * self.frequency * self._growth(position)
        c, s = np.cos(angle), np.sin(angle)
        half = len(self.frequency)
        out = np.empty_like(x)
        first, second = slice(0, half), slice(half, None)
        if self.truth.rope_pairs == "interleaved":
            first, second = slice(0, None, 2), slice(1, None, 2)
        out[:, first] = x[:, first] * c - x[:, second] * s
        out[:, second] = x[:, second] * c + x[:, first] * s
        return out

    def fuse(self, aux: np.ndarray) -> np.ndarray:
        """States [A, E] -> [D]."""
        x = aux.astype(np.float64)
        if self.truth.fc_norm:
            x = np.stack([self.norm(a, f"fc_norm.{i}") for i, a in enumerate(x)])
        x = x.reshape(-1)
        if self.truth.norm_before_fc:
            x = self.norm(x, "input_norm")
        return self.linear(x, "fc", self.truth.fc_bias)

    def step(
        self, token: int, hidden: np.ndarray, position: int, drafted: list[Row]
    ) -> tuple[np.ndarray, Row]:
        """One row over the committed rows and `drafted` ones.

        Returns:
          The states after the last layer and after the first, [2, D]; the row's keys and values.
        """
        t, e = self.truth, self.embedding[token]
        inner = self.norm(hidden, "midlayer.input_layernorm") if t.double_norm else hidden
        normed = self.norm(inner, "midlayer.hidden_norm")
        x = np.concatenate((self.norm(e, "midlayer.input_layernorm"), normed))
        residual = normed if t.norm_before_residual else hidden
        residual = e if t.residual == "embedding" else residual
        oldest = -1 if t.window is None else position - t.window
        seen = [r for r, p in zip(self.rows, self.positions, strict=True) if p > oldest]
        seen = [*seen, *drafted]
        own: Row = []
        first = out = self.layer("midlayer", x, residual, position, [r[0] for r in seen], own)
        for i in range(1, t.layers):
            x = self.norm(out, f"layers.{i}.{t.next_norm}")
            last = self.layer(f"layers.{i}", x, out, position, [r[i] for r in seen], own)
            out = last if i < t.runs else out
        return np.stack((out, first)), own

    def layer(
        self, name: str, x: np.ndarray, residual: np.ndarray, position: int, seen: Row, own: Row
    ) -> np.ndarray:
        """A whole layer for one row [D]; its key and value are added to `own`."""
        t, s = self.truth, self.sizes
        q, key, value = (self.latent if t.latent else self.grouped)(name, x, position)
        own.append((key, value))
        keys, values = (
            np.repeat(np.stack(part), s.heads // part[0].shape[0], axis=1)
            for part in zip(*seen, own[-1], strict=True)
        )
        scores = np.einsum("nh,jnh->nj", q, keys) / np.sqrt(s.head_dim)
        p = np.exp(scores - scores.max(1, keepdims=True))
        mixed = np.einsum("nj,jnh->nh", p / p.sum(1, keepdims=True), values).reshape(-1)
        attention = "latent" if t.latent else name
        a = residual + self.linear(mixed, f"{attention}.self_attn.o_proj", t.output_bias)
        y = self.norm(a, f"{name}.post_attention_layernorm")
        gate = self.linear(y, f"{name}.mlp.gate_proj", t.mlp_bias)
        up = self.linear(y, f"{name}.mlp.up_proj", t.mlp_bias)
        gated = gate / (1 + np.exp(-gate)) * up
        return a + self.linear(gated, f"{name}.mlp.down_proj", t.mlp_bias)

    def grouped(self, name: str, x: np.ndarray, position: int):
        """Query [N, H], key and value [K, H]."""
        q, k, v = (
            self.linear(x, f"{name}.self_attn.{n}_proj", self.truth.qkv_bias).reshape(
                -1, self.sizes.head_dim
            )
            for n in "qkv"
        )
        return self.rotate(q, position), self.rotate(k, position), v

    def latent(self, name: str, x: np.ndarray, position: int):
        """The same of latent attention, every head written out."""
        s, stem = self.sizes, "latent.self_attn"
        plain = s.head_dim - s.turning
        low = self.norm(self.linear(x, f"{stem}.q_a_proj"), f"{stem}.q_a_layernorm")
        q = self.linear(low, f"{stem}.q_b_proj").reshape(s.heads, -1)
        both = self.linear(x, f"{stem}.kv_a_proj_with_mqa")
        c = self.norm(both[: s.latent], f"{stem}.kv_a_layernorm")
        up = self.linear(c, f"{stem}.kv_b_proj").reshape(s.heads, -1)
        turned = np.repeat(self.rotate(both[None, s.latent :], position), s.heads, axis=0)
        q = np.concatenate((q[:, :plain], self.rotate(q[:, plain:], position)), axis=1)
        return q, np.concatenate((up[:, :plain], turned), axis=1), up[:, plain:]

    def commit(self, position: int, token: int, aux: np.ndarray, kept: Row | None = None):
        """Writes the row of `position` from target states (or as drafted), as the next seed."""
        out, row = self.step(token, self.fuse(aux), position, [])
        self.rows.append(row if kept is None else kept)
        self.positions.append(position)
        self.out = out

    def feedback(self, out: np.ndarray) -> np.ndarray:
        fed = out[1] if self.truth.fed_from == "first" else out[0]
        return self.norm(fed, "norm") if self.truth.feedback == "post_norm" else fed

    def logits(self, out: np.ndarray) -> np.ndarray:
        return self.head @ (self.norm(out[0], "norm") if self.truth.final_norm else out[0])

    def best(self, out: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best tokens as target ids, and their probabilities."""
        logits = self.logits(out)
        ids = np.argsort(-logits, kind="stable")[:k]
        p = np.exp(logits - logits.max())
        return self.to_target[ids], (p / p.sum())[ids]

    def draft(self, length: int, tree: TreeConfig, attention: str = "ancestors") -> "Drafted":
        """A whole tree from the last committed row, before pruning and after."""
        k = tree.topk
        tokens, probs = self.best(self.out, k)
        found = Drafted(tokens.tolist(), probs.tolist(), [-1] * k, [])
        beams = list(range(k))
        hidden = [self.feedback(self.out)] * k
        paths: list[list[Row]] = [[] for _ in range(k)]
        for level in range(tree.num_steps - 1):
            outs, children = [], []
            for b in range(k):
                out, row = self.step(found.tokens[beams[b]], hidden[b], length + level, paths[b])
                paths[b] = [*paths[b], row]
                outs.append(self.feedback(out))
                ids, p = self.best(out, k)
                for token, prob in zip(ids.tolist(), p.tolist(), strict=True):
                    children.append(len(found.tokens))
                    found.tokens.append(token)
                    found.scores.append(found.scores[beams[b]] * prob)
                    found.parents.append(beams[b])
            order = sorted(range(k * k), key=lambda i: (-found.scores[children[i]], i))[:k]
            found.rows = paths[0] if k == 1 else []
            beams = [children[i] for i in order]
            hidden = [outs[i // k] for i in order]
            if attention == "ancestors":
                paths = [paths[i // k] for i in order]
        count = len(found.tokens)
        best = sorted(range(count), key=lambda i: (-found.scores[i], i))
        if k > 1:
            found.selected = sorted(best[: tree.num_draft_tokens - 1])
        else:
            found.selected = list(range(count))
        return found


@dataclasses.dataclass
class Drafted:
    """Candidates in the flat order of levels, beams, children; `rows` of a chain's forwards."""

    tokens: list[int]
    scores: list[float]
    parents: list[int]
    rows: list[Row]
    selected: list[int] = dataclasses.field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Candidates from level 0 to `node`."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def children(self, node: int) -> list[int]:
        """Tokens of the selected children; node -1 is the root."""
        return [self.tokens[i] for i in self.selected if self.parents[i] == node]
