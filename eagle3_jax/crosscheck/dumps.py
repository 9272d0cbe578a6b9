"""Rounds from a folder of SGLang's dumper, every tensor under the names of `rounds(tensors=True)`.

The format is `records.dumper`'s; here each pass of either model is sorted into the round it belongs
to. A step is a target's when its `logits_processor` got a list of aux states, a draft's extend when
`model.fc` ran, else one drafted level. The dumper keeps no tree: parents and mask of a round are
unknown, and what a round accepted is known from where the next one starts.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.crosscheck.types import (
    CrosscheckError,
    DumpedRound,
    EngineRequest,
    EngineRun,
    Settings,
)
from eagle3_jax.records.dumper import CAPTURED, FUSED, HOOK, Step, steps_of

LOGITS = HOOK + "logits_processor.output.next_token_logits"
RESULT = HOOK + "logits_processor.inputs.4"
FC_OUT = HOOK + "model.fc.output"
INPUT = HOOK + "model.layers.0.hidden_norm.inputs.0"


@dataclasses.dataclass
class _Round:
    length: int
    tensors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tokens: np.ndarray | None = None
    positions: np.ndarray | None = None
    levels: int = 0


@dataclasses.dataclass
class _Request:
    """One request while its passes are read."""

    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    prompt_length: int = 0
    prefill: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    rounds: list[_Round] = dataclasses.field(default_factory=list)


def read_dump(folder: Path) -> EngineRun:
    """The requests of one rank's dump, in the order they began.

    Raises:
      RecordError, CrosscheckError: no dump, tensors that do not fit each other, no passes of a
        request's beginning.
    """
    running: dict[int, _Request] = {}
    done: list[_Request] = []
    drafted = False
    steps = steps_of(folder)
    gap = next((i for i in range(min(steps), max(steps)) if i not in steps), None)
    if gap is not None:
        raise CrosscheckError(
            f"{folder}: steps {min(steps)} to {max(steps)}, but nothing of step {gap}: passes are "
            "missing, and without them rounds would be put together wrongly"
        )
    for number, names in sorted(steps.items()):
        step = Step(number, names, folder, 1, None)
        drafted |= step.is_extend
        for index, (pool, rows, length) in enumerate(step.requests()):
            positions = step.positions[rows]
            if step.is_target and step.is_prefill(rows, length) and not step.is_extend:
                known = running.get(pool)
                begins = known is None or int(positions[0]) <= max(known.tokens, default=-1)
                if begins and known is not None and int(positions[0]) in known.tokens:
                    done.append(running.pop(pool))
                    known = None
                if known is None:
                    running[pool] = _Request()
            if pool in running:
                _take(running[pool], step, rows, index, length)
    done += running.values()
    requests = [_finished(r, f"{folder}: request {i}", i) for i, r in enumerate(done)]
    if not requests:
        raise CrosscheckError(f"{folder}: no pass of a target in it: dump the hooks of both models")
    notes = [] if drafted else ["the dump has no pass of a draft"]
    return EngineRun(str(folder), Settings(speculative=drafted), requests, tuple(notes))


def _take(request: _Request, step: Step, rows: slice, index: int, length: int):
    positions = step.positions[rows]
    if step.is_target and step.is_prefill(rows, length):
        request.tokens |= dict(zip(positions.tolist(), step.ids[rows].tolist(), strict=True))
        request.prompt_length = max(request.prompt_length, length)
        _prefilled(request, step, rows, index, "target")
    elif step.is_extend and int(positions[0]) < request.prompt_length:
        _prefilled(request, step, rows, index, "extend")
    elif step.is_extend:
        if request.rounds:
            _extended(request.rounds[-1], step, rows)
    else:
        if not request.rounds or request.rounds[-1].length != length:
            request.rounds.append(_Round(length))
        current = request.rounds[-1]
        if step.is_target:
            current.tokens, current.positions = step.ids[rows], positions
            _keep(current.tensors, step, rows, target_logits=LOGITS)
            aux = _aux(step, rows)
            if aux is not None:
                current.tensors["target_aux"] = aux
        else:
            level = current.levels
            current.levels += 1
            current.tensors[f"draft_tokens.{level}"] = step.ids[rows]
            current.tensors[f"draft_positions.{level}"] = positions
            names = {"draft_input": INPUT, "draft_logits": LOGITS, "draft_hidden": RESULT}
            _keep(current.tensors, step, rows, **{f"{k}.{level}": v for k, v in names.items()})


def _prefilled(request: _Request, step: Step, rows: slice, index: int, kind: str):
    """Chunks of a prompt follow each other; of logits the last chunk's count."""
    found: dict[str, np.ndarray] = {}
    if kind == "target":
        aux = _aux(step, rows)
        if aux is not None:
            found["prefill.target_aux"] = aux
    else:
        found["prefill.extend_tokens"] = step.ids[rows]
        found["prefill.extend_positions"] = step.positions[rows]
        names = {"extend_aux": FUSED, "fused": FC_OUT, "extend_hidden": RESULT}
        _keep(found, step, rows, **{f"prefill.{k}": v for k, v in names.items()})
    for name, value in found.items():
        request.prefill.setdefault(name, []).append(value)
    if LOGITS in step.names:
        logits = step.read(LOGITS)
        at = index if len(logits) == len(step.lengths) else rows.stop - 1
        request.prefill[f"prefill.{kind}_logits"] = [logits[at]]


