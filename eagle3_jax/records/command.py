"""`eagle3 record ...`: states of a target into one file form, from wherever they were captured."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax import prompts as prompts_module
from eagle3_jax import record as record_module
from eagle3_jax.checkpoint import manifest_config, read_manifest
from eagle3_jax.command import note, say
from eagle3_jax.config import Boundary, DraftConfig
from eagle3_jax.findings import ConvertError
from eagle3_jax.generate_report import progress
from eagle3_jax.hub import model_folder
from eagle3_jax.record import Record, RecordError, RecordSequence, RecordWriter
from eagle3_jax.records import arrays, dumper, live, page, sglang, trainers
from eagle3_jax.records.arguments import add_commands
from eagle3_jax.records.capture import Described, stored_as, target_facts
from eagle3_jax.records.last_state import read_final_norm
from eagle3_jax.records.recipe import recipe
from eagle3_jax.records.writing import check_destination
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.version import installed

Reader = Callable[[Sequence[Path], Described], Iterator[RecordSequence]]
FILES: dict[str, tuple[Reader, str]] = {
    "from-specforge": (trainers.read_specforge, "SpecForge .ckpt and .ckpt.gz (torch extra)"),
    "from-speculators": (trainers.read_speculators, "speculators' and vLLM's hs_N.safetensors"),
    "from-modelopt": (trainers.read_modelopt, "ModelOpt .pt (torch extra)"),
    "from-npz": (arrays.read_npz, ".npz with tokens, aux, prompt_length, ..."),
    "from-dumper": (
        lambda paths, described: dumper.read_dumps(_one(paths), described),
        "a folder of SGLang's dumper (torch extra)",
    ),
}


def add_parser(subparsers: Any):
    """Adds `record` to the commands of `eagle3`."""
    runs = {
        "show": _show,
        "make": _make,
        "from-sglang": _from_sglang,
        "recipe": _recipe,
        **dict.fromkeys(FILES, _from_files),
    }
    add_commands(subparsers, {name: text for name, (_, text) in FILES.items()}, runs)


def _show(args: argparse.Namespace) -> int:
    draft = None if args.draft is None else _draft_config(args.draft)
    found = page.describe(record_module.load(args.record), args.record, draft)
    say(json.dumps(found) if args.json else "\n".join(page.lines(found)))
    return 0


def _from_files(args: argparse.Namespace) -> int:
    described = _described(args, args.kind)
    reader, _ = FILES[args.reader]
    slots = described.slots()
    if args.reader == "from-speculators":
        slots = trainers.speculators_slots(args.paths, described)
    origin: dict[str, Any] = {"reader": args.reader, "paths": [str(path) for path in args.paths]}
    if args.reader == "from-dumper":
        origin["server"] = dumper.dumped_tree(_one(args.paths))
    return _write(args, described, slots, reader(args.paths, described), origin)


def _from_sglang(args: argparse.Namespace) -> int:
    if bool(args.answers) == (args.url is not None):
        raise ConvertError("USAGE", "give --url, or files of saved answers")
    if args.url is None:
        if args.kind is None:
            raise ConvertError("USAGE", "--kind: say whose tokens saved answers hold")
        described = _described(args, args.kind)
        ids = _prompt_ids(args, described.folder) if _has_prompts(args) else None
        sequences = sglang.read_responses(args.answers, described, ids)
        origin = {"reader": "from-sglang", "paths": [str(path) for path in args.answers]}
        return _write(args, described, described.slots(), sequences, origin)
    if args.kind is not None or not _has_prompts(args):
        raise ConvertError("USAGE", "--url takes --prompt, --prompts or --ids, and no --kind")
    _at_least("--max-new-tokens", args.max_new_tokens, 1)
    _at_least("--retries", args.retries, 0)
    _at_least("--top-logprobs", args.top_logprobs, 0)
    described = _described(args, "sampled" if args.temperature else "greedy")
    ids = _prompt_ids(args, described.folder)
    key = None if args.api_key_file is None else args.api_key_file.read_text().strip()
    server = live.Server(args.url, timeout=args.timeout, retries=args.retries, api_key=key)
    info = live.check_server(server.info(), max(map(len, ids)), args.partial_context)
    origin = {"reader": "from-sglang", "url": args.url, "server": info}
    with progress("prompts", len(ids)) as step:
        sequences = live.capture(
            server,
            ids,
            described,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
            top=args.top_logprobs,
            on_done=step,
        )
        return _write(args, described, described.slots(), sequences, origin, total=len(ids))


def _make(args: argparse.Namespace) -> int:
    import jax

    from eagle3_jax.records.making import Maker
    from eagle3_jax.targets import load_target

    _at_least("--max-new-tokens", args.max_new_tokens, 0)
    _at_least("--batch-size", args.batch_size, 1)
    _at_least("--top-logprobs", args.top_logprobs, 0)
    check_destination(args.out, args.force)
    folder = model_folder(args.target)
    draft = None if args.draft is None else _draft_config(args.draft)
    ids = _prompt_ids(args, folder)
    with jax.enable_x64(True) if args.dtype == "float64" else contextlib.nullcontext():
        target = load_target(folder, dtype=args.dtype)
        note(target.folder.notes)
        config = target.config
        prompts_module.check_sizes(_prompts(args), ids, config, args.max_new_tokens)
        if args.top_logprobs > config.vocab_size:
            raise ConvertError("USAGE", f"--top-logprobs: at most {config.vocab_size}")
        slots: tuple[Boundary, ...] | str = (*range(config.num_layers + 1), "final_norm")
        if draft is not None:
            slots = draft.resolve(config.num_layers).aux_boundaries
        elif args.boundaries is not None:
            slots = args.boundaries
        kind = "greedy" if args.max_new_tokens else "text"
        described = Described(slots, kind, **target_facts(folder), tags=tuple(args.tag))
        slots = described.slots()
        record_module.check_fields(
            Record(slots, kind, (), num_layers=config.num_layers), "--boundaries"
        )
        maker = Maker(target, slots, args.top_logprobs)
        stop = config.eos_token_ids if args.stop is None else args.stop
        origin = {
            "reader": "make",
            "dtype": args.dtype,
            "max_new_tokens": args.max_new_tokens,
            "stop": list(stop),
            "versions": installed("jax", "jaxlib", "numpy"),
        }

        def notes() -> Iterator[str]:
            if maker.disagreements:
                yield (
                    f"STATE_PASS_DIFFERS: {maker.disagreements} output tokens are not the best of "
                    f"the capturing pass, by {maker.worst_margin:.2g} at most: near ties"
                )

        with progress("prompts", len(ids)) as step:
            sequences = maker.sequences(
                ids,
                max_new_tokens=args.max_new_tokens,
                stop_token_ids=stop,
                batch_size=args.batch_size,
                tags=described.tags,
                on_done=step,
            )
            return _write(args, described, slots, sequences, origin, notes)


def _recipe(args: argparse.Namespace) -> int:
    _at_least("--tokens", args.tokens, 1)
    _at_least("--max-new-tokens", args.max_new_tokens, 1)
    path = Path(args.target)
    folder = path.parent if path.name == "config.json" else model_folder(args.target)
    described = Described("default", "greedy", **target_facts(folder))
    if described.num_layers is None or described.hidden_size is None:
        raise RecordError(f"{folder / 'config.json'}: has no num_hidden_layers")
    slots = args.boundaries
    if args.draft is not None:
        slots = _draft_config(args.draft).resolve(described.num_layers).aux_boundaries
    slots = dataclasses.replace(described, boundaries=slots).slots()
    record_module.check_fields(
        Record(slots, "greedy", (), num_layers=described.num_layers), "--boundaries"
    )
    say(
        recipe(
            args.engine,
            str(folder) if path.name == "config.json" else args.target,
            boundaries=slots,
            width=described.hidden_size,
            num_layers=described.num_layers,
            tokens=args.tokens,
            dtype=args.dtype,
            max_new_tokens=args.max_new_tokens,
        )
    )
    return 0


def _write(
    args: argparse.Namespace,
    described: Described,
    slots: tuple[Boundary, ...],
    sequences: Iterable[RecordSequence],
    origin: dict[str, Any],
    notes: Callable[[], Iterable[str]] = tuple,
    total: int | None = None,
) -> int:
    """Writes and shows a record; with `total` what came before a failure is kept and said."""
    cut: BaseException | None = None
    with RecordWriter(
        args.out,
        boundaries=slots,
        kind=described.kind,
        vocab_size=described.vocab_size,
        num_layers=described.num_layers,
        embedding=described.folder,
        provenance=origin,
        partial_context=args.partial_context,
        bos_token_id=described.bos_token_id,
        final_norm=read_final_norm(described.folder),
        allow=args.allow,
        force=args.force,
    ) as writer:
        waiting = iter(sequences)
        while True:
            try:
                sequence = next(waiting, None)
            except (RecordError, KeyboardInterrupt) as error:
                if total is None or not writer.count:
                    raise
                reason = str(error) or "interrupted"
                writer.note(f"CAPTURE_CUT: {writer.count} of {total} prompts: {reason}")
                cut = error
                break
            if sequence is None:
                break
            aux = sequence.aux
            if args.store is not None:
                aux = stored_as(aux, args.store, f"sequence {writer.count}")
            writer.append(dataclasses.replace(sequence, aux=aux))
        for note in notes():
            writer.note(note)
    if cut is not None:
        kept = f"{writer.count} of {total} sequences are kept in {args.out}"
        if isinstance(cut, KeyboardInterrupt):
            print(kept, file=sys.stderr)
            raise cut
        raise RecordError(f"{cut}; {kept}")
    found = page.describe(record_module.load(args.out), args.out, check=False)
    say(json.dumps(found) if args.json else "\n".join(page.lines(found)))
    return 0


def _described(args: argparse.Namespace, kind: Any) -> Described:
    check_destination(args.out, args.force)
    _at_least("--prompt-length", args.prompt_length, 0)
    facts: dict[str, Any] = {}
    if args.target is not None:
        facts = target_facts(model_folder(args.target))
    for name in ("num_layers", "vocab_size"):
        given = getattr(args, name)
        if given is None:
            continue
        flag = "--" + name.replace("_", "-")
        _at_least(flag, given, 1)
        if facts.get(name) not in (None, given):
            raise ConvertError("USAGE", f"{flag} is {given}, --target says {facts[name]}")
        facts[name] = given
    return Described(
        args.boundaries, kind, prompt_length=args.prompt_length, tags=tuple(args.tag), **facts
    )


def _draft_config(name: str) -> DraftConfig:
    folder = model_folder(name)
    return manifest_config(read_manifest(folder), folder)


def _has_prompts(args: argparse.Namespace) -> bool:
    return any(value is not None for value in (args.prompt, args.prompts, args.ids))


def _prompts(args: argparse.Namespace) -> list[prompts_module.Prompt]:
    if args.prompt is not None:
        return prompts_module.from_texts(args.prompt)
    if args.prompts is not None:
        return prompts_module.read_jsonl(args.prompts)
    return prompts_module.read_ids(args.ids)


def _prompt_ids(args: argparse.Namespace, folder: Path | None) -> list[list[int]]:
    found = _prompts(args)
    texts = [prompt for prompt in found if prompt.ids is None]
    tokenizer = None
    if texts:
        if folder is None:
            raise ConvertError("USAGE", f"{texts[0].where}: a text needs --target's tokenizer")
        tokenizer = Tokenizer.from_folder(folder)
    return prompts_module.encode(found, tokenizer, args.raw)


def _at_least(flag: str, value: int, least: int):
    if value < least:
        raise ConvertError("USAGE", f"{flag} is {value}, expected at least {least}")


def _one(paths: Sequence[Path]) -> Path:
    if len(paths) != 1:
        raise RecordError(f"{len(paths)} folders, expected one: a rank's dump")
    return paths[0]
