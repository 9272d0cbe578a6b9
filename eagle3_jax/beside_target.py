"""A draft's files beside its target's: sizes, and whose embedding and head there are."""

from pathlib import Path
from typing import Any

from eagle3_jax.files.shards import FileError, has_weights, open_weights, read_json
from eagle3_jax.findings import Findings
from eagle3_jax.manifest import SourceDraft
from eagle3_jax.source_config import TargetFacts
from eagle3_jax.target_match import compare_rows, find_target_tensors


def read_target(path: Path | None) -> tuple[Path | None, TargetFacts | None]:
    """The target's folder and what its config.json says, from either's path."""
    if path is None:
        return None, None
    file = path / "config.json" if path.is_dir() else path
    return file.parent, TargetFacts.read(read_json(file), str(file))


def beside_target(
    draft: SourceDraft, folder: Path | None, target: TargetFacts | None, findings: Findings
) -> dict[str, Any]:
    """What the target's files say about the draft's embedding and head."""
    if target is None or folder is None:
        return {}
    facts = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.num_layers,
    }
    beside: dict[str, Any] = {k: v for k, v in facts.items() if v is not None}
    if not has_weights(folder):
        return beside
    try:
        weights = open_weights(folder)
    except FileError as error:
        findings.warn("WEIGHT_TARGET_KEY", f"the target's weights were not looked at: {error}")
        return beside
    found = find_target_tensors(weights, target, findings)
    beside |= {k: v for k, v in (("embed", found.embed), ("head", found.head)) if v}
    if found.tied and found.embed:
        beside["head"] = f"tied to {found.embed}"
    own = draft.matched.sources.get("embed.weight")
    if own and found.embed and draft.sizes.hidden_size == target.hidden_size:
        result = compare_rows(draft.source.read(own[0]), weights.read(found.embed))
        beside["embed_compared"] = result
        if result["rows_different"]:
            findings.warn(
                "WEIGHT_OWNER",
                f"{own[0]} differs from the target's {found.embed} in {result['rows_different']} "
                f"of {result['rows']} rows, first row {result['first_different_row']}, max abs "
                f"{result['max_abs_diff']:.3g}: vLLM keeps the draft's, SGLang takes the target's",
            )
    return beside
