"""Sampled generation end to end on the tiny pair: the loop, its coins, its texts' distribution."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from selection import by_default, every_other

import eagle3_jax as e3
from eagle3_jax import AcceptRule, SamplingConfig, TreeConfig, loop
from eagle3_jax.sampling import SamplingPlan, SamplingValues, adjust, probabilities

F32 = np.dtype(np.float32)

PROMPTS = [[5, 17, 99, 3], [64, 2], [7, 7, 7, 7, 7, 7, 7], [120, 1, 33]]
CHAIN, TREE, WIDE = TreeConfig(3), TreeConfig(3, 4, 8), TreeConfig(2, 3, 10)
RULES = {
    "target_only": (AcceptRule(), WIDE),
    "rejection": (AcceptRule("rejection"), WIDE),
    "token_wise": (AcceptRule("rejection", sampled_drafts=True), CHAIN),
    "block": (AcceptRule("rejection", sampled_drafts=True, block=True), CHAIN),
}
SOME_RULES = by_default(RULES, lambda _, name: name in ("target_only", "block"))
EVERYTHING = SamplingConfig(
    1.1,
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={9: 2.0, 40: -3.0},
    seed=range(64),
)
PENALTIES = SamplingConfig(
    0.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.6, logit_bias={3: 4}
)


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    return tiny_target, tiny_draft


def run(pair, config, rule=None, tree=TREE, prompts=PROMPTS, n=16, trace=False):
    target, draft = pair
    return e3.speculate(
        target,
        draft,
        prompts,
        max_new_tokens=n,
        tree=tree,
        stop_token_ids=(),
        sampling=config,
        rule=rule,
        trace=trace,
    )


@pytest.mark.parametrize("tree", every_other([TREE, CHAIN]), ids=str)
def test_greedy_with_penalties_is_plain_decoding_with_penalties(pair, tree):
    """Each node's penalties see its own path: else the texts would part at the first repeat."""
    expected = e3.generate(
        pair[0], PROMPTS, max_new_tokens=40, stop_token_ids=(), sampling=PENALTIES
    ).tokens
    plain = e3.generate(pair[0], PROMPTS, max_new_tokens=40, stop_token_ids=()).tokens
    assert sum(len(t) - len(set(t)) for t in plain) > 10  # there is something to penalise
    assert expected != plain
    found = run(pair, PENALTIES, tree=tree, n=40)
    assert found.tokens == expected
    assert sum(sum(a) - len(a) for a in found.accept_lengths) > 0


