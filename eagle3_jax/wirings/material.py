"""A draft and a record made ready for the scorer: weights, labels, projections, batches."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import Boundary, ConfigError, DraftConfig, RopeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.modules import tensors_of
from eagle3_jax.rope import axes, inverse_frequencies
from eagle3_jax.wirings import scorer
from eagle3_jax.wirings.block import Form, Layer, Place, Weights
from eagle3_jax.wirings.maps import readings, rows_of
from eagle3_jax.wirings.pack import Pack, row_orders
from eagle3_jax.wirings.rungs import Rung
from eagle3_jax.wirings.wiring import Wiring

MAPS = 6
FAR = 1 << 30


class Material:
    """Everything the scorer needs, computed when first asked for."""

    def __init__(
        self,
        packed: Pack,
        boundaries: Sequence[Boundary],
        draft: Eagle3Draft,
        shared: Shared | None,
        extra: Mapping[str, np.ndarray],
        side: np.ndarray | None,
        rotation: np.ndarray | None,
    ):
        self.pack, self.boundaries, self.config = packed, tuple(boundaries), draft.config
        config = self.config
        self.form = Form.of(config)
        self.tensors = {
            name: tensor.astype(np.float32)
            for name, tensor in tensors_of(draft).items()
            if name != "draft_to_target"
        } | {name: np.asarray(tensor).astype(np.float32) for name, tensor in extra.items()}
        self.shared, self.rotation = shared, rotation
        self.targets = np.asarray(draft.draft_to_target[...])
        self.maps = readings(self.targets, config.vocab_size, side)
        self.rows_of = {n: rows_of(ids, config.vocab_size) for n, ids in self.maps.items()}
        self.orders = row_orders(packed)
        self._heads: dict[str, np.ndarray] = {}

    @property
    def has_both_norms(self) -> bool:
        """Whether later layers that read the state alone have both norms in the file."""
        later = [f"layers.{i}" for i, kind in enumerate(self.form.layers) if kind == "state"]
        norms = ("norm_embed", "norm_hidden")
        named = [f"{layer}.{norm}.weight" for layer in later for norm in norms]
        return bool(later) and all(name in self.tensors for name in named)

    def owns(self, what: str) -> list[str]:
        """Who has an `"embed"` or `"head"` this draft could use."""
        own = "embed.weight" if what == "embed" else "lm_head.weight"
        owners = ["draft"] if own in self.tensors else []
        if self.shared is None or self.config.hidden_size != self.config.target_hidden_size:
            return owners
        matrix = self.shared.embedding if what == "embed" else self.shared.head
        return [*owners, "target"] if len(matrix) else owners

    def embedding(self, owner: str) -> jax.Array:
        """[V, D] float32, the target's or the draft's own."""
        if owner == "draft":
            return jnp.asarray(self.tensors["embed.weight"])
        assert self.shared is not None
        return self.shared.embedding.astype(jnp.float32)

    @functools.cached_property
    def embedded(self) -> np.ndarray:
        """[2, T, D]: the tokens in the target's embedding and in the draft's own."""
        D = self.config.hidden_size
        made = np.zeros((2, len(self.pack.tokens), D), np.float32)
        for i, owner in enumerate(("target", "draft")):
            if owner in self.owns("embed"):
                if owner == "draft":
                    made[i] = self.tensors["embed.weight"][self.pack.tokens]
                else:
                    assert self.shared is not None
                    taken = self.shared.embedding[jnp.asarray(self.pack.tokens)]
                    made[i] = np.asarray(taken.astype(jnp.float32))
        return made

    @functools.cached_property
    def row_shift(self) -> int | None:
        """The shift at which rows belong to their tokens, None when the states do not tell.

        Early states of the same token are alike wherever it stands, so the right shift is the one
        at which rows of equal tokens are most alike. A row that is read too late holds the target's
        own choice of the next token: it would look like a cure.
        """
        numbers = [b for b in self.boundaries if isinstance(b, int)]
        if not numbers:
            return None
        low = self.boundaries.index(min(numbers))
        p = self.pack
        x = p.states([low], 0, min(len(p.tokens), 2048))[:, 0]
        x = x - x.mean(axis=0)
        x /= np.maximum(np.sqrt((x * x).sum(axis=1, keepdims=True)), 1e-6)
        alike = {}
        for shift in (-1, 0, 1):
            slots = np.arange(len(x))
            last = np.minimum(p.end[slots] - 1, len(x))
            inside = (slots + shift >= p.start[slots]) & (slots + shift < last)
            rows, tokens = x[slots[inside] + shift], p.tokens[slots[inside]]
            total, pairs = 0.0, 0
            for token in np.unique(tokens):
                same = rows[tokens == token]
                n = len(same)
                total += float((same.sum(axis=0) ** 2).sum()) - n
                pairs += n * (n - 1)
            alike[shift] = total / max(pairs, 1)
        ranked = sorted(alike, key=lambda s: -alike[s])
        return ranked[0] if alike[ranked[0]] > alike[ranked[1]] + 0.1 else None

    def head(self, owner: str) -> np.ndarray:
        """[W, D]; the target's, restricted to the draft's rows."""
        if owner not in self._heads:
            if owner == "draft":
                self._heads[owner] = self.tensors["lm_head.weight"]
            else:
                assert self.shared is not None
                rows = self.shared.head
                if self.config.draft_vocab_size != self.config.vocab_size:
                    rows = rows[jnp.asarray(np.maximum(self.maps["checkpoint"], 0))]
                self._heads[owner] = np.asarray(rows.astype(jnp.float32))
        return self._heads[owner]

    @functools.lru_cache(maxsize=16)  # noqa: B019  (one Material a diagnosis)
    def weights(self, head: str, swapped: bool, rows: tuple[int, ...] | None):
        """The scorer's tensors."""
        t, D = self.tensors, self.config.hidden_size
        matrix = self.head(head)
        return Weights(
            tuple(_layer(t, i, swapped) for i in range(self.config.num_layers)),
            fc_bias=jnp.asarray(t.get("fc.bias", np.zeros(D, np.float32))),
            norm_final=jnp.asarray(t.get("norm_final.weight", np.ones(D, np.float32))),
            head=jnp.asarray(matrix if rows is None else matrix[list(rows)]),
            eps=jnp.asarray(self.config.rms_norm_eps, jnp.float32),
        )

    def projections(
        self, wiring: Wiring, chosen: Sequence[int], rung: Rung, slots: int
    ) -> scorer.Projections:
        """`fc` of each slot and boundary in `chosen`, with the norm and space of `wiring`."""
        A, E, D = self.config.num_aux, self.config.target_hidden_size, self.config.hidden_size
        t = self.tensors
        fc = t["fc.weight"] if "fc.weight" in t else np.eye(D, dtype=np.float32)
        fc = fc.reshape(D, A, E).transpose(1, 0, 2)
        if wiring.fuse_norm == "concat":
            weight = t.get("input_norm.weight", np.ones(A * E, np.float32))
            fc = fc * weight.reshape(A, 1, E)
        elif wiring.fuse_norm == "per_state":
            fc = fc * t.get("fc_norm.weight", np.ones((A, E), np.float32)).reshape(A, 1, E)
        turn = np.eye(1, dtype=np.float32)
        if wiring.space != "as recorded":
            assert self.rotation is not None
            turn = self.rotation if wiring.space == "rotated" else self.rotation.T
        table, squares = [], []
        for b in chosen:
            x = self.pack.states([b], rung.low, rung.high)[:, 0]
            x = np.pad(x, ((0, slots - len(x)), (0, 0)))
            one, square = _project(
                jnp.asarray(x),
                jnp.asarray(fc),
                jnp.asarray(turn),
                jnp.asarray(self.config.rms_norm_eps, jnp.float32),
                per_state=wiring.fuse_norm == "per_state",
                turned=wiring.space != "as recorded",
            )
            table.append(one)
            squares.append(square)
        return scorer.Projections(
            jnp.stack(table, axis=1), jnp.stack(squares), jnp.asarray(A * E, jnp.float32)
        )

    def rows(self, rung: Rung) -> tuple[scorer.Rows, tuple[int, ...] | None]:
        """The rung's slots, and which rows of the head it compares among."""
        p, low, high, slots = self.pack, rung.low, rung.high, rung.slots
        labels = np.full((MAPS, slots), -1, np.int64)
        for i, name in enumerate(self.maps):
            labels[i, : high - low] = self.rows_of[name][p.tokens[low:high]]
        subset = None
        if rung.head_rows is not None and rung.head_rows < self.config.draft_vocab_size:
            subset = _subset(labels, rung.head_rows, self.config.draft_vocab_size)
            place = np.full(self.config.draft_vocab_size, -1, np.int64)
            place[subset] = np.arange(len(subset))
            labels = np.where(labels >= 0, place[np.maximum(labels, 0)], -1)
        pad = np.arange(high - low, slots, dtype=np.int32)
        orders = np.zeros((len(self.orders), slots), np.int32)
        for i, order in enumerate(self.orders.values()):
            inside = np.clip(order[low:high] - low, 0, high - low - 1)
            orders[i] = np.concatenate((inside, pad))
        chains = np.full(rung.chains_padded, slots - 1, np.int32)
        chains[: len(rung.chains)] = [p.chains[i].slot - low for i in rung.chains]
        embedded = np.pad(self.embedded[:, low:high], ((0, 0), (0, slots - high + low), (0, 0)))

        def padded(x: np.ndarray, fill: np.ndarray) -> jax.Array:
            return jnp.asarray(np.concatenate((x[low:high], fill)).astype(np.int32))

        placed = farthest = None
        if p.axes is not None and p.farthest is not None:
            placed = jnp.stack([padded(axis, pad * 0) for axis in p.axes])
            farthest = padded(p.farthest, pad * 0)
        made = scorer.Rows(
            embedded=jnp.asarray(embedded),
            labels=jnp.asarray(labels.astype(np.int32)),
            start=jnp.maximum(padded(p.start - low, pad), 0),
            end=jnp.minimum(padded(p.end - low, pad + 1), padded(p.end * 0 + high - low, pad + 1)),
            place=Place(padded(p.position, pad * 0), placed),
            farthest=farthest,
            prompt=padded(p.prompt, pad * 0),
            orders=jnp.asarray(orders),
            chains=jnp.asarray(chains),
        )
        return made, None if subset is None else tuple(subset.tolist())

    def knobs(self, wiring: Wiring, place: Mapping[int, int]) -> dict[str, np.ndarray]:
        """One wiring as the scorer's arguments; `place` finds a boundary in the projections."""
        attention = self.config.attention()
        turning, rope = attention.rotary_dim, wiring.rope
        order = np.arange(turning)
        if wiring.pairs == "interleaved":
            order = np.concatenate((order[0::2], order[1::2]))
        lanes = np.zeros(turning // 2, np.int32)
        if rope.mrope_section:
            lanes = 1 + axes(rope, turning)
        whole = {
            "slots": [place[self.index(b)] for b in wiring.boundaries],
            "embed": int(wiring.embed == "draft"),
            "pairs": order,
            "lanes": lanes,
            "window": [FAR if w is None else w for w in self._windows(wiring)],
            "clamp": FAR if wiring.clamp is None else wiring.clamp,
            "token_shift": wiring.token_shift,
            "row_shift": wiring.row_shift,
            "first_seen": int(wiring.first == "dropped"),
            "chunk": wiring.chunk or 0,
            "order": list(self.orders).index(wiring.rows),
            "depth": 1 if wiring.layers == "first alone" else self.config.num_layers,
        }
        truth = {
            "concat": wiring.fuse_norm == "concat",
            "before_residual": wiring.norm_before_residual,
            "double_norm": wiring.double_norm,
            "final_norm": wiring.final_norm,
            "post_norm": wiring.feedback == "post_norm",
            "embedding_residual": wiring.residual == "embedding",
            "next_hidden_norm": wiring.next_norm == "hidden_norm",
            "fed_first": wiring.fed_from == "first",
            "zero_first": wiring.first == "zeroed",
            "no_prompt": wiring.prefix == "missing",
        }
        numbers = {
            "frequency": inverse_frequencies(rope, turning),
            "amplitude": rope.amplitude,
            "growth": self._growth(rope),
            "scale": self.config.head_dim**-0.5 * self._sharpness(rope),
        }
        return (
            {name: np.asarray(value, np.int32) for name, value in whole.items()}
            | {name: np.asarray(value, np.bool_) for name, value in truth.items()}
            | {name: np.asarray(value, np.float32) for name, value in numbers.items()}
        )

    def _windows(self, wiring: Wiring) -> tuple[int | None, ...]:
        if wiring.window == "as configured":
            return self.config.windows
        return (wiring.window,) * self.config.num_layers  # type: ignore[return-value]

    def _growth(self, rope: RopeConfig) -> tuple[float, float]:
        dynamic = rope.kind == "dynamic"
        return (rope.factor, rope.original_max_position_embeddings) if dynamic else (1.0, 1e30)

    def _sharpness(self, rope: RopeConfig) -> float:
        return 1.0 if self.config.latent is None else rope.latent_sharpness

    def index(self, boundary: Boundary) -> int:
        """Which of the record's states this is.

        Raises:
          ConfigError: the record lacks it.
        """
        if boundary not in self.boundaries:
            raise ConfigError(
                f"the record has boundaries {list(self.boundaries)}, not {boundary!r}: capture "
                "them all"
            )
        return self.boundaries.index(boundary)


def _layer(tensors: Mapping[str, np.ndarray], index: int, swapped: bool) -> Layer:
    """One layer's tensors under short names; gate and up in each other's place if `swapped`."""
    found: Layer = {}
    start = f"layers.{index}."
    other = {"gate": "up", "up": "gate"} if swapped else {}
    for name, tensor in tensors.items():
        if name.startswith(start):
            module, kind = name.removeprefix(start).rsplit(".", 1)
            module = module.split(".")[-1]
            module = other.get(module, module)
            found[module if kind == "weight" else f"{module}.{kind}"] = jnp.asarray(tensor)
    return found


def _subset(labels: np.ndarray, count: int, rows: int) -> np.ndarray:
    """The rows of all true tokens, and others drawn to fill up to `count`."""
    needed = np.unique(labels[labels >= 0])
    count = min(max(count, -(-len(needed) // 256) * 256), rows)
    others = np.setdiff1d(np.arange(rows), needed)
    drawn = np.random.default_rng(0).permutation(others)[: count - len(needed)]
    return np.sort(np.concatenate((needed, drawn)))


@functools.partial(jax.jit, static_argnames=("per_state", "turned"))
def _project(x, fc, turn, eps, *, per_state: bool, turned: bool):
    """x [T, E], fc [A, D, E] -> [A, T, D] and the sum of squares [T]."""
    if turned:
        x = jnp.matmul(x, turn, precision="highest")
    if per_state:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    projected = jnp.einsum("te,ade->atd", x, fc, precision="highest")
    return projected, jnp.sum(x * x, axis=-1)


def checked_rotation(config: DraftConfig, rotation: np.ndarray, name: str) -> np.ndarray:
    """A given rotation, checked.

    Raises:
      ConfigError: another shape, or not orthogonal.
    """
    E = config.target_hidden_size
    if rotation.shape != (E, E):
        raise ConfigError(f"{name}: shape {list(rotation.shape)}, expected [{E}, {E}]")
    if rotation.dtype.kind != "f" and rotation.dtype.name != "bfloat16":
        raise ConfigError(f"{name}: dtype {rotation.dtype}, expected real numbers")
    rotation = rotation.astype(np.float32)
    gap = float(np.abs(rotation @ rotation.T - np.eye(E, dtype=np.float32)).max())
    if not gap < 1e-2:
        raise ConfigError(f"{name}: not orthogonal: Q @ Q.T differs from the identity by {gap:.2g}")
    return rotation
