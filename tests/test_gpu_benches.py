"""The byte floors against weights counted one by one, the curves, and each script in small."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import floors  # noqa: E402
import models  # noqa: E402
import plot  # noqa: E402


def matrices(leaves) -> list[int]:
    """Bytes of each floating matrix."""
    return [x.size * 2 for x in leaves if len(x.shape) == 2 and x.dtype == jnp.bfloat16]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_floors_count_every_matrix_that_a_pass_reads(name):
    pair = models.PAIRS[name]
    shapes, target, _ = models.shapes_of(pair, jnp.bfloat16)
    V, D, W = pair.target.vocab_size, pair.target.hidden_size, pair.draft.draft_vocab_size
    row = 2 * D
    passed = floors.target_pass(pair.target, 5, 2, 1000)
    assert passed.weights == sum(matrices(shapes.target)) - 2 * V * D + 2 * 5 * row
    cache = jax.eval_shape(lambda x: target.build(x).new_cache(2, 1000), shapes.target)
    assert passed.cache == sum(x.size * 2 for x in jax.tree.leaves(cache))
    assert passed.written == passed.cache * 5 // 1000
    extend = floors.draft_pass(pair.draft, 3, 1, 500, fused=True)
    assert extend.weights == sum(matrices(shapes.draft)) + 3 * row
    level = floors.draft_pass(pair.draft, 3, 1, 500)
    assert extend.weights - level.weights == 2 * 3 * D * D
    assert W * D * 2 in matrices(shapes.draft)


def test_a_round_is_its_forwards():
    pair, tree = models.PAIRS["llama-3.1-8b"], models.TREES["5/8/32"]
    parts = floors.round_parts(pair, tree, 1, 2048)
    total = 4 * parts["draft level"].total + parts["verify"].total + parts["extend"].total
    assert parts["round"].total == total
    assert list(floors.round_parts(pair, None, 1, 2048)) == ["decode"]


def test_curves():
    run = {
        "tree": "3/4/8",
        "batch": 1,
        "context": 64,
        "tokens_per_s": {"1": 5.0, "4": 20.0},
        "without_a_draft": 7.0,
    }
    curves, x, y = plot.curves_of({"runs": [run, {"tree": "3/4/8", "batch": 64, "context": 64}]})
    assert curves == {
        "3/4/8, batch 1, context 64": [(1.0, 5.0), (4.0, 20.0)],
        "no draft, batch 1, context 64": [(1.0, 7.0), (4.0, 7.0)],
    }
    assert (x, y) == ("tokens a round", "tokens/s")
    with pytest.raises(ValueError, match="not a result of a GPU benchmark"):
        plot.curves_of({"trees": {}})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "key", "entries"),
    [("kernel", "shapes", 2), ("round", "rounds", 2), ("generate", "runs", 4)],
)
def test_scripts_in_small(script, key, entries, tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCH / f"{script}.py"), "--tiny", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert len(result[key]) == entries
    assert plot.curves_of(result)[0]


@pytest.mark.exhaustive
def test_compare_torch_in_small(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCH / "compare_torch.py"), "--tiny", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [one["what"] for one in json.loads(out.read_text())["passes"]] == ["decode", "verify"]
