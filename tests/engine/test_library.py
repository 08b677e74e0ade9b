"""The library's generate and chat: keywords, lists, streams, live weights, interruptions, and words on compiling."""

import gc

import jax
import numpy as np
import pytest

import flint_jax
from flint_jax import RequestError, SamplingParams
from flint_jax.generation import Generation, Reader, ToolCall, Usage, Word
from tests.model import golden

NAME = "T2-nvfp4"
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def lm():
    """A golden model of our own, with one engine of four slots for every test here."""
    made = flint_jax.load(golden.FOLDER / NAME, dtype="float32", numerics="transformers", progress=False)
    made.generate([IDS, IDS], temperature=0, max_tokens=1)
    return made


@pytest.fixture(autouse=True)
def clean(request):
    """Nothing is left behind by any test."""
    yield
    if "lm" in request.fixturenames:
        engine = request.getfixturevalue("lm").engine()
        while engine.step():
            pass
        stats = engine.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert (stats["free_slots"], stats["free_pages"]) == (stats["slots"], stats["pages"])
        assert not engine._jobs


# -- keywords ----------------------------------------------------------------------------------------------------------


def test_keywords_are_sampling_fields(lm):
    wanted = lm.generate(IDS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert lm.generate(IDS, temperature=0, max_tokens=6, ignore_eos=True).token_ids == wanted.token_ids
    over = lm.generate(IDS, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), max_tokens=6)
    assert over.token_ids == wanted.token_ids
    assert wanted.usage == Usage(4, 6)
    assert wanted.usage.total_tokens == 10


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temprature": 0}, "did you mean temperature"),
        ({"max_new_tokens": 5}, "did you mean max_tokens|did you mean min_tokens"),
        ({"frobnicate": 1}, "need one of temperature"),
        ({"temperature": -1}, "temperature must be"),
        ({"params": {"temperature": 0}}, "need a SamplingParams"),
        ({"tools": [{"function": {"name": "f"}}]}, "only for chat messages"),
    ],
)
def test_what_is_not_known_is_refused(lm, arguments, match):
    with pytest.raises(RequestError, match=match):
        lm.generate(IDS, **arguments)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (5, "the prompt is int"),
        ({"role": "user"}, "the prompt is dict"),
        (b"bytes", "the prompt is bytes"),
        ([1, "a"], "mixes"),
        ([1.5], "no token id"),
        ([True], "no token id"),
        ([[1, 2], []], "at least one"),
    ],
)
def test_prompts_of_no_known_kind_are_refused(lm, prompt, match):
    with pytest.raises(RequestError, match=match):
        lm.generate(prompt, max_tokens=1)


# -- lists -------------------------------------------------------------------------------------------------------------


def test_a_list_gives_what_each_prompt_gives_alone(lm):
    prompts = [[5, 6, 7], [9], list(range(20, 45)), [5, 6, 7], [1, 2], [3, 4]]
    settings = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    together = lm.generate(prompts, **settings)
    assert [g.token_ids for g in together] == [lm.generate(p, **settings).token_ids for p in prompts]
    assert [list(g.prompt_token_ids) for g in together] == prompts
    rows = lm.generate(np.asarray([[5, 6, 7], [7, 6, 5]]), **settings)
    assert rows[0].token_ids == together[0].token_ids


def test_lists_of_texts_and_of_chats(lm):
    texts = lm.generate(["one two", "three"], temperature=0, max_tokens=3)
    assert [t.text for t in texts] == [lm.generate(t, temperature=0, max_tokens=3).text for t in ("one two", "three")]
    chats = [[{"role": "user", "content": c}] for c in ("a", "b")]
    assert [c.token_ids for c in lm.chat(chats, temperature=0, max_tokens=3)] == [
        lm.chat(c, temperature=0, max_tokens=3).token_ids for c in "ab"
    ]


def test_n_gives_that_many(lm):
    one, two = lm.generate(IDS, n=2, seed=3, temperature=1, max_tokens=4, ignore_eos=True)
    assert one.token_ids != two.token_ids
    assert one.token_ids == lm.generate(IDS, seed=3, temperature=1, max_tokens=4, ignore_eos=True).token_ids
    rows = lm.generate([IDS, [1]], n=2, max_tokens=1)
    assert [len(row) for row in rows] == [2, 2]


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_reply(lm):
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = lm.generate("Hello there", **settings)
    stream = lm.generate("Hello there", stream=True, **settings)
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(map(str, pieces)) == whole.text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert stream.generation == whole


def test_streams_can_be_read_in_turns_and_left(lm):
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = lm.generate(IDS, **settings)
    a, b = (lm.generate(IDS, stream=True, **settings) for _ in "ab")
    ids = [t for x, y in zip(a, b, strict=True) for t in (*x.token_ids, *y.token_ids)]
    assert sorted(ids) == sorted(whole.token_ids * 2)
    with lm.generate(IDS, stream=True, max_tokens=500, ignore_eos=True) as stream:
        next(stream)
    stream = lm.generate(IDS, stream=True, max_tokens=500, ignore_eos=True)
    next(stream)
    del stream
    gc.collect()
    assert lm.generate(IDS, **settings).token_ids == whole.token_ids
    assert not lm.engine()._jobs