def processed(logits: np.ndarray, before: list[int], config: SamplingConfig) -> np.ndarray:
    """The distribution after the tokens `before`, in NumPy, one token at a time."""
    z = logits.astype(np.float64)
    for token in set(before):
        z[token] -= config.presence_penalty + config.frequency_penalty * before.count(token)
        z[token] *= config.repetition_penalty if z[token] < 0 else 1 / config.repetition_penalty
    for token, bias in config.logit_bias:
        z[token] += bias
    if config.temperature == 0:
        return (np.arange(len(z)) == z.argmax()).astype(np.float64)
    p = np.exp((z - z.max()) / config.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    p[order[config.top_k :]] = 0
    p /= p.sum()
    before_it = np.cumsum(p[order]) - p[order]
    p[order[before_it >= config.top_p]] = 0
    p /= p.sum()
    p[p < config.min_p * p.max()] = 0
    return p / p.sum()


def distributions(target, texts, config):
    """(token, its distribution) for every token of texts, from one plain pass over each."""
    prompts, outputs = zip(*texts, strict=True)
    logits = {}
    for item in e3.rounds(
        target,
        None,
        prompts,
        max_new_tokens=len(outputs[0]),
        tree=None,
        stop_token_ids=(),
        follow=outputs,
        tensors=True,
    ):
        if item.index == 0:
            logits[item.sequence, 0] = item.tensors["prefill.target_logits"]
        logits[item.sequence, item.index + 1] = item.tensors["target_logits"][0]
    for b, tokens in enumerate(outputs):
        for i, token in enumerate(tokens):
            yield token, processed(logits[b, i], tokens[:i], config)


def test_plain_greedy_with_penalties_is_decoding_one_by_one(pair):
    found = e3.generate(pair[0], PROMPTS, max_new_tokens=40, stop_token_ids=(), sampling=PENALTIES)
    texts = list(zip(PROMPTS, found.tokens, strict=True))
    for token, p in distributions(pair[0], texts, PENALTIES):
        assert p[token] == 1


def p_value(target, texts, config, cells: int = 40) -> float:
    """Whether texts are drawn from the target: each token's place in its own distribution.

    Tokens stand in order of likelihood, so that a rule which favours likely ones shows. Spread
    evenly over the token's probability the places are uniform on [0, 1) and independent,
    for texts drawn from those distributions and no others.
    """
    rng, places = np.random.default_rng(0), []
    for token, p in distributions(target, texts, config):
        assert p[token] > 0
        likelier = p[(p > p[token]) | ((p == p[token]) & (np.arange(len(p)) < token))].sum()
        places.append(likelier + rng.random() * p[token])
    return stats.chisquare(np.histogram(places, cells, (0, 1))[0]).pvalue


MANY = [p for p in PROMPTS for _ in range(16)]
LENGTH = 24


@pytest.fixture(scope="module")
def many(pair):
    """Texts of all prompts under many seeds, once for each rule."""
    done = {}

    def found(name):
        if name not in done:
            done[name] = run(pair, EVERYTHING, *RULES[name], MANY, LENGTH, trace=True)
        return done[name]

    return found


@pytest.mark.parametrize("name", SOME_RULES)
def test_texts_are_drawn_from_the_target(pair, many, name):
    found = many(name)
    assert p_value(pair[0], list(zip(MANY, found.tokens, strict=True)), EVERYTHING) > 0.01
    assert found.trace.rule == RULES[name][0].name
    assert found.trace.sampling["rule"]["lossless"] is True


@pytest.mark.parametrize("name", SOME_RULES)
def test_the_expected_accept_length_is_the_measured_one(many, name):
    rounds = many(name).trace.rounds
    accepted = np.asarray([r.num_correct_drafts for r in rounds])
    expected = np.asarray([r.expected_drafts for r in rounds])
    assert accepted.sum() > 50
    spread = np.sqrt(((accepted - expected) ** 2).sum())
    assert abs(accepted.sum() - expected.sum()) < 4 * spread
    for item in rounds[:200]:
        assert len(item.target_probs) == len(item.tokens)
        assert item.margins == []
        for node in item.accepted[1:]:
            assert item.target_probs[node] > 0


@pytest.mark.parametrize("name", SOME_RULES)
def test_a_text_depends_on_its_prompt_and_seed_alone(pair, many, name):
    first = many(name)
    order = np.random.default_rng(1).permutation(len(MANY))
    seeds = [EVERYTHING.seed[i] for i in order]
    moved = [MANY[i] for i in order]
    again = run(pair, EVERYTHING.with_seed(seeds), *RULES[name], moved, LENGTH, trace=True)
    for i, at in enumerate(order):
        assert again.tokens[i] == first.tokens[at]
        assert again.accept_lengths[i] == first.accept_lengths[at]
    other = run(pair, EVERYTHING.with_seed(8), *RULES[name], MANY, LENGTH, trace=True)
    assert other.tokens != first.tokens
    assert other.tokens[0] == other.tokens[1]  # one prompt, one seed


@pytest.mark.parametrize("name", SOME_RULES)
def test_one_token_left_by_top_k_is_the_greedy_text(pair, name):
    values = {f.name: getattr(EVERYTHING, f.name) for f in dataclasses.fields(EVERYTHING)}
    greedy = SamplingConfig(**(values | {"temperature": 0.0, "seed": 0}))
    expected = e3.generate(
        pair[0], MANY, max_new_tokens=LENGTH, stop_token_ids=(), sampling=greedy
    ).tokens
    one = SamplingConfig(**(values | {"top_k": 1}))
    assert run(pair, one, *RULES[name], MANY, LENGTH, trace=True).tokens == expected


@pytest.mark.exhaustive  # the command's --trace takes this way too
def test_round_by_round_it_is_the_same(pair, many):
    whole = many("target_only")
    rule, tree = RULES["target_only"]
    streamed = e3.rounds(
        *pair,
        MANY,
        max_new_tokens=LENGTH,
        tree=tree,
        stop_token_ids=(),
        sampling=EVERYTHING,
        rule=rule,
    )
    for one, other in zip(streamed, whole.trace.rounds, strict=True):
        assert (one.sequence, one.index, one.tokens) == (other.sequence, other.index, other.tokens)
        assert (one.accepted, one.emitted) == (other.accepted, other.emitted)


@pytest.mark.exhaustive
def test_alone_as_among_others(pair, many):
    for at in (0, 40):
        config = EVERYTHING.with_seed(EVERYTHING.seed[at])
        alone = run(pair, config, *RULES["target_only"], [MANY[at]], LENGTH)
        assert alone.tokens[0] == many("target_only").tokens[at]


@pytest.mark.exhaustive  # test_verify.py has it exactly
def test_thresholds_below_one_are_not_the_target_and_the_trace_says_so(pair):
    rule = AcceptRule(threshold_acc=0.3)
    found = run(pair, EVERYTHING, rule, WIDE, MANY, LENGTH, trace=True)
    assert p_value(pair[0], list(zip(MANY, found.tokens, strict=True)), EVERYTHING) < 1e-6
    assert found.trace.sampling["rule"]["lossless"] is False


def test_plain_sampling_is_drawn_from_the_target(pair):
    found = e3.generate(
        pair[0], MANY, max_new_tokens=LENGTH, stop_token_ids=(), sampling=EVERYTHING
    )
    assert p_value(pair[0], list(zip(MANY, found.tokens, strict=True)), EVERYTHING) > 0.01


def test_another_temperature_compiles_nothing(pair, many):
    many("target_only")
    before = (loop.start_jit._cache_size(), loop.finish_jit._cache_size())
    other = SamplingConfig(
        1.5,
        top_k=3,
        top_p=0.3,
        min_p=0.2,
        repetition_penalty=0.9,
        logit_bias={2: 1},
        seed=4,
    )
    run(pair, other, *RULES["target_only"], MANY, LENGTH, trace=True)
    assert (loop.start_jit._cache_size(), loop.finish_jit._cache_size()) == before


def test_a_sampled_trace_reads_back(many, tmp_path):
    trace = many("block").trace
    trace.save(tmp_path / "t.jsonl")
    assert e3.Trace.load(tmp_path / "t.jsonl") == trace


BAD = [
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"temperature": True}, "temperature is True"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"top_p": 0}, r"top_p is 0, expected a number in \(0, 1\]"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"frequency_penalty": 3}, "frequency_penalty is 3"),
    ({"logit_bias": {-1: 2}}, "token id is -1"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1 is inf"),
    ({"logit_bias": {1: -1e31}}, r"logit_bias of token 1 is -1e\+31"),
    ({"logit_bias": [(1, 2), (1, 3)]}, "token 1 twice"),
    ({"logit_bias": 4}, "logit_bias is 4"),
    ({"logit_bias": {"1_0": 2}}, "token id is '1_0'"),
    ({"logit_bias": {"01": 2}}, "token id is '01'"),
    ({"logit_bias": {" 1": 2}}, "token id is ' 1'"),
    ({"logit_bias": {"\u0661": 2}}, "token id is '\u0661'"),
    ({"logit_bias": {2**31: 1}}, f"token id is {2**31}"),
    ({"logit_bias": {10**5000: 1}}, "token id is an int too long to write"),
    ({"logit_bias": [(-(10**5000),)]}, "logit_bias is list with an int too long to write"),
    ({"logit_bias": {1: True}}, "logit_bias of token 1 is True"),
    ({"top_k": -(10**5000)}, "top_k is an int too long to write"),
    ({"seed": 10**5000}, "seed is an int too long to write"),
    ({"logit_bias": {-(10**5000): 1}}, "token id is an int too long to write"),
    ({"temperature": 10**400}, "temperature is too large"),
    ({"logit_bias": {1: 10**400}}, "logit_bias of token 1 is too large"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**32}, "seed is 4294967296"),
    ({"seed": [1, "2"]}, "seed is '2'"),
    ({"seed": np.zeros((2, 2), int)}, "seed is array"),
    ({"top_k": np.array([1, 2])}, "top_k is array"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[words for _, words in BAD])
