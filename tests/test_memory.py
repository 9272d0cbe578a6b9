"""The estimate against what XLA itself says, and the refusals."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from random_models import draft_config, random_draft, random_target, target_config

import eagle3_jax as e3
from eagle3_jax import loop, memory
from eagle3_jax.run import Run

WIDE = {
    "hidden_size": 64,
    "vocab_size": 4000,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
}


pytestmark = pytest.mark.full_compile


@pytest.fixture(scope="module")
def pair():
    target = random_target(target_config(**WIDE), seed=1, dtype=np.float32)
    return target, random_draft(draft_config(target.config), seed=2, dtype=np.float32)


@pytest.mark.parametrize(
    ("prompt", "batch"), [(8, 3), pytest.param(700, 1, marks=pytest.mark.exhaustive)]
)
def test_estimate_covers_what_xla_allocates(pair, prompt, batch):
    target, draft = pair
    tree = e3.TreeConfig(3, 4, 16)
    run = Run(
        target, draft, [[1] * prompt] * batch, max_new_tokens=20, tree=tree, stop_token_ids=()
    )
    asked = run._need(batch)
    prompts = jnp.zeros((batch, run.padded), jnp.int32)
    lengths = jnp.full((batch,), prompt, jnp.int32)
    start = loop.start_jit.lower(
        run.program,
        run.weights,
        prompts,
        lengths,
        run.limits,
        slots=run.slots,
        capacity=run.capacity,
    ).compile()
    state, _ = run._start(False)
    finish = loop.finish_jit.lower(run.program, run.weights, state, run.limits).compile()
    used = [c.memory_analysis() for c in (start, finish)]
    caches = sum(x.nbytes for c in (state.target_cache, state.draft_cache) for x in (*c.k, *c.v))
    assert asked.caches == caches
    temporaries = max(u.temp_size_in_bytes for u in used)
    assert temporaries <= asked.total
    assert asked.total < 6 * (temporaries + caches), "an estimate that refuses too early"


def test_a_call_that_does_not_fit_is_refused(pair, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(memory, "free_bytes", lambda: 3 * memory.MIB)
    before = loop.start_jit._cache_size()
    with pytest.raises(memory.NotEnoughMemoryError) as caught:
        e3.speculate(target, draft, [[1] * 50] * 64, max_new_tokens=60, tree=e3.TreeConfig(3))
    found = re.search(
        r"about (\d+) MiB .* 3 MiB are free; what would fit: a batch of (\d+) instead of 64",
        str(caught.value),
    )
    assert found, caught.value
    assert int(found[1]) > 3
    assert loop.start_jit._cache_size() == before
    fitting = int(found[2])
    e3.speculate(target, draft, [[1] * 50] * fitting, max_new_tokens=60, tree=e3.TreeConfig(3))


def test_long_prompts_need_no_scores_of_all_against_all():
    """32k tokens of a Llama-3.1-8B: its MLP's rows are the most there is, some 8 GiB."""
    config = target_config(
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        num_layers=32,
    )
    asked = memory.need(memory.Shape(1, 32768, 33000), config, 2, None, 0, None)
    rows = 4 * 32768 * (3 * 14336 + 6 * 4096)
    assert rows < asked.temporaries < 1.1 * rows
    short = memory.need(memory.Shape(1, 256, 512), config, 2, None, 0, None)
    assert short.temporaries > 4 * 4 * 32 * 256**2


def test_free_memory_is_a_number_here():
    free = memory.free_bytes()
    assert free is None or free > memory.MIB


def test_weights_that_do_not_fit():
    shapes = [(memory.MIB,), (512, 2048)]
    with pytest.raises(
        memory.NotEnoughMemoryError,
        match="8 MiB as float32, 5 MiB are free; dtype='bfloat16' takes 4 MiB and would fit",
    ):
        memory.check_weights("DIR", shapes, "float32", 5 * memory.MIB)
    memory.check_weights("DIR", shapes, "float32", 8 * memory.MIB)
    memory.check_weights("DIR", shapes, "bfloat16", 5 * memory.MIB)


def test_models_that_do_not_fit_are_refused_unread(sglang_models, converted, monkeypatch):
    target = sglang_models / "target"
    draft = converted(sglang_models / "draft", "--target", str(target))
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    monkeypatch.setattr("numpy.memmap", None)  # nothing may be read
    for load, path in ((e3.load_target, target), (e3.load_draft, draft)):
        with pytest.raises(memory.NotEnoughMemoryError, match=re.escape(str(path))):
            load(path)
