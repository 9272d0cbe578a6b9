"""Records of our own target: states against decoding and transformers, recipes that run, pages."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from record_commands import fails, run
from sglang_goldens import load as load_goldens

import eagle3_jax as e3
from eagle3_jax import record
from eagle3_jax.config import TreeConfig
from eagle3_jax.records.making import CHUNK, Maker

ALL = (*range(9), "final_norm")
PROMPTS = [[5, 17, 33, 91, 120, 7, 100, 45], [64, 3, 88, 21, 9]]


@pytest.fixture
def ids(tmp_path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(PROMPTS))
    return path


@pytest.fixture
def target(sglang_models) -> Path:
    return sglang_models / "target"


def make(target, ids, out, *flags):
    assert run("make", "--target", target, "--ids", ids, "--out", out, *flags) == 0
    return record.load(out)


def test_states_are_those_of_decoding(tiny_target, tiny_draft):
    """One pass over the text against the states that drafting and verifying computed."""
    (made,) = Maker(tiny_target, (2, 4, 5), top=3).sequences(
        PROMPTS[:1], max_new_tokens=24, stop_token_ids=()
    )
    rounds = list(
        e3.rounds(
            tiny_target,
            tiny_draft,
            PROMPTS[:1],
            max_new_tokens=24,
            tree=TreeConfig(3),
            stop_token_ids=(),
            tensors=True,
        )
    )
    prefill = rounds[0].tensors["prefill.target_aux"][: len(PROMPTS[0])]
    assert np.abs(made.aux[: len(prefill)] - prefill).max() < 5e-6
    compared = 0
    for item in rounds:
        for depth, node in enumerate(item.accepted):
            if item.length + depth < len(made.aux):
                found = item.tensors["target_aux"][node]
                assert np.abs(made.aux[item.length + depth] - found).max() < 5e-6
                best = made.top_ids[item.length + depth, 0]
                assert best == item.predicted[node]
                compared += 1
    assert compared == len(made.aux) - len(prefill)


def test_tokens_and_states_are_sglangs(tiny_target):
    golden = load_goldens("traces", "chain_s3")["single0"]
    (made,) = Maker(tiny_target, (2, 4, 5)).sequences(
        [golden.prompt], max_new_tokens=24, stop_token_ids=()
    )
    assert made.tokens.tolist() == list(golden.prompt) + list(golden.output_ids)
    hidden = golden.arrays["prefill/target_hidden"].reshape(-1, 3, 32)
    assert np.abs(made.aux[: len(hidden)] - hidden).max() < 5e-6


def test_long_texts_take_several_passes(tiny_target):
    text = (np.arange(2 * CHUNK + 7) * 37 % 128).tolist()
    maker = Maker(tiny_target, (0, 8))
    whole = maker.capture(text, 0, "long").aux
    for cut in (2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1):
        part = maker.capture(text[:cut], 0, "part").aux
        assert part.shape == (cut - 1, 2, 32)
        assert np.abs(part - whole[: cut - 1]).max() < 1e-5
    table = np.asarray(tiny_target.shared().embedding)
    assert np.array_equal(whole[:, 0], table[text[:-1]])


def test_make(target, ids, tmp_path, tiny_target, capsys):
    flags = ["--all-boundaries", "--max-new-tokens", 12, "--stop", "none", "--top-logprobs", 4]
    found = make(target, ids, tmp_path / "m.record", *flags, "--tag", "chat", "--batch-size", 1)
    page = capsys.readouterr().out
    assert found.boundaries == ALL
    assert (found.kind, found.vocab_size, found.num_layers) == ("greedy", 128, 8)
    assert found.embedding == target
    assert found.findings == ()
    plain = e3.generate(tiny_target, PROMPTS, max_new_tokens=12, stop_token_ids=())
    for item, prompt, new in zip(found.sequences, PROMPTS, plain.tokens, strict=True):
        assert item.tokens.tolist() == prompt + new
        assert item.prompt_length == len(prompt)
        assert item.tags == ("chat",)
        logits = tiny_target.logits(jnp.asarray(item.aux[:, -1]))
        logprobs = np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        taken = np.take_along_axis(logprobs, item.top_ids, axis=1)
        assert np.abs(taken - item.top_logprobs).max() < 1e-5
        assert np.array_equal(item.top_ids[:, 0], logprobs.argmax(-1))
    assert "last state slot 8, before the final norm" in page
    assert "logprobs   the best 4 of each row" in page
    assert "checks: nothing found" in page


def test_make_for_a_draft(target, ids, tmp_path, converted, sglang_models, capsys):
    draft = converted(sglang_models / "draft_aux_1_3_6", "--target", str(target))
    found = make(target, ids, tmp_path / "m", "--draft", draft, "--max-new-tokens", 3)
    assert found.boundaries == (2, 4, 7)
    capsys.readouterr()
    assert run("show", tmp_path / "m", "--draft", draft) == 0
    assert "fits: its states are slots 0, 1, 2" in capsys.readouterr().out
    other = converted(sglang_models / "draft", "--target", str(target))
    message = fails(capsys, "show", tmp_path / "m", "--draft", other)
    assert "the draft reads boundaries (2, 4, 5), the record has (2, 4, 7): no 5" in message
    make(target, ids, tmp_path / "one", "--boundaries", "4", "--max-new-tokens", 3)
    message = fails(capsys, "show", tmp_path / "one", "--draft", other)
    assert "needs 3 states, got 1" in message


def test_make_of_a_text(target, ids, tmp_path):
    found = make(target, ids, tmp_path / "t", "--boundaries", "2,4", "--max-new-tokens", 0)
    assert found.kind == "text"
    assert [s.tokens.tolist() for s in found.sequences] == PROMPTS
    assert [s.prompt_length for s in found.sequences] == [0, 0]


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)]
)
def test_make_in_another_dtype(target, ids, tmp_path, dtype):
    flags = ["--boundaries", "2,4,5", "--max-new-tokens", 8, "--stop", "none"]
    found = make(target, ids, tmp_path / "h", *flags, "--dtype", dtype)
    exact = make(target, ids, tmp_path / "f", *flags)
    assert found.sequences[0].aux.dtype.name == dtype
    rows = len(PROMPTS[0])
    gap = found.sequences[0].aux[:rows].astype(np.float32) - exact.sequences[0].aux[:rows]
    assert 0 < np.abs(gap).max() < 0.1


def test_stop_ids(target, ids, tmp_path, tiny_target):
    third = e3.generate(tiny_target, PROMPTS, max_new_tokens=5, stop_token_ids=()).tokens[0][2]
    flags = ["--boundaries", "2", "--max-new-tokens", 20, "--stop", third]
    found = make(target, ids, tmp_path / "m", *flags)
    assert found.sequences[0].tokens.tolist()[-1] == third
    assert len(found.sequences[0].tokens) == len(PROMPTS[0]) + 3


WRONG = {
    "boundary": (["--boundaries", "2,9", "--max-new-tokens", 1], "boundary 9 lies outside"),
    "twice": (["--boundaries", "2,2", "--max-new-tokens", 1], "repeat a boundary"),
    "too long": (["--boundaries", "2", "--max-new-tokens", 9999], "the target has"),
    "negative": (["--boundaries", "2", "--max-new-tokens", -1], "expected at least 0"),
    "nothing asked": (["--max-new-tokens", 1], "--all-boundaries"),
    "top": (
        ["--boundaries", "2", "--max-new-tokens", 1, "--top-logprobs", 129],
        "--top-logprobs: at most 128",
    ),
    "no folder": (["--boundaries", "2", "--max-new-tokens", 1, "--target", "nowhere"], "no such"),
}


@pytest.mark.parametrize("name", WRONG)
def test_make_that_cannot_be(name, target, ids, tmp_path, capsys):
    flags, message = WRONG[name]
    given = ["make", "--target", target, "--ids", ids, "--out", tmp_path / "r", *flags]
    assert message in fails(capsys, *given)
    assert [p.name for p in tmp_path.iterdir()] == ["ids.json"]


def test_a_taken_destination_is_refused_before_the_work(target, ids, tmp_path, capsys):
    (tmp_path / "r").write_text("mine")
    given = ["make", "--target", target, "--ids", ids, "--boundaries", "2", "--max-new-tokens", 1]
    assert "never overwritten" in fails(capsys, *given, "--out", tmp_path / "r", "--force")
    assert "no such folder" in fails(capsys, *given, "--out", tmp_path / "no" / "r")


def test_show_of_what_is_no_record(tmp_path, capsys):
    assert "no such record" in fails(capsys, "show", tmp_path / "x")
    assert "no record.json" in fails(capsys, "show", tmp_path)
    assert run("show", tmp_path, "--json") == 2
    assert "no record.json" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_last_state_is_not_decidable_without_the_target(tmp_path, capsys):
    item = record.RecordSequence(
        np.arange(5, dtype=np.int32),
        np.ones((4, 1, 6), np.float32) * np.arange(1, 5)[:, None, None].astype(np.float32),
        0,
    )
    with record.RecordWriter(
        tmp_path / "r", boundaries=(8,), kind="text", num_layers=8, embedding=tmp_path / "gone"
    ) as writer:
        writer.append(item)
    assert run("show", tmp_path / "r", "--json") == 0
    page = json.loads(capsys.readouterr().out)
    assert "declared before the final norm; not decidable" in page["last_state"]
    assert page["embedding_found"] is False
    assert page["rms"] == [pytest.approx(np.sqrt(30 / 4), abs=1e-5)]
    assert page["state_bytes"] == 4 * 6 * 4


def recipe(capsys, *argv) -> str:
    capsys.readouterr()
    assert run("recipe", *argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("engine", ["sglang", "vllm", "transformers"])
def test_a_recipe_says_its_size_first(engine, target, capsys):
    flags = ["--target", target, "--tokens", 1000, "--boundaries", "2,4"]
    first = recipe(capsys, engine, *flags).splitlines()[0]
    assert first == "# 128000 bytes (128.0 kB): 1000 tokens x 2 boundaries x 32 x 2 (bfloat16)"
    wide = recipe(capsys, engine, *flags, "--dtype", "float32").splitlines()[0]
    assert wide.startswith("# 256000 bytes")


def test_the_recipe_for_sglang_names_blocks(target, capsys):
    text = recipe(capsys, "sglang", "--target", target)
    assert "--return-aux-hidden-state-layer-ids 1 3 4 \\" in text
    assert "--boundaries 2,4,5" in text
    for boundary in ("0,2,4", "2,4,8", "2,4,final_norm"):
        message = fails(capsys, "recipe", "sglang", "--target", target, "--boundaries", boundary)
        assert "SGLang's Llama classes capture 1..7" in message
    message = fails(capsys, "recipe", "sglang", "--target", target, "--boundaries", "4,2")
    assert "ascending order" in message


@pytest.mark.parametrize(
    ("engine", "lacking"),
    [("sglang", "prompts.jsonl"), ("vllm", "states"), ("transformers", "states")],
)
def test_the_commands_of_a_recipe_are_ours(engine, lacking, target, tmp_path, capsys):
    text = recipe(capsys, engine, "--target", target).replace("\\\n", " ")
    (command,) = re.findall(r"^eagle3 (record .*)$", text, re.M)
    with contextlib.chdir(tmp_path):
        message = fails(capsys, *command.split()[1:])
    assert f"]: {lacking}: " in message


def test_the_recipe_for_vllm_names_boundaries(target, capsys):
    text = recipe(capsys, "vllm", "--target", target, "--boundaries", "2,4,8")
    given = json.loads(re.search(r"--speculative_config '(.*?)'", text).group(1))
    assert given["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 8]
    }
    script = text[text.index("import json") : text.index("eagle3 record")]
    compile(script, "capture.py", "exec")
    message = fails(capsys, "recipe", "vllm", "--target", target, "--boundaries", "2,final_norm")
    assert "captures 0..L only" in message


def test_the_recipe_for_transformers_runs(target, ids, tmp_path, capsys):
    """Its script makes what `make` makes, at all boundaries: an independent target."""
    pytest.importorskip("transformers")
    named = ",".join(map(str, ALL))
    flags = ["--target", target, "--boundaries", named, "--max-new-tokens", 12]
    text = recipe(capsys, "transformers", *flags)
    script = text[text.index("import json") : text.index("eagle3 record")]
    # float32 weights stay float32, and nothing ends the text early
    script = script.replace("do_sample=False,", "do_sample=False, eos_token_id=None,")
    (tmp_path / "capture.py").write_text(script)
    subprocess.run([sys.executable, "-W", "ignore", "capture.py"], cwd=tmp_path, check=True)
    (command,) = re.findall(r"^eagle3 record (.*)$", text.replace("\\\n", " "), re.M)
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()):
        assert run(*command.split()) == 0
    theirs = record.load(tmp_path / "NAME.record").sequences
    ours = make(
        target, ids, tmp_path / "m", "--all-boundaries", "--max-new-tokens", 12, "--stop", "none"
    ).sequences
    for a, b in zip(theirs, ours, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.prompt_length == b.prompt_length
        assert np.abs(a.aux[: len(b.aux)] - b.aux).max() < 1e-5