def test_bad_values_are_refused(given, message):
    with pytest.raises(e3.ConfigError, match=message):
        SamplingConfig(**given)


@pytest.mark.parametrize(
    ("config", "rule", "tree", "message"),
    [
        (None, "target_only", TREE, "temperature > 0"),
        (SamplingConfig(0.0), "rejection", TREE, "temperature > 0"),
        (SamplingConfig(), "greedy", TREE, "rule greedy at temperature 1"),
        (SamplingConfig(), "strict", TREE, "rule is 'strict'"),
        (SamplingConfig(), 3, TREE, "rule is 3"),
        (SamplingConfig(), AcceptRule("rejection", sampled_drafts=True), TREE, "needs a chain"),
        (SamplingConfig(seed=[1, 2]), None, TREE, "2 seeds for 4 prompts"),
        (SamplingConfig(logit_bias={128: 1}), None, TREE, "names token 128"),
        ({"temperature": 1}, None, TREE, "expected a SamplingConfig"),
    ],
)
def test_calls_that_do_not_go_together_are_refused(pair, config, rule, tree, message):
    with pytest.raises(e3.ConfigError, match=message):
        run(pair, config, rule, tree)


def test_seeds_of_any_kind():
    for given in ([3, 4], (3, 4), range(3, 5), np.array([3, 4])):
        assert SamplingConfig(seed=given).seed == (3, 4)
    assert SamplingConfig(seed=np.int64(3)).seed == 3


