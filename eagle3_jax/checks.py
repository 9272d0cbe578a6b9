"""What a call must satisfy before anything is compiled or allocated."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from eagle3_jax.config import Boundary, ConfigError, TargetConfig, TreeConfig, whole_number
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.source_config import shorten
from eagle3_jax.targets.base import Target
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.tree import DRAFT_ATTENTIONS, DraftAttention

INT32 = range(-(2**31), 2**31)

Prompts = Sequence[Sequence[int]] | Sequence[str]


def encode_prompts(
    prompts: Prompts, target: Target
) -> tuple[Sequence[Sequence[int]], Tokenizer | None]:
    """Texts as ids, with the target folder's tokenizer; lists of ids pass through.

    A text is encoded as it stands, plus what the tokenizer itself adds in front (bos); a
    conversation is rendered first with `Tokenizer.apply_chat_template`.

    Raises:
      ConfigError: texts mixed with ids, or the target did not come from a folder.
      FileError: the tokenizer extra is not installed, or the folder has no tokenizer.json.
    """
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)  # type: ignore[assignment]
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
        raise ConfigError(
            f"prompts is a {type(prompts).__name__}, expected a list of id lists or of texts"
        )
    texts = [p for p in prompts if isinstance(p, str)]
    if not texts:
        return prompts, None  # type: ignore[return-value]
    if len(texts) < len(prompts):
        raise ConfigError("prompts mixes texts and id lists, expected one kind")
    if target.folder.path is None:
        raise ConfigError("prompts are texts, but this target has no folder with a tokenizer.json")
    tokenizer = Tokenizer.from_folder(target.folder.path)
    return [tokenizer.encode(t, add_special_tokens=True) for t in texts], tokenizer


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """The prompts as lists of ints.

    Raises:
      ConfigError: no prompt, an empty one, something that is no list of ids, an id outside [0, V).
    """
    if len(prompts) == 0:
        raise ConfigError("prompts is empty, expected at least one list of token ids")
    checked = []
    for i, prompt in enumerate(prompts):
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of unequal lengths inside
            ids = np.zeros((0, 0))
        if ids.dtype == object and all(isinstance(t, int) for t in ids.flat):
            ids = np.clip(ids, INT32[0], INT32[-1]).astype(np.int64)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ConfigError(f"prompt {i} is {str(prompt)[:40]!r}, expected a list of token ids")
        if ids.size == 0:
            raise ConfigError(f"prompt {i} is empty, expected at least one token id")
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if wrong.size:
            at = int(wrong[0])
            raise ConfigError(
                f"prompt {i}, position {at}: id {int(ids[at])} is outside the target's vocabulary "
                f"0..{vocab_size - 1}"
            )
        checked.append([int(t) for t in ids])
    return checked


def check_models(target: object, draft: object, tree: object):
    """Raises `ConfigError` unless all three are of their types; draft and tree go together."""
    if not isinstance(target, Target) or not isinstance(target.config, TargetConfig):
        raise ConfigError(f"target is a {type(target).__name__}, expected what load_target returns")
    if draft is None and tree is None:
        return
    if draft is None or tree is None:
        raise ConfigError("draft and tree go together: give both or neither")
    if not isinstance(draft, Eagle3Draft):
        raise ConfigError(f"draft is a {type(draft).__name__}, expected what load_draft returns")
    if not isinstance(tree, TreeConfig):
        raise ConfigError(f"tree is {shorten(tree)}, expected a TreeConfig")


def check_stop_ids(ids: object) -> tuple[int, ...]:
    """Stop ids as ints; ids outside the vocabulary are harmless and pass.

    Raises:
      ConfigError: no sequence of whole numbers, or one that is no 32-bit id.
    """
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ConfigError(
            f"stop_token_ids is {shorten(ids)}, expected a sequence of ids, () or None"
        )
    checked = []
    for value in ids:
        try:
            checked.append(whole_number(value, "an id"))
        except ConfigError:
            raise ConfigError(
                f"stop_token_ids has {shorten(value)}, expected whole numbers"
            ) from None
        if checked[-1] not in INT32:
            raise ConfigError(f"stop_token_ids has {shorten(value)}, which is no 32-bit id")
    return tuple(checked)


def check_draft_attention(draft: Eagle3Draft, asked: str | None) -> DraftAttention:
    """The mode asked for, else the draft's own."""
    mode = draft.draft_attention if asked is None else asked
    if mode not in DRAFT_ATTENTIONS:
        raise ConfigError(f"draft_attention is {shorten(mode)}, expected one of {DRAFT_ATTENTIONS}")
    return mode  # type: ignore[return-value]


def check_pair(target: Target, draft: Eagle3Draft, tree: TreeConfig) -> tuple[Boundary, ...]:
    """The boundaries to capture for this draft on this target.

    Raises:
      ConfigError: the draft was made for another width, vocabulary or depth; topk is above W.
    """
    t, d = target.config, draft.config
    if d.target_hidden_size != t.hidden_size:
        raise ConfigError(
            f"the draft expects a target of width {d.target_hidden_size} ({d.num_aux} states), "
            f"this target has {t.hidden_size}"
        )
    if d.vocab_size != t.vocab_size:
        raise ConfigError(
            f"the draft was made for a vocabulary of {d.vocab_size}, this target has {t.vocab_size}"
        )
    if tree.topk > d.draft_vocab_size:
        raise ConfigError(f"topk={tree.topk} exceeds the draft vocabulary of {d.draft_vocab_size}")
    boundaries = d.resolve(t.num_layers).aux_boundaries
    assert isinstance(boundaries, tuple)
    return boundaries
