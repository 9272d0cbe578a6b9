"""Makes tests/data/crosscheck with the real server: answers and dumps, right and with each fault.

python tests/sglang_engine/record.py --sglang-python VENV/bin/python [--tree chain] [--only NAME]
"""

import argparse
import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from client import Engine, serving
from faults import FAULTS, ONCE

from eagle3_jax.records.live import Server

TESTS = Path(__file__).resolve().parent.parent
DATA = TESTS / "data/crosscheck"
MODELS = TESTS / "data/sglang/models"
TREES = {"chain": (3, 1, 4), "tree": (3, 4, 8)}
PROMPTS = [
    [5, 17, 33, 91, 120, 7, 100, 45],
    [64, 3, 88, 21, 9],
    [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    [77],
]
NEW_TOKENS, FIRST_ROUND = 24, 1
DUMPED_TOKENS = {True: 10, False: 5}
"""Enough for a fault of `ONCE` to be followed by a round; the others are there from the start."""
NOT_IN_A_CHAIN = ("mask_bit", "tree_scores", "draft_position", "stale_draft_kv")
"""The first two have nothing to act on there; of the others these prompts' answers show nothing."""
PENALISED = (
    (0, {"frequency_penalty": 0.8}),
    (2, {"frequency_penalty": 0.8}),
    (2, {"repetition_penalty": 1.8}),
    (3, {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "presence_penalty": 0.3}),
)
"""Prompts with penalties, 40 tokens each: with fewer next to nothing repeats."""
FROM = "logprob_start_len"
HISTOGRAM = "spec_correct_drafts_histogram"
NOT_KEPT = ("e2e_latency", "response_sent_to_client_ts", "weight_versions", "cached_tokens_details")
INFO_KEYS = (
    "model_path", "tokenizer_path", "skip_tokenizer_init", "context_length", "dtype",
    "kv_cache_dtype", "chunked_prefill_size", "page_size", "disable_radix_cache",
    "disable_overlap_schedule", "tp_size", "dp_size", "pp_size", "device", "attention_backend",
    "sampling_backend", "disable_cuda_graph", "speculative_algorithm",
    "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc", "speculative_token_map",
    "speculative_use_rejection_sampling", "enable_return_hidden_states",
    "return_hidden_states_mode", "enable_return_aux_hidden_states",
    "return_aux_hidden_state_layer_ids", "max_req_input_len", "max_total_num_tokens",
    "max_running_requests", "random_seed", "status", "version",
)  # fmt: skip
DUMPED = re.compile(
    r"name=(input_ids|positions|seq_lens|req_pool_indices|non_intrusive__("
    r"model\.fc\.(inputs\.0|output)|model\.layers\.0\.hidden_norm\.inputs\.0"
    r"|logits_processor\.(inputs\.4(\.\d)?|output\.next_token_logits)))___"
)


def body(prompt: list[int], *, states: bool, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """A greedy request for everything the server tells."""
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_hidden_states": states,
        "return_logprob": True,
        FROM: 0,
        "top_logprobs_num": 3,
    }


def penalised(prompt: list[int], penalties: dict[str, float]) -> dict[str, Any]:
    """A greedy request with penalties, for logprobs of the output alone."""
    request = body(prompt, states=False, new_tokens=40)
    request["sampling_params"] |= penalties
    return {k: v for k, v in request.items() if k not in ("return_hidden_states", FROM)}


def ask(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    return {"request": request, "response": slim(server.ask("/generate", request))}


def slim(value: Any) -> Any:
    """Float32 in its shortest form; what no comparison reads is left out."""
    if isinstance(value, float):
        return float(np.format_float_positional(np.float32(value), unique=True))
    if isinstance(value, list):
        return [slim(item) for item in value]
    if isinstance(value, dict):
        return {key: slim(item) for key, item in value.items() if key not in NOT_KEPT}
    return value


def write(path: Path, answers: list[dict[str, Any]]):
    lines = [json.dumps(answer, separators=(",", ":")) + "\n" for answer in answers]
    path.write_text("".join(lines), encoding="utf-8")


def pack(dump: Path, out: Path):
    """The files of a dump that a comparison reads, in one archive without times and owners."""
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for path in sorted(dump.glob("*.pt"), key=_order):
            if DUMPED.search(path.name) and not _repeated(path.name):
                entry = tarfile.TarInfo(path.name)
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    archive.addfile(entry, file)


def _order(path: Path) -> tuple[str, int]:
    fields = dict(part.split("=", 1) for part in path.stem.split("___"))
    return fields["name"] + fields.get("layer_id", ""), int(fields["step"])


def _repeated(name: str) -> bool:
    """Positions are dumped once more at every layer."""
    return "name=positions" in name and "layer_id" in name


def dumped(engine: Engine, fault: str | None, out: Path, prompts: list[list[int]], tokens: int):
    """One more run of some prompts, together, with the dumper on."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "dump"
        engine.set(fault, first_round=FIRST_ROUND, dump=folder)
        together(engine, [body(p, states=False, new_tokens=tokens) for p in prompts])
        engine.set(None)
        ask(Server(engine.url), body(PROMPTS[3], states=False, new_tokens=1))
        pack(folder, out)


def together(engine: Engine, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to one request with all prompts, so that they run as one batch."""
    if len(requests) == 1:
        return [ask(Server(engine.url), requests[0])]
    both = requests[0] | {"input_ids": [request["input_ids"] for request in requests]}
    answers = Server(engine.url).ask("/generate", both)
    return [{"request": r, "response": slim(a)} for r, a in zip(requests, answers, strict=True)]


def record(python: Path, kind: str, only: list[str]):
    folder = DATA / kind
    folder.mkdir(parents=True, exist_ok=True)
    effects_file = folder / "effects.json"
    effects = json.loads(effects_file.read_text()) if effects_file.exists() else {}
    with (
        tempfile.TemporaryDirectory() as work,
        serving(python, MODELS / "target", MODELS / "draft", TREES[kind], Path(work)) as engine,
    ):
        server = Server(engine.url)
        if not only:
            info = {key: value for key, value in server.info().items() if key in INFO_KEYS}
            _write_json(folder / "server_info.json", _placed(info))
            _write_json(folder / "model_info.json", _placed(server.ask("/model_info")))
            write(folder / "right.jsonl", [ask(server, body(p, states=True)) for p in PROMPTS])
            asked = [penalised(PROMPTS[i], given) for i, given in PENALISED]
            write(folder / "penalties.jsonl", [ask(server, one) for one in asked])
            batch = together(engine, [body(p, states=True) for p in PROMPTS])
            write(folder / "right_batch4.jsonl", batch)
            dumped(engine, None, folder / "right.dump.tar.xz", PROMPTS[:1], 10)
            dumped(engine, None, folder / "right_batch4.dump.tar.xz", PROMPTS, 4)
        for fault in only or FAULTS:
            if kind == "chain" and fault in NOT_IN_A_CHAIN:
                continue
            engine.set(fault, first_round=FIRST_ROUND)
            answers = [ask(server, body(PROMPTS[0], states=True))]
            if fault not in ONCE:
                answers.append(ask(server, body(PROMPTS[1], states=False)))
            effects[fault] = _effect(engine, answers, folder)
            write(folder / f"{fault}.jsonl", answers)
            if kind == "tree" and fault not in ("histogram_cut", "rounding"):
                tokens = DUMPED_TOKENS[fault in ONCE]
                dumped(engine, fault, folder / f"{fault}.dump.tar.xz", PROMPTS[:1], tokens)
            print(kind, fault, effects[fault], flush=True)
    _write_json(effects_file, dict(sorted(effects.items())))


def _effect(engine: Engine, answers: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What the fault did, and what of it is seen in the answers."""
    done = [{k: v for k, v in entry.items() if k != "request"} for entry in engine.done()]
    right = [json.loads(line) for line in (folder / "right.jsonl").open(encoding="utf-8")]
    return {"done": done, "answers": [seen(*pair) for pair in zip(answers, right, strict=False)]}


def seen(answer: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """How far an answer is from the right one: counts of tokens, largest differences elsewhere."""
    found, expected = answer["response"], right["response"]
    meta, other = found["meta_info"], expected["meta_info"]
    same = [a == b for a, b in zip(found["output_ids"], expected["output_ids"], strict=True)]
    logged = zip(meta["output_token_logprobs"], other["output_token_logprobs"], strict=True)
    result = {
        "other_tokens": same.count(False),
        "first_other_token": None if all(same) else same.index(False),
        "logprobs": max(abs(a[0] - b[0]) for a, b in logged),
        "states": None,
        "rounds": [meta["spec_verify_ct"], other["spec_verify_ct"]],
        "histogram": [meta[HISTOGRAM], other[HISTOGRAM]],
    }
    if meta.get("hidden_states"):
        pair = zip(meta["hidden_states"], other["hidden_states"], strict=True)
        result["states"] = max(float(np.abs(np.subtract(a, b)).max()) for a, b in pair)
    return result


def _placed(value: dict[str, Any]) -> dict[str, Any]:
    """Paths of this machine as they lie in the repository."""
    return json.loads(json.dumps(value).replace(str(MODELS), "models"))


def _write_json(path: Path, value: Any):
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", type=Path, required=True)
    parser.add_argument("--tree", choices=TREES, action="append")
    parser.add_argument("--only", choices=FAULTS, action="append", default=[])
    args = parser.parse_args()
    for kind in args.tree or TREES:
        record(args.sglang_python, kind, args.only)


if __name__ == "__main__":
    main()
