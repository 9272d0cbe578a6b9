"""A real 135M target and a draft trained elsewhere: the answers of four engines, round by round."""

import dataclasses

import pytest
from selection import by_default
from smollm2_goldens import greedy, read

import eagle3_jax as e3

pytestmark = [pytest.mark.smollm2, pytest.mark.full_compile]

ALL = tuple(range(10))
FEW = (0, 2, 6, 8)
"""Ended by eos, and one (8) by the limit, whose drafts depend on the embedding's rounding."""

NEAR_TIE = 1e-3
"""Rounding moves these float32 logits by about 1e-4: a smaller margin may fall either way."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One generation over recorded prompts; `--exhaustive` makes it all ten.

    `embed`: whose embedding the draft reads.
    """

    tree: e3.TreeConfig
    draft_attention: str = "ancestors"
    embed: str = "target"
    max_new_tokens: int = 128
    prompts: tuple[int, ...] = FEW


RUNS = {
    "chain3": Run(e3.TreeConfig(3)),
    "chain5": Run(e3.TreeConfig(5)),
    "tree16,3,4": Run(e3.TreeConfig(4, 4, 16)),
    "tree60,7,10": Run(e3.TreeConfig(8, 10, 60), prompts=(0, 6)),
    "sglang_chain_s3": Run(e3.TreeConfig(3), "beam_slots", max_new_tokens=64, prompts=ALL),
    "sglang_tree_s3_k4_d8": Run(
        e3.TreeConfig(3, 4, 8), "beam_slots", max_new_tokens=64, prompts=ALL
    ),
    "sglang_tree_s5_k4_d16": Run(
        e3.TreeConfig(5, 4, 16), "beam_slots", max_new_tokens=64, prompts=(0, 2, 4, 6, 8)
    ),
    "bf16_chain3": Run(e3.TreeConfig(3), embed="draft"),
    "bf16_chain5": Run(e3.TreeConfig(5), embed="draft"),
}
MORE = (
    "chain3",
    "chain5",
    "sglang_chain_s3",
    "tree16,3,4",
    "bf16_chain3",
    "tree60,7,10",
    "sglang_tree_s5_k4_d16",
    "bf16_chain5",
)


def runs(*prefixes: str) -> list:
    """The runs of an engine, those of MORE only for `--exhaustive`."""
    names = [name for name in RUNS if name.startswith(prefixes)]
    return by_default(names, lambda _, name: name not in MORE)


OFFICIAL, SGLANG, BF16 = runs("chain", "tree"), runs("sglang_"), runs("bf16_")


@pytest.fixture(scope="module")
def generated(smollm2_target, smollm2_drafts, request):
    """`generated(name)`: the run's `Generation`, made once."""
    done: dict[str, tuple[Run, e3.Generation]] = {}

    def get(name: str) -> tuple[Run, e3.Generation]:
        if name not in done:
            run = RUNS[name]
            if request.config.getoption("--exhaustive"):
                run = dataclasses.replace(run, prompts=ALL)
            result = e3.speculate(
                smollm2_target,
                smollm2_drafts[run.embed],
                [greedy()[i]["prompt_ids"] for i in run.prompts],
                max_new_tokens=run.max_new_tokens,
                tree=run.tree,
                draft_attention=run.draft_attention,
                trace=True,
            )
            done[name] = (run, result)
        return done[name]

    return get


def check_text(found: list[int], recorded: dict, limit: int):
    """The target's own text; where it differs, the margin there must be a near tie."""
    expected = recorded["gen_ids"][:limit]
    if found == expected:
        return
    shared = zip(found, expected, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(shared) if ours != theirs), None)
    assert at is not None, f"{len(found)} tokens, recorded {len(expected)}"
    margin = recorded["margins"][at]
    print(f"token {at}: {found[at]}, recorded {expected[at]}, margin {margin}")
    assert margin < NEAR_TIE


def test_plain_decoding(smollm2_target, request):
    """Without a draft: transformers' greedy text."""
    numbers = ALL if request.config.getoption("--exhaustive") else FEW
    prompts = [greedy()[number]["prompt_ids"] for number in numbers]
    result = e3.generate(smollm2_target, prompts, max_new_tokens=128)
    for number, tokens in zip(numbers, result.tokens, strict=True):
        check_text(tokens, greedy()[number], 128)


@pytest.mark.parametrize("name", runs(""))
def test_speculation_keeps_the_text(name, generated):
    run, result = generated(name)
    for number, tokens in zip(run.prompts, result.tokens, strict=True):
        check_text(tokens, greedy()[number], run.max_new_tokens)
    assert sum(map(sum, result.accept_lengths)) > 1.3 * sum(map(len, result.accept_lengths))


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_statistics(name, generated):
    """Rounds, accept length and rate, histogram, finish reason of SGLang 0.5.23."""
    run, result = generated(name)
    recorded = read(name)
    assert recorded["tree"] == [run.tree.num_steps, run.tree.topk, run.tree.num_draft_tokens]
    for number, stats, tokens in zip(run.prompts, result.stats, result.tokens, strict=True):
        answer = recorded["results"][number]
        assert tokens == answer["output_ids"]
        assert {k: stats.get(k) for k in answer["meta_info"]} == answer["meta_info"]


