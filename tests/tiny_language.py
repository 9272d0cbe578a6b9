"""A target over few tokens whose probabilities, after all processors, are worked out in Python."""

import numpy as np

from eagle3_jax.config import SamplingConfig

V = 4

PROCESSORS = {
    "none": SamplingConfig(),
    "temperature": SamplingConfig(0.6),
    "top_k": SamplingConfig(1.3, top_k=2),
    "top_p": SamplingConfig(top_p=0.7),
    "min_p": SamplingConfig(min_p=0.4),
    "penalties": SamplingConfig(
        repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.7
    ),
    "bias": SamplingConfig(logit_bias={1: 1.5, 3: -2.0}),
    "all": SamplingConfig(
        0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={0: 0.5},
    ),
}


class Language:
    """A target over few tokens: fixed random logits after every path, decoded one at a time."""

    def __init__(self, seed: int, config: SamplingConfig, size: int = V):
        self.seed, self.config, self.size = seed, config, size
        self.counts = np.random.default_rng([seed, 99]).integers(0, 3, size)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([self.seed, len(path), *path]).normal(size=self.size) * 1.5

    def __call__(self, path: tuple[int, ...]) -> np.ndarray:
        """p(. | path) after all processors, in plain Python."""
        if path not in self._known:
            self._known[path] = self._work_out(path)
        return self._known[path]

    def _work_out(self, path: tuple[int, ...]) -> np.ndarray:
        c, logits = self.config, self.logits(path).tolist()
        for token in range(self.size):
            often = int(self.counts[token]) + path.count(token)
            if often:
                logits[token] -= c.frequency_penalty * often + c.presence_penalty
                over = logits[token] < 0
                factor = c.repetition_penalty if over else 1 / c.repetition_penalty
                logits[token] *= factor
            logits[token] += dict(c.logit_bias).get(token, 0.0)
        p = np.exp(np.asarray(logits) / c.temperature)
        p /= p.sum()
        order = sorted(range(self.size), key=lambda t: (-p[t], t))
        if c.top_k is not None:
            p = _only(p, order[: c.top_k])
        kept, mass = [], 0.0
        for token in order:
            if kept and mass >= c.top_p:
                break
            kept.append(token)
            mass += p[token]
        p = _only(p, kept)
        return _only(p, [t for t in order if p[t] >= c.min_p * p.max()])

    def sequences(self, length: int) -> dict[tuple[int, ...], float]:
        """The exact probability of every sequence."""
        found = {(): 1.0}
        for _ in range(length):
            found = {
                (*path, t): weight * self(path)[t]
                for path, weight in found.items()
                for t in range(self.size)
            }
        return found


def _only(p: np.ndarray, kept: list[int]) -> np.ndarray:
    left = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    return left / left.sum()