@pytest.mark.parametrize(
    "given",
    every_other(
        [
            {"temperature": 1e300, "logit_bias": dict.fromkeys(range(128), 1e30)},
            {"temperature": 1e-6, "repetition_penalty": 1e-300, "logit_bias": {3: -1e30}},
        ]
    ),
    ids=["flat", "steep"],
)
def test_the_ends_of_the_ranges_stay_numbers(given):
    """Of float32, in which 1e300 is infinite and 1e-300 nothing."""
    config = SamplingConfig(**given)
    plan, values = SamplingPlan.of(config, AcceptRule()), SamplingValues.of(config, 1, 128, F32)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 128)) * 20, jnp.float32)
    counts = jnp.asarray(np.arange(128)[None, None] % 3, jnp.int32)
    p = probabilities(adjust(logits, counts, plan, values), plan, values)
    assert np.isfinite(np.asarray(p)).all()
    assert float(p.sum()) == pytest.approx(1, abs=1e-4)


def test_below_a_millionth_a_temperature_is_greedy():
    """As SGLang has it (`sampling_params._SAMPLING_EPS`)."""
    assert SamplingConfig(9e-7).greedy
    assert not SamplingConfig(1e-6).greedy


def test_a_rule_takes_its_own_options_only():
    for given in [
        {"name": "rejection", "threshold_acc": 0.5},
        {"name": "target_only", "sampled_drafts": True},
        {"name": "rejection", "block": True},
        {"name": "target_only", "threshold_single": 2},
    ]:
        with pytest.raises(e3.ConfigError):
            AcceptRule(**given)


def test_following_a_text_leaves_nothing_to_sample(pair):
    with pytest.raises(e3.ConfigError, match="follow needs greedy"):
        next(
            e3.rounds(
                *pair,
                PROMPTS[:1],
                max_new_tokens=4,
                tree=CHAIN,
                sampling=SamplingConfig(),
                follow=[[1, 2]],
            )
        )
