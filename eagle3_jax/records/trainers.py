"""Records from what trainers store: SpecForge, speculators (and vLLM's connector), ModelOpt.

Their texts are the trainer's, so nothing but the user can tell whether the target wrote them.
"""

import contextlib
import gzip
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.files.safetensors_file import SafetensorsFile
from eagle3_jax.files.torchfile import load_dict, to_numpy
from eagle3_jax.records.capture import Described, flat_ids, fold, mask_of, prompt_of
from eagle3_jax.records.types import RecordError, RecordSequence


def find(paths: Sequence[Path], *patterns: str) -> list[Path]:
    """Files as given, and those of folders that match, in the order of their numbers.

    Raises:
      RecordError: a path that is not there, a folder without any.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise RecordError(f"{path}: no such file or folder")
        inside = {p for pattern in patterns for p in path.rglob(pattern) if p.is_file()}
        if not inside:
            raise RecordError(f"{path}: no {' or '.join(patterns)} in it")
        found += sorted(inside, key=lambda p: _natural(str(p)))
    return found


def read_specforge(paths: Sequence[Path], described: Described) -> Iterator[RecordSequence]:
    """`.ckpt` and `.ckpt.gz` of SpecForge's `scripts/prepare_hidden_states.py` (commit 0168a59).

    `input_ids` [T], `loss_mask` [T], `aux_hidden_state` [1, T, A*E] and `hidden_state` [1, T, E],
    the last after the final norm. Its layer ids 1, L//2 - 1, L - 4 name blocks whose output is
    taken: boundaries (2, L//2, L-3), `--boundaries default`.
    """
    for path in find(paths, "*.ckpt", "*.ckpt.gz"):
        with _unpacked(path) as file:
            data = load_dict(file)
            yield _trained(
                path,
                data,
                described,
                aux="aux_hidden_state",
                last="hidden_state",
                last_boundary="final_norm",
            )


def read_modelopt(paths: Sequence[Path], described: Described) -> Iterator[RecordSequence]:
    """`.pt` of Model-Optimizer's `collect_hidden_states/compute_hidden_states_{hf,vllm}.py`.

    (Commits 6340546 and 1a7bb82.) `input_ids` [T], `aux_hidden_states` [T, A*E], `hidden_states`
    [T, E] after the final norm, or before it where `base_hidden_prenorm` is true; optional
    `loss_mask` and `conversation_id`. Its default layers are hidden_states 2, L//2, L-3 of
    transformers: `--boundaries default`.
    """
    for path in find(paths, "*.pt"):
        data = load_dict(path)
        prenorm = bool(data.get("base_hidden_prenorm", False))
        yield _trained(
            path,
            data,
            described,
            aux="aux_hidden_states",
            last="hidden_states",
            last_boundary=described.before_norm() if prenorm else "final_norm",
        )


def read_speculators(paths: Sequence[Path], described: Described) -> Iterator[RecordSequence]:
    """`hs_N.safetensors` of speculators 0.9 and the files of vLLM's `extract_hidden_states`.

    `token_ids` [T], `hidden_states` [T, n, E]. vLLM's layer ids are boundaries as they stand; its
    launcher appends L, so that the last slot is the state before the final norm. `--boundaries`
    names all n slots, or all but that last one. The loss mask is in the Arrow data set, not here.
    """
    for path in find(paths, "hs_*.safetensors", "*.safetensors"):
        file = SafetensorsFile(path)
        ids = flat_ids(_tensor(file, "token_ids"), str(path), "token_ids")
        states, slots = _tensor(file, "hidden_states"), described.slots()
        if states.ndim == 3 and states.shape[1] == len(slots) + 1:
            slots = (*slots, described.before_norm())
        aux = fold(states, len(slots), str(path), described.hidden_size)
        yield RecordSequence(
            tokens=ids,
            aux=aux,
            prompt_length=described.prompt_length,
            name=path.stem,
            tags=described.tags,
        )


def speculators_slots(paths: Sequence[Path], described: Described) -> tuple:
    """The boundaries of all slots of the first file, the one that is appended included."""
    path = find(paths, "hs_*.safetensors", "*.safetensors")[0]
    shape = SafetensorsFile(path).shape("hidden_states")
    slots = described.slots()
    if len(shape) == 3 and shape[1] == len(slots) + 1:
        return (*slots, described.before_norm())
    return slots


def _trained(
    path: Path, data: dict[str, Any], described: Described, *, aux: str, last: str, last_boundary
) -> RecordSequence:
    where, slots = str(path), described.slots()
    for key in ("input_ids", aux):
        if key not in data:
            raise RecordError(f"{where}: no {key!r}, found {', '.join(map(str, data))}")
    ids = flat_ids(to_numpy(data["input_ids"], where), where, "input_ids")
    captured = to_numpy(data[aux], where)
    asked = [slot for slot in slots if slot == last_boundary]
    states = fold(captured, len(slots) - len(asked), where, described.hidden_size)
    if asked:
        if last not in data or slots[-1] != last_boundary:
            raise RecordError(f"{where}: boundary {last_boundary} is {last!r} here, the last slot")
        ending = fold(to_numpy(data[last], where), 1, where, states.shape[2])
        if ending.shape[0] != states.shape[0]:
            raise RecordError(f"{where}: {last!r} has {len(ending)} rows, {aux!r} {len(states)}")
        states = np.concatenate([states, ending.astype(states.dtype, copy=False)], axis=1)
    mask = None
    if "loss_mask" in data:
        mask = mask_of(to_numpy(data["loss_mask"], where), len(ids), where)
    return RecordSequence(
        tokens=ids,
        aux=states,
        prompt_length=prompt_of(mask, described.prompt_length),
        loss_mask=mask,
        name=str(data.get("conversation_id", path.name.split(".")[0])),
        tags=described.tags,
    )


def _tensor(file: SafetensorsFile, name: str) -> np.ndarray:
    if name not in file.names():
        raise RecordError(f"{file.path}: no tensor {name!r}, found {', '.join(file.names())[:200]}")
    return file.read(name)


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.ckpt"
        try:
            with gzip.open(path) as packed, plain.open("wb") as file:
                shutil.copyfileobj(packed, file, 16 << 20)
        except (OSError, EOFError) as error:
            raise RecordError(f"{path}: cannot be unpacked: {error}") from None
        yield plain


def _natural(text: str) -> list[tuple[bool, int, str]]:
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", text)]
