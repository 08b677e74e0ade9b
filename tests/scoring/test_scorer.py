"""Scores: right, the same in any company, with every token run once and nothing of the size of the logits in memory."""

import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest

import flint_jax
from flint_jax import RequestError
from flint_jax.compilations import watch
from flint_jax.lm import LanguageModel
from flint_jax.scoring import Scorer, windows
from flint_jax.scoring.inputs import default_prefix
from flint_jax.scoring.programs import Pages
from loaders import load_tokenizer
from tests.model import golden
from tests.scoring import micro

RNG = np.random.default_rng(0)


def ids(count):
    return RNG.integers(0, micro.VOCAB, count).tolist()


@pytest.fixture(scope="module")
def scorer():
    """One set of programs for the file. float32, pages for its longest sequence."""
    made = Scorer(micro.language_model(), tokens=512, max_length=1024)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def narrow():
    """A context of 100 tokens, the batch-invariant mode, and a prefix for empty contexts."""
    return Scorer(micro.language_model(), tokens=512, max_length=100, batch_invariant=True, prefix=9)


@functools.cache
def of_golden(name):
    """Over a golden model, float32."""
    return Scorer(golden.language_model(name), tokens=128, top_k=5, batch_invariant=True)


@pytest.fixture
def stats(scorer):
    """Counters from zero."""
    scorer.stats = type(scorer.stats)()
    return scorer.stats


