"""Start to first token, and peak memory: `python bench/footprint.py` after `make model`.

Each number comes from a fresh process. Start to first token runs `eagle3 generate` for one token,
first without a compilation cache, then with one: the median of three is the warm start. Memory is
the peak resident size of a process that loads the models and generates, less that of one that only
imports, over weights and caches: of the demo's pair, and of a random Llama of 2.4 GB, since what
tracing and compiling take (about 0.3 GB) does not grow with the weights.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

parser = harness.parser(__doc__)
args = parser.parse_args()
harness.use_cores(args.cores)
import numpy as np  # noqa: E402
from pair import folders  # noqa: E402

IMPORT = """
import json, resource
import jax, eagle3_jax as e3
jax.devices()
"""
GENERATE = """
target = e3.load_target({folder!r})
draft = e3.load_draft({draft!r}, target=target)
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
e3.speculate(target, draft, [[1] * 40], max_new_tokens=64, tree=e3.TreeConfig(3, 4, 8))
"""
PRINT = """
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024} | {
    "loaded": globals().get("loaded")}))
"""
CONVERT = """
from convert import from_torch
from_torch.main([{source!r}, "--target", {folder!r}, "--out", {out!r}])
"""


LARGE = """
target = e3.load_target({folder!r})
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
e3.generate(target, [[1] * 40], max_new_tokens=16, stop_token_ids=())
"""


def large_model(folder: Path) -> int:
    """A Llama of 12 layers, 2048 wide, in float32, of random weights; returns their bytes."""
    D, F, V, layers, heads, kv = 2048, 5632, 32000, 12, 16, 4
    block = {
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (D, D),
        "self_attn.k_proj": (D // heads * kv, D),
        "self_attn.v_proj": (D // heads * kv, D),
        "self_attn.o_proj": (D, D),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    shapes = {f"model.layers.{i}.{n}.weight": s for i in range(layers) for n, s in block.items()}
    shapes |= {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D}
    config |= {"intermediate_size": F, "num_hidden_layers": layers, "vocab_size": V}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 2048, "tie_word_embeddings": True, "rope_theta": 1e4}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    block_of = np.random.default_rng(0).normal(0, 0.02, 2**22).astype("<f4").tobytes()
    return harness.write_weights(folder / "model.safetensors", shapes, "F32", 4, block_of)


def python(code: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=harness.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def first_token(folder: Path, cache: Path | None) -> float:
    command = [sys.executable, "-m", "eagle3_jax", "generate", "--target", str(folder)]
    command += ["--prompt", "Hello", "--max-new-tokens", "1", "--json"]
    environment = dict(os.environ)
    if cache is None:
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    else:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    start = time.perf_counter()
    subprocess.run(command, cwd=harness.ROOT, env=environment, capture_output=True, check=True)
    return time.perf_counter() - start


folder, draft = folders()
with tempfile.TemporaryDirectory() as scratch:
    cold = first_token(folder, None)
    first_token(folder, Path(scratch) / "cache")
    warm = sorted(first_token(folder, Path(scratch) / "cache") for _ in range(3))
    base = python(IMPORT + PRINT)["peak"]
    ran = python(IMPORT + GENERATE.format(folder=str(folder), draft=str(draft)) + PRINT)
    source, out = str(harness.ROOT / "demo/draft"), str(Path(scratch) / "draft")
    converted = python(IMPORT + CONVERT.format(source=source, folder=str(folder), out=out) + PRINT)[
        "peak"
    ]
    large = large_model(Path(scratch) / "large")
    far = python(IMPORT + LARGE.format(folder=str(Path(scratch) / "large")) + PRINT)
weights = json.loads(
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, sys, jax, eagle3_jax as e3\n"
            "from eagle3_jax.modules import take_apart\n"
            f"t = e3.load_target({str(folder)!r}); d = e3.load_draft({str(draft)!r}, target=t)\n"
            "print(json.dumps(sum(x.nbytes for m in (t, d) for x in take_apart(m)[0])))",
        ],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
)
size = sum(f.stat().st_size for f in (harness.ROOT / "demo/draft").iterdir())
MIB = 2**20
harness.report(
    {
        "first_token_s": {"no compilation cache": round(cold, 2), "warm": round(warm[1], 2)},
        "memory_MiB": {
            "import": base // MIB,
            "weights": weights // MIB,
            "peak after loading, above import": (ran["loaded"] - base) // MIB,
            "peak after speculate, above import": (ran["peak"] - base) // MIB,
            "peak / weights": round((ran["peak"] - base) / weights, 3),
            "of 2.4 GB: peak after loading / weights": round((far["loaded"] - base) / large, 3),
            "of 2.4 GB: peak after generate / weights": round((far["peak"] - base) / large, 3),
            "draft on disk": size // MIB,
            "peak of the converter, above import": (converted - base) // MIB,
        },
    },
    args.out,
)
