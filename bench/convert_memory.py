"""Memory of converting a large draft: `python bench/convert_memory.py [--gib 6]`.

Writes a draft of random bfloat16 weights with Kimi's widths (hidden 7,168, vocabulary 163,840 for
target and draft alike), converts it in a process of its own, exports it again in another, and
samples their anonymous memory (RssAnon: not the mapped pages of the checkpoint) all the while. The
promise is 1 GiB and 1.3 times the largest tensor.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import harness

parser = harness.parser(__doc__)
parser.add_argument("--folder", type=Path, help="where to put them, 20 GB free (a temporary one)")
parser.add_argument("--gib", type=float, default=6.0, metavar="X", help="size of the draft")
args = parser.parse_args()
harness.use_cores(args.cores)

import numpy as np  # noqa: E402

D, F, HEADS, KV, H = 7168, 18432, 64, 8, 128
MIB = 2**20


def shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    """Of a draft as SpecForge writes it, with its own embedding and a full vocabulary."""
    layer = {
        "input_layernorm": (D,),
        "hidden_norm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (HEADS * H, 2 * D),
        "self_attn.k_proj": (KV * H, 2 * D),
        "self_attn.v_proj": (KV * H, 2 * D),
        "self_attn.o_proj": (D, HEADS * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    made = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    return made | {
        "fc.weight": (D, 3 * D),
        "norm.weight": (D,),
        "embed_tokens.weight": (vocab, D),
        "lm_head.weight": (vocab, D),
    }


def write(folder: Path) -> int:
    """The draft; returns the bytes of its largest tensor."""
    fixed = sum(int(np.prod(s)) * 2 for n, s in shapes(0).items())
    vocab = int((args.gib * 2**30 - fixed) / (2 * D * 2))
    made = shapes(vocab)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": H,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    # Random mantissas and signs under one exponent: finite, and nothing a compressor could shrink.
    bits = np.random.default_rng(0).integers(0, 2**16, 8 * MIB, dtype=np.uint16)
    block = ((bits & 0x807F) | 0x3C00).astype("<u2").tobytes()
    harness.write_weights(folder / "model.safetensors", made, "BF16", 2, block)
    return max(int(np.prod(s)) * 2 for s in made.values())


def anonymous(command: list[str]) -> tuple[int, float]:
    """The largest RssAnon while a command runs, in bytes, and its seconds."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.DEVNULL)

    def watch():
        nonlocal peak
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            try:
                lines = status.read_text().splitlines()
            except OSError:
                return
            found = [int(x.split()[1]) for x in lines if x.startswith("RssAnon:")]
            peak = max([peak, *(1024 * n for n in found)])
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    if process.wait():
        sys.exit(f"failed: {' '.join(command)}")
    thread.join()
    return peak, time.perf_counter() - start


def main():
    """Write, convert, export, report."""
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="convert-memory-"))
    try:
        largest = write(folder / "draft")
        size = (folder / "draft/model.safetensors").stat().st_size
        made, out = folder / "made", folder / "export"
        convert, seconds = anonymous(
            [sys.executable, "-m", "convert.from_torch", str(folder / "draft"), "--out", str(made)]
        )
        again = [sys.executable, "-m", "convert.to_torch", str(made), "--dialect", "vllm"]
        export, export_seconds = anonymous([*again, "--out", str(out)])
    finally:
        shutil.rmtree(folder)
    allowed = 2**30 + 1.3 * largest
    harness.report(
        {
            "MiB": {
                "draft": size // MIB,
                "largest tensor": largest // MIB,
                "allowed": int(allowed) // MIB,
                "convert, peak anonymous": convert // MIB,
                "export, peak anonymous": export // MIB,
            },
            "convert / allowed": round(convert / allowed, 3),
            "export / allowed": round(export / allowed, 3),
            "seconds": {"convert": round(seconds, 1), "export": round(export_seconds, 1)},
        },
        args.out,
    )


if __name__ == "__main__":
    main()
