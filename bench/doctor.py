"""Seconds of `eagle3 doctor` on 2,000 tokens of SmolLM2 with all its boundaries.

python bench/doctor.py [--wrong] [--tokens 2000]: `--wrong` starts from boundaries (8, 20, 12).
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the capital of France and what is it known for?",
    "Give me three tips for learning to cook.",
    "Why is the sky blue?",
    "Describe the water cycle for a child.",
    "List the planets of the solar system with one fact each.",
    "What are the benefits of regular exercise?",
)


def record(target: str, folder: Path, tokens: int):
    """The target's own greedy answers with the states at all boundaries."""
    from eagle3_jax.cli import main
    from eagle3_jax.record import load

    out = folder / "R.record"
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    new = str(tokens // len(PROMPTS) + 8)
    argv = ["record", "make", "--target", target, *prompts, "--all-boundaries"]
    assert main([*argv, "--max-new-tokens", new, "--stop", "none", "--out", str(out)]) == 0
    return load(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", action="store_true", help="start from boundaries (8, 20, 12)")
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()

    from real_model import DEMO, smollm2_folder

    import eagle3_jax
    from convert import from_torch
    from eagle3_jax.doctor import diagnose
    from eagle3_jax.wirings.report import lines

    place = str(smollm2_folder())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [str(DEMO / "draft"), "--out", str(folder / "D"), "--target", place]
        assert from_torch.main(argv) == 0
        found = record(place, folder, args.tokens)
        target = eagle3_jax.load_target(place)
        draft = eagle3_jax.load_draft(folder / "D", target=target)
        start = time.perf_counter()
        diagnosis = diagnose(
            found,
            draft,
            target.shared(),
            changes={"boundaries": (8, 20, 12)} if args.wrong else {},
            max_tokens=args.tokens,
        )
        seconds = time.perf_counter() - start
    print("\n".join(lines(diagnosis)))
    print(
        f"{seconds:.1f} s for {args.tokens} tokens, {diagnosis.tried} wirings, "
        f"{len(found.boundaries)} boundaries, {os.cpu_count()} CPUs"
    )
