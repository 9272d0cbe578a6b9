"""A Llama GGUF file as a Hugging Face folder: `python -m convert.from_gguf FILE --out HF_DIR`."""

import argparse
import collections
import importlib.metadata
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from eagle3_jax.command import Parser, run_command, say
from eagle3_jax.files.gguf_file import GgufFile
from eagle3_jax.files.gguf_model import GgufLlama, Weight, read_llama
from eagle3_jax.files.gguf_tokenizer import GgufTokenizer, read_tokenizer
from eagle3_jax.files.source import FileError, sha256_file
from eagle3_jax.files.whole import put
from eagle3_jax.version import __version__

PROVENANCE = "provenance.json"
FORMAT = 1


def convert(
    source: Path,
    out: Path,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes model.safetensors (float32), configs, tokenizer and provenance.json; all or nothing.

    Args:
      source: the GGUF file.
      out: the folder; it must not exist, or with `force` be one that this function wrote.
      progress: called with bytes written and bytes in all.

    Returns:
      The report: facts on model and tokenizer, and what provenance.json holds.

    Raises:
      FileError: the file cannot be converted, or the folder not be written.
    """
    source, out = Path(source), Path(out)
    _check_destination(out, force)
    file = GgufFile(source)
    llama = read_llama(file)
    tokenizer = read_tokenizer(file, llama.config["vocab_size"])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
            made = Path(temporary) / "new"
            made.mkdir()
            _write_folder(made, llama, tokenizer, progress)
            provenance = _provenance(file, llama, made)
            _write_json(made / PROVENANCE, provenance)
            put(made, out)
    except OSError as error:
        raise FileError(f"{out}: cannot be written: {error.strerror}") from None
    return {
        "out": str(out),
        "parameters": sum(math.prod(w.shape) for w in llama.weights),
        "config": json.loads((out / "config.json").read_text(encoding="utf-8")),
        "tokenizer": {
            "pre": file.value("tokenizer.ggml.pre", str),
            "tokens": len(tokenizer.tokenizer["model"]["vocab"]),
            "merges": len(tokenizer.tokenizer["model"]["merges"]),
            "special": len(tokenizer.tokenizer["added_tokens"]),
            "chat_template": "chat_template" in tokenizer.config,
        },
        **provenance,
    }


def _check_destination(out: Path, force: bool):
    if not os.path.lexists(out):
        return
    if not force:
        raise FileError(f"{out}: exists; --force overwrites it")
    if not (out / PROVENANCE).is_file():
        raise FileError(f"{out}: holds no {PROVENANCE}, so it is not overwritten: not our folder")


def _write_folder(
    folder: Path,
    llama: GgufLlama,
    tokenizer: GgufTokenizer,
    progress: Callable[[int, int], None],
):
    eos = list(tokenizer.eos)
    ids = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": tokenizer.pad,
    }
    _write_json(folder / "config.json", llama.config | ids)
    _write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    _write_json(folder / "tokenizer.json", tokenizer.tokenizer)
    _write_json(folder / "tokenizer_config.json", tokenizer.config)
    write_weights(folder / "model.safetensors", llama.weights, progress)


def _write_json(path: Path, value: dict[str, Any]):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(
    path: Path, weights: tuple[Weight, ...], progress: Callable[[int, int], None]
) -> None:
    """Writes float32 safetensors: the header first, then the tensors, some rows at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for weight in weights:
        size = 4 * math.prod(weight.shape)
        header[weight.name] = {
            "dtype": "F32",
            "shape": list(weight.shape),
            "data_offsets": [total, total + size],
        }
        total += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for weight in weights:
            for chunk in weight.chunks():
                file.write(chunk.data)
                done += chunk.nbytes
                progress(done, total)


def _provenance(file: GgufFile, llama: GgufLlama, folder: Path) -> dict[str, Any]:
    kinds = collections.Counter(w.tensor.tensor_type.name for w in llama.weights)
    return {
        "format": FORMAT,
        "source": {
            "file": file.path.name,
            "bytes": file.path.stat().st_size,
            "sha256": sha256_file(file.path),
            "quantisation": dict(kinds.most_common()),
        },
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "versions": {"eagle3_jax": __version__, "gguf": importlib.metadata.version("gguf")},
    }


def intact(folder: Path, sha256: str) -> bool:
    """Whether a folder is this converter's finished work on the source with that digest.

    Compares provenance.json with the sizes on disk; contents are not read.
    """
    try:
        provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in provenance["files"]}
        return (
            provenance["format"] == FORMAT
            and provenance["source"]["sha256"] == sha256
            and provenance["files"] == sizes
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _report(result: dict[str, Any]) -> str:
    config, tokenizer, source = result["config"], result["tokenizer"], result["source"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in source["quantisation"].items())
    scaling = config["rope_scaling"]
    rope = f"theta {config['rope_theta']:g}"
    if scaling:
        rope += f", llama3 scaling by {scaling['factor']:g}"
    heads = f"{config['num_attention_heads']} query and {config['num_key_value_heads']} kv heads"
    template = "with" if tokenizer["chat_template"] else "without"
    head = "the embedding's" if config["tie_word_embeddings"] else "its own"
    rows = {
        "source": f"{source['file']}, {source['bytes']:,} bytes, sha256 {source['sha256']}",
        "tensors": f"{kinds}; written as float32, {result['parameters']:,} parameters",
        "model": f"{config['architectures'][0]}, {config['num_hidden_layers']} layers of "
        f"{config['hidden_size']}, MLP {config['intermediate_size']}",
        "attention": f"{heads} of {config['head_dim']}, rope {rope}",
        "head": f"{head}, vocabulary {config['vocab_size']:,}",
        "tokenizer": f"{tokenizer['pre']}: {tokenizer['tokens']:,} tokens, "
        f"{tokenizer['merges']:,} merges, {tokenizer['special']} special, {template} chat template",
        "ids": f"bos {config['bos_token_id']}, eos {config['eos_token_id']}, "
        f"pad {config['pad_token_id']}",
        "out": result["out"],
    }
    return "\n".join(f"{name:<10} {text}" for name, text in rows.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser(
        prog="python -m convert.from_gguf",
        description="Converts a Llama-architecture GGUF file to a Hugging Face folder in float32. "
        "Exit status 0, or 2 with one error and nothing written.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, metavar="HF_DIR", help="folder to write")
    parser.add_argument(
        "--force", action="store_true", help="replace a folder that was written to HF_DIR before"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return run_command(parser, run, argv)


def run(args: argparse.Namespace):
    """Converts as parsed arguments say, with a bar if stderr is a terminal; prints the report."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"converting {args.file.name}", total=None)
        result = convert(
            args.file,
            args.out,
            force=args.force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    say(json.dumps(result, indent=2) if args.json else _report(result))


if __name__ == "__main__":
    sys.exit(main())
