"""Records to disk, one sequence at a time; nothing of a state stays in memory."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from eagle3_jax.config import Boundary
from eagle3_jax.files.whole import put
from eagle3_jax.records.checks import Checks
from eagle3_jax.records.last_state import FinalNorm
from eagle3_jax.records.parts import Part
from eagle3_jax.records.reading import FORMAT, INDEX, load
from eagle3_jax.records.structure import check_fields, check_sequence
from eagle3_jax.records.types import Kind, Record, RecordError, RecordSequence
from eagle3_jax.version import __version__

PART_BYTES = 256 << 20


class RecordWriter:
    """Writes a record, all or nothing: beside `path` first, renamed when the block ends.

    A `path` that ends with `.safetensors` becomes one file, any other a folder of parts of about
    `part_bytes` and `record.json`.

    Args:
      partial_context: accept sequences whose rows begin after position 0.
      bos_token_id: of the target, to tell a doubled BOS; None only notes equal first ids.
      final_norm: of the target, to tell a last state before it from one after it.
      allow: codes of `checks.ALLOWABLE` that become findings.
      force: replace an existing record; nothing else is ever replaced.

    Raises:
      RecordError: fields, sequences or states that cannot be right (`check_sequence`, `Checks`), a
        sequence of another width or dtype than the first, no sequence at all, a destination that is
        taken or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        boundaries: Iterable[Boundary],
        kind: Kind,
        vocab_size: int | None = None,
        num_layers: int | None = None,
        embedding: str | os.PathLike | None = None,
        provenance: dict[str, Any] | None = None,
        partial_context: bool = False,
        bos_token_id: int | None = None,
        final_norm: FinalNorm | None = None,
        allow: Iterable[str] = (),
        force: bool = False,
        part_bytes: int = PART_BYTES,
    ):
        self.path = Path(path)
        self._fields = Record(
            boundaries=tuple(boundaries),
            kind=kind,
            sequences=(),
            vocab_size=vocab_size,
            num_layers=num_layers,
            embedding=None if embedding is None else Path(embedding).absolute(),
            provenance={"eagle3_jax": __version__, **(provenance or {})},
            partial_context=partial_context,
        )
        check_fields(self._fields, str(self.path))
        check_destination(self.path, force)
        self._single = self.path.suffix == ".safetensors"
        self._part_bytes = part_bytes
        self._checks = Checks(
            self._fields.boundaries,
            kind,
            num_layers=num_layers,
            bos_token_id=bos_token_id,
            final_norm=final_norm,
            allow=allow,
        )
        self._notes: list[str] = []
        self._layout: tuple[int, np.dtype] | None = None
        self._parts: list[tuple[str, int]] = []
        self._part: Part | None = None
        self._temporary: Path | None = None
        self._broken: str | None = None
        self.count = 0

    def __enter__(self) -> "RecordWriter":
        try:
            self._temporary = Path(
                tempfile.mkdtemp(dir=self.path.parent, prefix=".record.", suffix=".tmp")
            )
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def append(self, sequence: RecordSequence):
        """Checks one sequence and writes it; its states are copied in pieces."""
        assert self._temporary is not None, "RecordWriter is a context manager"
        self._refuse_broken()
        where = f"sequence {self.count}" + (f" {sequence.name!r}" if sequence.name else "")
        check_sequence(sequence, self._fields, where)
        layout = (sequence.aux.shape[2], sequence.aux.dtype)
        if self._layout is not None and layout != self._layout:
            (width, dtype), (expected, kind) = layout, self._layout
            raise RecordError(
                f"{where}: states are {dtype.name} of width {width}, expected {kind.name} of "
                f"width {expected} as in the sequences before"
            )
        self._layout = layout
        self._broken = where
        try:
            if self._part is None:
                name = f"{len(self._parts):06d}.safetensors"
                self._part = Part(self._temporary / name)
            self._checks.open(sequence, where)
            self._part.add(sequence, self._checks)
            self._checks.close()
            if not self._single and self._part.size >= self._part_bytes:
                self._end_part()
        except OSError as error:
            raise self._unwritable(error) from None
        self.count += 1
        self._broken = None

    def note(self, finding: str):
        """Adds a finding of whoever made the record, such as `CODE: what was seen`."""
        self._notes.append(finding)

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ):
        assert self._temporary is not None
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise self._unwritable(error) from None
        finally:
            if self._part is not None:
                self._part.file.close()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _finish(self):
        assert self._temporary is not None
        self._refuse_broken()
        if not self.count:
            raise RecordError(f"{self.path}: no sequences: nothing is written")
        findings = (*self._checks.finish(), *self._notes)
        self._end_part(findings)
        if self._single:
            put(self._temporary / self._parts[0][0], self.path)
            return
        parts = [{"file": name, "sequences": count} for name, count in self._parts]
        index = self._header(findings) | {"parts": parts}
        text = json.dumps(index, indent=1, allow_nan=False)
        (self._temporary / INDEX).write_text(text + "\n", encoding="utf-8")
        self._temporary.chmod(0o755)
        put(self._temporary, self.path)

    def _end_part(self, findings: Iterable[str] = ()):
        if self._part is None:
            return
        self._part.close(self._header(findings))
        self._parts.append((self._part.path.name, len(self._part.sequences)))
        self._part = None

    def _header(self, findings: Iterable[str]) -> dict[str, Any]:
        fields = self._fields
        return {
            "format": FORMAT,
            "boundaries": list(fields.boundaries),
            "kind": fields.kind,
            "vocab_size": fields.vocab_size,
            "num_layers": fields.num_layers,
            "embedding": None if fields.embedding is None else str(fields.embedding),
            "provenance": fields.provenance,
            "partial_context": fields.partial_context,
            "findings": list(findings),
        }

    def _refuse_broken(self):
        if self._broken is not None:
            raise RecordError(f"{self.path}: not written: {self._broken} was refused half-way")

    def _unwritable(self, error: OSError) -> RecordError:
        return RecordError(f"{self.path}: cannot be written: {error.strerror or error}")


def check_destination(path: Path, force: bool = False):
    """Raises `RecordError` unless `path` is free or (with `force`) a record."""
    if not path.parent.is_dir():
        raise RecordError(f"{path.parent}: no such folder")
    if not path.exists() and not path.is_symlink():
        return
    if path.resolve() == Path.cwd().resolve() or not path.name:
        raise RecordError(f"{path}: is the folder you stand in: name a new one")
    try:
        load(path)
    except ValueError:
        raise RecordError(f"{path}: exists and is not a record: never overwritten") from None
    if not force:
        raise RecordError(f"{path}: exists: --force overwrites it")
