"""Compares what an engine produced with what this implementation computes on the same text."""

from collections.abc import Sequence

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.judging import Comparison
from eagle3_jax.crosscheck.ours import Ours
from eagle3_jax.crosscheck.recorded import RecordedOurs, draft_states
from eagle3_jax.crosscheck.result import Result
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRun
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.targets.base import Target
from eagle3_jax.tree import DraftAttention


def compare(
    run: EngineRun,
    target: Target,
    draft: Eagle3Draft | None = None,
    *,
    tree: TreeConfig | None = None,
    draft_attention: DraftAttention | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | None = None,
    reference: Target | None = None,
) -> Result:
    """An engine's run against this implementation: the first place where they part, or none.

    Args:
      target, draft: in the engine's dtype, the draft with its profile (`as_engine`).
      tree: the triple, None for what the run says.
      stop_token_ids: None for the target's eos; ignore_eos: None for what the requests say.
      reference: the target in float32, to measure what the engine's half type rounds.

    Raises:
      CrosscheckError: no requests, a tree that nobody names, ids outside the vocabulary.
    """
    checks = Comparison(run, target.config.vocab_size)
    found = checks.settled_tree(tree) if draft is not None else None
    checks.ours = Ours(target, draft if found is not None else None, found, draft_attention)
    checks.stop_ids = tuple(
        target.config.eos_token_ids if stop_token_ids is None else stop_token_ids
    )
    checks.ignore_eos = ignore_eos
    return checks.result(reference)


def compare_recorded(
    run: EngineRun,
    draft: Eagle3Draft,
    shared: Shared | None = None,
    *,
    tree: TreeConfig | None = None,
    draft_attention: DraftAttention | None = None,
    num_layers: int | None = None,
) -> Result:
    """Drafts and acceptance alone, on the states that came with the text; no target runs.

    Equal rounds are `not an acceptance problem`: the engine accepts what it should, whatever else
    is slow.

    Args:
      shared: the target's embedding and head, for drafts that use them.
      num_layers: of the target, for drafts that leave their boundaries to it.

    Raises:
      CrosscheckError: requests without aux states, or as for `compare`.
    """
    run = draft_states(run, draft)
    num_layers = num_layers or run.settings.other.get("num_layers")
    checks = Comparison(run, draft.config.vocab_size)
    bare = next((r for r in checks.requests if r.aux is None), None)
    if bare is not None:
        raise CrosscheckError(
            f"{run.source}: request {bare.name} has no aux states: give --target, or record them "
            "(return_hidden_states)"
        )
    found = checks.settled_tree(tree)
    if found is None:
        raise CrosscheckError(f"{run.source}: no rounds and no statistics to compare drafts with")
    checks.ours = RecordedOurs(checks.requests, draft, shared, found, draft_attention, num_layers)
    checks.notes.append("no target was given: the text itself was not checked")
    return checks.result(None)
