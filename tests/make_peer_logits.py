"""Records what SpecForge 0.2.0 and speculators 0.9.0 compute from our exports, by their classes.

python tests/make_peer_logits.py tests/data/exports           records them
python tests/make_peer_logits.py tests/data/exports --check   compares with what is recorded

"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peer_drafts
import torch

STEPS, FAR = 4, 1e-4


def specforge(folder: Path, ids: np.ndarray, aux: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[STEPS, T, W] logits of the training-time unroll."""
    from specforge.modeling.draft.llama3_eagle import (
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    model = LlamaForCausalLMEagle3.from_pretrained(folder, torch_dtype=torch.float32).eval()
    model.midlayer.self_attn._init_rope()  # its tables are not saved, nor made when loading
    if model.config.hidden_size == table.shape[1]:
        model.embed_tokens.weight.data.copy_(torch.from_numpy(table))
    T = len(ids)
    mask = torch.ones(1, T, dtype=torch.bool)
    hidden = model.project_hidden_states(torch.from_numpy(aux)[None])
    mask = prepare_decoder_attention_mask(mask, (1, T), hidden, 0)
    cache: list = [[], []]
    result = []
    for k in range(STEPS):
        tokens = np.zeros((1, T), np.int64)
        tokens[0, : T - 1 - k] = ids[1 + k :]
        hidden = model.backbone(
            input_embeds=model.embed_input_ids(torch.from_numpy(tokens)),
            hidden_states=hidden,
            cache_hidden=cache,
            attention_mask=mask,
            position_ids=torch.arange(T)[None],
        )
        result.append(model.compute_logits(hidden)[0].numpy())
    return np.stack(result)


def speculators(folder: Path, ids: np.ndarray, aux: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[STEPS, T, W] logits of the training-time unroll."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    # Loading wants the verifier's model for its embedding and head; the draft has its own.
    Eagle3DraftModel.load_verifier_weights = lambda self: None
    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(str(folder), config=config).float().eval()
    result: list[np.ndarray] = []
    model.lm_head.register_forward_hook(lambda *args: result.append(args[-1][0].numpy()))
    shifted = np.append(ids[1:], 0)[None]
    model(
        hidden_states=torch.from_numpy(aux)[None],
        input_ids=torch.from_numpy(shifted),
        document_ids=torch.zeros(1, len(ids), dtype=torch.long),
        ttt_steps=STEPS,
    )
    return np.stack(result)


def compute(name: str) -> tuple[str, np.ndarray]:
    """The digest of a case's export, and the peer's logits [STEPS, T, W] of it."""
    config, _ = peer_drafts.make(name)
    with tempfile.TemporaryDirectory() as temporary:
        export = peer_drafts.export(name, Path(temporary))
        digest = peer_drafts.digest(export)
        run = {"specforge": specforge, "speculators": speculators}[name.split("_")[0]]
        with torch.no_grad():
            return digest, run(export, *peer_drafts.inputs(config)).astype(np.float32)


def record(out: Path) -> int:
    """Writes one .npy a case, and the digests of what was loaded."""
    out.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name in peer_drafts.CASES:
        digests[name], logits = compute(name)
        np.save(out / f"{name}.npy", logits)
    (out / "exports.json").write_text(json.dumps(digests, indent=1) + "\n")
    return 0


def check(recorded: Path) -> int:
    """Every case anew beside its record; 1 where one differs."""
    digests, bad = json.loads((recorded / "exports.json").read_text()), 0
    for name in peer_drafts.CASES:
        digest, logits = compute(name)
        far = float(np.abs(logits - np.load(recorded / f"{name}.npy")).max())
        same = digest == digests[name] and far <= FAR
        bad += not same
        files = "" if digest == digests[name] else ", the export's files are others"
        print(f"{'ok  ' if same else 'FAIL'} {name}: max difference {far:.1e}{files}")
    print(f"{bad} of {len(peer_drafts.CASES)} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(check(folder) if "--check" in sys.argv[2:] else record(folder))
