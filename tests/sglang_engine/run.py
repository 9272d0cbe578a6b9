"""The real SGLang against this package: right runs must be equal, each fault must be named.

python tests/sglang_engine/run.py --sglang-python VENV/bin/python [--pair tiny] [--tree chain]

Exit status 1 when a verdict is not the expected one.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from client import Engine, environment, serving  # noqa: E402
from faults import FAULTS, WIRING  # noqa: E402
from real_model import DEMO, smollm2_folder  # noqa: E402
from record import MODELS, NOT_IN_A_CHAIN, PROMPTS, TREES  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from convert import from_torch  # noqa: E402
from eagle3_jax import cli  # noqa: E402
from eagle3_jax.crosscheck.dumping import write_sglang_dump  # noqa: E402
from eagle3_jax.crosscheck.result import FINE  # noqa: E402
from eagle3_jax.records.live import Server  # noqa: E402

TEXTS = [
    "Why is the sky blue?",
    "Count from one to ten.",
    "Write a short poem about the sea.",
    "What is the capital of France?",
]
NAMED = {
    "d2t_as_ids": "d2t read as ids",
    "aux_one_early": "one layer early",
    "norm_before_residual": "norm_before_residual",
    "norm_output": "post_norm",
    "fc_norm": "fc_norm",
    "draft_position": "positions off by +1",
    "histogram_cut": "histogram",
    "token_swapped": "the target's choice",
    "accept_one_less": "accepted fewer drafts",
    "stale_kv": "stale KV row",
    "stale_draft_kv": "stale KV row",
    "mask_bit": "mask bit",
    "position": "positions off by +1",
}
"""What a verdict says of a fault; of the others only where it shows."""
DUMPED_TOKENS = 12
PAIRS = ("tiny", "smollm2")
SEEN_IN_SMOLLM2 = {"aux_one_early": "one layer early", "stale_kv": "target differs"}
"""There the stale row changes the next token, before any state behind it is in the answer."""
FOR_SMOLLM2 = (*SEEN_IN_SMOLLM2, "rounding")
IN_THE_DUMP = ("draft_position", "stale_draft_kv")
"""Faults that answers hardly show; judged by a dump of the same run."""


@dataclasses.dataclass
class Pair:
    """A target and its draft as both engines take them, and what is asked of them."""

    name: str
    target: Path
    draft: Path
    converted: Path
    prompts: list[str]
    new_tokens: int

    def crosscheck(self, *arguments: object) -> dict[str, Any]:
        """The object that `eagle3 crosscheck ... --json` prints."""
        said = io.StringIO()
        command = ["crosscheck", "--target", self.target, "--draft", self.converted, *arguments]
        with contextlib.redirect_stdout(said):
            cli.main([*map(str, command), "--json"])
        found = json.loads(said.getvalue())
        if "error" in found:
            found |= {"kind": "error", "verdict": found["error"]["message"]}
        return found


def make_pair(name: str, work: Path) -> Pair:
    converted = work / f"{name}-draft"
    if name == "tiny":
        prompts = [json.dumps({"input_ids": prompt}) for prompt in PROMPTS]
        pair = Pair(name, MODELS / "target", MODELS / "draft", converted, prompts, 24)
    else:
        prompts = [json.dumps({"prompt": text}) for text in TEXTS]
        pair = Pair(name, smollm2_folder(), DEMO / "draft", converted, prompts, 24)
    command = [str(pair.draft), "--out", str(converted), "--target", str(pair.target), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if from_torch.main(command) != 0:
            raise SystemExit(said.getvalue())
    return pair


class Checks:
    """Runs one check after the other and remembers what went wrong."""

    def __init__(self):
        self.failed: list[str] = []

    def note(self, name: str, passed: bool, what: str, since: float):
        mark = "ok  " if passed else "FAIL"
        print(f"{mark} {time.monotonic() - since:5.1f} s  {name}: {what}", flush=True)
        if not passed:
            self.failed.append(name)


def ask(pair: Pair, engine: Engine, save: Path, prompts: Sequence[str], batch: int = 1):
    """`eagle3 crosscheck --url`, its answers kept."""
    file = save.with_name(f"{save.name}.jsonl")
    file.write_text("".join(f"{line}\n" for line in prompts), encoding="utf-8")
    options = ["--url", engine.url, "--prompts", file, "--save", save, "--batch-size", batch]
    return pair.crosscheck(*options, "--ignore-eos", "--max-new-tokens", pair.new_tokens)


def check_pair(checks: Checks, pair: Pair, kind: str, engine: Engine, work: Path):
    """Right runs of one server, then its faults."""
    name = f"{pair.name} {kind}"
    for batch in (1, 4):
        since, folder = time.monotonic(), work / f"right-{batch}"
        found = ask(pair, engine, folder, pair.prompts, batch)
        checks.note(f"{name} batch {batch}", found["kind"] == "equal", found["verdict"], since)
    since, again = time.monotonic(), pair.crosscheck(folder)
    checks.note(f"{name} offline", again == found, again["verdict"], since)
    if pair.name == "tiny":
        check_dumps(checks, pair, kind, engine, work)
    for fault in faults_of(pair, kind):
        since, folder = time.monotonic(), work / fault
        engine.set(fault, first_round=1)
        found = ask(pair, engine, folder, pair.prompts[: 2 if fault in WIRING else 1])
        if not engine.done():
            checks.note(f"{name} {fault}", False, "the fault found no place to act", since)
            continue
        if fault in IN_THE_DUMP:
            found = pair.crosscheck(dumped(engine, pair, fault, folder))
        wrong = found["kind"] not in (*FINE, "error", "not decidable")
        expected = found["kind"] == "equal" if fault == "rounding" else wrong
        word = NAMED.get(fault, "") if pair.name == "tiny" else SEEN_IN_SMOLLM2.get(fault, "")
        named = word in found["verdict"]
        checks.note(f"{name} {fault}", expected and named, found["verdict"], since)
    engine.set(None)


def faults_of(pair: Pair, kind: str) -> Iterator[str]:
    for fault in FAULTS:
        if kind == "chain" and fault in NOT_IN_A_CHAIN[:2]:
            continue
        if pair.name == "tiny" or fault in FOR_SMOLLM2:
            yield fault


def dumped(engine: Engine, pair: Pair, fault: str | None, answers: Path) -> Path:
    """A dump of the first prompt with what the server said of itself, as a folder to read."""
    folder = answers.with_name(answers.name + "-dump")
    folder.mkdir()
    (folder / "server_info.json").write_bytes((answers / "server_info.json").read_bytes())
    engine.set(fault, first_round=1, dump=folder / "dump")
    generate(engine, DUMPED_TOKENS)
    engine.set(None)
    generate(engine, 1)
    return folder


def generate(engine: Engine, tokens: int):
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    Server(engine.url).ask("/generate", {"input_ids": PROMPTS[0], "sampling_params": sampling})


def check_dumps(checks: Checks, pair: Pair, kind: str, engine: Engine, work: Path):
    """SGLang's dump read here, and ours beside SGLang's own in SGLang's comparator."""
    since, theirs = time.monotonic(), dumped(engine, pair, None, work / "right-1")
    found = pair.crosscheck(theirs)
    checks.note(f"{pair.name} {kind} dump", found["kind"] == "equal", found["verdict"], since)
    since, ours = time.monotonic(), work / "ours"
    target = e3.load_target(pair.target)
    write_sglang_dump(
        ours,
        target,
        e3.load_draft(pair.converted, target=target, as_engine="sglang-0.5.23"),
        PROMPTS[:1],
        max_new_tokens=DUMPED_TOKENS,
        tree=e3.TreeConfig(*TREES[kind]),
        stop_token_ids=(),
    )
    command = [str(engine.python), "-m", "sglang.srt.debug_utils.dump_comparator"]
    command += ["--baseline-path", str(theirs / "dump"), "--target-path", str(ours)]
    command += ["--diff-threshold", "1e-6"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    equal, wrong, missing = compared(done.stdout)
    what = f"{equal} tensors equal, {len(wrong)} differ, {missing} not compared: {wrong[:3]}"
    passed = done.returncode == 0 and equal > 100 and not wrong and not missing
    if done.returncode:
        what = done.stderr.strip().splitlines()[-1][:200]
    checks.note(f"{pair.name} {kind} SGLang's comparator", passed, what, since)


def compared(text: str) -> tuple[int, list[str], int]:
    """Equal tensors, names of others, and tensors not compared, of the comparator's text.

    `req_pool_indices` are left out: which rows of a pool were free is no result.
    """
    equal, wrong, missing = 0, [], text.count("Skip") + text.count("Shape mismatch")
    for block in text.split("Check:\n")[1:]:
        name = re.search(r"target=.*/(step=\d+)\S*___name=(\w[\w.]*?)___", block)
        assert name is not None
        if name[2] == "req_pool_indices":
            continue
        good = "\u2705 rel_diff" in block
        equal += good
        if not good:
            wrong.append(f"{name[1]} {name[2]}")
    return equal, wrong, missing


def side_by_side(pairs: Sequence[str]) -> int:
    """Each pair in a process of its own: half the time on two cores."""
    others, at = [a for a in sys.argv[1:] if a not in PAIRS and a != "--pair"], []
    try:
        for pair in pairs:
            at.append(subprocess.Popen([sys.executable, __file__, *others, "--pair", pair]))
        return max(process.wait() for process in at)
    finally:
        for process in at:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", type=Path, required=True)
    parser.add_argument("--pair", choices=PAIRS, action="append")
    parser.add_argument("--tree", choices=TREES, action="append")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    pairs = args.pair or PAIRS
    if len(pairs) > 1:
        return side_by_side(pairs)
    checks, begun = Checks(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for pair_name in pairs:
            pair = make_pair(pair_name, work)
            for kind in args.tree or TREES:
                since, folder = time.monotonic(), work / f"{pair_name}-{kind}"
                with serving(
                    args.sglang_python,
                    pair.target,
                    pair.draft,
                    TREES[kind],
                    folder,
                ) as engine:
                    checks.note(f"{pair_name} {kind} server", True, engine.url, since)
                    check_pair(checks, pair, kind, engine, folder)
    total = time.monotonic() - begun
    print(f"{len(checks.failed)} failed in {total:.0f} s{': ' if checks.failed else ''}", end="")
    print(", ".join(checks.failed))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
