"""Reads what an engine left behind, whatever its form, into an `EngineRun`."""

import dataclasses
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.answers import run_of, settings_of_server
from eagle3_jax.crosscheck.dumps import read_dump
from eagle3_jax.crosscheck.fields import sampling_of
from eagle3_jax.crosscheck.types import (
    CrosscheckError,
    DumpedRound,
    EngineRequest,
    EngineRun,
    Settings,
)
from eagle3_jax.record import Record, load
from eagle3_jax.records.reading import INDEX
from eagle3_jax.trace import Trace

SERVER = "server_info.json"
NO_ANSWERS = (SERVER, "model_info.json", "driven.json")


def read_run(
    path: str | os.PathLike,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
) -> EngineRun:
    """What an engine produced, from a file or folder.

    Files: JSON (an answer or a list of them) or JSON lines of SGLang's `/generate`, vLLM's outputs
    or OpenAI-style answers with token ids, each alone or as `{"request", "response"}`; a trace of
    this package; named tensors (`.npz`, in forward order). Folders: SGLang's dumper files, or
    answers beside a `server_info.json` and a folder of dumps.

    Args:
      prompts: prompt ids in the answers' order, for answers that do not hold them.

    Raises:
      CrosscheckError, RecordError, FileError: unreadable, no known form, or without what a
        comparison needs; the message names file and place.
    """
    path = Path(path)
    if (path / INDEX).is_file() or path.suffix == ".safetensors":
        return of_record(load(path), str(path))
    if path.is_dir():
        return _folder(path, prompts)
    if not path.is_file():
        raise CrosscheckError(f"{path}: no such file or folder")
    if path.suffix == ".npz":
        return _tensors(path)
    items = _items(path)
    if items and isinstance(items[0][1], dict) and items[0][1].get("type") == "trace":
        return of_trace(Trace.load(path), str(path))
    return run_of(items, path, prompts)


def of_trace(trace: Trace, source: str) -> EngineRun:
    """A trace of this package as a run."""
    requests = []
    for i, (prompt, tokens) in enumerate(zip(trace.prompts, trace.tokens, strict=True)):
        rounds = [
            DumpedRound(
                index=r.index,
                length=r.length,
                tokens=r.tokens,
                parents=r.parents,
                positions=r.positions,
                scores=np.asarray(r.scores[1:]),
                accepted=r.accepted,
                bonus=r.bonus if r.bonus >= 0 else None,
                num_correct=r.num_correct_drafts,
                tensors=dict(r.tensors or {}),
            )
            for r in trace.of(i)
        ]
        requests.append(
            EngineRequest(
                name=f"sequence {i}",
                prompt=prompt,
                output=tokens,
                stats=dict(trace.stats[i]) if trace.stats else {},
                accepts=[r.num_correct or 0 for r in rounds] if trace.tree else None,
                rounds=rounds if trace.tree else None,
                **sampling_of(trace.sampling or {}),
            )
        )
    tree = TreeConfig(**trace.tree) if trace.tree else None
    versions = trace.versions.get("eagle3_jax")
    settings = Settings(
        engine="eagle3_jax",
        version=versions,
        tree=tree,
        speculative=tree is not None,
        dtype=trace.dtype.get("target"),
        other={
            "as_engine": trace.engine,
            "draft_attention": trace.draft_attention,
            "rule": (trace.sampling or {}).get("rule"),
        },
    )
    return EngineRun(source, settings, requests)


def of_record(record: Record, source: str) -> EngineRun:
    """A record (`eagle3 record`) with the rounds its engine ran, as a run with aux states."""
    requests = []
    for number in range(len(record.sequences)):
        one = record.sequences[number]
        text = np.asarray(one.tokens).tolist()
        rounds = [
            DumpedRound(
                index=i,
                length=r.start,
                tokens=None if r.proposed is None else [text[r.start], *r.proposed],
                parents=None if r.proposed is None else list(range(-1, len(r.proposed))),
                bonus=r.bonus,
                num_correct=r.accepted,
            )
            for i, r in enumerate(one.rounds or ())
        ]
        requests.append(
            EngineRequest(
                name=one.name or f"sequence {number}",
                prompt=text[: one.prompt_length],
                output=text[one.prompt_length :],
                accepts=[r.num_correct or 0 for r in rounds] or None,
                aux=np.asarray(one.aux),
                first=one.first,
                hidden_kind="aux",
                rounds=rounds or None,
            )
        )
    sampled = record.kind == "sampled"
    notes = ("the record holds sampled text",) if sampled else ()
    other = {"boundaries": record.boundaries, "num_layers": record.num_layers}
    other["embedding"] = record.embedding
    return EngineRun(source, Settings(engine="record", other=other), requests, notes)