def _extended(current: _Round, step: Step, rows: slice):
    current.tensors["extend_tokens"] = step.ids[rows]
    current.tensors["extend_positions"] = step.positions[rows]
    names = {"extend_aux": FUSED, "extend_hidden": RESULT, "extend_logits": LOGITS}
    _keep(current.tensors, step, rows, **names)


def _keep(into: dict[str, np.ndarray], step: Step, rows: slice, **names: str):
    """Rows of tensors of a pass, those that were dumped."""
    for ours, theirs in names.items():
        if theirs in step.names:
            value = step.read(theirs)
            if len(value) != len(step.positions):
                raise CrosscheckError(
                    f"{step.where}: {theirs} has {len(value)} rows, positions {len(step.positions)}"
                )
            into[ours] = value[rows]


def _aux(step: Step, rows: slice) -> np.ndarray | None:
    count = sum(name.startswith(CAPTURED) for name in step.names)
    if not count:
        return None
    return np.stack([step.read(f"{CAPTURED}{i}")[rows] for i in range(count)], axis=1)


def _finished(request: _Request, where: str, number: int) -> EngineRequest:
    if sorted(request.tokens) != list(range(request.prompt_length)):
        raise CrosscheckError(
            f"{where}: not all of its prompt's {request.prompt_length} tokens are in the dump: a "
            "prefix was cached; dump with the prefix cache off"
        )
    tensors: dict[str, Any] = {k: np.concatenate(v) for k, v in request.prefill.items()}
    prompt = [request.tokens[i] for i in range(request.prompt_length)]
    output: list[int] = []
    shifted = tensors.get("prefill.extend_tokens")
    if shifted is not None:
        output.append(int(shifted[-1]))
    elif request.rounds and request.rounds[0].tokens is not None:
        output.append(int(request.rounds[0].tokens[0]))
    rounds: list[DumpedRound] = []
    for index, current in enumerate(request.rounds):
        after = request.rounds[index + 1 : index + 2]
        count = after[0].length - current.length if after else None
        extended = current.tensors.get("extend_tokens")
        bonus = None
        if count is not None and extended is not None:
            if not 1 <= count <= len(extended):
                raise CrosscheckError(
                    f"{where}, round {index}: it starts at {current.length} and the next at "
                    f"{current.length + count}: more than its {len(extended)} rows"
                )
            committed = extended[:count].tolist()
            output += committed
            bonus = committed[-1]
        own = {k: _row(k, v, count) for k, v in current.tensors.items()}
        chain = current.positions is not None and bool((np.diff(current.positions) == 1).all())
        rounds.append(
            DumpedRound(
                index=index,
                length=current.length,
                tokens=None if current.tokens is None else current.tokens.tolist(),
                parents=list(range(-1, len(current.positions) - 1))
                if chain and current.positions is not None
                else None,
                positions=None if current.positions is None else current.positions.tolist(),
                accepted=list(range(count)) if chain and count is not None else None,
                bonus=bonus,
                num_correct=None if count is None else count - 1,
                tensors={k: v for k, v in own.items() if v is not None}
                | (tensors if index == 0 else {}),
            )
        )
    if tensors and not rounds:
        rounds.append(DumpedRound(0, request.prompt_length, tensors=tensors))
    return EngineRequest(
        name=f"request {number}", prompt=prompt, output=output, rounds=rounds, partial=True
    )


def _row(name: str, value: np.ndarray, count: int | None) -> np.ndarray | None:
    """An extend's rows past the accepted ones are leftovers; its logits are the last one's."""
    if not name.startswith("extend_"):
        return value
    if count is None:
        return None
    return value[count - 1] if name == "extend_logits" else value[:count]
