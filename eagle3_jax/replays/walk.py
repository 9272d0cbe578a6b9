"""From what a draft says at every row to rounds: free walks, pinned starts, kept rows."""

import dataclasses

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.record import Record, RecordSequence
from eagle3_jax.replays.answers import Answers
from eagle3_jax.replays.bin import OUTSIDE, BinReplay, Runner
from eagle3_jax.replays.findings import Seen, findings
from eagle3_jax.replays.free import Walk, levels
from eagle3_jax.replays.kept import kept_rounds
from eagle3_jax.replays.result import (
    Mode,
    Norms,
    ReplayedSequence,
    ReplayResult,
    ReplayRound,
    TreeReplay,
    Vocabulary,
)
from eagle3_jax.replays.rows import Part, Rows, Run, judged_runs, longest_repeat, pack
from eagle3_jax.replays.temperature import expected_drafts
from eagle3_jax.sampling_config import AcceptRule


class Walker:
    """One call: bins one after the other, each walked under every tree and forgotten."""

    def __init__(
        self,
        record: Record,
        runner: Runner,
        trees: list[TreeConfig],
        mode: Mode,
        refresh: bool,
        temperatures: tuple[float, ...],
        rule: AcceptRule,
    ):
        self.record, self.runner, self.trees = record, runner, trees
        self.mode: Mode = mode
        self.refresh, self.temperatures, self.rule = refresh, temperatures, rule
        self.rounds: list[list[ReplayRound]] = [[] for _ in trees]
        self.censored = [0] * len(trees)
        self.bounds = np.zeros((len(trees), 2), np.int64)
        self.sequences: list[ReplayedSequence] = []
        self.tokens = self.outside = self.rows = self.placed = 0
        self.largest = 0.0
        self.aux_norm = np.zeros(len(runner.slots))
        self.fused = 0.0
        chains = [t.num_steps for t in trees if t.topk == 1]
        self.norms = np.zeros((max(chains, default=1), 2))
        self.levels = np.zeros((max(chains, default=1), 2), np.int64)
        self.ids: set[int] = set()

    def run(self, capacity: int):
        """Packs the sequences into bins of `capacity` rows and walks each."""
        config = self.runner.draft.config
        to_draft = np.full(config.vocab_size, -1, np.int32)
        ids = np.asarray(self.runner.draft.draft_to_target[...])
        to_draft[ids] = np.arange(len(ids), dtype=np.int32)
        for number in range(len(self.record.sequences)):
            self._note(self.record.sequences[number], number, to_draft)
        steps = max(t.num_steps for t in self.trees)
        bins = pack(
            self.record.sequences,
            to_draft,
            steps=steps,
            capacity=capacity,
            multiple=self.runner.chunk,
            multi_axis=bool(config.rope.mrope_section),
        )
        for rows in bins:
            self._bin(rows)

    def _note(self, sequence: RecordSequence, number: int, to_draft: np.ndarray):
        runs = judged_runs(sequence, number)
        self.placed += sequence.positions is not None
        for run in runs:
            text = np.asarray(sequence.tokens[run.begin + 1 : run.end])
            self.tokens += len(text)
            self.outside += int((to_draft[text] < 0).sum())
            if len(self.ids) < 2:
                self.ids |= set(np.unique(text).tolist())
        self.sequences.append(
            ReplayedSequence(
                sequence.name,
                sequence.tags,
                len(sequence.tokens),
                tuple(r.begin for r in runs),
                tuple(r.end for r in runs),
                longest_repeat(np.asarray(sequence.tokens[: sequence.prompt_length])),
            )
        )

    def _bin(self, rows: Rows):
        topk = max(t.topk for t in self.trees)
        replayed = BinReplay(self.runner, rows, topk=topk)
        self.largest = max(self.largest, replayed.largest)
        self.aux_norm += replayed.aux_norm
        self.fused += float(replayed.fused[: rows.used].sum())
        self.rows += rows.used
        self._bounds(rows)
        if not self.refresh:
            self._kept(rows)
            return
        pinned = self._pinned(rows) if self.mode == "pinned" else None
        for k in sorted({t.topk for t in self.trees}):
            steps = max(t.num_steps for t in self.trees if t.topk == k)
            chains = None
            if k == 1:
                starts = np.flatnonzero(rows.judged)
                if pinned is not None:
                    starts = starts[np.isin(starts, [slot for _, _, slot, _ in pinned])]
                chains = replayed.chains(starts, steps)
                self.norms[:steps] += chains.norms
                self.levels[:steps] += levels(chains.hits[starts], rows.judged[starts], steps)
            answers = Answers(replayed, k, steps, chains)
            if chains is not None:
                answers.known[:] = True
            chosen = [i for i, t in enumerate(self.trees) if t.topk == k]
            if pinned is None:
                self._free(answers, chosen)
            else:
                self._at(answers, chosen, pinned)

    def _free(self, answers: Answers, chosen: list[int]):
        rows = answers.replay.rows
        walks = [
            Walk(answers, self.trees[i], i, part, run) for i in chosen for part, run in rows.runs
        ]
        moving = walks
        while moving:
            wanted = [(walk, walk.advance()) for walk in moving]
            moving = [walk for walk, slot in wanted if slot is not None]
            answers.grow((slot for _, slot in wanted if slot is not None), fill=True)
        for walk in walks:
            self.censored[walk.number] += walk.censored
            for index, (slot, start, accepted) in enumerate(walk.rounds):
                self._add(answers, walk.number, walk.part, walk.run, index, slot, start, accepted)

    def _pinned(self, rows: Rows) -> list[tuple[Part, Run, int, int]]:
        """(part, run, slot, accepted by the engine) of every recorded round inside a run."""
        found = []
        for part in rows.parts:
            for item in part.sequence.rounds or ():
                for run in part.runs:
                    if run.begin <= item.start < run.end - 1:
                        found.append((part, run, part.slot_of(item.start), item.accepted))
        return found

    def _at(self, answers: Answers, chosen: list[int], pinned: list[tuple[Part, Run, int, int]]):
        judged = answers.replay.rows.judged
        answers.grow((slot for *_, slot, _ in pinned if not answers.known[slot]), fill=False)
        for i in chosen:
            tree, index = self.trees[i], -1
            before = None
            for part, run, slot, engine in pinned:
                index = index + 1 if before == (part.number, run.index) else 0
                before = (part.number, run.index)
                accepted = answers.accepted(slot, tree)
                if accepted == judged[slot] < tree.num_steps:
                    self.censored[i] += 1
                    continue
                start = slot - part.slot + part.sequence.first + 1
                self._add(answers, i, part, run, index, slot, start, accepted, engine)

    def _add(
        self,
        answers: Answers,
        number: int,
        part: Part,
        run: Run,
        index: int,
        slot: int,
        start: int,
        accepted: int,
        engine: int | None = None,
    ):
        tree = self.trees[number]
        reason, rank = None, None
        if accepted < tree.num_steps:
            reason, rank = answers.miss(slot, accepted, tree)
        expected = None
        if self.temperatures and answers.chains is not None:
            proposed = answers.chains.proposed[slot, : tree.num_steps]
            expected = expected_drafts(
                part.sequence,
                start,
                proposed,
                self.temperatures,
                self.runner.draft.config.vocab_size,
                self.rule,
            )
        self.rounds[number].append(
            ReplayRound(
                part.number, run.index, index, start, accepted, reason, rank, engine, expected
            )
        )

    def _bounds(self, rows: Rows):
        """The walk of a draft that is right whenever its vocabulary allows."""
        for part, run in rows.runs:
            for i, tree in enumerate(self.trees):
                start = run.begin
                while start < run.end - 1:
                    first = part.slot_of(start) + 1
                    most = min(tree.num_steps, run.end - 1 - start)
                    outside = np.flatnonzero(rows.true[first : first + most] == OUTSIDE)
                    accepted = int(outside[0]) if len(outside) else most
                    if accepted == most < tree.num_steps:
                        break
                    self.bounds[i] += accepted, 1
                    start += accepted + 1

    def _accuracies(self, tree: TreeConfig) -> list[float | None] | None:
        if tree.topk > 1:
            return None
        counts = self.levels[: tree.num_steps].tolist()
        return [right / reached if reached else None for right, reached in counts]

    def _kept(self, rows: Rows):
        for part, run in rows.runs:
            for i, tree in enumerate(self.trees):
                found, cut = kept_rounds(self.runner, part.sequence, run, tree)
                self.censored[i] += cut
                for index, (start, accepted) in enumerate(found):
                    self.rounds[i].append(
                        ReplayRound(part.number, run.index, index, start, accepted)
                    )

    def result(self, window: int | None) -> ReplayResult:
        """Everything that was counted, with what it shows."""
        count = len(self.record.sequences)
        trees = [
            TreeReplay(
                tree,
                sorted(rounds, key=lambda r: (r.sequence, r.run, r.index)),
                cut,
                1 + int(total) / int(number) if number else None,
                count,
                self._accuracies(tree) if self.mode == "free" and self.refresh else None,
            )
            for tree, rounds, cut, (total, number) in zip(
                self.trees, self.rounds, self.censored, self.bounds, strict=True
            )
        ]
        norms = None
        if self.rows:
            ratio = self.norms[self.norms[:, 1] > 0]
            norms = Norms(
                dict(
                    zip(
                        map(str, self.runner.boundaries),
                        (self.aux_norm / self.rows).tolist(),
                        strict=True,
                    )
                ),
                self.fused / self.rows,
                (ratio[:, 0] / ratio[:, 1]).tolist(),
                ratio[:, 1].astype(int).tolist(),
            )
        draft = self.runner.draft
        result = ReplayResult(
            trees,
            self.mode,
            self.record.kind,
            self.refresh,
            self.runner.draft_attention,
            str(draft.dtype),
            self.sequences,
            Vocabulary(self.tokens, self.outside),
            norms,
            [],
            window,
            self.temperatures,
        )
        multi_axis = bool(draft.config.rope.mrope_section)
        seen = Seen(self.largest, self.ids, self.record, self.placed, multi_axis)
        return dataclasses.replace(result, findings=findings(result, seen))
