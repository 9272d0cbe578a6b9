"""Attention query by query in NumPy and float64, with visibility spelled out slot by slot."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle3_jax.ops.attention import Window

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
# Of the sum of |weight * value|. Inputs of 16 bits are exact and sums in float32: what is left is
# one rounding of each weight and one of the output, each at most half an ulp.
TOLERANCES = {
    "float64": 1e-13,
    "float32": 1e-5,
    "float16": 2**-10 + 1e-5,
    "bfloat16": 2**-7 + 1e-5,
}


@dataclasses.dataclass
class Case:
    """Arguments of `attend` and what each row sees.

    Attributes:
      bits: an integer a row. positions: of rows and slots, with a window.
    """

    q: np.ndarray  # [B, T, N, H]
    k: np.ndarray  # [B, S, K, H]
    v: np.ndarray | None  # [B, S, K, width]
    lengths: np.ndarray  # [B]
    bits: list[list[int]]  # [B][T]
    words: int
    scale: float = 0.7
    softcap: float | None = None
    sinks: np.ndarray | None = None  # [N]
    window: int | None = None
    positions: tuple[np.ndarray, np.ndarray] | None = None  # [B, T], [B, S]
    width: int | None = None

    def run(self, attend, **options):
        """`attend` of these arguments."""
        packed = [
            [[row >> 32 * w & 0xFFFFFFFF for w in range(self.words)] for row in rows]
            for rows in self.bits
        ]
        window = None
        if self.window is not None:
            window = Window(self.window, *map(jnp.asarray, self.positions))
        return attend(
            jnp.asarray(self.q),
            jnp.asarray(self.k),
            None if self.v is None else jnp.asarray(self.v),
            jnp.asarray(self.lengths, jnp.int32),
            jnp.asarray(np.array(packed, np.uint32)),
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else jnp.asarray(self.sinks),
            window=window,
            width=self.width,
            **options,
        )

    def sees(self) -> np.ndarray:
        """[B, T, S] bool."""
        B, T = self.q.shape[:2]
        sees = np.zeros((B, T, self.k.shape[1]), bool)
        for b, t, s in np.ndindex(sees.shape):
            j = s - int(self.lengths[b])
            sees[b, t, s] = j < 0 or bool(self.bits[b][t] >> j & 1)
            if self.window is not None:
                rows, slots = self.positions
                sees[b, t, s] &= rows[b, t] - slots[b, s] < self.window
        return sees

    def check(self, found):
        """Within the dtype's tolerance of the naive result."""
        assert found.dtype == self.q.dtype
        v = self.k[..., : self.width] if self.v is None else self.v
        expected, bound = naive(
            self.q, self.k, v, self.sees(), self.scale, self.softcap, self.sinks
        )
        found = np.asarray(found, np.float64)
        assert found.shape == expected.shape
        allowed = TOLERANCES[str(self.q.dtype)] * bound
        assert np.all(np.abs(found - expected) <= allowed)


def naive(q, k, v, sees, scale, softcap=None, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, width], and the weighted sum of |v| that bounds its rounding."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, _ = q.shape
    out = np.zeros((B, T, N, v.shape[3]))
    bound = np.zeros(out.shape)
    for b, t, n in np.ndindex(B, T, N):
        head = n // (N // k.shape[2])
        slots = np.flatnonzero(sees[b, t])
        if len(slots) == 0:
            continue
        scores = scale * (k[b, slots, head] @ q[b, t, n])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        extra = [] if sinks is None else [float(sinks[n])]
        highest = max(*scores, *extra, -np.inf)
        weights = np.exp(scores - highest)
        weights /= weights.sum() + sum(np.exp(x - highest) for x in extra)
        out[b, t, n] = weights @ v[b, slots, head]
        bound[b, t, n] = weights @ np.abs(v[b, slots, head])
    return out, bound


def draw(rng, dtype: str, shape, *, lengths=None, width: int | None = None, **options) -> Case:
    """Random arguments of shape (B, T, S, K, G, H, words).

    Any bits, but each row has one that names a slot there is. Lengths: an empty prefix first, then
    the last T slots of a full cache, then any.
    """
    B, T, S, K, G, H, words = shape
    made = [
        rng.normal(size=size).astype(DTYPES[dtype])
        for size in ((B, T, K * G, H), (B, S, K, H), (B, S, K, width or H))
    ]
    if lengths is None:
        lengths = rng.integers(0, S - T + 1, B)
        lengths[: min(B, 2)] = (0, S - T)[: min(B, 2)]
    bits = [
        [
            int.from_bytes(rng.bytes(4 * words), "little")
            | 1 << int(rng.integers(0, min(S - n, 32 * words)))
            for _ in range(T)
        ]
        for n in lengths
    ]
    return Case(*made, np.asarray(lengths), bits, words, **options)