def test_a_stream_is_of_one_prompt(lm):
    with pytest.raises(RequestError, match="one prompt"):
        lm.generate([IDS, IDS], stream=True)
    with pytest.raises(RequestError, match="one prompt"):
        lm.generate(IDS, stream=True, n=2)


# -- live weights ------------------------------------------------------------------------------------------------------


def test_generate_follows_the_live_weights():
    lm = flint_jax.load(golden.FOLDER / "T1", dtype="float32", progress=False)
    settings = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    before = lm.generate(IDS, **settings)
    engine = lm.engine()
    attn = lm.model.blocks[2].attn
    kept = attn.o.matrix
    attn.o.matrix = kept * 0
    changed = lm.generate(IDS, **settings)
    assert lm.engine() is engine  # nothing was compiled anew
    (score,) = lm.score([(IDS, changed.token_ids)])
    np.testing.assert_allclose([t.logprob for t in changed.logprobs], score, atol=1e-4)
    assert abs(changed.logprobs[0].logprob - before.logprobs[0].logprob) > 1e-5
    attn.o.matrix = kept
    assert lm.generate(IDS, **settings) == before
    # A matrix of another kind has other programs; logits and generate both take it.
    stack = lm.model.stacks["o"]
    stack.set_value(stack.get_value().astype(np.float16).astype(np.float32) * 0)
    zeroed = lm.generate(IDS, **settings)
    (score,) = lm.score([(IDS, zeroed.token_ids)])
    np.testing.assert_allclose([t.logprob for t in zeroed.logprobs], score, atol=1e-4)


def test_an_engine_of_ones_own_takes_up_changes_and_forgets_prefixes():
    lm = flint_jax.load(golden.FOLDER / "T1", dtype="float32", progress=False)
    engine = lm.make_engine(max_num_seqs=1, max_num_batched_tokens=64, compile_ahead=False)
    prompt, params = list(range(1, 41)), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def ask():
        events = []
        engine.submit(prompt, params, on_event=events.append)
        while engine.step():
            pass
        return events[-1].cached_tokens, tuple(t for e in events for t in e.token_ids)

    assert ask()[0] == 0
    assert ask()[0] == 39
    engine.set_weights(lm.model)  # nothing has changed: nothing is forgotten
    assert ask()[0] == 39
    o = lm.model.blocks[2].attn.o
    o.matrix = o.matrix * 0
    engine.submit(prompt, params, on_event=lambda event: None)
    with pytest.raises(RuntimeError, match="requests are running"):
        engine.set_weights(lm.model)
    while engine.step():
        pass
    engine.set_weights(lm.model)
    assert ask() == (0, lm.generate(prompt, params).token_ids)


def test_a_packed_stack_may_become_plain():
    from flint_jax.research import lora

    lm = flint_jax.load(golden.FOLDER / NAME, dtype="float32", numerics="transformers", progress=False)
    settings = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    before = lm.generate(IDS, **settings)
    logits = lm.logits([IDS])
    stack = lm.model.stacks["o"]
    packed = stack.get_value()
    stack.set_value(jax.numpy.stack([lora.plain(packed[i]) for i in range(packed.shape[0])]))
    np.testing.assert_allclose(lm.logits([IDS]), logits, atol=1e-4)
    assert lm.generate(IDS, **settings).token_ids == before.token_ids


@pytest.mark.parametrize("value", [0.0, np.zeros((1, 1), np.float32), np.zeros(3, np.int32), None])
def test_a_weight_is_replaced_by_its_like_only(value):
    lm = golden.language_model("T1")
    o = lm.model.blocks[2].attn.o
    with pytest.raises(RequestError, match="a weight of this layer is an array float32"):
        o.matrix = value
    packed = golden.language_model(NAME).model.blocks[2].attn.o
    with pytest.raises(RequestError, match="a weight of this layer is Packed"):
        packed.matrix = np.zeros(packed.matrix.shape, np.float32)


# -- interruptions -----------------------------------------------------------------------------------------------------


