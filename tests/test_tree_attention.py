"""Every implementation of tree attention against NumPy in float64: one file for all of them.

The compiled kernel runs where jax has a GPU; elsewhere it is lowered for one, and interpreted.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import draw
from selection import by_default

from eagle3_jax.ops import attention, kernel_plan
from eagle3_jax.ops.merge import merge

IMPLEMENTATIONS = ["xla", "interpret"] + (["pallas"] if jax.default_backend() == "gpu" else [])
KERNELS = IMPLEMENTATIONS[1:]
# (B, T, S, K, G, H, words)
SHAPES = {
    "one row": (1, 1, 5, 1, 1, 2, 1),
    "ragged, odd heads": (3, 7, 24, 2, 3, 6, 1),
    "rows in several blocks": (2, 33, 80, 1, 5, 16, 2),
    "64 rows, H of two pieces": (1, 64, 97, 1, 4, 80, 2),
    "three words": (2, 10, 160, 2, 1, 16, 3),
    "ten splits": (1, 3, 300, 1, 2, 16, 1),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request):
    return functools.partial(compiled, implementation=request.param)


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "width", "size", "implementation"))
def _compiled(q, k, v, lengths, ancestors, sinks, positions, *, size, **options):
    window = None if size is None else attention.Window(size, *positions)
    return attention.attend(q, k, v, lengths, ancestors, sinks=sinks, window=window, **options)


def compiled(q, k, v, lengths, ancestors, *, sinks, window, **options):
    """`attend` in one program."""
    positions = None if window is None else (window.queries, window.keys)
    size = None if window is None else window.size
    return _compiled(q, k, v, lengths, ancestors, sinks, positions, size=size, **options)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("one row", "bfloat16"),
        ("ragged, odd heads", "float32"),
        ("rows in several blocks", "float32"),
        ("64 rows, H of two pieces", "bfloat16"),
        ("three words", "float16"),
        ("ten splits", "float32"),
    ],
)
def test_shapes(attend, shape, dtype):
    rng = np.random.default_rng(len(shape))
    for _ in range(2):
        case = draw(rng, dtype, SHAPES[shape])
        case.check(case.run(attend))


@pytest.mark.parametrize("shape", SHAPES)
def test_float64_is_the_einsum(shape):
    """With its tolerance, whatever was asked for."""
    with jax.enable_x64(True):
        case = draw(np.random.default_rng(7), "float64", SHAPES[shape])
        case.check(case.run(compiled, implementation="pallas"))


def test_every_tree_of_up_to_six_nodes(attend):
    """One sequence a tree: 153 of them, at lengths from an empty prefix to a full cache."""
    trees = [
        parents
        for nodes in range(1, 7)
        for parents in itertools.product(*(range(i) for i in range(1, nodes)))
    ]
    assert len(trees) == 1 + 1 + 2 + 6 + 24 + 120
    rng = np.random.default_rng(0)
    lengths = [i % 15 for i in range(len(trees))]
    case = draw(rng, "float32", (len(trees), 6, 20, 1, 2, 4, 1), lengths=lengths)
    for rows, parents in zip(case.bits, trees, strict=True):
        rows[:] = [1 << i for i in range(6)]
        for node, parent in enumerate(parents, start=1):
            rows[node] |= rows[parent]
    case.check(case.run(attend))


def tree_positions(lengths, T: int, S: int, beams: int) -> tuple[np.ndarray, np.ndarray]:
    """Of rows and slots: `beams` nodes a level side by side, so positions repeat, slots do not."""
    rows = np.asarray(lengths)[:, None] + np.arange(T)[None] // beams
    slots = np.tile(np.arange(S), (len(lengths), 1))
    for b, n in enumerate(lengths):
        slots[b, n : n + T] = rows[b]
    return rows.astype(np.int32), slots.astype(np.int32)


@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), (3, "float32"), (40, "bfloat16")])
def test_a_window_counts_positions(attend, size, dtype):
    B, T, S = 3, 9, 120
    case = draw(np.random.default_rng(size), dtype, (B, T, S, 2, 2, 16, 1), width=8)
    case.window = size
    case.positions = tree_positions(case.lengths, T, S, 3)
    case.check(case.run(attend))


def test_positions_in_any_order(attend):
    """A window is about positions alone: slots may hold them in any order."""
    rng = np.random.default_rng(5)
    case = draw(rng, "float32", (2, 4, 90, 1, 1, 16, 1), window=20)
    case.positions = tuple(rng.integers(0, 80, n).astype(np.int32) for n in ((2, 4), (2, 90)))
    case.check(case.run(attend))


def test_softcap_sinks_and_a_window(attend):
    rng = np.random.default_rng(3)
    for softcap, sinks, window in ((1.5, True, None), (None, True, 12), (1.5, False, 12)):
        case = draw(rng, "float32", (2, 5, 70, 2, 2, 16, 1), softcap=softcap, window=window)
        case.sinks = rng.normal(size=4, scale=3).astype(np.float32) if sinks else None
        case.positions = tree_positions(case.lengths, 5, 70, 2)
        case.check(case.run(attend))


@pytest.mark.parametrize(("H", "width"), [(24, 16), (80, 64)])
def test_values_inside_the_keys(attend, H, width):
    """Latent attention: one head of keys, whose first elements are the values."""
    case = draw(np.random.default_rng(H), "float32", (2, 5, 40, 1, 6, H, 1))
    case.v, case.width = None, width
    case.check(case.run(attend))


@pytest.mark.parametrize("H", by_default([64, 80, 96, 128, 192, 256], lambda _, H: H in (96, 192)))
def test_head_dims(attend, H):
    case = draw(np.random.default_rng(H), "bfloat16", (1, 4, 70, 1, 2, H, 1), lengths=[66])
    case.check(case.run(attend))


def test_a_row_that_sees_nothing_is_zeros(attend):
    """In one split and in several, by its bits, by its window, beside a sink."""
    rng = np.random.default_rng(1)
    case = draw(rng, "float32", (2, 3, 70, 1, 2, 16, 1), lengths=[0, 64])
    case.window, case.positions = 4, tree_positions([0, 64], 3, 70, 1)
    case.bits = [[0, 1, 0], [1, 0, 4]]
    case.positions[0][1, 1] = 1000  # sees the prefix by its length, and none of it by position
    for sinks in (None, np.ones(2, np.float32)):
        case.sinks = sinks
        found = case.run(attend)
        for b, t in ((0, 0), (0, 2), (1, 1)):
            assert np.all(found[b, t] == 0)
        case.check(found)
    case = draw(rng, "float32", (1, 2, 10, 1, 1, 16, 1), lengths=[0])
    case.bits = [[1 << 10, 1 << 9]]  # slot 10 is not there
    found = case.run(attend)
    assert np.all(found[0, 0] == 0)
    case.check(found)


def test_large_scores_stay_finite(attend):
    case = draw(np.random.default_rng(2), "float32", (2, 3, 40, 1, 2, 4, 1), scale=1e6)
    case.check(case.run(attend))


@pytest.mark.parametrize("implementation", KERNELS)
def test_slots_nobody_sees_may_hold_anything(implementation):
    """The kernel does not read them at all (the einsum gives them a weight of 0: NaN stays NaN)."""
    case = draw(np.random.default_rng(4), "float32", (1, 2, 50, 1, 1, 16, 1), lengths=[9])
    case.bits = [[0b1, 0b11]]
    expected = case.run(compiled, implementation=implementation)
    case.k[0, 9 + 32 :], case.v[0, 9 + 32 :] = np.nan, np.nan
    found = case.run(compiled, implementation=implementation)
    np.testing.assert_array_equal(found, expected)


def test_merge_of_any_split_is_one_softmax():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(2, 3, 40), scale=4), rng.normal(size=(40, 5))
    sinks = rng.normal(size=3)
    owner = rng.integers(0, 6, 40)
    owner[owner == 4] = 0  # split 4 has nothing
    m = np.full((6, 2, 3), np.finfo(np.float32).min)
    total, o = np.zeros((6, 2, 3)), np.zeros((6, 2, 3, 5))
    for part in set(owner):
        mine = scores[:, :, owner == part]
        m[part] = mine.max(-1) / np.log(2)
        weights = np.exp(mine - mine.max(-1, keepdims=True))
        total[part], o[part] = weights.sum(-1), weights @ values[owner == part]
    parts = [jnp.asarray(x, jnp.float32) for x in (o, m, total)]
    run = functools.partial(merge, interpret=True)
    for sink in (None, sinks):
        found = run(*parts, None if sink is None else jnp.asarray(sink), jnp.float32)
        weights = np.exp(scores)
        below = weights.sum(-1) + (0 if sink is None else np.exp(sink))
        np.testing.assert_allclose(found, weights @ values / below[..., None], atol=1e-5)
    none = [jnp.asarray(x[4:5], jnp.float32) for x in (o, m, total)]
    assert not np.any(run(*none, None, jnp.float32))


def test_more_results_than_int32_counts_are_refused():
    o, m = (jax.ShapeDtypeStruct((2, 2**15, 2**9, *width), jnp.float32) for width in ((128,), ()))
    with pytest.raises(ValueError, match="16777216 rows of 128 are more results than int32"):
        jax.eval_shape(lambda o, m: merge(o, m, m, None, jnp.bfloat16), o, m)


def test_plans():
    """Powers of two, all rows covered, work for every program, one wave of programs at most."""
    for batch, heads, rows, slots, width, size in itertools.product(
        (1, 3, 64), (1, 8), (1, 7, 32, 100, 256), (40, 4096), (6, 64, 80, 128, 256, 576), (2, 4)
    ):
        cut = kernel_plan.plan(batch, heads, rows, slots, width, size)
        for n in (cut.rows, cut.keys):
            assert n >= 16
            assert n & (n - 1) == 0
        assert cut.rows * cut.row_blocks >= rows > cut.rows * (cut.row_blocks - 1)
        assert 1 <= cut.splits <= -(-slots // cut.keys) + 1
        assert cut.splits < 3 or slots // (cut.splits - 2) >= 2 * cut.rows
        programs = batch * heads * cut.row_blocks
        assert cut.splits == 1 or cut.splits * programs <= kernel_plan.MULTIPROCESSORS


def test_pieces():
    for width in range(1, 600):
        covered = 0
        for start, size in kernel_plan.pieces(width):
            assert (start, size & (size - 1)) == (covered, 0)
            assert size >= 16
            covered += size
        assert 0 <= covered - width < 16


def test_unknown_names():
    case = draw(np.random.default_rng(0), "float32", SHAPES["one row"])
    with pytest.raises(ValueError, match="implementation is 'cuda', expected xla, pallas, mosaic"):
        case.run(attention.attend, implementation="cuda")
    with pytest.raises(ValueError, match="implementation is 'einsum'"):
        attention.use_attention("einsum")


def test_the_choice_is_part_of_the_program():
    """A program of another choice is not reused, and the call's own word comes first."""
    case = draw(np.random.default_rng(0), "float32", SHAPES["ragged, odd heads"])

    def text(**options):
        arguments = []
        case.run(lambda *args, **rest: arguments.append((args, rest)))
        args, rest = arguments[0]
        rest.pop("window")
        return (
            jax.jit(lambda *args: attention.attend(*args, **rest, **options)).lower(*args).as_text()
        )

    assert "while" not in text()
    with attention.use_attention("interpret"):
        assert "while" in text()
        assert "while" not in text(implementation="xla")
    assert "while" not in text()
