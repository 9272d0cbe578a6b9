"""The doctor's seconds on 2,000 tokens of SmolLM2: `python bench/doctor.py` after `make model`.

With the target's states at all its boundaries, once as configured and once from the boundaries
(8, 20, 12), compilation included.
"""

import sys
import tempfile
import time
from pathlib import Path

import harness

parser = harness.parser(__doc__)
parser.add_argument("--tokens", type=int, default=2000, metavar="N")
args = parser.parse_args()
harness.use_cores(args.cores)

sys.path.insert(0, str(harness.ROOT / "tests"))
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


def main():
    import jax
    from real_model import DEMO, smollm2_folder

    import eagle3_jax
    from convert import from_torch
    from eagle3_jax.doctor import diagnose
    from eagle3_jax.wirings.report import sentence

    place = str(smollm2_folder())
    result = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [str(DEMO / "draft"), "--out", str(folder / "D"), "--target", place]
        assert from_torch.main(argv) == 0
        found = record(place, folder, args.tokens)
        target = eagle3_jax.load_target(place)
        draft = eagle3_jax.load_draft(folder / "D", target=target)
        for start_from, changes in (("as configured", {}), ("wrong", {"boundaries": (8, 20, 12)})):
            jax.clear_caches()
            start = time.perf_counter()
            diagnosis = diagnose(
                found, draft, target.shared(), changes=changes, max_tokens=args.tokens
            )
            result[start_from] = {
                "seconds": round(time.perf_counter() - start, 1),
                "wirings": diagnosis.tried,
                "verdict": diagnosis.verdict,
                "sentence": sentence(diagnosis),
            }
        result |= {"tokens": args.tokens, "boundaries": len(found.boundaries)}
    harness.report({"doctor": result}, args.out)


if __name__ == "__main__":
    main()