def plain(lm, context, continuation):
    """The same from whole-sequence logits, in float64: log p of everything, of the continuation; greedy."""
    tokens = [*context, *continuation][:-1]
    width = -(-len(tokens) // 256) * 256
    padded = np.zeros((1, width), np.int64)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(lm.logits(padded, [len(tokens)]))[0, len(context) - 1 :][: len(continuation)].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp, logp[np.arange(len(continuation)), continuation], logits.argmax(-1) == continuation


# -- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.MODELS)
def test_goldens(name):
    """transformers' log-probabilities of the padded batch, their sums and likeliest five, to the goldens' tolerance."""
    g = golden.arrays(name)
    rows = [row[:n] for row, n in zip(g["score.input_ids"], g["score.lengths"], strict=True)]
    found = of_golden(name).score_texts(rows)
    for i, (score, row) in enumerate(zip(found, rows, strict=True)):
        want = g["score.token_logprob"][i, : len(row)]
        limit = 2e-4 * max(1.0, float(np.abs(want).max()))
        assert score.first == 1
        np.testing.assert_allclose(score.logprobs, want, atol=limit, rtol=0)
        assert abs(score.total - g["score.sum_logprob"][i]) <= limit * len(row)
        # Entry j of a score is about token j; the golden's is about the token after position j.
        np.testing.assert_array_equal(score.top_ids[1:], g["score.top_ids"][i, : len(row) - 1])
        np.testing.assert_allclose(score.top_logprobs[1:], g["score.top_logprobs"][i, : len(row) - 1], atol=limit)
        assert (score.greedy[1:] == (g["score.top_ids"][i, : len(row) - 1, 0] == row[1:])).all()


CASES = {
    "one-token context": (1, 5),
    "one-token continuation": (40, 1),
    "ends of a page": (64, 64),
    "one beyond a page": (65, 63),
    "one before a page": (63, 2),
    "inside the window": (10, 20),
    "continuation longer than the window": (5, 200),
    "longer than a step": (300, 400),
    "the whole context": (1, 1024),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_forward_pass(scorer, case):
    # Numbers of its own, whichever tests ran before: now and then a token has two experts that tie to within rounding
    # (3.6e-7 was seen), and takes the one here and the other there.
    rng = np.random.default_rng(list(CASES).index(case))
    context, continuation = (rng.integers(0, micro.VOCAB, n).tolist() for n in CASES[case])
    (score,) = scorer.score([(context, continuation)])
    _, want, greedy = plain(scorer.lm, context, continuation)
    np.testing.assert_allclose(score.logprobs, want, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(score.greedy, greedy)
    assert score.logprobs.dtype == np.float32
    assert score.is_greedy == greedy.all()


def test_greedy_is_what_greedy_decoding_gives(scorer):
    context, said = ids(30), []
    for _ in range(3):
        said.append(int(np.asarray(scorer.lm.logits([context + said]))[0, -1].argmax()))
    right, wrong = scorer.score([(context, said), (context, [*said[:2], (said[2] + 1) % micro.VOCAB])])
    assert right.is_greedy
    assert wrong.greedy.tolist() == [True, True, False]


# -- company -----------------------------------------------------------------------------------------------------------


def crowd():
    """Pairs of every kind: shared contexts, duplicates, short and long ones."""
    shared = ids(150)
    pairs = [(shared, ids(1 + 9 * i)) for i in range(4)]
    pairs += [(ids(n), ids(m)) for n, m in ((1, 3), (20, 30), (64, 64), (200, 100), (500, 40))]
    return [*pairs, pairs[0], pairs[3]]


def test_company_order_and_padding_change_nothing(scorer):
    pairs = crowd()
    alone = [scorer.score([pair])[0] for pair in pairs]
    order = RNG.permutation(len(pairs))
    for chosen in (range(len(pairs)), order, order[:4], order[:5]):
        for i, score in zip(chosen, scorer.score([pairs[i] for i in chosen]), strict=True):
            np.testing.assert_allclose(score.logprobs, alone[i].logprobs, atol=1e-5, rtol=0)
            np.testing.assert_array_equal(score.greedy, alone[i].greedy)


def test_batch_invariant_mode_gives_the_same_bits_in_bfloat16():
    scorer = Scorer(micro.language_model("bfloat16"), tokens=512, max_length=1024, batch_invariant=True)
    assert list(scorer.programs.rows) == [64], "one tile width"
    pairs = crowd()
    together = scorer.score(pairs)
    for pair, score in zip(pairs, together, strict=True):
        np.testing.assert_array_equal(scorer.score([pair])[0].logprobs, score.logprobs)
    backwards = scorer.score(pairs[::-1])[::-1]
    for a, b in zip(together, backwards, strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert scorer.stats.reused > 0


def test_stale_pages_are_never_read(scorer):
    pairs = crowd()
    clean = scorer.score(pairs)
    scorer._pages = jax.tree.map(lambda a: a * np.float32("nan"), scorer._pages)
    for a, b in zip(clean, scorer.score(pairs), strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


# -- work --------------------------------------------------------------------------------------------------------------


def test_a_hundred_questions_run_each_context_once(scorer, stats):
    """100 questions of 500 tokens, 4 answers each: what is run is the contexts and what the answers need."""
    pairs = []
    for _ in range(100):
        context = ids(500)
        pairs += [(context, [letter, *ids(int(RNG.integers(0, 8)))]) for letter in (5, 6, 7, 8)]
    scores = scorer.score(pairs)
    answers = sum(len(a) - 1 for _, a in pairs)  # nothing is predicted from a last token
    assert stats.context_tokens == 100 * 500
    assert stats.tokens == 100 * 500 + answers
    assert stats.reused == 300 * 500
    assert (stats.sequences, stats.distinct) == (400, 400)
    assert stats.scored == sum(len(a) for _, a in pairs)
    assert stats.tokens / stats.slots > 0.8, "padding"
    for i in (0, 201, 399):
        np.testing.assert_allclose(scores[i].logprobs, plain(scorer.lm, *pairs[i])[1], atol=1e-5, rtol=0)


def test_equal_requests_are_scored_once(scorer, stats):
    pair = ids(20), ids(5)
    first, second, third = scorer.score([pair, (ids(3), ids(2)), pair])
    assert (stats.sequences, stats.distinct, stats.scored) == (3, 2, 7)
    np.testing.assert_array_equal(first.logprobs, third.logprobs)
    assert len(second.logprobs) == 2


def test_nothing_compiles_after_warm_up(scorer):
    compiled = watch()
    compiled.mark_ready()
    scorer.score(crowd())
    scorer.score_texts([ids(700), ids(1), ids(65)], prefix=3)
    assert compiled.after_ready == 0
    jax.jit(lambda x: x + 1)(np.zeros(3))  # the count does count
    assert compiled.after_ready == 1


def test_logits_of_all_positions_are_never_in_memory():
    """At 384 tokens no value of the two programs has vocabulary (96) x as many entries."""
    lm = micro.language_model()
    programs = Scorer(lm, tokens=384, batch_invariant=True).programs
    leaves, pages = lm._leaves(), Pages.create(lm.config, 8, np.float32)
    assert programs.positions == 128  # a power of two, at most half the tokens
    rows = jax.ShapeDtypeStruct((programs.rows[64], 3 + 64 + 8), np.int32)
    run = programs._run[64].lower(leaves, pages, rows)
    hidden = jax.ShapeDtypeStruct((384, lm.config.hidden_size), np.float32)
    score = programs._score.lower(leaves, hidden, jax.ShapeDtypeStruct((2, 128), np.int32))
    shapes = [
        [int(n) for n in s.split("x")] for s in re.findall(r"tensor<([\dx]+)x\w+>", run.as_text() + score.as_text())
    ]
    of_vocabulary = {np.prod(s) for s in shapes if micro.VOCAB in s}
    assert 128 * micro.VOCAB in of_vocabulary  # logits of one call
    assert max(of_vocabulary) < 384 * micro.VOCAB
    assert run.compile().memory_analysis().alias_size_in_bytes >= 2 * pages.k.nbytes  # written in place


def test_the_pool_grows_for_a_longer_sequence():
    scorer = Scorer(micro.language_model(), tokens=128, batch_invariant=True)
    short, long = (ids(5), ids(5)), (ids(1000), ids(24))
    (before,) = scorer.score([short])
    small = scorer._pool
    assert np.isfinite(scorer.score([long])[0].logprobs).all()
    assert scorer._pool > small
    np.testing.assert_allclose(scorer.score([short])[0].logprobs, before.logprobs, atol=1e-5)


# -- texts and windows -------------------------------------------------------------------------------------------------


def test_a_long_text_is_read_in_windows(narrow):
    lm, scorer = narrow.lm, narrow
    text = ids(350)
    for overlap in (1, 30):
        (score,) = scorer.score_texts([text], prefix=7, overlap=overlap)
        assert score.first == 0
        whole = [7, *text]
        want = [
            plain(lm, whole[w.begin : w.first], whole[w.first : w.end])[1] for w in windows(len(whole), 1, 100, overlap)
        ]
        np.testing.assert_allclose(score.logprobs, np.concatenate(want), atol=1e-5, rtol=0)
    (bare,) = scorer.score_texts([text[:50]])
    assert (bare.first, bare.logprobs[0]) == (1, 0.0)
    np.testing.assert_allclose(bare.logprobs[1:], plain(lm, text[:1], text[1:50])[1], atol=1e-5)


def test_a_pair_beyond_the_context_is_refused_or_read_in_windows(narrow):
    scorer = narrow
    fits, beyond = (ids(60), ids(41)), (ids(60), ids(42))
    assert len(scorer.score([fits])[0].logprobs) == 41  # nothing is predicted from the last token
    with pytest.raises(RequestError, match=r"maximum context length is 100 tokens.*pair 1 has 102 tokens") as e:
        scorer.score([fits, beyond])
    assert e.value.code == "context_length_exceeded"
    (score,) = scorer.score_long([beyond])
    assert len(score.logprobs) == 42
    np.testing.assert_allclose(score.logprobs[:41], plain(scorer.lm, beyond[0], beyond[1][:41])[1], atol=1e-5)
    only_context = ids(150), ids(2)
    (cut,) = scorer.score_long([only_context], overlap=99)
    np.testing.assert_allclose(cut.logprobs, plain(scorer.lm, only_context[0][51:], only_context[1])[1], atol=1e-5)


# -- edges -------------------------------------------------------------------------------------------------------------


def test_empty_continuations_and_texts(scorer):
    empty, none, nothing, one = (
        *scorer.score([(ids(3), []), ([], [])]),
        *scorer.score_texts([[], [5]]),
    )
    for score in (empty, none, nothing):
        assert score.logprobs.shape == (0,)
        assert (score.total, score.is_greedy, score.first) == (0.0, True, 0)
    assert (one.first, one.logprobs.tolist()) == (1, [0.0])
    assert scorer.score([]) == []


def test_an_empty_context_needs_a_prefix_token(narrow):
    lm = narrow.lm  # names neither BOS nor EOS
    with pytest.raises(RequestError, match=r"context of pair 0 is empty.*prefix=TOKEN_ID"):
        Scorer(lm).score([([], [1, 2])])
    found, want = narrow.score([([], [1, 2]), ([9], [1, 2])])
    np.testing.assert_array_equal(found.logprobs, want.logprobs)
    assert len(found.logprobs) == 2


def test_text_goes_through_the_tokenizer():
    lm = golden.language_model("T2-nvfp4")
    scorer = of_golden("T2-nvfp4")
    ids = lm.tokenizer.encode
    # A space at the end of the context belongs to the continuation, as in lm-evaluation-harness.
    texts = [("The harbour ", "was quiet"), ("The harbour", " was quiet"), ("", "The harbour")]
    head = ids("The harbour")
    whole = ids("The harbour was quiet")
    first, second, third = scorer.score(texts)
    (want,) = scorer.score([(head, whole[len(head) :])])
    for score in (first, second):
        np.testing.assert_array_equal(score.logprobs, want.logprobs)
    np.testing.assert_array_equal(third.logprobs, scorer.score([([scorer.prefix], head)])[0].logprobs)
    assert scorer.prefix == lm.tokenizer.token_id("[gMASK]")  # its BOS


def test_one_bos_and_no_eos_in_between(tmp_path):
    """A tokenizer whose files ask for both around every text."""
    inner = golden.language_model("T2")
    shutil.copy(golden.FOLDER / "T2" / "tokenizer.json", tmp_path)
    names = {"bos_token": "<|user|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | {"add_bos_token": True, "add_eos_token": True}))
    lm = LanguageModel(inner.model, load_tokenizer(tmp_path))
    bos, eos = (lm.tokenizer.token_id(name) for name in names.values())
    ids = lm.tokenizer.encode
    head, whole = ids("The harbour"), ids("The harbour was quiet")
    assert ids("The harbour", add_special_tokens=True) == [bos, *head, eos]
    scorer, of_ids = Scorer(lm, tokens=128, batch_invariant=True), of_golden("T2").score
    assert scorer.prefix == bos
    found = scorer.score([("The harbour", " was quiet"), ("", "The harbour"), ("The", "")])
    want = of_ids([([bos, *head], whole[len(head) :]), ([bos], head), ([bos], [])])
    (behind,), (own,) = scorer.score_texts(["The harbour"], prefix=bos), scorer.score_texts(["The harbour"])
    assert len(own.logprobs) == len(head) + 2
    for a, b in zip([*found, behind], [*want, want[1]], strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    np.testing.assert_allclose(own.logprobs[1:-1], want[1].logprobs, atol=1e-5)


def test_a_boundary_inside_a_token():
    """As the harness counts; where nothing of the continuation would be left, an error, not the best score of all."""
    lm, scorer = golden.language_model("T2-nvfp4"), of_golden("T2-nvfp4")
    ids = lm.tokenizer.encode
    with pytest.raises(
        RequestError, match=r"pair 1: .* joins the end of the context, .*à la me., and the whole.*, 'r'"
    ):
        scorer.score([("The", " harbour"), ("l'été à la me", "r")])
    text, cut = "don't can't they're", 4
    head, whole = ids(text[:cut]), ids(text)
    assert whole[: len(head)] != head
    (score,) = scorer.score([(text[:cut], text[cut:])])
    (want,) = scorer.score([(head, whole[len(head) :])])
    np.testing.assert_array_equal(score.logprobs, want.logprobs)
    for context in ("The harbour ", "The harbour", " ", ""):  # the space that would move stays, too
        (score,) = scorer.score([(context, "")])
        assert (score.total, len(score.logprobs)) == (0.0, 0)


def test_the_prefix_is_bos_else_eos_else_nothing():
    assert default_prefix(golden.language_model("T2")) == 483  # its tokenizer's <|endoftext|>
    assert default_prefix(micro.language_model()) is None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: s.score([([1], [2]), ([1], [micro.VOCAB])]), "continuation of pair 1: token id 96 is outside"),
        (lambda s: s.score([([-1], [2])]), "context of pair 0: token id -1 is outside"),
        (lambda s: s.score([([1.5], [2])]), "list of integers"),
        (lambda s: s.score([([[1], [2, 3]], [2])]), "flat list"),
        (lambda s: s.score([("text", [2])]), "both be text or both be token ids"),
        (lambda s: s.score([("text", "more")]), "no tokenizer"),
        (lambda s: s.score_texts([[1, 2]], prefix=200), "prefix: token id 200"),
        (lambda s: Scorer(s.lm, tokens=100), "multiple of 64"),
        (lambda s: Scorer(s.lm, max_length=2000), "max_length = 2000: need a whole number from 1 to 1024"),
        (lambda s: Scorer(s.lm, top_k=-1), "top_k = -1"),
        (lambda s: Scorer(s.lm, tokens=0), "tokens = 0: need a whole number from 64"),
        (lambda s: Scorer(s.lm, max_length=0), "max_length = 0"),
        (lambda s: Scorer(s.lm, prefix=micro.VOCAB), "prefix = 96: need a whole number from 0 to 95"),
        (lambda s: Scorer(s.lm, prefix="bos"), "prefix = 'bos'"),
        (lambda s: Scorer(s.lm, prefix=True), "prefix = True"),
        (lambda s: s.score_long([([1], [2])], overlap=0), "overlap = 0: need a whole number from 1 to 1024"),
        (lambda s: s.score_long([], overlap=-3), "overlap = -3"),
        (lambda s: s.score_texts([[1]], overlap=1025), "overlap = 1025"),
        (lambda s: s.score_texts([[1]], overlap=1.0), "overlap = 1.0"),
        (lambda s: s.score_texts("one text"), "need a list of texts or of .* pairs, got 'one text'"),
        (lambda s: s.score_texts([1, 2]), "text 0: token ids must be a list"),
        (lambda s: s.score_texts(5), "need a list of texts"),
        (lambda s: s.score(("ab", "cd")), r"pair 0: need \(context, continuation\), got 'ab'"),
        (lambda s: s.score([{"context": [1], "continuation": [2]}]), "pair 0: need"),
        (lambda s: s.score([([1], [2]), ([1],)]), "pair 1: need"),
        (lambda s: s.score([5]), "pair 0: need"),
        (lambda s: s.score([(None, [2])]), "context of pair 0: token ids must be"),
        (lambda s: s.score([(3, "text")]), "pair 0: context and continuation must both be text or both be token ids"),
        (lambda s: s.score([(b"ab", [2])]), "context of pair 0: token ids must be"),
        (lambda s: s.lm.score([([1], [2], [3])]), "pair 0: need"),
        (lambda s: s.lm.score(["ab"]), "pair 0: need"),
    ],
)
def test_refusals(scorer, call, match):
    with pytest.raises(flint_jax.FlintError, match=match):
        call(scorer)


def test_changed_weights_are_seen(scorer):
    lm = scorer.lm
    pair = ids(5), ids(5)
    (before,) = scorer.score([pair])
    head = lm.model.head
    old = head.matrix
    try:
        head.matrix = old * 2
        (after,) = scorer.score([pair])
    finally:
        head.matrix = old
    assert np.abs(after.logprobs - before.logprobs).max() > 1e-2
