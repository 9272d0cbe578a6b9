"""A record: tokens and the target's states beside them, enough to replay a draft without a target.

A greedy round depends only on the prefix and its states, so what a target once computed gives the
exact accept length of any draft under any tree.
"""

from eagle3_jax.records.checks import check_for_draft, check_record
from eagle3_jax.records.reading import load
from eagle3_jax.records.structure import check_fields, check_sequence
from eagle3_jax.records.types import (
    KINDS,
    EngineRound,
    Kind,
    Record,
    RecordError,
    RecordSequence,
)
from eagle3_jax.records.writing import RecordWriter

__all__ = [
    "KINDS",
    "EngineRound",
    "Kind",
    "Record",
    "RecordError",
    "RecordSequence",
    "RecordWriter",
    "check_fields",
    "check_for_draft",
    "check_record",
    "check_sequence",
    "load",
]
