"""Checkpoint dialects as data: tensor names, prefixes, and what a missing switch means."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence

from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import SourceConfig

PREFIXES = ("module.", "_orig_mod.", "draft_model.", "model.")
"""Wrappers that save under their own name: DDP, torch.compile, SpecForge's trainer, NeMo and HF."""

LAYER_PREFIXES = ("midlayer.", "layers.0.")

LAYER_NAMES = {
    "input_layernorm.weight": "layers.0.norm_embed.weight",
    "hidden_norm.weight": "layers.0.norm_hidden.weight",
    "post_attention_layernorm.weight": "layers.0.norm_post.weight",
    **{
        f"self_attn.{name}_proj.{part}": f"layers.0.attn.{name}.{part}"
        for name in "qkvo"
        for part in ("weight", "bias")
    },
    **{
        f"mlp.{name}_proj.{part}": f"layers.0.mlp.{name}.{part}"
        for name in ("gate", "up", "down")
        for part in ("weight", "bias")
    },
}
"""Name after the layer's prefix -> canonical name (dialects of official, SpecForge, speculators,
ModelOpt: the same names under `midlayer.` or `layers.0.`)."""

MODEL_NAMES = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "input_norm.weight": "input_norm.weight",
    "fc_norm.weight": "input_norm.weight",
    "norm.weight": "norm_final.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed.weight",
    "d2t": "d2t",
    "t2d": "t2d",
}
"""Name outside the layer -> canonical name; one `fc_norm.weight` is a norm over all states."""

FC_NORM = re.compile(r"fc_norm\.([0-9]{1,3})\.weight")
FC_NORM_ALIASES = {"aux_norm_low.weight": 0, "aux_norm_mid.weight": 1, "aux_norm_high.weight": 2}

