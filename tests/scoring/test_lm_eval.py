"""The harness' model: against a stand-in of its interface, and against the harness itself where there is one.

For the latter: python3.12 -m venv .venv-lmeval && .venv-lmeval/bin/pip install 'lm_eval[api]==0.4.13' -e .
(FLINT_LM_EVAL_PYTHON names another interpreter.)
"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flint_jax.errors import ConfigError, RequestError
from tests.model import golden
from tests.scoring import harness, micro
from tests.scoring.harness import Instance

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("FLINT_LM_EVAL_PYTHON", str(ROOT / ".venv-lmeval/bin/python"))
LM = micro.language_model(text=True)


@pytest.fixture(scope="module")
def registry():
    with pytest.MonkeyPatch.context() as patch:
        yield harness.install(patch) | {"module": importlib.import_module("flint_jax.integrations.lm_eval")}


@pytest.fixture(scope="module")
def model(registry):
    return registry["module"].FlintLM(lm=LM, max_length=100, batch_size=2, batch_invariant=True)


def ask(model, kind, *requests):
    return getattr(model, kind)([Instance(r) for r in requests], disable_tqdm=True)


def test_registers_itself(registry, monkeypatch):
    seen = harness.install(monkeypatch)
    module = importlib.import_module("flint_jax.integrations.lm_eval")
    assert seen == {"flint_jax": module.FlintLM}


def test_takes_what_the_harness_always_gives(registry):
    """Its command line names a device and a batch size for every model."""
    made = registry["module"].FlintLM(lm=LM, batch_size="auto:4", max_batch_size=8, device="cuda:0")
    assert made.slots == 8
    assert registry["module"].FlintLM(lm=LM, batch_size="1").slots == 1


def test_loglikelihood(model):
    pairs = [("The harbour", " was quiet"), ("The harbour ", "was quiet"), ("", "The harbour"), ("The", " harbour")]
    found = ask(model, "loglikelihood", *pairs)
    want = model.scorer.score(pairs)
    assert found == [(s.total, s.is_greedy) for s in want]
    assert model.cache_hook.seen[-4:] == [("loglikelihood", p, f) for p, f in zip(pairs, found, strict=True)]


def test_a_continuation_without_tokens_is_refused(model):
    assert ask(model, "loglikelihood", ("The harbour", "")) == [(0.0, True)]
    with pytest.raises(RequestError, match=r"joins the end of the context.*, 'r', so that no token"):
        ask(model, "loglikelihood", ("l'été à la me", "r"))


def test_too_long_is_cut_at_the_beginning(model):
    rng = np.random.default_rng(0)
    context, answer = rng.integers(0, 480, 200).tolist(), [5, 6, 7]
    (cut,) = model._loglikelihood_tokens([(None, context, answer)], disable_tqdm=True)
    (want,) = model.scorer.score([(context[-98:], answer)])
    assert cut == (want.total, want.is_greedy)
    (windows,) = model._loglikelihood_tokens([(None, [3], context)], disable_tqdm=True)
    assert windows[0] == model.scorer.score_long([([3], context)])[0].total


def test_rolling_counts_every_token_behind_one_prefix(model):
    bos = LM.tokenizer.bos_token
    texts = "The harbour was quiet. " * 20, "", f"{bos}The harbour"
    found = ask(model, "loglikelihood_rolling", *((t,) for t in texts))
    ids = [LM.tokenizer.encode(t) for t in texts]
    assert len(ids[0]) > 100
    want = [s.total for s in model.scorer.score_texts(ids, prefix=LM.tokenizer.token_id(bos))]
    assert found == want
    assert found[1] == 0.0


def test_no_second_bos(registry, model):
    bos = LM.tokenizer.bos_token
    plain = LM.tokenizer.encode("The")
    assert model.tok_encode("The") == plain  # this tokenizer adds none
    adds = registry["module"].FlintLM(lm=LM, max_length=100, add_bos_token=True)
    start = [LM.tokenizer.token_id(bos)]
    assert adds.tok_encode("The") == start + plain
    assert adds.tok_encode(f"{bos}The") == start + plain
    assert adds.tok_encode("The", add_special_tokens=False) == plain


def test_generate_until(model):
    prompts = "The harbour", "The", "Hello", "We", "1 2", "was"
    made = dict(zip(prompts, ask(model, "generate_until", *((p, {"max_gen_toks": 6}) for p in prompts)), strict=True))
    prompt, free = max(made.items(), key=lambda item: len(item[1]))
    stop = free[2:4]
    assert len(stop) == 2
    requests = [
        (prompt, {"max_gen_toks": 6}),
        (prompt, {"until": [stop], "max_new_tokens": 6, "do_sample": False, "temperature": 1.0}),
        ("The", {"until": "zzz", "max_tokens": 2, "temperature": 0.0}),
        (prompt, {"max_gen_toks": 6, "do_sample": True, "temperature": 1.0, "top_k": 1}),
    ]
    found = ask(model, "generate_until", *requests)
    assert found[0] == found[3] == free
    assert found[1] == free[: free.index(stop)]
    assert made["The"].startswith(found[2])
    # The tokens of a greedy answer are what scoring calls greedy.
    answer = LM.tokenizer.encode(free)
    ((_, greedy),) = model._loglikelihood_tokens([(None, LM.tokenizer.encode(prompt), answer[:1])], disable_tqdm=True)
    assert greedy


def test_thoughts_are_cut_before_stop_strings(model):
    model.think_end = "</think>"
    try:
        params, until = model._params({"until": ["\n\n"]})
        assert params.stop == ()
        assert model._cut("a\n\nb</think>\n\nanswer\n\nmore", until) == "answer"
        assert model._cut("no thought\n\nmore", until) == "no thought"
    finally:
        model.think_end = None


def test_chats(model):
    chat = [{"role": "user", "content": "Hello"}]
    prompt = model.apply_chat_template(chat)
    assert model.tok_encode(prompt) == LM.encode(chat)
    begun = [*chat, {"role": "assistant", "content": "The answer is"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("The answer is")
    assert model.chat_template(True) == (LM.chat_template or LM.tokenizer.chat_template)
    assert model.chat_template(False) is None
    assert "/" not in model.tokenizer_name


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "need a model"),
        ({"lm": LM, "batch_sise": 4}, "unknown model arguments: batch_sise"),
        ({"lm": micro.language_model()}, "no tokenizer"),
    ],
)
def test_refuses(registry, options, match):
    with pytest.raises(ConfigError, match=match):
        registry["module"].FlintLM(**options)


def test_refuses_fields_it_would_have_to_ignore(model):
    with pytest.raises(RequestError, match="does not know: num_beams"):
        ask(model, "generate_until", ("The", {"num_beams": 4}))
    with pytest.raises(RequestError, match="leaves no room for a prompt in 100 tokens"):
        ask(model, "generate_until", ("The", {"max_gen_toks": 100}))


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with lm_eval")
def test_the_harness_itself_in_process_and_over_http(tmp_path):
    """The example tasks through lm_eval: our class, and local-completions against serve.py, give the same numbers."""
    checkpoint = str(golden.FOLDER / "T2-nvfp4")
    flags = ["--port", "0", "--max-num-seqs", "2", "--max-model-len", "256", "--max-num-batched-tokens", "64"]
    environment = os.environ | {"FLINT_API_KEY": "", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "serve.py", "--model", checkpoint, "--dtype", "float32", *flags],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip
        try:
            url = None
            for line in server.stdout:
                url = url or ((found := re.search(r"http://[\d.]+:\d+", line)) and found[0])
                if line.startswith("Try: "):
                    break
            answers = tmp_path / "answers.json"
            run = subprocess.run(
                [PYTHON, "-m", "examples.lm_eval.compare", "--model", checkpoint, "--dtype", "float32", "--url", url,
                 "--json", str(answers)],
                cwd=ROOT, capture_output=True, text=True, env=environment, timeout=500, check=False,
            )  # fmt: skip
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    found = json.loads(answers.read_text())
    assert sorted(found) == ["flint_jax", "local-completions"]
    for tasks in found.values():
        assert sorted(tasks) == ["flint_choice", "flint_generate", "flint_text"]
    assert len(found["flint_jax"]["flint_choice"]) == 5
