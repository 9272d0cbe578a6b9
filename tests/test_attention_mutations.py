"""Every one of these mistakes in the kernel must show: one case has all its parts at once."""

import importlib
import types

import numpy as np
import pytest
from attention_cases import draw
from selection import by_default

MERGE, STEP, KERNEL = (
    f"eagle3_jax.ops.{name}" for name in ("merge", "tree_step", "tree_attention")
)
MUTATIONS = {
    "tree one slot late": ("length + w * WORD + iota", "length + w * WORD + 1 + iota"),
    "bits ignored": ("jnp.uint32(1)) == 1", "jnp.uint32(1)) < 2"),
    "bits shifted by one": ("iota(WORD).astype", "(iota(WORD) + 1).astype"),
    "the first word for all": ('["ancestors"].at[node, w]', '["ancestors"].at[node, w * 0]'),
    "prefix past its length": ("jnp.minimum(length, s.slots)", "s.slots"),
    "a block is skipped": ("low = part * share", "low = part * share + 1"),
    "old sums not scaled": ("total * shrink + jnp.sum", "total + jnp.sum"),
    "old values not scaled": ("a * shrink[:, None] + _dot", "a + _dot"),
    "window one wider": ("key_at[None, :] < s.window", "key_at[None, :] <= s.window"),
    "softcap as a scale": ("(s.softcap * LOG2E)", "LOG2E"),
    "natural logits": ("scores * (s.scale / s.softcap)", "scores * s.scale"),
    "splits weighed alike": ("jnp.exp2(m - top[None, :])", "jnp.ones_like(m)"),
    "sums not weighed": ("jnp.sum(weight * total", "jnp.sum(total"),
    "no sinks": ("total + jnp.exp2(sink - top)", "total"),
    "the first head's sink": ("lax.rem(row, jnp.int32(heads))", "row * 0"),
}


def kernel(old: str, new: str) -> types.ModuleType:
    """The kernel's module with one piece of source replaced, in it, its step or the merge."""
    names = (MERGE, STEP, KERNEL)  # each may import those before it
    sources = {name: importlib.import_module(name).__loader__.get_source(name) for name in names}
    assert sum(source.count(old) for source in sources.values()) == 1
    modules: dict[str, types.ModuleType] = {}
    for name, source in sources.items():
        module = types.ModuleType(name)
        exec(compile(source.replace(old, new), name, "exec"), module.__dict__)
        for thing, value in [*vars(module).items()]:
            home = getattr(value, "__module__", None)
            if home in modules:
                setattr(module, thing, getattr(modules[home], thing))
        modules[name] = module
    return modules[KERNEL]


def run(module: types.ModuleType) -> None:
    """Two words of tree, several splits, a window, a softcap and sinks; 2 heads a group."""
    rng = np.random.default_rng(0)
    case = draw(rng, "float32", (1, 5, 200, 1, 2, 16, 2), lengths=[130], softcap=2.0, window=100)
    case.sinks = np.array([1.0, -2.0], np.float32)
    slots = np.minimum(np.arange(200), 130)[None].astype(np.int32)
    case.positions = (130 + np.arange(5) // 2)[None].astype(np.int32), slots
    assert (case.sees()[:, :, 130 + 32 :]).any()

    def attend(q, k, v, lengths, ancestors, *, sinks, window, **options):
        positions = (window.queries, window.keys)
        return module.tree_attention(
            q,
            k,
            v,
            lengths,
            ancestors,
            positions,
            sinks,
            window=window.size,
            interpret=True,
            **options,
        )

    case.check(case.run(attend))


def test_the_kernel_as_it_is():
    run(kernel("WIDEST, WIDEST_FLOAT32 = 576, 256", "WIDEST, WIDEST_FLOAT32 = 576, 256"))


@pytest.mark.parametrize("name", by_default(MUTATIONS, lambda i, _: i % 3 == 0))
def test_mistakes_show(name):
    with pytest.raises(AssertionError):
        run(kernel(*MUTATIONS[name]))
