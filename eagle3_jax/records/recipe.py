"""Commands and short scripts that capture a record on the machine where the target runs."""

import json
import shlex
from collections.abc import Sequence

from eagle3_jax.config import Boundary
from eagle3_jax.records.page import human
from eagle3_jax.records.types import RecordError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
JSON_BYTES = 20
"""Of one number in SGLang's answers, measured."""


def recipe(
    engine: str,
    target: str,
    *,
    boundaries: Sequence[Boundary],
    width: int,
    num_layers: int,
    tokens: int,
    dtype: str = "bfloat16",
    max_new_tokens: int = 512,
) -> str:
    """What to run, the size in bytes first.

    Args:
      engine: `"sglang"`, `"vllm"` or `"transformers"`.

    Raises:
      RecordError: a boundary the engine cannot capture.
    """
    numbers = tokens * len(boundaries) * width
    named = ",".join(map(str, boundaries))
    lines = [
        f"# {numbers * BYTES[dtype]} bytes ({human(numbers * BYTES[dtype])}): {tokens} tokens x "
        f"{len(boundaries)} boundaries x {width} x {BYTES[dtype]} ({dtype})",
    ]
    read = (
        f"--boundaries {named} --kind greedy \\\n  --target {shlex.quote(target)} --out NAME.record"
    )
    if engine == "sglang":
        lines += [
            f"# SGLang sends JSON, about {human(numbers * JSON_BYTES)} on the wire; --store keeps "
            "the record at the size above",
            *_sglang(target, boundaries, num_layers, max_new_tokens, named, dtype),
        ]
    elif engine == "vllm":
        lines += [*_vllm(target, boundaries, num_layers, max_new_tokens), ""]
        lines += [f"eagle3 record from-speculators states {read}"]
    else:
        lines += [*_transformers(target, boundaries, num_layers, max_new_tokens), ""]
        lines += [f"eagle3 record from-npz states {read}"]
    return "\n".join(lines)


def _sglang(
    target: str, boundaries: Sequence[Boundary], num_layers: int, new: int, named: str, dtype: str
) -> list[str]:
    ids = []
    for boundary in boundaries:
        if boundary == "final_norm" or boundary == 0 or boundary == num_layers:
            raise RecordError(
                f"boundary {boundary}: SGLang's Llama classes capture 1..{num_layers - 1}, the "
                "states that enter blocks 1 and later; transformers captures all"
            )
        ids.append(int(boundary) - 1)
    if list(ids) != sorted(set(ids)):
        raise RecordError(f"boundaries {named}: SGLang captures in ascending order, each once")
    return [
        "# SGLang 0.5.23 or later; its ids name blocks whose output is taken: boundary - 1. Its",
        "# DeepSeek, Kimi and gpt-oss classes read some lists as boundaries: let doctor decide",
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --port 30000 \\",
        "  --speculative-algorithm EAGLE3 --enable-return-aux-hidden-states \\",
        f"  --return-aux-hidden-state-layer-ids {' '.join(map(str, ids))} \\",
        "  --disable-radix-cache --chunked-prefill-size -1",
        "",
        "eagle3 record from-sglang --url http://127.0.0.1:30000 --prompts prompts.jsonl \\",
        f"  --max-new-tokens {new} --boundaries {named} --target {shlex.quote(target)} \\",
        f"  --out NAME.record --store {dtype}",
    ]


def _vllm(target: str, boundaries: Sequence[Boundary], num_layers: int, new: int) -> list[str]:
    if "final_norm" in boundaries:
        raise RecordError("boundary final_norm: vLLM's extract_hidden_states captures 0..L only")
    ids = [int(b) for b in boundaries]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/tmp/hidden_states"},
    }
    return [
        "# vLLM's ids are boundaries as they stand. Flags as speculators' scripts/launch_vllm.py "
        "(01a981e) gives them",
        f"vllm serve {shlex.quote(target)} --no-enable-prefix-caching \\",
        f"  --speculative_config {shlex.quote(json.dumps(speculative))} \\",
        f"  --kv_transfer_config {shlex.quote(json.dumps(connector))}",
        "",
        "# capture.py: the answer first, then one pass over prompt and answer that keeps states",
        _script(VLLM_SCRIPT, target, new),
    ]


def _transformers(
    target: str, boundaries: Sequence[Boundary], num_layers: int, new: int
) -> list[str]:
    script = _script(TRANSFORMERS_SCRIPT, target, new)
    script = script.replace("BOUNDARIES", repr(list(boundaries)))
    return ["# capture.py", script.replace("LAYERS", str(num_layers))]


def _script(text: str, target: str, new: int) -> str:
    return text.replace("TARGET", repr(target)).replace("NEW", str(new)).strip()


VLLM_SCRIPT = """
import json, os, shutil, urllib.request
def ask(prompt, n):
    body = {"model": TARGET, "prompt": prompt, "max_tokens": n, "temperature": 0,
            "return_token_ids": True}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions",
                                     json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
os.makedirs("states", exist_ok=True)
for i, ids in enumerate(json.load(open("ids.json"))):  # a list of id lists
    new = ask(ids, NEW)["choices"][0]["token_ids"]
    answer = ask(ids + new, 1)
    shutil.move(answer["kv_transfer_params"]["hidden_states_path"], f"states/hs_{i}.safetensors")
"""

TRANSFORMERS_SCRIPT = """
import json, os
import numpy as np, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto").eval()
model.to("cuda" if torch.cuda.is_available() else "cpu")  # several GPUs: device_map="auto" above
inner, boundaries, layers = model.get_decoder(), BOUNDARIES, LAYERS
kept = {}
inner.norm.register_forward_pre_hook(lambda module, args: kept.update({layers: args[0][0]}))
os.makedirs("states", exist_ok=True)
for i, ids in enumerate(json.load(open("ids.json"))):  # a list of id lists
    prompt = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                              max_new_tokens=NEW)
        out = inner(text, output_hidden_states=True, use_cache=False)
    kept |= {k: state[0] for k, state in enumerate(out.hidden_states[:-1])}
    kept["final_norm"] = out.last_hidden_state[0]
    aux = torch.stack([kept[b].cpu() for b in boundaries], 1)
    bits = aux.dtype == torch.bfloat16
    np.savez(f"states/{i}.npz", tokens=text[0].cpu().numpy(), prompt_length=len(ids),
             aux=aux.view(torch.uint16).numpy() if bits else aux.numpy())
"""
