"""Cross-check: what an engine produced against what this implementation computes."""

from eagle3_jax.crosscheck.compare import compare, compare_recorded
from eagle3_jax.crosscheck.pair import compare_runs
from eagle3_jax.crosscheck.reading import of_record, of_trace, read_run, with_dump
from eagle3_jax.crosscheck.result import Divergence, Result, Tie
from eagle3_jax.crosscheck.types import (
    CrosscheckError,
    DumpedRound,
    EngineRequest,
    EngineRun,
    Settings,
)

__all__ = [
    "CrosscheckError",
    "Divergence",
    "DumpedRound",
    "EngineRequest",
    "EngineRun",
    "Result",
    "Settings",
    "Tie",
    "compare",
    "compare_recorded",
    "compare_runs",
    "of_record",
    "of_trace",
    "read_run",
    "with_dump",
]
