"""Records from a folder of SGLang's dumper (`debug_utils/dumper.py` of 0.5.23, with its hooks on).

One file a tensor, `step=S___rank=R___dump_index=I___name=N___...pt`, each `{"value", "meta"}`. A
step is one forward pass of either model. A draft's extend tells all: `model.fc.inputs.0` holds the
target's states, `positions` where they stand, `input_ids` the token after each. After a
verification only the rows below the next `seq_lens` of that request were accepted; the last round
is left out, since no later step says what it accepted. Without a draft the target's passes are
read: prompt and decode rows as they stand. Other filters than the hooks' own names are not needed:
`DUMPER_FILTER` may keep input_ids, positions, seq_lens, req_pool_indices, `model.fc.inputs` and
`logits_processor.inputs`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eagle3_jax.files.torchfile import load_dict, to_numpy
from eagle3_jax.records.capture import Described, first_of, fold
from eagle3_jax.records.types import EngineRound, RecordError, RecordSequence

HOOK = "non_intrusive__"
FUSED = HOOK + "model.fc.inputs.0"
CAPTURED = HOOK + "logits_processor.inputs.4."


@dataclasses.dataclass
class _Request:
    """One request in the making: pieces of states with the positions they cover."""

    tokens: dict[int, int]
    states: list[np.ndarray] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    prompt_length: int = 0
    rounds: list[EngineRound] = dataclasses.field(default_factory=list)
    pending: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    window: np.ndarray | None = None


def read_dumps(folder: Path, described: Described) -> Iterator[RecordSequence]:
    """The requests of one rank's dump, in the order they began.

    Raises:
      RecordError: no such folder, two ranks, missing tensors, a gap in a request's positions, an
        image's positions on three axes.
    """
    steps = steps_of(folder)
    drafted = any(FUSED in names for names in steps.values())
    slots = len(described.slots())
    running: dict[int, _Request] = {}
    done: list[_Request] = []
    for number, names in sorted(steps.items()):
        step = Step(number, names, folder, slots, described.hidden_size)
        for pool, rows, length in step.requests():
            position = int(step.positions[rows][0])
            begins = step.is_prefill(rows, length) and not step.is_extend
            known = running.get(pool)
            if begins and (known is None or position not in known.tokens):
                if known is not None and position <= max(known.tokens):
                    done.append(running.pop(pool))
                    known = None
                if known is None:
                    running[pool] = known = _Request({})
            if known is None:
                continue
            if drafted:
                _take_drafted(known, step, rows, length)
            else:
                _take(known, step, rows)
                known.prompt_length = known.prompt_length or len(step.positions[rows])
    done += running.values()
    found = False
    for number, request in enumerate(done):
        if request.states:
            found = True
            yield _finished(request, f"{folder}: request {number}", number, described)
    if not found:
        raise RecordError(f"{folder}: no target states in it: {FUSED} or {CAPTURED}N")


def dumped_tree(folder: Path) -> dict[str, int]:
    """SGLang's names for the tree that was drafted, empty where the dump does not show it.

    Between an extend and a verification the draft runs `num_steps - 1` passes of `topk` rows a
    request; the verification has `num_draft_tokens` rows. One drafted level leaves no pass: its
    topk is then the rows below the root.
    """
    steps = steps_of(folder)
    if not any(FUSED in names for names in steps.values()):
        return {}  # no draft ran: nothing needs to be read
    passes, topk, extended = 0, 0, False
    for number, names in sorted(steps.items()):
        step = Step(number, names, folder, 0, None)
        if step.is_extend:
            passes, topk, extended = 0, 0, True
            continue
        count, rows = max(len(step.lengths), 1), len(step.positions)
        if not step.is_target:
            passes, topk = passes + 1, rows // count
        elif extended and rows > count and rows % count == 0:
            starts = step.positions[:: rows // count]
            if bool((starts == step.lengths).all()):
                nodes = rows // count
                return {
                    "speculative_num_steps": passes + 1,
                    "speculative_eagle_topk": topk or nodes - 1,
                    "speculative_num_draft_tokens": nodes,
                }
    return {}


class Step:
    """The tensors of one forward pass, read when needed."""

    def __init__(
        self, number: int, names: dict[str, Path], folder: Path, slots: int, width: int | None
    ):
        self.where = f"{folder}, step {number}"
        self.names, self._slots, self._width = names, slots, width
        self.is_extend = FUSED in names
        self.is_target = any(name.startswith(CAPTURED) for name in names)
        self.ids, self.positions = self.read("input_ids"), self._positions()
        self.lengths, self.pools = self.read("seq_lens"), self.read("req_pool_indices")

    def _positions(self) -> np.ndarray:
        """[rows] where each row stands; a multi-axis target of text has it three times."""
        found = self.read("positions")
        if found.ndim == 1:
            return found
        if found.ndim != 2 or len(found) != 3:
            raise RecordError(
                f"{self.where}: positions are {list(found.shape)}, expected [rows] or [3, rows]"
            )
        if bool((found == found[0]).all()):
            return found[0]
        raise RecordError(
            f"{self.where}: positions are {list(found.shape)}, which differ by axis: an image's do "
            "not say which token a row is; give tokens, states and mrope_positions as an .npz"
        )

    def requests(self) -> Iterator[tuple[int, slice, int]]:
        """Pool index, rows and `seq_lens` of each request of the batch.

        Drafted and verified rows stand at `seq_lens` and later, equally many for each request; all
        others end right before it.
        """
        lengths, count = self.lengths.tolist(), len(self.lengths)
        even = len(self.positions) // max(count, 1)
        begins = self.positions[: count * even : even] if even else self.positions
        windows = len(begins) == count and bool((begins >= self.lengths).all())
        start = 0
        for pool, length in zip(self.pools.tolist(), lengths, strict=True):
            if windows:
                stop = start + even
            else:
                ends = np.flatnonzero(self.positions[start:] == length - 1)
                if not len(ends):
                    raise RecordError(
                        f"{self.where}: no position {length - 1} for a request of {length} tokens: "
                        "positions and seq_lens do not fit"
                    )
                stop = start + int(ends[0]) + 1
            yield pool, slice(start, stop), length
            start = stop

    def is_prefill(self, rows: slice, length: int) -> bool:
        """Whether rows end at the request's length: a prompt, or one decoded token."""
        positions = self.positions[rows]
        return len(positions) > 0 and int(positions[-1]) == length - 1

    def states(self, rows: slice) -> np.ndarray:
        """[r, A, E] of some rows."""
        if self.is_extend:
            states = self.read(FUSED)
        else:
            count = sum(name.startswith(CAPTURED) for name in self.names)
            if not count:
                raise RecordError(
                    f"{self.where}: no target states: neither {FUSED} nor {CAPTURED}N"
                )
            states = np.stack([self.read(f"{CAPTURED}{i}") for i in range(count)], axis=1)
        return fold(states, self._slots, self.where, self._width)[rows]

    def read(self, name: str) -> np.ndarray:
        """One tensor, by the name it was dumped under."""
        if name not in self.names:
            raise RecordError(f"{self.where}: no {name!r} was dumped")
        file = self.names[name]
        return to_numpy(load_dict(file).get("value"), f"{file}: value")


