"""The README as a newcomer reads it: a fresh environment, then its commands, pasted.

    python .ci/newcomer.py FOLDER

FOLDER becomes the environment. Every `$` line of the README runs in a shell, from the repository's
root, with DRAFT and TARGET replaced by the demo's; `make test` is left to the gate. The commands
must succeed and say what the README promises.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"make test": "the gate runs it"}
PROMISED = {
    "make demo": "same text: 6 of 6",
    "python -m convert.from_torch": "draft-jax: official draft",
    "eagle3 speculate": "same text: yes",
    "eagle3 replay": "3/4/8",
    "eagle3 doctor": "",
    "eagle3 crosscheck": "equal",
    "eagle3 inspect": "target states",
    "python -m convert.to_torch": "config and tensors are the same",
}
QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "What is 17 plus 28?")
WRITTEN = ("draft-jax", "R.record", "tiny-jax", "draft-sglang")


def commands(text: str) -> list[str]:
    """Every command of the console blocks, without its comment."""
    lines = [
        line
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    return [re.sub(r"\s+#.*$", "", line[2:]).strip() for line in lines if line.startswith("$ ")]


def run(command: str, environment: dict[str, str]) -> str:
    """Runs it as a shell would; ends everything when it fails. Status 1 of inspect is a warning."""
    print(f"$ {command}", flush=True)
    start = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print("\n".join(done.stdout.splitlines()[-12:]))
    print(f"({time.monotonic() - start:.0f} s)", flush=True)
    if done.returncode not in ((0, 1) if command.startswith("eagle3 inspect") else (0,)):
        sys.exit(f"exit status {done.returncode}: {command}")
    return done.stdout


def main(folder: Path):
    """The environment, then command after command."""
    venv.create(folder, with_pip=True, clear=True)
    environment = dict(os.environ)
    environment["PATH"] = f"{folder.resolve() / 'bin'}:{environment['PATH']}"
    environment["VIRTUAL_ENV"] = str(folder.resolve())
    environment.pop("PYENV_VERSION", None)
    words = {
        "DRAFT": "demo/draft",
        "TARGET": "",
        "PROMPTS": str(folder.resolve() / "prompts.jsonl"),
    }
    lines = [json.dumps({"prompt": text}) for text in QUESTIONS]
    Path(words["PROMPTS"]).write_text("\n".join(lines), encoding="utf-8")
    promised = dict(PROMISED)
    for line in commands((ROOT / "README.md").read_text(encoding="utf-8")):
        command = line
        if command in LEFT_OUT:
            print(f"$ {command}: {LEFT_OUT[command]}")
            continue
        if "TARGET" in command and not words["TARGET"]:
            where = (
                "import sys; sys.path.insert(0, 'demo'); import model; print(model.ensure_model())"
            )
            words["TARGET"] = run(f'python -c "{where}"', environment).split()[-1]
        for word, value in words.items():
            command = re.sub(rf"\b{word}\b", value, command)
        output = run(command, environment)
        for start in [p for p in promised if command.startswith(p)]:
            if promised[start] not in output:
                sys.exit(f"{command} did not print {promised[start]!r}")
            del promised[start]
    if promised:
        sys.exit(f"the README no longer has: {', '.join(promised)}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        for name in WRITTEN:
            shutil.rmtree(ROOT / name, ignore_errors=True)