def _folder(path: Path, prompts: Sequence[Sequence[int]] | None) -> EngineRun:
    info, settings = path / SERVER, None
    if info.is_file():
        settings = settings_of_server(_items(info)[0][1], str(info))
    files = [
        f for s in ("*.json", "*.jsonl") for f in sorted(path.glob(s)) if f.name not in NO_ANSWERS
    ]
    files = [f for f in files if f.name.split(".")[0] in ("answers", "results", "responses")] or (
        files if len(files) == 1 else []
    )
    dumped = next(path.rglob("step=*.pt"), None)
    if len(files) > 1:
        raise CrosscheckError(f"{path}: {len(files)} files of answers: name one")
    if not files and dumped is None:
        raise CrosscheckError(
            f"{path}: neither SGLang's dumper files (step=*.pt) nor a file of answers "
            "(answers.json, answers.jsonl)"
        )
    if not files:
        run = read_dump(path)
        return run if settings is None else dataclasses.replace(run, settings=settings)
    run = run_of(_items(files[0]), files[0], prompts, settings)
    if dumped is None:
        return run
    return with_dump(run, read_dump(path))


def with_dump(run: EngineRun, dump: EngineRun) -> EngineRun:
    """Answers with the rounds of a dump of the same requests, found by prompt and text.

    Raises:
      CrosscheckError: no request of the dump belongs to an answer.
    """
    left = list(dump.requests)
    requests, found = [], 0
    for request in run.requests:
        own = next((d for d in left if _same(request, d)), None)
        if own is None or own.rounds is None:
            requests.append(request)
            continue
        left.remove(own)
        found += 1
        requests.append(dataclasses.replace(request, rounds=_closed(request, own.rounds)))
    if not found:
        raise CrosscheckError(f"{dump.source}: no request of the dump has a prompt of {run.source}")
    return dataclasses.replace(run, requests=requests, notes=(*run.notes, *dump.notes))


def _same(request: EngineRequest, dumped: EngineRequest) -> bool:
    upto = min(len(request.output), len(dumped.output))
    same = request.output[:upto] == dumped.output[:upto]
    return request.prompt == dumped.prompt and same


def _closed(request: EngineRequest, rounds: list[DumpedRound]) -> list[DumpedRound]:
    """The statistics tell what the last round accepted, which no later round does."""
    known = [r.num_correct for r in rounds[:-1]]
    total = request.stats.get("spec_num_correct_drafts")
    count = request.stats.get("spec_verify_ct")
    if total is None or count != len(rounds) or None in known or rounds[-1].num_correct is not None:
        return rounds
    last = total - sum(k or 0 for k in known)
    chain = rounds[-1].parents is not None
    path = list(range(last + 1)) if chain and last >= 0 else None
    return [*rounds[:-1], dataclasses.replace(rounds[-1], num_correct=last, accepted=path)]


def _tensors(path: Path) -> EngineRun:
    """Named tensors in forward order, of one position or pass."""
    tensors: dict[str, Any] = {}
    try:
        if not is_zipfile(path):
            raise BadZipFile("no .npz archive, or not all of it")
        with np.load(path, allow_pickle=False) as file:
            tensors = {f"raw.{name}": file[name] for name in file.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error, NotImplementedError) as error:
        raise CrosscheckError(f"{path}: cannot be read as .npz: {error}") from None
    if not tensors:
        raise CrosscheckError(f"{path}: no tensors in it")
    for name, value in tensors.items():
        kind = value.dtype if isinstance(value, np.ndarray) else "no array"
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufV":
            shown = name.removeprefix("raw.")
            raise CrosscheckError(f"{path}: {shown} is {kind}, expected numbers")
    request = EngineRequest("tensors", [], [], rounds=[DumpedRound(0, 0, tensors=tensors)])
    return EngineRun(str(path), Settings(engine="tensors"), [request])


def _items(path: Path) -> list[tuple[str, Any]]:
    """JSON or JSON lines, each value with its place."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CrosscheckError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise CrosscheckError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _lines(path, text, error)
    if isinstance(value, list):
        return [(f"{path}, answer {i}", item) for i, item in enumerate(value)]
    return [(str(path), value)]


def _lines(path: Path, text: str, whole: Exception) -> list[tuple[str, Any]]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append((f"{path}, line {number}", json.loads(line)))
        except (ValueError, RecursionError) as error:
            single = found == [] and isinstance(whole, json.JSONDecodeError)
            worst = whole if single and isinstance(whole, json.JSONDecodeError) else error
            at = worst.lineno if single and isinstance(worst, json.JSONDecodeError) else number
            deep = "nested too deep" if isinstance(worst, RecursionError) else "a number too long"
            what = worst.msg if isinstance(worst, json.JSONDecodeError) else deep
            raise CrosscheckError(f"{path}, line {at}: not JSON: {what}") from None
    if not found:
        raise CrosscheckError(f"{path}: empty, expected answers")
    return found
