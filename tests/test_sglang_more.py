"""SGLang 0.5.23 on drafts, targets, trees and prompts other than those the code was written with.

`data/sglang/more`: recorded answers of its offline engine (float32, CPU). Drafts with one, four and
unsorted aux states, permuted and wide vocabularies, several switches at once, older names and
prefixes; targets with biases, a tied head, seven blocks, an eos that is reached.
"""

import json
from pathlib import Path

import pytest
from selection import by_default

import eagle3_jax as e3

FOLDER = Path(__file__).parent / "data/sglang"
CASES = json.loads((FOLDER / "more/answers.json").read_text())
FLAGS = {"combo1": ("--feedback", "post_norm")}
KEYS = (
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_correct_drafts_histogram",
    "completion_tokens",
    "finish_reason",
)


def model(name: str) -> Path:
    own = FOLDER / "more/models" / name
    return own if own.is_dir() else FOLDER / "models" / name


@pytest.mark.parametrize(
    "case", by_default(CASES, lambda i, _: i % 7 == 0), ids=lambda case: case["name"]
)
def test_answers_and_statistics(case, converted):
    folder = model(case["target"])
    target = e3.load_target(folder)
    flags = FLAGS.get(case["draft"], ())
    path = converted(model(case["draft"]), "--target", str(folder), *flags)
    draft = e3.load_draft(path, target=target, as_engine="sglang-0.5.23")
    rounds = 0
    for call in case["calls"]:
        sampling = call["sampling"]
        stop = () if sampling.get("ignore_eos") else target.config.eos_token_ids
        found = e3.speculate(
            target,
            draft,
            call["prompts"],
            max_new_tokens=sampling["max_new_tokens"],
            tree=e3.TreeConfig(*case["tree"]),
            stop_token_ids=(*stop, *(sampling.get("stop_token_ids") or ())),
        )
        for i, answer in enumerate(call["answers"]):
            assert found.tokens[i] == answer["output_ids"]
            theirs = {key: answer["meta_info"].get(key) for key in KEYS}
            assert {key: found.stats[i].get(key) for key in KEYS} == theirs
            rounds += len(found.accept_lengths[i])
    assert rounds > 0
