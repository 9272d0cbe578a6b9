"""Wall time with the time spent compiling told apart."""

import time

import jax

COMPILE = "/jax/core/compile/"
"""Prefix of jax's own duration events: tracing, lowering, XLA."""


class Stopwatch:
    """Counts from `with` to its end, or until now.

    Attributes:
      total: seconds. compiling: seconds of it in which jax traced, lowered or compiled.
      running: the rest.
    """

    def __init__(self):
        self._start = time.perf_counter()
        self._end: float | None = None
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> "Stopwatch":
        self._start = time.perf_counter()
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object):
        self._end = time.perf_counter()
        jax.monitoring.unregister_event_duration_listener(self._note)

    @property
    def total(self) -> float:  # noqa: D102
        end = time.perf_counter() if self._end is None else self._end
        return end - self._start

    @property
    def compiling(self) -> float:  # noqa: D102
        return sum(end - start for start, end in list(self._spans))

    @property
    def running(self) -> float:  # noqa: D102
        return self.total - self.compiling

    def _note(self, event: str, duration_secs: float, **_: str | int):
        if event.startswith(COMPILE):
            end = time.perf_counter()
            self._add(max(end - duration_secs, self._start), end)

    def _add(self, start: float, end: float):
        """Joins spans that overlap: a jitted function inside another reports its own tracing."""
        while self._spans and self._spans[-1][1] > start:
            start = min(start, self._spans.pop()[0])
        self._spans.append((start, end))
