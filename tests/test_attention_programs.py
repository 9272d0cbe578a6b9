"""Which attention whole programs have: lowered for a GPU, and run by the interpreted kernel."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import an_h200, lowered, times_run
from random_models import draft_config, random_draft, random_target, target_config
from selection import by_default
from sglang_compare import SCORE_TOLERANCE
from sglang_goldens import TRACES, load

import eagle3_jax as e3
from eagle3_jax import loop
from eagle3_jax.ops import tree_attention, tree_step
from eagle3_jax.ops import which as choice
from eagle3_jax.ops.attention import attend, attend_causal, use_attention
from eagle3_jax.run import Run

BFLOAT16 = jnp.bfloat16


def shapes(B, T, N, K, H, S, words, dtype=BFLOAT16) -> tuple:
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return (
        *(jax.ShapeDtypeStruct(size, dtype) for size in sizes),
        jax.ShapeDtypeStruct((B,), jnp.int32),
        jax.ShapeDtypeStruct((B, T, words), jnp.uint32),
    )


def kernels(text: str) -> int:
    """How often the program runs the kernel."""
    return times_run(text, 'name = "tree_attention_kernel"')


KERNELS = [
    (1, 32, 8, 128, 1, "bfloat16"),
    (8, 32, 8, 128, 1, "bfloat16"),
    (8, 32, 8, 128, 1, "float16"),
    (10, 28, 4, 128, 3, "bfloat16"),
    (64, 32, 8, 80, 2, "bfloat16"),
    (7, 6, 2, 6, 1, "float32"),
    (8, 64, 8, 256, 1, "float32"),
]


@pytest.mark.parametrize(("T", "N", "K", "H", "words", "dtype"), KERNELS)
def test_the_kernel_lowers_for_a_gpu(T, N, K, H, words, dtype):
    """Triton's powers of two, its primitives and its dtypes; no mask and no scores in memory."""
    S = 1000
    run = jax.jit(lambda *args: attend(*args, scale=0.1))
    text = lowered(run, *shapes(2, T, N, K, H, S, words, dtype))
    assert kernels(text) == 1
    assert f"x{S}xi1>" not in text
    assert f"x{S}xf32>" not in text
    assert f"x{T}x{S}x" not in text


@pytest.mark.parametrize("possible", [True, False])
def test_the_default_is_the_kernel_in_programs_for_a_gpu(possible, monkeypatch):
    """Where one can be compiled for; on a CPU it is the einsum."""
    monkeypatch.setattr(choice, "_cuda_is_possible", lambda: possible)
    run = jax.jit(lambda *args: attend(*args, scale=0.1))
    with an_h200():
        traced = run.trace(*shapes(1, 8, 4, 2, 64, 100, 1))
        assert kernels(traced.lower(lowering_platforms=("cuda",)).as_text()) == possible
        assert kernels(traced.lower(lowering_platforms=("cpu",)).as_text()) == 0


def test_latent_attention_lowers_without_a_copy_of_the_values():
    q, k, _, lengths, ancestors = shapes(1, 8, 64, 1, 576, 1000, 1)
    run = jax.jit(lambda q, k, n, bits: attend(q, k, None, n, bits, scale=0.1, width=512))
    text = lowered(run, q, k, lengths, ancestors)
    assert kernels(text) == 1
    assert "1000x1x512x" not in text


def test_a_fault_in_the_kernel_shows_in_lowering(monkeypatch):
    """A tile of 80 columns runs interpreted and fails here."""
    for module in (tree_attention, tree_step):
        monkeypatch.setattr(module, "pieces", lambda width: ((0, width),))
    jax.clear_caches()
    run = jax.jit(lambda *args: attend(*args, scale=0.1))
    with pytest.raises(Exception, match=r"power of 2|power of two"):
        lowered(run, *shapes(1, 8, 4, 2, 80, 100, 1))
    jax.clear_caches()


def test_what_the_kernel_does_not_take_is_the_einsum():
    run = jax.jit(lambda *args: attend(*args, scale=0.1))
    with jax.enable_x64(True):
        assert kernels(lowered(run, *shapes(1, 8, 4, 2, 64, 100, 1, jnp.float64))) == 0
    assert kernels(lowered(run, *shapes(1, 8, 4, 1, 640, 100, 1))) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prefill_without_a_gpu_is_the_kernel(dtype):
    """cuDNN cannot be asked on this machine, so a program it lowers for one does without."""
    T = 200
    q, k, v, *_ = shapes(1, T, 4, 2, 64, T, 1, dtype)
    run = jax.jit(lambda q, k, v: attend_causal(q, k, v, scale=0.1, window=50))
    text = lowered(run, q, k, v)
    assert text.count('name = "tree_attention_kernel"') == 1
    assert f"{T}x{T}x" not in text