IGNORED = {
    "verifier_lm_head.weight": "the target's head, kept in memory by speculators' trainer",
    "verifier_norm.weight": "the target's final norm, kept in memory by speculators' trainer",
    "rotary_emb.inv_freq": "recomputed from the RoPE settings",
    "self_attn.rotary_emb.inv_freq": "recomputed from the RoPE settings",
}
"""Names (after the layer's prefix, if any) that carry nothing the draft needs."""


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What a framework means when a switch is not in the file; None: it must be stated.

    Attributes:
      norm_output_clear: whether `norm_output` true has one meaning (post-norm feedback).
      theta_untrue: whether trainers of this dialect are known to use base 10000 whatever the config
        says (AngelSlim; SpecForge before 2025-10-30).
    """

    name: str
    norm_before_residual: bool | None
    double_norm: bool | None
    norm_output_clear: bool
    theta_untrue: bool


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("official", False, False, norm_output_clear=False, theta_untrue=True),
        Dialect("speculators", None, False, norm_output_clear=True, theta_untrue=False),
        Dialect("modelopt", False, None, norm_output_clear=False, theta_untrue=False),
    )
}


@dataclasses.dataclass(frozen=True)
class Matched:
    """A checkpoint's tensors by meaning.

    Attributes:
      sources: canonical name (or `d2t`, `t2d`) -> the file's names, several for `fc_norm`.
      ignored: the file's name -> why nothing is lost by leaving it out.
      layer: the layer's prefix, "midlayer." or "layers.0.".
    """

    sources: dict[str, tuple[str, ...]]
    ignored: dict[str, str]
    layer: str

    def spelled(self, canonical: str) -> str:
        """How this file spells, or would spell, a canonical name."""
        if canonical in self.sources:
            return self.sources[canonical][0]
        if canonical == "fc_norm.weight":
            return "fc_norm.0.weight"
        for table, prefix in ((LAYER_NAMES, self.layer), (MODEL_NAMES, "")):
            for name, target in table.items():
                if target == canonical:
                    return prefix + name
        return canonical


def strip_prefixes(names: Sequence[str]) -> dict[str, str]:
    """Plain name -> the file's name, `PREFIXES` removed.

    Raises:
      ConvertError: two names differ only by their prefix.
    """
    plain: dict[str, str] = {}
    for name in names:
        short = name
        while prefix := next((p for p in PREFIXES if short.startswith(p)), None):
            short = short.removeprefix(prefix)
        if short in plain:
            raise ConvertError(
                "WEIGHT_DUPLICATE", f"tensors {plain[short]!r} and {name!r} are both {short!r}"
            )
        plain[short] = name
    return plain


def match(plain: dict[str, str]) -> Matched:
    """Gives every tensor its canonical name; `plain` is what `strip_prefixes` returned.

    Raises:
      ConvertError: WEIGHT_UNMATCHED_KEY with the closest known name; WEIGHT_DUPLICATE for two
        spellings of one tensor.
    """
    layer = next(
        (p for p in LAYER_PREFIXES if any(name.startswith(p) for name in plain)), LAYER_PREFIXES[0]
    )
    sources: dict[str, tuple[str, ...]] = {}
    ignored: dict[str, str] = {}
    norms: dict[int, str] = {}
    unknown: list[str] = []
    for name, original in plain.items():
        inner = name.removeprefix(layer)
        slot = _fc_norm_slot(name)
        if slot is not None:
            if slot in norms:
                raise _twice(norms[slot], original)
            norms[slot] = original
        elif inner in IGNORED:
            ignored[original] = IGNORED[inner]
        else:
            canonical = LAYER_NAMES.get(inner) if inner != name else MODEL_NAMES.get(name)
            if canonical is None:
                unknown.append(name)
            elif canonical in sources:
                raise _twice(sources[canonical][0], original)
            else:
                sources[canonical] = (original,)
    if unknown:
        raise ConvertError("WEIGHT_UNMATCHED_KEY", _unmatched(unknown, plain, layer))
    if norms:
        if sorted(norms) != list(range(len(norms))):
            raise ConvertError(
                "WEIGHT_MISSING", f"fc_norm has tensors {sorted(norms)}, expected 0..{max(norms)}"
            )
        sources["fc_norm.weight"] = tuple(norms[i] for i in sorted(norms))
    return Matched(sources, ignored, layer)


def detect(matched: Matched, config: SourceConfig, findings: Findings) -> Dialect:
    """The dialect of a matched EAGLE-3 checkpoint: the config decides, then the tensors."""
    if config.top("speculators_model_type") is not None:
        if config.nested and config.layer("model_type") is None:
            findings.note(
                "ARCH_LAYER_TYPE",
                "transformer_layer_config has no model_type: speculators would build a Qwen3 layer "
                "with q/k norms; the file has none, so none are used",
            )
        return DIALECTS["speculators"]
    bare = not {"t2d", "embed.weight"} & matched.sources.keys()
    if matched.layer == "layers.0." and config.eagle and bare:
        findings.note(
            "DIALECT_MODELOPT",
            "layers.0.*, eagle_config, no t2d and no embed_tokens: read as ModelOpt >= 0.43",
        )
        return DIALECTS["modelopt"]
    return DIALECTS["official"]


def known_names(layer: str) -> list[str]:
    """Every name a checkpoint with this layer prefix may use."""
    names = [layer + name for name in LAYER_NAMES] + list(MODEL_NAMES)
    return names + [f"fc_norm.{i}.weight" for i in range(3)] + list(FC_NORM_ALIASES)


def _fc_norm_slot(name: str) -> int | None:
    found = FC_NORM.fullmatch(name)
    return int(found[1]) if found else FC_NORM_ALIASES.get(name)


def _twice(first: str, second: str) -> ConvertError:
    return ConvertError("WEIGHT_DUPLICATE", f"tensors {first!r} and {second!r} mean the same one")


def _unmatched(unknown: Iterable[str], plain: dict[str, str], layer: str) -> str:
    name, *others = unknown
    absent = [known for known in known_names(layer) if known not in plain]
    close = difflib.get_close_matches(name, absent or known_names(layer), n=1, cutoff=0.5)
    hint = f", closest known name that is absent: {close[0]}" if close else ""
    more = f"; also unknown: {', '.join(map(repr, others[:5]))}" if others else ""
    return f"tensor {plain[name]!r} is not one of this dialect{hint}{more}"
