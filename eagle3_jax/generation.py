"""The public way to generate: everything checked on the host, then one program on the device."""

from collections.abc import Iterator, Sequence

from eagle3_jax.checks import Prompts
from eagle3_jax.config import ConfigError, SamplingConfig, TreeConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.run import Generation, Run
from eagle3_jax.sampling_config import AcceptRule
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round
from eagle3_jax.tree import DraftAttention


def generate(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | None = None,
    trace: bool = False,
) -> Generation:
    """Decoding without a draft, one token a target pass.

    Args:
      prompts: lists of token ids, of any lengths, or texts (tokenizer extra), encoded as they
        stand; `Tokenizer.apply_chat_template` renders a conversation.
      max_new_tokens: per prompt, at least 1.
      stop_token_ids: None for the target's own eos, () for none.
      sampling: None is greedy.
      trace: record every pass (a round whose tree is its root).

    Raises:
      ConfigError: before anything is compiled: an empty prompt, an id outside the vocabulary, a
        prompt that does not fit (with the memory it would need), a seed or bias that does not fit
        the prompts or the vocabulary.
    """
    run = Run(
        target,
        None,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        trace=trace,
        sampling=sampling,
    )
    return run.finish()


def speculate(
    target: Target,
    draft: Eagle3Draft,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    tree: TreeConfig,
    draft_attention: DraftAttention | None = None,
    stop_token_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | None = None,
    rule: str | AcceptRule | None = None,
    trace: bool = False,
) -> Generation:
    """Decoding with a draft: the text of `generate` in fewer target passes.

    Sampled, it is another draw from the same distribution as `generate`'s, unless the rule's
    thresholds say otherwise (`AcceptRule.lossless`).

    Args:
      tree: SGLang's num_steps, topk, num_draft_tokens.
      draft_attention: what a drafted row sees of earlier drafted rows: `"ancestors"` (SafeAILab) or
        `"beam_slots"` (SGLang); None for the draft's own (`load_draft(as_engine=...)` sets it).
      rule: at a temperature, `"target_only"` (None), `"rejection"`, or an `AcceptRule`.
      prompts, max_new_tokens, stop_token_ids, sampling, trace: as for `generate`.

    Raises:
      ConfigError: as for `generate`; also a draft made for another target width, vocabulary or
        depth, a topk above the draft vocabulary, or a rule that does not go with the temperature
        or the tree.
    """
    if draft is None or tree is None:
        raise ConfigError("speculate needs a draft and a tree; generate decodes without")
    run = Run(
        target,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        tree=tree,
        draft_attention=draft_attention,
        stop_token_ids=stop_token_ids,
        trace=trace,
        sampling=sampling,
        rule=rule,
    )
    return run.finish()


def rounds(
    target: Target,
    draft: Eagle3Draft | None,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    tree: TreeConfig | None,
    draft_attention: DraftAttention | None = None,
    stop_token_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | None = None,
    rule: str | AcceptRule | None = None,
    tensors: bool = False,
    follow: Sequence[Sequence[int]] | None = None,
) -> Iterator[Round]:
    """The same generation driven round by round: yields each `Round` as it ends.

    Per round, the sequences still running come in batch order. The prefill's token is no round:
    it is `Round.tokens[0]` of the first one.

    Args:
      draft, tree: both None for plain decoding.
      tensors: fill `Round.tensors` with what was computed, as NumPy arrays of that sequence:
        `seed_probs`, `seed_ids` [topk], `seed_hidden` [D]; per draft forward i `draft_tokens.i`,
        `draft_positions.i` [topk], `draft_logits.i` [topk, W], `draft_hidden.i` [topk, D];
        `candidate_tokens`, `candidate_scores`, `candidate_parents` [C], `selected` [N - 1],
        `ancestors` [N, words]; `target_logits` [N, V], `target_aux` [N, A, E]; `extend_tokens`
        [rows], `extend_hidden` [rows, D], `extend_logits` [W]. Round 0 also has the prefill's as
        `prefill.fused`, `prefill.target_aux`, `prefill.target_logits`, `prefill.extend_tokens`,
        `prefill.extend_logits`.
      follow: output tokens, one list a prompt: they count as the target's choice as far as they go,
        whatever it would have chosen (`Round.margins` is below 0 where it would not have). Greedy
        decoding only.
      The rest as for `speculate`.
    """
    run = Run(
        target,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        tree=tree,
        draft_attention=draft_attention,
        stop_token_ids=stop_token_ids,
        trace=True,
        tensors=tensors,
        sampling=sampling,
        rule=rule,
    )
    if follow is not None:
        run.follow(follow)
    return run.stream()
