"""The real pair's part of `make_goldens.py`, with the writers both parts use."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

PROBED_ROWS = 8
LOGIT_STRIDE = 16
TOP_LOGITS = 64


def result_of(result: dict) -> dict:
    """A request's answer: ids and the statistics a user of the engine sees."""
    meta = result["meta_info"]
    kept = {k: v for k, v in meta.items() if k.startswith("spec_")}
    kept |= {k: meta[k] for k in ("finish_reason", "prompt_tokens", "completion_tokens")}
    return {"output_ids": result["output_ids"], "meta_info": kept}


def write_json(path: Path, value: object):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n")


def write_arrays(path: Path, arrays: dict[str, np.ndarray]):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def few(values: np.ndarray, rows: int = PROBED_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spaced rows, the first and last included, and their numbers."""
    chosen = np.unique(np.linspace(0, len(values) - 1, rows).round().astype(int))
    return chosen, values[chosen]


def some_logits(prefix: str, logits: np.ndarray) -> dict[str, np.ndarray]:
    """Every 16th logit and the 64 largest with their ids; [.., V] in."""
    top = np.argsort(-logits, axis=-1, kind="stable")[..., :TOP_LOGITS]
    return {
        f"{prefix}.strided": np.ascontiguousarray(logits[..., ::LOGIT_STRIDE]),
        f"{prefix}.top_ids": top.astype(np.int32),
        f"{prefix}.top": np.take_along_axis(logits, top, axis=-1),
    }


def slim_states(path: Path, skip: tuple[str, ...]) -> dict[str, np.ndarray]:
    """States at a few rows, a sample of the logits, ids whole."""
    out: dict[str, np.ndarray] = {}
    for name, value in load_file(path).items():
        if name in skip:
            continue
        if value.dtype.kind == "i":
            out[name] = value.astype(np.int32)
        elif "logits" in name:
            out |= some_logits(name, value)
        elif name == "chain_hidden":
            out[name] = value
        else:
            out["rows"], out[name] = few(value)
    return out


def slim_official(recorded: dict) -> dict:
    """SafeAILab's accepts; chains with every draft, trees with their recorded first rounds."""
    modes = {}
    for mode, value in recorded["modes"].items():
        if mode == "naive":
            continue
        results = []
        for result in value["results"]:
            trees = result["trees"]
            if trees and isinstance(trees[0], dict):
                trees = [
                    {
                        "seq_len": tree["seq_len"],
                        "tokens": tree["draft_tokens"],
                        "depths": tree["tree_position_ids"],
                        "mask": ["".join(str(int(x)) for x in row) for row in tree["tree_mask"]],
                    }
                    for tree in trees
                ]
            results.append(
                {"accept": result["accept"], "gen_ids": result["gen_ids"], "trees": trees}
            )
        sizes = {k: value[k] for k in ("total_token", "depth", "top_k")}
        modes[mode] = sizes | {"results": results}
    return {"code": recorded["code"], "dtype": recorded["dtype"], "modes": modes}


def slim_peer(recorded: dict) -> dict:
    """Chains over speculators' own modules: accepts (bonus excluded) and proposals."""
    results = [
        {k: {f: result[k][f] for f in ("accept", "drafts")} for k in ("k3", "k5")}
        for result in recorded["results"]
    ]
    return {"speculators": recorded["speculators"], "dtype": recorded["dtype"], "results": results}


def slim_vllm(recorded: dict) -> dict:
    """vLLM's ids and counters."""
    results = [
        {"output_ids": r["output_ids"], "spec": {k: v for k, v in r["spec"].items() if "num" in k}}
        for r in recorded["results"]
    ]
    return {k: recorded[k] for k in ("vllm", "dtype", "k")} | {"results": results}


def slim_greedy(recorded: dict) -> dict:
    """transformers' greedy continuation with the margin of every step."""
    results = [
        {k: r[k] for k in ("prompt", "prompt_ids", "gen_ids", "finish")}
        | {"margins": [round(m, 5) for m in r["margin_top1_top2"]]}
        for r in recorded["results"]
    ]
    return {"transformers": recorded["transformers"], "results": results}


def make_smollm2(raw: Path, out: Path):
    """What four engines answered on the real pair."""

    def read(name: str) -> dict:
        return json.loads((raw / name).read_text())

    write_json(out / "target_greedy.json", slim_greedy(read("golden/target_greedy.json")))
    write_json(out / "official_eagle.json", slim_official(read("golden/official_eagle.json")))
    bf16 = slim_official(read("golden/official_eagle_bf16emb.json"))
    write_json(out / "official_eagle_bf16emb.json", bf16)
    write_json(out / "chain_accept_peer.json", slim_peer(read("golden/chain_accept_peer.json")))
    for k in (3, 5):
        write_json(out / f"vllm_k{k}.json", slim_vllm(read(f"golden/vllm_eagle3_k{k}_fp32.json")))
    for case in ("chain_s3", "tree_s3_k4_d8", "tree_s5_k4_d16"):
        recorded = read(f"sglang/{case}.json")
        results = [result_of(r) | {"prompt_ids": r["prompt_ids"]} for r in recorded["results"]]
        kept = {k: recorded[k] for k in ("sglang", "tree", "dtype")}
        write_json(out / f"sglang_{case}.json", kept | {"results": results})
    for i in range(4):
        states = slim_states(raw / f"golden/target_aux_{i:02d}.safetensors", ())
        write_arrays(out / f"target_aux_{i:02d}.npz", states)
        skip = ("prefill_logits",)
        states = slim_states(raw / f"golden/draft_chain_{i:02d}.safetensors", skip)
        write_arrays(out / f"draft_chain_{i:02d}.npz", states)