def correct_drafts(lengths: list[int]) -> list[int]:
    return [length - 1 for length in lengths]


def check_safeai_accepts(accept: list[int], recorded: list[int], tokens: list[int]):
    """SafeAILab ends when the last token was fed back, so a final bonus costs it one more round."""
    fed_back = sum(accept) + len(accept)
    extra = 1 if fed_back < len(tokens) else 0
    assert len(recorded) == len(accept) + extra
    assert recorded[: len(accept)] == accept


@pytest.mark.parametrize("name", OFFICIAL)
def test_safeai_accepts(name, generated):
    run, result = generated(name)
    mode = read("official_eagle")["modes"][name]
    sizes = (mode["depth"] + 1, mode["top_k"], mode["total_token"])
    assert sizes == (run.tree.num_steps, run.tree.topk, run.tree.num_draft_tokens)
    for row, number in enumerate(run.prompts):
        answer = mode["results"][number]
        tokens = result.tokens[row]
        assert answer["gen_ids"][: len(tokens)] == tokens
        check_safeai_accepts(correct_drafts(result.accept_lengths[row]), answer["accept"], tokens)


@pytest.mark.parametrize("name", OFFICIAL)
def test_safeai_proposals(name, generated):
    """Chains: every drafted token. Trees: tokens, depths and mask of the recorded first rounds."""
    run, result = generated(name)
    assert result.trace is not None
    compared = 0
    for row, number in enumerate(run.prompts):
        trees = read("official_eagle")["modes"][name]["results"][number]["trees"]
        rounds = result.trace.of(row)
        assert len(trees) in (0, 4, len(rounds), len(rounds) + 1, len(rounds) + 2)
        for ours, recorded in zip(rounds, trees, strict=False):
            compared += 1
            if run.tree.topk == 1:
                assert ours.tokens == recorded
                continue
            assert ours.tokens == recorded["tokens"]
            assert [p - ours.length for p in ours.positions] == recorded["depths"]
            assert ours.length + 1 == recorded["seq_len"]
            assert ancestor_rows(ours.parents) == recorded["mask"]
    assert compared >= 8


def ancestor_rows(parents: list[int]) -> list[str]:
    """Row i has a 1 for every node on the way from node i to the root."""
    rows: list[list[str]] = []
    for node, parent in enumerate(parents):
        row = list(rows[parent]) if parent >= 0 else ["0"] * len(parents)
        row[node] = "1"
        rows.append(row)
    return ["".join(row) for row in rows]


@pytest.mark.parametrize("name", BF16)
def test_peers_with_the_drafts_own_embedding(name, generated):
    """speculators' modules, SafeAILab's code and vLLM, all with the bf16 copy of the embedding."""
    run, result = generated(name)
    assert result.trace is not None
    k = run.tree.num_steps
    peer = read("chain_accept_peer")["results"]
    official = read("official_eagle_bf16emb")["modes"][f"chain{k}"]["results"]
    vllm = read(f"vllm_k{k}")["results"]
    for row, number in enumerate(run.prompts):
        accept = correct_drafts(result.accept_lengths[row])
        tokens = result.tokens[row]
        assert accept == peer[number][f"k{k}"]["accept"]
        proposals = [r.tokens[1:] for r in result.trace.of(row)]
        assert proposals == peer[number][f"k{k}"]["drafts"]
        check_safeai_accepts(accept, official[number]["accept"], tokens)
        assert tokens == vllm[number]["output_ids"]
        assert vllm[number]["spec"] == {
            "num_drafts": len(accept),
            "num_draft_tokens": k * len(accept),
            "num_accepted_tokens": sum(accept),
            "num_accepted_tokens_per_pos": [sum(a > i for a in accept) for i in range(k)],
        }


@pytest.mark.exhaustive
def test_the_embedding_owner_matters(generated):
    """The last digits of the embedding decide a draft of prompt 8."""
    accepts = []
    for name in ("chain3", "bf16_chain3"):
        run, result = generated(name)
        accepts.append(result.accept_lengths[run.prompts.index(8)])
    assert accepts[0] != accepts[1]


@pytest.mark.exhaustive  # each is compared with its own recording by default
def test_safeai_and_sglang_agree_on_a_chain(generated):
    """SGLang's 64 tokens of every prompt are the first rounds of SafeAILab's 128."""
    run, result = generated("sglang_chain_s3")
    for row, number in enumerate(run.prompts):
        accept = correct_drafts(result.accept_lengths[row])
        recorded = read("official_eagle")["modes"]["chain3"]["results"][number]["accept"]
        assert recorded[: len(accept)] == accept