def _take_drafted(request: _Request, step: Step, rows: slice, length: int):
    ids, positions = step.ids[rows], step.positions[rows]
    if step.is_target and step.is_prefill(rows, length):
        request.tokens |= dict(zip(positions.tolist(), ids.tolist(), strict=True))
        request.prompt_length = max(request.prompt_length, length)
        return
    if not step.is_extend:
        if request.pending is not None:
            _accept(request, length)
        if step.is_target:
            request.window = ids[1:] if (np.diff(positions) == 1).all() else None
        return
    states = step.states(rows)
    if int(positions[0]) < request.prompt_length:
        _append(request, ids, positions, states)
        return
    request.pending = (ids, positions, states)


def _accept(request: _Request, length: int):
    """Keeps what the last extend's rows below `length` say."""
    assert request.pending is not None
    ids, positions, states = request.pending
    kept = length - int(positions[0])
    proposed = None if request.window is None else tuple(request.window.tolist())
    request.rounds.append(EngineRound(int(positions[0]), kept - 1, proposed, int(ids[kept - 1])))
    _append(request, ids[:kept], positions[:kept], states[:kept])
    request.pending = request.window = None


def _append(request: _Request, following: np.ndarray, positions: np.ndarray, states: np.ndarray):
    request.states.append(states)
    request.positions += positions.tolist()
    after = zip((positions + 1).tolist(), following.tolist(), strict=True)
    request.tokens |= dict(after)


def _take(request: _Request, step: Step, rows: slice):
    positions = step.positions[rows].tolist()
    request.states.append(step.states(rows))
    request.positions += positions
    request.tokens |= dict(zip(positions, step.ids[rows].tolist(), strict=True))


def _finished(request: _Request, where: str, number: int, described: Described) -> RecordSequence:
    first = first_of(request.positions, where)
    ordered = sorted(request.tokens)
    if ordered[0] > 0:
        raise RecordError(
            f"{where}: tokens 0..{ordered[0] - 1} are not in the dump: their prefix was cached; "
            "dump with the prefix cache off"
        )
    first_of(ordered, where)
    last = request.positions[-1] + 1
    tokens = [request.tokens[i] for i in ordered if i <= last]
    return RecordSequence(
        tokens=np.array(tokens, np.int32),
        aux=np.concatenate(request.states),
        prompt_length=request.prompt_length,
        first=first,
        rounds=tuple(request.rounds) or None,
        name=f"request {number}",
        tags=described.tags,
    )


def steps_of(folder: Path) -> dict[int, dict[str, Path]]:
    """Files of one rank by step and tensor name.

    Raises:
      RecordError: no such folder, no dumped files, several ranks.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder")
    steps: dict[int, dict[str, Path]] = {}
    ranks: set[str] = set()
    for path in sorted(folder.rglob("step=*.pt")):
        fields: dict[str, str] = {}
        for part in path.stem.split("___"):
            key, _, value = part.partition("=")
            fields[key] = value
        name, step = fields.get("name", ""), fields["step"]
        if "layer_id" in fields and not name.startswith(HOOK):
            continue
        if not step.isdecimal():
            raise RecordError(f"{path}: its step is {step!r}, expected a number")
        ranks.add(fields.get("rank", "0"))
        steps.setdefault(int(step), {})[name] = path
    if not steps:
        raise RecordError(f"{folder}: no step=*.pt files: not a folder of SGLang's dumper")
    if len(ranks) > 1:
        raise RecordError(f"{folder}: ranks {', '.join(sorted(ranks))}: give one rank's folder")
    return steps