class _Cut:
    """Raises in the n-th call of a method, before or after it has done its work."""

    def __init__(self, method, n, *, late):
        self.method, self.left, self.late = method, n, late

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and not self.late:
            raise KeyboardInterrupt
        out = self.method(*args, **kwargs)
        if self.left == 0:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("where", ["prefill", "decode", "admit", "peek"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_an_interrupted_generate_leaves_nothing(lm, monkeypatch, where, late, prompts):
    settings = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    wanted = lm.generate(IDS, **settings).token_ids
    engine = lm.engine()
    with monkeypatch.context() as patch:
        nth = 2 if prompts > 1 and where != "prefill" else 1  # short prompts share one prefill step
        patch.setattr(engine.steps, where, _Cut(getattr(engine.steps, where), nth, late=late))
        with pytest.raises(KeyboardInterrupt):
            lm.generate([IDS] * prompts if prompts > 1 else IDS, **settings)
    assert not engine._jobs
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["free_slots"]) == (0, 0, stats["slots"])
    assert lm.generate(IDS, **settings).token_ids == wanted
    assert lm.engine() is engine


def test_an_engine_that_lost_its_buffers_is_made_anew(monkeypatch):
    lm = flint_jax.load(golden.FOLDER / "T1", dtype="float32", progress=False)
    settings = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    wanted = lm.generate(IDS, **settings).token_ids
    engine = lm.engine()

    def lose(*args, **kwargs):
        jax.tree.map(lambda leaf: leaf.delete(), engine.steps.state)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.steps, "prefill", lose)
    with pytest.raises(KeyboardInterrupt):
        lm.generate(IDS, **settings)
    assert lm.generate(IDS, **settings).token_ids == wanted
    assert lm.engine() is not engine


# -- chats -------------------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def small():
    """The embedded model."""
    return flint_jax.load(progress=False, max_context=512)


def test_a_chat_with_thoughts_and_a_call(small):
    reply = small.chat("What is 348 + 276?", temperature=0)
    assert (reply.text, reply.finish_reason) == ("624", "stop")
    assert reply.reasoning
    assert "<think>" not in reply.text
    assert 0 < reply.usage.reasoning_tokens < reply.usage.completion_tokens
    assert "'624'" in repr(reply)
    assert len(repr(reply)) < 200
    assert str(reply) == "624"

    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    stream = small.chat(messages, tools=TOOLS, temperature=0, stream=True)
    pieces = list(stream)
    called = stream.generation
    assert [(c.name, c.arguments) for c in called.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert called.finish_reason == "tool_calls"
    assert tuple(c for p in pieces for c in p.tool_calls) == called.tool_calls
    assert "".join(p.reasoning for p in pieces) == called.reasoning
    assert "get_weather(city='Paris')" in repr(called)
    messages += [
        called.message,
        {"role": "tool", "content": '{"temperature": 18}', "tool_call_id": called.tool_calls[0].id},
    ]
    assert "18" in small.chat(messages, tools=TOOLS, temperature=0).text


def test_thinking_can_be_switched_off(small):
    reply = small.chat("Hello", enable_thinking=False, temperature=0)
    assert reply.reasoning is None
    assert reply.text.startswith("Hello")
    assert small.encode([{"role": "user", "content": "Hello"}], enable_thinking=False) == list(reply.prompt_token_ids)


def test_chat_wants_messages(small):
    for wrong in (5, [], [1, 2], ["a"], [[1]], None):
        with pytest.raises(RequestError, match="need a string, or a list of messages"):
            small.chat(wrong)


# -- the reader alone --------------------------------------------------------------------------------------------------


def test_stop_strings_belong_to_the_answer(small):
    from flint_jax.engine import Event

    tok = small.tokenizer
    text = "<think>maybe 9?</think>It is 8. Or 9 or 10"
    lexer = small._lexer("<|assistant|>\n", {})
    reader = Reader(tok, ["9"], [1], lexer)
    for token in tok.encode(text):
        reader.push(Event("x", (token,)))
        if reader.hit:
            break
    reader.push(Event("x", finish_reason="abort"))
    out = reader.result()
    assert (out.text, out.reasoning, out.finish_reason) == ("It is 8. Or ", "maybe 9?", "stop")


def test_a_long_reply_has_a_short_repr():
    long = Generation(
        tuple(range(5000)), "x" * 5000, "length", None, (1,), None, (ToolCall("i", "f", {"a": "b" * 999}),)
    )
    assert len(repr(long)) < 400
    assert "length, 5000 tokens" in repr(long)


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_load_turns_the_compile_cache_on(tmp_path, monkeypatch):
    from flint_jax import compile_cache

    before = jax.config.jax_compilation_cache_dir
    try:
        monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "ours"))
        jax.config.update("jax_compilation_cache_dir", None)
        flint_jax.load(golden.FOLDER / "T1", progress=False)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
        flint_jax.load(golden.FOLDER / "T1", progress=False)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_word_while_something_compiles(capsys):
    import time

    word = Word("compiling", after=0.05)
    with word:
        pass
    assert capsys.readouterr().err == ""
    with word:
        time.sleep(0.3)
    with word:
        time.sleep(0.2)
    assert capsys.readouterr().err == "compiling\n"


def test_the_first_generate_says_that_it_compiles(monkeypatch, capsys):
    from flint_jax import lm as module

    monkeypatch.setattr(module, "Word", lambda text: Word(text, after=0.0))
    lm = flint_jax.load(golden.FOLDER / "T1", progress=False)
    lm.progress = True
    lm.generate(IDS, max_tokens=2)
    assert "compiling the steps" in capsys.readouterr().err
    lm.generate(IDS, max_tokens=2)
    assert capsys.readouterr().err == ""


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(flint_jax.ConfigError, match=r"max_model_len 5000: the model's context is 4096 tokens"):
        golden.language_model(NAME).make_engine(max_model_len=5000)