def test_latent_prefill_is_the_kernel_without_a_copy_of_the_values():
    q, k, *_ = shapes(1, 100, 8, 1, 576, 100, 1)
    run = jax.jit(lambda q, k: attend_causal(q, k, None, scale=0.1, width=512))
    text = lowered(run, q, k)
    assert text.count('name = "tree_attention_kernel"') == 1
    assert "100x1x512x" not in text


def test_heads_and_sequences_over_a_mesh():
    """XLA partitions no kernel: each device has to run it on its own part."""
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "attention_on_mesh.py"],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "ok\n", run.stderr


@pytest.fixture(scope="module")
def pair():
    target = random_target(target_config(eos_token_ids=(3,)), seed=1, dtype=np.float32)
    return target, random_draft(draft_config(target.config), seed=2, dtype=np.float32)


PROGRAMS = [
    (None, "ancestors"),
    (e3.TreeConfig(4, 3, 12), "ancestors"),
    (e3.TreeConfig(4, 3, 12), "beam_slots"),
    (e3.TreeConfig(1, 1, 2), "ancestors"),
    (e3.TreeConfig(1, 1, 2), "beam_slots"),
]


@pytest.mark.parametrize("which", by_default(PROGRAMS, lambda i, _: i < 4), ids=str)
def test_a_round_runs_the_kernel_once_a_layer_and_draft_forward(pair, which):
    tree, mode = which
    target, draft = pair
    run = Run(
        target,
        draft if tree else None,
        [[1, 2, 3]],
        max_new_tokens=8,
        tree=tree,
        draft_attention=mode,
        stop_token_ids=(),
    )
    state, _ = jax.eval_shape(
        lambda: loop.start(
            run.program,
            run.weights,
            jnp.zeros((1, run.padded), jnp.int32),
            jnp.ones((1,), jnp.int32),
            run.limits,
            slots=run.slots,
            capacity=run.capacity,
        )
    )
    text = lowered(loop.round_jit, run.program, run.weights, state, run.limits)
    # verification, num_steps - 1 draft forwards and the extend
    assert kernels(text) == target.config.num_layers + (tree.num_steps if tree else 0)
    assert f"x{run.slots}xi1>" not in text


@pytest.mark.parametrize("case", by_default(TRACES, lambda _, case: case == "tree_s3_k4_d8"))
def test_whole_generations_by_the_kernel(case, tiny_target, tiny_draft):
    """Two prompts of unequal length: ids, accept lengths and trees the real SGLang recorded."""
    requests = [load("traces", case)[f"batch{i}"] for i in range(2)]
    with use_attention("interpret"):
        found = e3.speculate(
            tiny_target,
            tiny_draft,
            [request.prompt for request in requests],
            max_new_tokens=requests[0].max_new_tokens,
            tree=requests[0].tree,
            draft_attention="beam_slots",
            stop_token_ids=(),
            trace=True,
        )
    for number, request in enumerate(requests):
        assert found.tokens[number] == request.output_ids
        assert found.accept_lengths[number] == request.arrays["accept_len"].tolist()
        for index, mine in enumerate(found.trace.of(number)):
            assert mine.tokens == request.at("tokens", index).tolist()
            if request.tree.topk > 1:
                chosen = request.candidates("scores", index)[request.at("selected", index)]
                np.testing.assert_allclose(mine.scores[1:], chosen, atol=SCORE_TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", TRACES)
def test_whole_generations_by_ancestors(case, tiny_target, tiny_draft):
    """Nodes that see their own path, which SGLang's do not: the same rounds as with the einsum."""
    request = load("traces", case)["single0"]
    arguments = {
        "prompts": [request.prompt, request.prompt[:5]],
        "max_new_tokens": 8,
        "tree": request.tree,
        "draft_attention": "ancestors",
        "stop_token_ids": (),
        "trace": True,
    }
    with use_attention("interpret"):
        found = e3.speculate(tiny_target, tiny_draft, **arguments)
    expected = e3.speculate(tiny_target, tiny_draft, **arguments)
    assert found.tokens == expected.tokens
    assert found.accept_lengths == expected.accept_lengths
    for mine, theirs in zip(found.trace.rounds, expected.trace.rounds, strict=True):
        assert (mine.tokens, mine.accepted) == (theirs.tokens, theirs.accepted)
        np.testing.assert_allclose(mine.scores, theirs.scores, atol=1e-5)
