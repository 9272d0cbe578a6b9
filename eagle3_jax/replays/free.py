"""A free walk through one output, and what all its rows say level by level."""

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.replays.answers import Answers
from eagle3_jax.replays.rows import Part, Run


def levels(hits: np.ndarray, judged: np.ndarray, steps: int) -> np.ndarray:
    """[steps, 2] of level i: starts with i true drafts before it and one there; starts with i."""
    level = np.arange(steps)[:, None]
    reached = (hits >= level) & (judged > level)
    return np.stack([(reached & (hits > level)).sum(axis=1), reached.sum(axis=1)], axis=1)


class Walk:
    """One output under one tree, from its beginning by its own accepts."""

    def __init__(self, answers: Answers, tree: TreeConfig, number: int, part: Part, run: Run):
        self.answers, self.tree, self.number = answers, tree, number
        self.part, self.run = part, run
        self.start = run.begin
        self.censored = 0
        self.rounds: list[tuple[int, int, int]] = []

    def advance(self) -> int | None:
        """Walks as far as is known; the row that must be drafted next, None at the end."""
        judged = self.answers.replay.rows.judged
        while self.start < self.run.end - 1:
            slot = self.part.slot_of(self.start)
            if not self.answers.known[slot]:
                return slot
            accepted = self.answers.accepted(slot, self.tree)
            if accepted == judged[slot] < self.tree.num_steps:
                self.censored = 1
                return None
            self.rounds.append((slot, self.start, accepted))
            self.start += accepted + 1
        return None
