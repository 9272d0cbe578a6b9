"""Makes tests/data/sglang and tests/data/smollm2 from the raw recordings; never runs in the tests.

    python tests/make_goldens.py RAW

RAW holds `sglang/` (traces of the real SGLang 0.5.23) and `smollm2/` (answers of four engines).
tests/data/README.md describes what is written.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from make_smollm2_goldens import make_smollm2, result_of, write_arrays, write_json

DATA = Path(__file__).parent / "data"
CASES = ("chain_s1", "chain_s3", "tree_s2_k2_d4", "tree_s3_k4_d8", "tree_s5_k8_d32")
SINGLES = ("single0", "single1", "single2", "single3")
VARIANTS = (
    "attn_bias",
    "aux_1_3_6",
    "aux_6_1_3",
    "aux_toplevel",
    "fc_bias",
    "fc_norm",
    "nolmhead_null",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "novocabmap",
    "own_embed",
    "rope_llama3",
    "two_layers",
)
OTHER_CONFIGS = ("rope_dynamic", "rope_yarn", "window")
"""Variants that have the plain draft's weights: their config.json alone is kept."""

OTHER_DRAFTS = ("nolmhead",)


def events_of(path: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The recorded calls in order: (kind, fields)."""
    names = [name for name, _ in json.loads(path.with_suffix(".events.json").read_text())]
    with np.load(path) as arrays:
        fields: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
        for key in arrays.files:
            name, field = key.split("/")
            fields[name][field] = arrays[key]
    for name in names:
        yield name.split(".", 1)[1], fields[name]


class Recorder:
    """Splits one run's calls into one dict of arrays per request."""

    def __init__(self, path: Path, prompt_lengths: list[int], max_new_tokens: int):
        self.max_new_tokens = max_new_tokens
        self.lengths = np.array(prompt_lengths)
        self.starts = np.cumsum([0, *prompt_lengths])
        self.prefill: list[dict[str, np.ndarray]] = [{} for _ in prompt_lengths]
        self.rounds: list[list[dict[str, np.ndarray]]] = [[] for _ in prompt_lengths]
        self.emitted = np.ones(len(prompt_lengths), int)
        self.live = list(range(len(prompt_lengths)))
        self.step = 0
        for kind, fields in events_of(path):
            method = getattr(self, "on_" + kind.replace(".", "_"), None)
            if method is not None:
                method(fields)

    def put(self, name: str, values: np.ndarray):
        """Gives each live request its element of the first axis."""
        for request, value in zip(self.live, values, strict=True):
            self.rounds[request][-1][name] = value

    def put_rows(self, name: str, values: np.ndarray):
        """Gives each live request its share of the first axis, equal for all."""
        for request, value in zip(self.live, np.split(values, len(self.live)), strict=True):
            self.rounds[request][-1][name] = value

    def on_target_model(self, fields: dict[str, np.ndarray]):
        if str(fields["mode"]) != "EXTEND":
            return
        for i, out in enumerate(self.prefill):
            rows = slice(self.starts[i], self.starts[i + 1])
            out["prompt"] = fields["input_ids"][rows]
            out["target_hidden"] = fields["hidden_states"][rows]
            out["target_logits"] = fields["next_token_logits"][i]
            out["boundaries"] = fields["layers_to_capture"]

    def on_draft_model(self, fields: dict[str, np.ndarray]):
        mode = str(fields["mode"])
        if mode == "EXTEND":
            for i, out in enumerate(self.prefill):
                rows = slice(self.starts[i], self.starts[i + 1])
                out["draft_tokens"] = fields["input_ids"][rows]
                out["draft_positions"] = fields["positions"][rows]
                out["draft_logits"] = fields["next_token_logits"][i]
                out["draft_hidden"] = fields["hidden_states"][i]
        elif mode == "DECODE":
            step = f"step{self.step}/"
            self.step += 1
            self.put_rows(step + "tokens", fields["input_ids"])
            self.put_rows(step + "positions", fields["positions"])
            self.put_rows(step + "hidden_in", fields["spec_hidden_in"])
            self.put_rows(step + "logits", fields["next_token_logits"])
            self.put_rows(step + "hidden", fields["hidden_states"])
        elif mode == "DRAFT_EXTEND_V2":
            self.extend(fields)

    def on_draft_forward_begin(self, fields: dict[str, np.ndarray]):
        self.step = 0
        for request in self.live:
            self.rounds[request].append({})
        assert fields["in_seq_lens"].tolist() == self.lengths[self.live].tolist()
        self.put("seq_len", fields["in_seq_lens"])
        self.put("root", fields["in_bonus_tokens"])
        self.put("seed_probs", fields["in_topk_p"])
        self.put("seed_draft_ids", fields["in_topk_index_draft_vocab"])
        self.put("seed_hidden", fields["in_hidden"])

    def on_select_top_k_tokens(self, fields: dict[str, np.ndarray]):
        level = f"level{int(fields['i'])}/"
        rows = len(self.live)
        self.put(level + "scores", fields["out_score_list"].reshape(rows, -1))
        self.put(level + "tokens", fields["out_token_list"].reshape(rows, -1))
        self.put(level + "parents", fields["out_parents"].reshape(rows, -1))

    def on_build_tree(self, fields: dict[str, np.ndarray]):
        rows = len(self.live)
        nodes = int(fields["num_verify_tokens"])
        first = nodes * np.arange(rows)[:, None]
        assert int(fields["mask_mode"]) == 1, "QLEN_ONLY expected"
        self.put("parent_list", fields["parent_list"])
        self.put("selected", fields["top_scores_index"])
        self.put("tokens", fields["out_draft_tokens"].reshape(rows, nodes))
        self.put("mask", fields["out_tree_mask"].reshape(rows, nodes, nodes))
        self.put("positions", fields["out_positions"].reshape(rows, nodes))
        self.put("retrieve_index", fields["out_retrieve_index"] - first)
        self.put("retrieve_next_token", fields["out_retrieve_next_token"])
        self.put("retrieve_next_sibling", fields["out_retrieve_next_sibling"])

    def on_verify(self, fields: dict[str, np.ndarray]):
        rows = len(self.live)
        nodes = len(fields["predict"]) // rows
        index = fields["accept_index"]
        self.put_rows("target_logits", fields["target_logits"])
        self.put_rows("target_hidden", fields["target_hidden"])
        self.put("predict", fields["predict"].reshape(rows, nodes))
        first = nodes * np.arange(rows)[:, None]
        self.put("accept_index", np.where(index < 0, -1, index - first))
        self.put("accept_len", fields["accept_lens"])

    def on_draft_extend_decode_begin(self, fields: dict[str, np.ndarray]):
        self.put("bonus", fields["bonus_tokens"])

    def extend(self, fields: dict[str, np.ndarray]):
        self.put_rows("extend_tokens", fields["input_ids"])
        self.put_rows("extend_positions", fields["positions"])
        self.put_rows("extend_hidden", fields["hidden_states"])
        self.put_rows("extend_logits", fields["next_token_logits"])
        for request in self.live:
            last = self.rounds[request][-1]
            count = int(last["accept_len"])
            steps = len(last["accept_index"])
            last["extend_logits"] = last["extend_logits"][count - 1]
            for name in ("tokens", "positions", "hidden"):
                rows = last[f"extend_{name}"][:steps].copy()
                rows[count:] = 0
                last[f"extend_{name}"] = rows

    def on_draft_extend_decode_end(self, fields: dict[str, np.ndarray]):
        del fields
        accepted = np.array([int(self.rounds[i][-1]["accept_len"]) for i in self.live])
        self.lengths[self.live] += accepted
        self.emitted[self.live] += accepted
        self.live = [i for i in self.live if self.emitted[i] < self.max_new_tokens]


def stack(request: list[dict[str, np.ndarray]], tensor_rounds: list[int]) -> dict[str, np.ndarray]:
    """One array per name with the round first; tensors only for `tensor_rounds`."""
    out = {"tensor_rounds": np.array(tensor_rounds, np.int32)}
    for name in request[0]:
        floating = request[0][name].dtype == np.float32
        probability = name == "seed_probs" or name.endswith("/scores")
        rounds = tensor_rounds if floating and not probability else range(len(request))
        value = np.stack([request[r][name] for r in rounds])
        if value.dtype.kind == "i":
            value = value.astype(np.int32)
        out[name] = value
    return out


def choose_rounds(case: str, tag: str, count: int) -> list[int]:
    """Rounds whose states and logits are kept: all of the small cases, three of the others."""
    if tag != "batch" and case in ("chain_s1", "chain_s3", "tree_s2_k2_d4", "var"):
        return list(range(count))
    if tag != "batch" and case == "tree_s3_k4_d8":
        return sorted({0, 1, 2, count // 2, count - 1})
    if tag == "batch" and case == "tree_s5_k8_d32":
        return [1]
    return sorted({0, 1, count - 1})


def slim_run(raw: Path, name: str, tag: str, case: str) -> dict[str, np.ndarray]:
    """One recorded run as `<tag><request>/<name>` arrays."""
    recorded = json.loads((raw / f"{name}.json").read_text())
    prompts = recorded["prompts"]
    if tag != "batch":
        prompts = [prompts[int(tag.removeprefix("single"))]]
    recorder = Recorder(
        raw / f"{name}.{tag}.npz",
        [len(prompt) for prompt in prompts],
        recorded["sampling_params"]["max_new_tokens"],
    )
    results = recorded["results"][tag]
    arrays: dict[str, np.ndarray] = {}
    for i, result in enumerate(results):
        rounds = recorder.rounds[i]
        assert len(rounds) == result["meta_info"]["spec_verify_ct"]
        assert recorder.prefill[i]["prompt"].tolist() == prompts[i]
        key = f"{tag}{i}/" if tag == "batch" else f"{tag}/"
        kept = choose_rounds(case, tag, len(rounds))
        for field, value in {**prefill(recorder.prefill[i]), **stack(rounds, kept)}.items():
            arrays[key + field] = value
    return arrays


def prefill(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The prefill's arrays under `prefill/`."""
    return {
        f"prefill/{k}": v.astype(np.int32) if v.dtype.kind == "i" else v for k, v in fields.items()
    }


def make_sglang(raw: Path, out: Path):
    """Models, traces, variants and unit cases of the tiny pair."""
    models = ["target", "draft", *(f"draft_{name}" for name in (*VARIANTS, *OTHER_DRAFTS))]
    for model in models:
        (out / "models" / model).mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(raw / "models" / model / file, out / "models" / model / file)
    for name in OTHER_CONFIGS:
        (out / "models" / f"draft_{name}").mkdir(exist_ok=True)
        config = Path("models") / f"draft_{name}" / "config.json"
        shutil.copyfile(raw / config, out / config)
    for suffix in (".npz", ".json"):
        (out / "unit").mkdir(exist_ok=True)
        shutil.copyfile(raw / f"unit/tree_cases{suffix}", out / f"unit/tree_cases{suffix}")
    for case in CASES:
        arrays: dict[str, np.ndarray] = {}
        for tag in (*SINGLES, "batch"):
            arrays |= slim_run(raw / "engine", case, tag, case)
        write_arrays(out / f"traces/{case}.npz", arrays)
        write_json(out / f"traces/{case}.json", answers(raw / f"engine/{case}.json"))
    plain = answers(raw / "engine/nospec.json")
    write_json(out / "traces/nospec.json", plain)
    for name in (*VARIANTS, *OTHER_CONFIGS):
        arrays = slim_run(raw / "variants", f"var_{name}", "single0", "var")
        write_arrays(out / f"variants/{name}.npz", arrays)
        write_json(out / f"variants/{name}.json", answers(raw / f"variants/var_{name}.json"))


def answers(path: Path) -> dict:
    """Arguments, prompts and answers of one engine run, one key per request."""
    recorded = json.loads(path.read_text())
    args = recorded["args"]
    results = {}
    for tag, values in recorded["results"].items():
        if tag == "hidden0":
            continue
        for i, value in enumerate(values):
            results[f"{tag}{i}" if tag == "batch" else tag] = result_of(value)
    tree = {k.removeprefix("speculative_"): v for k, v in args.items() if "speculative_num" in k}
    if "speculative_eagle_topk" in args:
        tree["topk"] = args["speculative_eagle_topk"]
    return {
        "sglang": "0.5.23",
        "tree": tree,
        "dtype": args["dtype"],
        "prompts": recorded["prompts"],
        "sampling_params": recorded["sampling_params"],
        "results": results,
    }


def main():
    parser = argparse.ArgumentParser(description="Slim the raw recordings into tests/data.")
    parser.add_argument("raw", type=Path, help="folder that holds sglang/ and smollm2/")
    arguments = parser.parse_args()
    make_sglang(arguments.raw / "sglang", DATA / "sglang")
    make_smollm2(arguments.raw / "smollm2", DATA / "smollm2")


if __name__ == "__main__":
    main()
