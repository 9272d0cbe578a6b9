"""The Mosaic GPU kernel: its body, in NumPy and by jax's interpreter, against NumPy in float64, and
its lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import draw
from cuda_lowering import lowered, times_run
from jax.experimental import pallas as pl
from mosaic_by_hand import Barriers, Ref, by_hand, copy  # noqa: F401
from mosaic_interpreted import interpreted, needs_interpreter  # noqa: F401
from selection import by_default

from eagle3_jax.ops import attention
from eagle3_jax.ops import which as choice
from eagle3_jax.ops.mosaic_attention import takes

# (B, T, S, K, G, H, words)
CASES = [
    ((1, 1, 40, 1, 4, 64, 1), "bfloat16", None),
    ((3, 7, 200, 2, 3, 64, 1), "float16", None),
    ((2, 33, 504, 1, 5, 128, 2), "bfloat16", None),  # rows in three blocks
    ((1, 64, 704, 1, 4, 64, 2), "bfloat16", 1.5),
    ((2, 10, 160, 2, 1, 64, 3), "float16", None),  # words of an odd number
    ((140, 2, 72, 1, 1, 64, 1), "float16", None),  # one split each
]


def drawn(seed, dtype, shape, **options):
    """A case whose scores are close, so that a slot too many weighs something."""
    case = draw(np.random.default_rng(seed), dtype, shape, **options)
    case.scale = 0.1
    return case


@pytest.mark.parametrize("which", by_default(CASES, lambda i, _: i in (1, 3)), ids=str)
def test_the_body_is_attention(by_hand, which):  # noqa: F811
    shape, dtype, softcap = which
    case = drawn(shape[1], dtype, shape, softcap=softcap)
    case.check(case.run(by_hand))


@pytest.mark.parametrize(
    ("words", "start", "slots"), [(1, 0, 40), (2, 64, 136), (3, 120, 136), (1, 56, 72)]
)
def test_a_tree_may_start_anywhere(by_hand, words, start, slots):  # noqa: F811
    """Lengths of every remainder: TMA copies tiles of 8 rows. Some windows pass the cache's end."""
    shape = (8, 2, slots, 1, 1, 64, words)
    case = drawn(words, "float16", shape, lengths=start + np.arange(8))
    case.check(case.run(by_hand))


def test_a_copy_from_within_a_tile_ends_with_it():
    """The model: what made the tree's slots zeros."""
    rows = np.arange(1, 25, dtype=np.float32)[:, None]
    target = Ref(np.full((16, 1), np.nan, np.float32), tile=8)
    copy(Ref(rows).at[pl.ds(11, 16)], target, Barriers())
    assert target.array[:, 0].tolist() == [*range(12, 17), 0, 0, 0, *range(20, 25), 0, 0, 0]


@needs_interpreter
def test_the_body_by_jaxs_own_interpreter(interpreted):  # noqa: F811
    """Two sequences in three splits, trees at 7 and 3 slots of a tile, rows past the cache."""
    shape = (2, 2, 192, 1, 1, 64, 2)
    case = drawn(3, "float16", shape, lengths=[71, 187])
    case.check(case.run(interpreted))


def test_a_row_that_sees_nothing_is_zeros(by_hand):  # noqa: F811
    case = draw(np.random.default_rng(1), "float16", (1, 3, 72, 1, 2, 64, 1), lengths=[0])
    case.bits = [[0, 1, 0]]
    found = case.run(by_hand)
    assert np.all(found[0, [0, 2]] == 0)
    case.check(found)


def test_what_it_takes():
    def of(dtype="bfloat16", H=128, S=64):
        q, k = (jax.ShapeDtypeStruct((1, s, n, H), dtype) for s, n in ((8, 8), (S, 2)))
        return q, k, k

    assert takes(*of(), plain=True)
    assert takes(*of("float16", 256), plain=True)
    assert not takes(*of(), plain=False)
    assert not takes(*of("float32"), plain=True)
    assert not takes(*of(H=80), plain=True)
    assert not takes(*of(S=100), plain=True)
    assert not takes(*of()[:2], None, plain=True)


@pytest.mark.parametrize("H", [64, 80])
@pytest.mark.parametrize("by", [None, "mosaic"])
def test_it_runs_where_it_was_asked_for(H, by, monkeypatch):
    """By name only; what it does not take is the Triton kernel's."""
    monkeypatch.setattr(choice, "_cuda_is_possible", lambda: True)
    shapes = (
        jax.ShapeDtypeStruct((1, 8, 8, H), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((1, 104, 2, H), jnp.bfloat16)] * 2,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((1, 8, 1), jnp.uint32),
    )
    run = jax.jit(lambda *args: attention.attend(*args, scale=0.1))
    text = lowered(run, *shapes, by=by)
    mosaic = by == "mosaic" and H == 64
    assert times_run(text, "@mosaic_gpu") == mosaic
    assert times_run(text, 'name = "tree_attention_kernel"') == (not mosaic)
