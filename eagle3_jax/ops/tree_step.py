"""One step of the tree kernel: some rows of one sequence and KV head over a few slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.ops.kernel_plan import WORD, pieces
from eagle3_jax.ops.merge import LOG2E
from eagle3_jax.ops.pallas_backend import load

NOTHING = float(jnp.finfo(jnp.float32).min)  # the largest score of a row that saw none


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for, beside its plan.

    Attributes:
      nodes, group: T and G, folded into rows. words: of ancestors, a row.
      key, value: widths. shared: values are the first elements of the keys.
      window: positions a row sees, None for all.
      chunks: sequences of rows, one after the other, that share one cache.
    """

    nodes: int
    group: int
    slots: int
    words: int
    key: int
    value: int
    shared: bool
    scale: float
    softcap: float | None
    window: int | None
    chunks: int = 1


class Step:
    """Over a few slots: scores, running softmax, weighted values."""

    def __init__(self, sizes: Sizes, ref: dict, node: jax.Array, real: jax.Array):
        self.sizes = sizes
        self.ref = ref
        if sizes.window is not None:
            self.at = load(ref["at"].at[node], mask=real, other=jnp.int32(0))

    def __call__(
        self,
        queries: tuple[jax.Array, ...],  # [rows, size] of each piece
        slot: jax.Array,  # [keys]
        inside: jax.Array,  # [keys] bool, slots there are
        seen: jax.Array,  # [rows or 1, keys] bool
        state: tuple[jax.Array, ...],  # m, sums and the pieces of o
    ) -> tuple[jax.Array, ...]:
        """The state with these slots."""
        s, (m, total, *o) = self.sizes, state
        keys = self._rows("k", s.key, slot, inside)
        scores = sum(_dot(a, b, 1) for a, b in zip(queries, keys, strict=True))
        if s.softcap is None:
            scores = scores * (s.scale * LOG2E)
        else:
            scores = jnp.tanh(scores * (s.scale / s.softcap)) * (s.softcap * LOG2E)
        if s.window is not None:
            key_at = load(self.ref["key_at"].at[slot], mask=inside, other=jnp.int32(0))
            seen = seen & (self.at[:, None] - key_at[None, :] < s.window)
        scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.maximum(m, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - top[:, None])
        shrink = jnp.exp2(m - top)
        total = total * shrink + jnp.sum(weights, axis=1)
        if s.shared and pieces(s.value) == pieces(s.key)[: len(pieces(s.value))]:
            values = keys
        else:
            values = self._rows("k" if s.shared else "v", s.value, slot, inside)
        weights = weights.astype(values[0].dtype)
        o = [a * shrink[:, None] + _dot(weights, b, 0) for a, b in zip(o, values, strict=False)]
        return (top, total, *o)

    def _rows(self, name: str, width: int, slot: jax.Array, inside: jax.Array) -> list[jax.Array]:
        return [
            load(
                self.ref[name].at[slot[:, None], columns(start, size)],
                mask=inside[:, None] & (columns(start, size) < width),
                other=0.0,
            )
            for start, size in pieces(width)
        ]


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Sums over a's axis 1 and b's `axis`, in float32, without TF32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def iota(size: int) -> jax.Array:
    """[size] int32 from 0."""
    return lax.iota(jnp.int32, size)


def columns(start: int, size: int) -> jax.Array:
    """[1, size] int32 from `start`."""
    return (start + iota(size))[None, :]


def bits_of(word: jax.Array) -> jax.Array:
    """[rows] uint32 -> [rows, 32] bool."""
    shape = (word.shape[0], WORD)
    shift = jnp.broadcast_to(iota(WORD).astype(jnp.uint32)[None, :], shape)
    shifted = lax.shift_right_logical(jnp.broadcast_to(word[:, None], shape), shift)
    return (shifted & jnp.uint32(1)) == 1
