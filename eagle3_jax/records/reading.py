"""A record from its files: headers first, each sequence mapped when it is asked for."""

import bisect
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from eagle3_jax.files.safetensors_file import SafetensorsFile
from eagle3_jax.files.source import FileError, parse_object, read_json
from eagle3_jax.records.structure import check_fields, check_sequence, describe
from eagle3_jax.records.types import EngineRound, Record, RecordError, RecordSequence

FORMAT = 1
INDEX = "record.json"
METADATA_KEY = "eagle3_record"
MOST = 1 << 40
"""More sequences than any part holds."""


def load(path: str | os.PathLike) -> Record:
    """Opens a record: a folder with `record.json`, or one `.safetensors` part of it.

    Only headers are read here; a sequence is mapped, and its layout checked, when it is indexed.

    Raises:
      RecordError: not a record, a newer format, fields that contradict each other.
      FileError: files that are missing, cut short or damaged.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / INDEX).exists():
            raise RecordError(f"{path}: no {INDEX}: not a record, or one whose writing was cut")
        header, where = read_json(path / INDEX), path / INDEX
        parts = [_part(path, entry, where) for entry in _list(header, "parts", where)]
        names = [part.name for part, _ in parts]
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise RecordError(f"{where}: part {twice} is listed more than once")
    elif path.exists():
        header, where = _part_header(SafetensorsFile(path)), path
        parts = [(path, len(_list(header, "sequences", where)))]
    else:
        raise RecordError(f"{path}: no such record")
    if header.get("format") != FORMAT:
        raise RecordError(f"{where}: format {header.get('format')!r}, this version reads {FORMAT}")
    try:
        embedding = header["embedding"]
        record = Record(
            boundaries=tuple(header["boundaries"]),
            kind=header["kind"],
            sequences=(),
            vocab_size=header["vocab_size"],
            num_layers=header["num_layers"],
            embedding=None if embedding is None else path.parent / embedding,
            provenance=dict(header["provenance"]),
            partial_context=header["partial_context"],
            findings=tuple(map(_text, _list(header, "findings", where))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{where}: not a record's header: {error!r}") from None
    check_fields(record, str(where))
    return dataclasses.replace(record, sequences=_FileSequences(parts, record))


class _FileSequences(Sequence[RecordSequence]):
    """The sequences of some parts; one part's header is kept, so that reading in order is fast."""

    def __init__(self, parts: list[tuple[Path, int]], record: Record):
        self._paths = [path for path, _ in parts]
        self._ends = list(itertools.accumulate(count for _, count in parts))
        self._record = record
        self._opened: tuple[int, SafetensorsFile, dict[str, Any]] | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> RecordSequence: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RecordSequence]: ...
    def __getitem__(self, index: int | slice) -> RecordSequence | Sequence[RecordSequence]:
        if isinstance(index, slice):
            return _Selected(self, range(*index.indices(len(self))))
        number = range(len(self))[index]
        part = bisect.bisect_right(self._ends, number)
        local = number - (self._ends[part - 1] if part else 0)
        if self._opened is None or self._opened[0] != part:
            self._opened = part, *self._open(part)
        _, file, header = self._opened
        return _read_sequence(file, header["sequences"][local], local, self._record, number)

    def _open(self, part: int) -> tuple[SafetensorsFile, dict[str, Any]]:
        file = SafetensorsFile(self._paths[part])
        header = _part_header(file)
        expected = self._ends[part] - (self._ends[part - 1] if part else 0)
        found = len(_list(header, "sequences", file.path))
        boundaries = tuple(header.get("boundaries", ()))
        if found != expected or boundaries != self._record.boundaries:
            raise RecordError(
                f"{file.path}: {found} sequences at boundaries {boundaries}, {INDEX} says "
                f"{expected} at {self._record.boundaries}"
            )
        return file, header


class _Selected(Sequence[RecordSequence]):
    def __init__(self, sequences: _FileSequences, numbers: range):
        self._sequences, self._numbers = sequences, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> RecordSequence: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RecordSequence]: ...
    def __getitem__(self, index: int | slice) -> RecordSequence | Sequence[RecordSequence]:
        if isinstance(index, slice):
            return _Selected(self._sequences, self._numbers[index])
        return self._sequences[self._numbers[index]]


def _read_sequence(
    file: SafetensorsFile, fields: Any, local: int, record: Record, number: int
) -> RecordSequence:
    prefix, names = f"{local:06d}.", set(file.names())

    def small(name: str) -> np.ndarray | None:
        full = prefix + name
        return np.array(file.read(full)) if full in names else None

    where = f"{file.path}: sequence {number}"
    if not isinstance(fields, Mapping):
        raise RecordError(f"{where}: its entry is {fields!r}, expected an object")
    name = fields.get("name", "")
    where += f" {name!r}" if name else ""
    tokens, rounds = small("tokens"), small("rounds")
    if tokens is None or prefix + "aux" not in names:
        raise RecordError(f"{where}: lacks tensor {prefix}tokens or {prefix}aux")
    try:
        sequence = RecordSequence(
            tokens=tokens,
            aux=file.read(prefix + "aux"),
            prompt_length=_whole(fields["prompt_length"]),
            first=_whole(fields["first"]),
            loss_mask=small("loss_mask"),
            top_ids=small("top_ids"),
            top_logprobs=small("top_logprobs"),
            positions=small("positions"),
            rounds=None if rounds is None else _unpack_rounds(rounds, small("proposed")),
            name=str(name),
            tags=tuple(map(str, fields["tags"])),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, FileError):
            raise
        raise RecordError(f"{where}: its entry is damaged: {error!r}") from None
    check_sequence(sequence, record, where)
    return sequence


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _unpack_rounds(rounds: np.ndarray, proposed: np.ndarray | None) -> tuple[EngineRound, ...]:
    for name, array in (("rounds", rounds), ("proposed", proposed)):
        if array is not None and (array.ndim != 2 or array.dtype.kind not in "iu"):
            raise ValueError(f"{name} are {describe(array)}, expected integers of two axes")
    items = []
    for i, (start, accepted, bonus) in enumerate(rounds.tolist()):
        ids = [] if proposed is None else [t for t in proposed[i].tolist() if t >= 0]
        items.append(
            EngineRound(start, accepted, tuple(ids) if ids else None, None if bonus < 0 else bonus)
        )
    return tuple(items)


def _part(folder: Path, entry: Any, where: Path) -> tuple[Path, int]:
    if not isinstance(entry, dict) or set(entry) != {"file", "sequences"}:
        raise RecordError(f"{where}: part {entry!r}, expected file and sequences")
    name, count = entry["file"], entry["sequences"]
    if (
        not isinstance(name, str)
        or Path(name).name != name
        or type(count) is not int
        or not 1 <= count <= MOST
    ):
        raise RecordError(f"{where}: part {entry!r} is not a file of this folder and its count")
    if not (folder / name).is_file():
        raise RecordError(f"{folder / name}: no such file, {where} lists it")
    return folder / name, count


def _part_header(file: SafetensorsFile) -> dict[str, Any]:
    text = file.metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        raise RecordError(
            f"{file.path}: no {METADATA_KEY} in its metadata: not a record; other captures are "
            "read by `eagle3 record from-...`"
        )
    return parse_object(text.encode(), f"{file.path}: {METADATA_KEY}")


def _list(header: Mapping[str, Any], key: str, where: Path) -> list[Any]:
    if not isinstance(header.get(key), list):
        raise RecordError(f"{where}: {key} is {header.get(key)!r}, expected a list")
    return header[key]
