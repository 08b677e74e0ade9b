"""The trained model in the package: right in both formats, the same in any company, the same as transformers."""

import json
import random
import subprocess
import tomllib
from pathlib import Path

import pytest

import flint_jax
import loaders
from examples.train_tiny import model as recipe
from flint_jax import evals
from flint_jax.errors import CheckpointError
from flint_jax.evals import suite
from flint_jax.evals.replies import LocalModel
from flint_jax.sampling_params import SamplingParams
from loaders import embedded
from loaders.embedded import embedded_checkpoint
from tests.model.test_oracle import PYTHON

ROOT = Path(__file__).parents[2]
MOST = 320  # tokens of a reply
DISTANCES = (300, 900)  # tokens; the window is 129


def read(format: str, **options):
    return flint_jax.load(embedded_checkpoint(format), progress=False, **options)


@pytest.fixture(scope="module")
def bf16():
    """Four at a time, with a prefix cache."""
    return LocalModel(read("bf16"), slots=4)


@pytest.fixture(scope="module")
def asked(bf16):
    """16 held-out items: two of each family, of each distance."""
    return suite.items(suite.NAMES, 2, seed=11, distances=DISTANCES, length=bf16.length)


def greedy(engine, prompts) -> list[tuple[int, ...]]:
    """Token ids of every reply, all submitted at once."""
    made, ended = [[] for _ in prompts], {}

    def hear(n):
        def take(event):
            made[n].extend(event.token_ids)
            if event.finish_reason is not None:
                ended[n] = event.finish_reason

        return take

    for n, ids in enumerate(prompts):
        engine.submit(ids, SamplingParams(temperature=0.0, max_tokens=MOST), on_event=hear(n))
    while len(ended) < len(prompts):
        engine.step()
    assert set(ended.values()) == {"stop"}
    return [tuple(ids) for ids in made]


def score(model, items) -> tuple[int, int]:
    """(exact replies, well-formed replies)"""
    replies = model.ask(items)
    right = [item.right(reply.content, reply.calls) for item, reply in zip(items, replies, strict=True)]
    return sum(right), sum(reply.well_formed for reply in replies)


@pytest.mark.slow
def test_company_changes_nothing(bf16, asked):
    """Alone in pieces of 32 tokens; in batches of four and pieces of 256; the same again from the prefix cache."""
    prompts = [bf16.prompt(item)[1] for item in asked]
    single = bf16.lm.make_engine(
        max_num_seqs=1, max_num_batched_tokens=32, enable_prefix_caching=False, compile_ahead=False
    )
    alone = greedy(single, prompts)
    assert greedy(bf16.engine, prompts) == alone
    before = bf16.engine.stats()
    assert greedy(bf16.engine, prompts) == alone
    after = bf16.engine.stats()
    assert after["prefix_hits"] > before["prefix_hits"]


@pytest.mark.slow
def test_both_formats_answer_right(bf16, asked):
    """A small sample of the scores in docs/tiny.md: 9 of 10 exact, and the formats one reply apart at most."""
    right, formed = score(bf16, asked)
    assert formed == len(asked)
    assert right >= 0.9 * len(asked)
    packed, formed = score(LocalModel(read("nvfp4"), slots=4), asked)
    assert formed == len(asked)
    assert abs(packed - right) <= 1


@pytest.mark.slow
def test_thinks_in_the_middle_of_a_chat(bf16):
    """The template leaves out what was thought before; a model that then stops thinking gets sums of three digits wrong
    (an earlier one: 8 of 36)."""
    rng = random.Random(3)
    sums = [item for item in (evals.arithmetic(rng, evals.HELD_OUT) for _ in range(40)) if item.thinking]
    items = [evals.later(rng, evals.HELD_OUT, item) for item in sums[:16]]
    assert {len(item.messages) for item in items} == {3, 5, 7, 9}
    replies = bf16.ask(items)
    assert all(reply.well_formed and reply.thought for reply in replies)
    right = [item.right(reply.content, reply.calls) for item, reply in zip(items, replies, strict=True)]
    assert sum(right) >= len(items) - 1


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with transformers")
def test_transformers_writes_the_same(tmp_path):
    """50 prompts, greedy, float32: transformers loads our folder by name and writes the same tokens."""
    model = LocalModel(read("bf16", dtype="float32", numerics="transformers"), slots=4)
    items = suite.items([n for n in suite.NAMES if n != suite.LOOK_UP], 8, seed=12)
    items += suite.items([suite.LOOK_UP], 1, seed=12, distances=DISTANCES, length=model.length)
    prompts = [model.prompt(item)[1] for item in items]
    assert len(prompts) == 50
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    script = str(Path(__file__).with_name("oracle_greedy.py"))
    paths = [str(embedded_checkpoint("bf16")), str(tmp_path / "prompts.json"), str(tmp_path / "out.json"), str(MOST)]
    done = subprocess.run([PYTHON, script, *paths], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    want = [tuple(ids) for ids in json.loads((tmp_path / "out.json").read_text())]
    assert greedy(model.engine, prompts) == want


def test_what_is_shipped():
    """Both formats: the recipe's shape and its features, one tokenizer and template; 16 MB at most."""
    plain, packed = (loaders.open_checkpoint(embedded_checkpoint(f)) for f in ("bf16", "nvfp4"))
    assert (plain.weight_format, packed.weight_format) == ("bf16", "nvfp4")
    wanted = recipe.config()
    for ckpt in (plain, packed):
        c = ckpt.config
        assert c.num_parameters == wanted.num_parameters
        assert (c.layer_types, c.rope_layers, c.sliding_window) == (
            wanted.layer_types, wanted.rope_layers, wanted.sliding_window,
        )  # fmt: skip
        assert c.max_position_embeddings >= 4096
        assert ckpt.generation["temperature"] > 0
        assert ckpt.chat_template == (embedded.HERE / "chat_template.jinja").read_text()
    text = 'Hello, wörld 🦜 123\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>["x", 1]</arg_value>\n</tool_call>'
    assert plain.tokenizer.encode(text) == packed.tokenizer.encode(text)
    assert plain.tokenizer.eog_ids == packed.tokenizer.eog_ids
    files = [f for f in embedded.HERE.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in files) <= 16e6


def test_every_file_goes_into_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "loaders.embedded" in settings["packages"]
    packed = {f for glob in settings["package-data"]["loaders.embedded"] for f in embedded.HERE.glob(glob)}
    files = {f for f in embedded.HERE.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert files == packed


def test_what_is_not_there_is_refused(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="format 'int8': need one of bf16, nvfp4"):
        embedded_checkpoint("int8")
    monkeypatch.setattr(embedded, "HERE", tmp_path)
    with pytest.raises(CheckpointError, match="lacks the embedded model; name a model"):
        embedded_checkpoint()
