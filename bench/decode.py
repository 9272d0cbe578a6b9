"""Decoding and speculation on a CPU, as ratios: `python bench/decode.py` after `make model`.

    python bench/decode.py                      the cached SmolLM2 and the demo's draft
    python bench/decode.py --transformers       also transformers' greedy generate
    python bench/decode.py --cores 1

Four questions, every comparison within one alternating run:
  weights      a decoding step against the time to copy as many bytes as the weights have
  transformers tokens/s of `generate` against transformers' (float32, its own KV cache)
  rounds       a round against the sum of its own target and draft forwards, each compiled alone
  trees        tokens/s of `speculate` against `generate`, and against the bound
               accept length x t(decoding step) / t(round)
"""

import functools

import harness

parser = harness.parser(__doc__)
parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
parser.add_argument("--tree", action="append", metavar="STEPS,TOPK,TOKENS", help="repeatable")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--transformers", action="store_true")
args = parser.parse_args()
harness.use_cores(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from pair import models  # noqa: E402
from run import PROMPTS  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from eagle3_jax import loop  # noqa: E402
from eagle3_jax.draft import Eagle3Draft  # noqa: E402
from eagle3_jax.layers import Rows  # noqa: E402
from eagle3_jax.modules import take_apart  # noqa: E402
from eagle3_jax.ops.bits import chain_bits  # noqa: E402
from eagle3_jax.run import Run  # noqa: E402
from eagle3_jax.tokenizer import Tokenizer  # noqa: E402
from eagle3_jax.tree import top_probabilities  # noqa: E402

TREES = ["3,1,4", "3,4,8", "5,4,16"]
SLOTS = 160


def seconds_per_round(target, draft, ids, tree) -> tuple[float, int]:
    """Of the compiled loop alone, and the rounds it ran."""
    run = Run(
        target, draft, [ids], max_new_tokens=args.max_new_tokens, tree=tree, stop_token_ids=()
    )

    def once() -> tuple[float, int]:
        state, _ = run._start(False)
        jax.block_until_ready(state)
        start = harness.time.perf_counter()
        state = loop.finish_jit(run.program, run.weights, state, run.limits)
        rounds = int(state.rounds)
        return (harness.time.perf_counter() - start) / rounds, rounds

    once()
    times = [once() for _ in range(args.repeats)]
    return harness.statistics.median(t for t, _ in times), times[0][1]


def forwards(target, draft: Eagle3Draft, tree: e3.TreeConfig) -> dict[str, float]:
    """Median seconds of each forward a round holds, compiled alone, caches donated."""
    target_leaves, target_structure = take_apart(target)
    draft_leaves, draft_structure = take_apart(draft)
    length = jnp.full((1,), 50, jnp.int32)
    nodes, topk, rows = tree.num_draft_tokens, tree.topk, tree.num_steps + 1

    def bits(count: int) -> jax.Array:
        return jnp.asarray(chain_bits(count))[None]

    @functools.partial(jax.jit, donate_argnames="cache")
    def verify(leaves, cache):
        model = target_structure.build(leaves)
        tokens = jnp.ones((1, nodes), jnp.int32)
        at = Rows(length[:, None] + jnp.arange(nodes)[None], length, length, bits(nodes))
        states, aux, cache = model.states(tokens, at, cache, draft.config.aux_boundaries)
        return jnp.argmax(model.logits(states), axis=-1), aux, cache

    @functools.partial(jax.jit, donate_argnames="cache")
    def level(leaves, shared, cache):
        model = draft_structure.build(leaves)
        tokens, hidden = (
            jnp.ones((1, topk), jnp.int32),
            jnp.ones((1, topk, draft.config.hidden_size), draft.dtype),
        )
        at = Rows(length[:, None] + jnp.arange(topk)[None], length, length, bits(topk))
        out, cache = model.step(tokens, hidden, at, cache, shared=shared)
        return top_probabilities(model.logits(out, shared=shared), topk), cache

    @functools.partial(jax.jit, donate_argnames="cache")
    def extend(leaves, shared, cache, aux):
        model = draft_structure.build(leaves)
        tokens = jnp.ones((1, rows), jnp.int32)
        out, cache = model.step(
            tokens, model.fuse(aux), Rows.chain(length, rows), cache, shared=shared
        )
        return top_probabilities(model.logits(out[:, -1], shared=shared), topk), cache

    shared = target.shared()
    aux = jnp.ones((1, rows, draft.config.num_aux, draft.config.target_hidden_size), target.dtype)
    caches = {
        "verify": target.new_cache(1, SLOTS),
        "draft level": draft.new_cache(1, SLOTS),
        "extend": draft.new_cache(1, SLOTS),
    }
    calls = {
        "verify": lambda c: verify(target_leaves, c),
        "draft level": lambda c: level(draft_leaves, shared, c),
        "extend": lambda c: extend(draft_leaves, shared, c, aux),
    }

    def once(name: str):
        *out, caches[name] = calls[name](caches[name])
        jax.block_until_ready(out)

    runs = {name: functools.partial(once, name) for name in calls}
    return harness.medians(harness.alternate(runs, 2 * args.repeats))


folder, target, draft = models(args.dtype)
tokenizer = Tokenizer.from_folder(folder)
prompts = [
    tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
    for text in PROMPTS
]
trees = {name: e3.TreeConfig(*map(int, name.split(","))) for name in args.tree or TREES}
leaves, _ = take_apart(target)
weights = sum(leaf.nbytes for leaf in leaves)
tokens = len(prompts) * args.max_new_tokens


def plain():
    return [
        e3.generate(target, [p], max_new_tokens=args.max_new_tokens, stop_token_ids=())
        for p in prompts
    ]


def fast(tree: e3.TreeConfig):
    return [
        e3.speculate(
            target, draft, [p], max_new_tokens=args.max_new_tokens, tree=tree, stop_token_ids=()
        )
        for p in prompts
    ]


runs = {"generate": plain} | {name: functools.partial(fast, tree) for name, tree in trees.items()}
if args.transformers:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.cores or len(harness.os.sched_getaffinity(0)))
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def peer():
        options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
        counts = {"max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}
        return [model.generate(torch.tensor([p]), **options, **counts) for p in prompts]

    runs["transformers"] = peer
source = np.ones(weights // 2, np.uint8)
copy = np.empty_like(source)
runs["copy"] = lambda: np.copyto(copy, source)  # reads half, writes half: as many bytes
times = harness.alternate(runs, args.repeats)
rate = {k: round(tokens / v, 2) for k, v in harness.medians(times).items() if k != "copy"}
step, _ = seconds_per_round(target, None, prompts[0], None)
copied = harness.medians(times)["copy"]
result = {
    "prompts": len(prompts),
    "new_tokens": tokens,
    "dtype": args.dtype,
    "tokens_per_s": rate,
    "weights": {
        "bytes": weights,
        "copy_GB_per_s": round(weights / copied / 1e9, 2),
        "read_ms": round(1e3 * copied, 2),
        "step_ms": round(1e3 * step, 2),
        "step / read": round(step / copied, 3),
    },
}
if args.transformers:
    result["generate / transformers"] = round(harness.ratio(times, "transformers", "generate"), 3)
result["trees"] = {}
for name, tree in trees.items():
    lengths = [n for g in fast(tree) for n in g.accept_lengths[0]]
    accept = (tokens - len(prompts)) / len(lengths)
    in_loop, _ = seconds_per_round(target, draft, prompts[0], tree)
    again, _ = seconds_per_round(target, None, prompts[0], None)
    own = forwards(target, draft, tree)
    total = own["verify"] + (tree.num_steps - 1) * own["draft level"] + own["extend"]
    bound = accept * again / in_loop
    speedup = harness.ratio(times, "generate", name)
    result["trees"][name] = {
        "tokens_per_round": round(accept, 3),
        "round_ms": round(1e3 * in_loop, 2),
        "forwards_ms": {k: round(1e3 * v, 2) for k, v in own.items()},
        "round / forwards": round(in_loop / total, 3),
        "speculate / generate": round(speedup, 3),
        "bound": round(bound, 3),
        "speculate / bound": round(speedup / bound, 3),
        "break_even_accept_length": round(in_loop / again, 3),
    }
harness.report(result, args.out)
