"""Recorded requests of the real SGLang (tests/data/sglang/traces) as runs, and edits of them."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from sglang_goldens import Request, load

from eagle3_jax.crosscheck import DumpedRound, EngineRequest, EngineRun, Settings

PREFILL = {
    "target_hidden": "prefill.target_aux",
    "target_logits": "prefill.target_logits",
    "draft_tokens": "prefill.extend_tokens",
    "draft_positions": "prefill.extend_positions",
    "draft_logits": "prefill.extend_logits",
}
STEP = {"hidden_in": "draft_input", "hidden": "draft_hidden", "logits": "draft_logits"}


def golden_run(case: str, tags: Sequence[str] = ("single0",)) -> EngineRun:
    """Requests of one engine run with every array that was recorded."""
    recorded = load("traces", case)
    requests = [_request(tag, recorded[tag]) for tag in tags]
    settings = Settings(tree=recorded[tags[0]].tree, dtype="float32", version="0.5.23")
    return EngineRun(case, settings, requests)


def _request(tag: str, golden: Request) -> EngineRequest:
    rounds = [_round(golden, index) for index in range(golden.num_rounds)]
    stats = dict(golden.meta_info)
    return EngineRequest(tag, golden.prompt, golden.output_ids, stats, rounds=rounds)


def _round(golden: Request, index: int) -> DumpedRound:
    rows = int(golden.at("accept_len", index))
    made: dict[str, np.ndarray] = {}
    if index == 0:
        made |= {ours: golden.arrays[f"prefill/{theirs}"] for theirs, ours in PREFILL.items()}
    for i in range(golden.tree.num_steps - 1):
        made[f"draft_tokens.{i}"] = golden.at(f"step{i}/tokens", index)
        made[f"draft_positions.{i}"] = golden.at(f"step{i}/positions", index)
        if golden.has_tensors(index):
            for theirs, ours in STEP.items():
                made[f"{ours}.{i}"] = golden.tensor(f"step{i}/{theirs}", index)
    made["candidate_tokens"] = golden.candidates("tokens", index)
    made["candidate_scores"] = golden.candidates("scores", index)
    made["selected"] = golden.at("selected", index)
    for name in ("extend_tokens", "extend_positions"):
        made[name] = golden.at(name, index)[:rows]
    nodes = golden.at("accept_index", index)
    nodes = nodes[nodes >= 0].tolist()
    if golden.has_tensors(index):
        aux = golden.tensor("target_hidden", index)
        made |= {
            "seed_hidden": golden.tensor("seed_hidden", index),
            "target_aux": aux,
            "target_logits": golden.tensor("target_logits", index),
            "extend_aux": aux[nodes],
            "extend_hidden": golden.tensor("extend_hidden", index)[:rows],
            "extend_logits": golden.tensor("extend_logits", index),
        }
    return DumpedRound(
        index=index,
        length=int(golden.at("seq_len", index)),
        tokens=golden.at("tokens", index).tolist(),
        positions=golden.at("positions", index).tolist(),
        mask=golden.at("mask", index).astype(bool),
        accepted=nodes,
        bonus=int(golden.at("bonus", index)),
        num_correct=rows - 1,
        tensors=made,
    )


def edited(
    run: EngineRun, index: int, edit: Callable[[DumpedRound], DumpedRound | None], number: int = 0
) -> EngineRun:
    """The run with one round changed; `edit` may change the copied tensors in place."""
    request = run.requests[number]
    assert request.rounds is not None
    old = request.rounds[index]
    new = dataclasses.replace(old, tensors={k: v.copy() for k, v in old.tensors.items()})
    new = edit(new) or new
    rounds = [new if r.index == index else r for r in request.rounds]
    return with_request(run, dataclasses.replace(request, rounds=rounds), number)


def with_request(run: EngineRun, request: EngineRequest, number: int = 0) -> EngineRun:
    """The run with one request in another's place."""
    requests = [*run.requests]
    requests[number] = request
    return dataclasses.replace(run, requests=requests)


def with_stats(run: EngineRun, **changes: object) -> EngineRun:
    """The first request's statistics changed; None removes one."""
    request = run.requests[0]
    stats = {k: v for k, v in (request.stats | changes).items() if v is not None}
    return with_request(run, dataclasses.replace(request, stats=stats))
