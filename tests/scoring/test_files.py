"""python -m flint_jax score: every line once, in order, whatever happened before."""

import fcntl
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_jax.__main__ import main
from flint_jax.errors import RequestError
from flint_jax.scoring import Scorer, files, records
from flint_jax.scoring.files import ScoringError, score_file
from tests.model import golden
from tests.scoring import micro


@pytest.fixture(scope="module")
def scorer():
    return Scorer(micro.language_model(), tokens=512, max_length=100, batch_invariant=True, top_k=2, prefix=9)


LINES = [
    {"context": [1, 2, 3], "continuation": [4, 5]},
    {"id": "b", "text": [5, 6, 7, 8]},
    {"id": 3, "context": [], "continuation": [4]},
    {"context": [1, 2], "continuation": []},
    {"text": list(range(90)) * 2},
    {"context": [1, 2, 3], "continuation": [6]},
]


@pytest.fixture
def paths(tmp_path):
    """Input and output; the input has a blank line and no end of its last line."""
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([json.dumps(line) for line in LINES[:2]] + [""] + [json.dumps(x) for x in LINES[2:]]))
    return source, tmp_path / "out.jsonl"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(scorer, paths, **options):
    return score_file(scorer, *paths, **{"progress": False, "lines": 2, **options})


def test_records(scorer, paths):
    assert run(scorer, paths) == []
    out = read(paths[1])
    assert [r["line"] for r in out] == [1, 2, 4, 5, 6, 7]
    assert [r.get("id") for r in out] == [None, "b", 3, None, None, None]
    want = scorer.score([([1, 2, 3], [4, 5]), ([9], [4])])
    for record, score in zip((out[0], out[2]), want, strict=True):
        assert np.float32(record["logprobs"]).tolist() == score.logprobs.tolist()  # nine digits lose nothing
        assert record["sum"] == score.total
        assert record["greedy_tokens"] == score.greedy.tolist()
        top = zip(score.top_ids[0].tolist(), score.top_logprobs[0], strict=True)
        assert record["top"][0] == [[i, pytest.approx(v)] for i, v in top]
    assert out[0]["tokens"] == [4, 5]
    text = out[1]
    assert (text["logprobs"][0], text["top"][0], text["count"], len(text["tokens"])) == (None, None, 3, 4)
    assert (out[3]["sum"], out[3]["count"], out[3]["greedy"]) == (0.0, 0, True)
    assert out[4]["count"] == 179  # in windows


def test_nothing_to_score_is_a_record_all_the_same(scorer, paths):
    empty = [{"text": []}, {"context": [], "continuation": []}, {"context": [1], "continuation": []}, {"text": [5]}]
    paths[0].write_text("\n".join(map(json.dumps, empty)))
    assert run(scorer, paths) == []
    *nothing, one = read(paths[1])
    for record in nothing:
        assert [record[k] for k in ("sum", "count", "greedy")] == [0.0, 0, True]
        assert record["tokens"] == record["logprobs"] == record["greedy_tokens"] == record["top"] == []
    assert (one["count"], one["logprobs"], one["top"], one["tokens"]) == (0, [None], [None], [5])


def test_prefix_and_brief(scorer, paths):
    run(scorer, paths, text_prefix=9, brief=True)
    text = read(paths[1])[1]
    assert text["count"] == 4
    assert "logprobs" not in text
    assert text["sum"] == scorer.score_texts([LINES[1]["text"]], prefix=9)[0].total


def test_resumes_from_any_byte(scorer, paths):
    """A run killed after any number of bytes goes on to the same file."""
    run(scorer, paths)
    whole = paths[1].read_bytes()
    cuts = [0, 1, *(i + d for i in range(len(whole)) if whole[i : i + 1] == b"\n" for d in (0, 1, 2, 30))]
    for cut in sorted({c for c in cuts if c <= len(whole)}):
        paths[1].write_bytes(whole[:cut])
        before = scorer.stats.sequences
        run(scorer, paths)
        assert paths[1].read_bytes() == whole
        assert scorer.stats.sequences - before == len(LINES) - whole[:cut].count(b"\n"), "scored again"


def test_a_kill_between_two_writes_costs_a_batch(scorer, paths, monkeypatch):
    calls = []
    inner = files.records.render

    def dies(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return inner(*args, **options)

    monkeypatch.setattr(files.records, "render", dies)
    with pytest.raises(KeyboardInterrupt):
        run(scorer, paths)
    assert len(read(paths[1])) in (2, 3)
    monkeypatch.undo()
    run(scorer, paths)
    assert [r["line"] for r in read(paths[1])] == [1, 2, 4, 5, 6, 7]


_KILLED = """
import os, signal, sys
calls, fsync = [], os.fsync
def dies(file):
    fsync(file)
    calls.append(file)
    if len(calls) == 3:
        os.write(file, b'{"line": 9, "sum": -1')  # a write that did not come to its end
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = dies
from flint_jax.__main__ import main
main(sys.argv[1:])
"""


def test_the_command_killed_and_started_again(tmp_path):
    """Every line once, in order, and each with the scores it has alone."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 300, 70).tolist()
    lines = [{"context": shared[: n + 1], "continuation": shared[:3]} for n in (0, 15, 63, 64, 69)]
    lines += [{"context": shared, "continuation": rng.integers(0, 300, n).tolist()} for n in (0, 1, 2, 130)]
    lines += [{"text": rng.integers(0, 300, n).tolist()} for n in (0, 1, 2, 300)] + lines[:2]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    words = f"score --model {golden.FOLDER / 'T1'} --dtype float32 --tokens 128 --max-length 128 --long --batch 3"
    command = [*words.split(), "--batch-invariant", "--input", str(source), "--output", str(target)]
    done = subprocess.run([sys.executable, "-c", _KILLED, *command], timeout=300, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert target.read_bytes().count(b"\n") == 9
    assert main(command) == 0
    out = read(target)
    assert [record["line"] for record in out] == list(range(1, len(lines) + 1))
    alone = Scorer(golden.language_model("T1", "serving"), tokens=128, max_length=128, batch_invariant=True)
    for line, record in zip(lines, out, strict=True):
        text = "text" in line
        (want,) = alone.score_texts([line["text"]]) if text else alone.score_long([tuple(line.values())])
        logprobs = [0.0 if x is None else x for x in record["logprobs"]]
        np.testing.assert_allclose(logprobs, want.logprobs, atol=1e-5)
        assert record["tokens"] == line["text" if text else "continuation"]


BAD = {
    "{": "not JSON",
    "[1]": "need an object",
    '"x"': "need an object",
    "{}": "got the keys",
    '{"text": [1], "context": [1], "continuation": [2]}': "got the keys",
    '{"context": [1]}': "got the keys",
    '{"text": 5}': "text must be a string or a list",
    '{"text": [1, 2.5]}': "list of integers",
    '{"text": [1, [2]]}': "flat list",
    '{"text": [true]}': "list of integers",
    '{"text": [96]}': "token id 96 is outside the vocabulary, 0 to 95",
    '{"text": [99999999999999999999]}': "list of integers",
    '{"text": "no tokenizer here"}': "no tokenizer",
    '{"id": [1], "text": [1]}': "id must be",
    '{"context": [1], "continuation": %s}' % ([2] * 101): "maximum context length is 100",
    "\x00": "not JSON",
    "[" * 100_000: "not JSON",
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_bad_lines_by_number(scorer, paths, bad):
    source, target = paths
    source.write_text(f'{{"text": [1, 2]}}\n{bad}\n{{"text": [3, 4]}}\n')
    with pytest.raises(ScoringError, match=r"in\.jsonl, line 2: ") as error:
        run(scorer, paths)
    assert BAD[bad] in str(error.value)
    assert [r["line"] for r in read(target)] == [1]  # what came before is there
    assert run(scorer, paths, stop_on_error=False) == [2]
    good, wrong, last = read(target)
    assert (good["line"], wrong["line"], last["line"]) == (1, 2, 3)
    assert BAD[bad] in wrong["error"]
    assert "sum" in last


def test_bytes_that_are_no_text(scorer, paths):
    paths[0].write_bytes(b'\xff\xfe{"text"\n')
    with pytest.raises(ScoringError, match="line 1: not JSON"):
        run(scorer, paths)


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_bytes_become_a_record(raw):
    scorer = Scorer(micro.language_model())
    record = records.parse(raw.replace(b"\n", b""), 7, scorer)
    assert record.line == 7
    assert (record.error is None) != (record.item is None)


def test_mended_input_goes_on_where_it_stopped(scorer, paths):
    source, target = paths
    source.write_text('{"text": [1, 2]}\n{"text": [1, 2\n{"text": [3, 4]}\n')
    with pytest.raises(ScoringError, match="mend it and run again"):
        run(scorer, paths)
    source.write_text('{"text": [1, 2]}\n{"text": [1, 2]}\n{"text": [3, 4]}\n')
    run(scorer, paths)
    assert [r["line"] for r in read(target)] == [1, 2, 3]


def test_a_line_too_long_to_hold(scorer, paths, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 64)
    texts = [1, 2], [1] * 100, [3, 4]
    paths[0].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run(scorer, paths, stop_on_error=False) == [2]
    assert [("error" in r, r["line"]) for r in read(paths[1])] == [(False, 1), (True, 2), (False, 3)]


def test_an_output_of_something_else_is_left_alone(scorer, paths):
    source, target = paths
    run(scorer, paths)
    whole = source.read_text()
    source.write_text(whole.replace("[1, 2, 3]", "[1, 2, 2]"))
    with pytest.raises(ScoringError, match="was not made from"):
        run(scorer, paths)
    source.write_text("\n".join(whole.splitlines()[:4]))
    with pytest.raises(ScoringError, match="has only 4"):
        run(scorer, paths)
    target.write_text("notes of mine\n")
    with pytest.raises(ScoringError, match="no record of a scoring run"):
        run(scorer, paths)
    assert target.read_text() == "notes of mine\n"
    run(scorer, paths, overwrite=True)
    assert [r["line"] for r in read(target)] == [1, 2, 4]


def test_two_writers_are_one_too_many(scorer, paths):
    with open(paths[1], "ab") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # even a reader's lock: ours is exclusive
        with pytest.raises(ScoringError, match="another process is writing"):
            run(scorer, paths)


def test_scores_that_are_not_numbers_are_an_error():
    record = records.Record(1, "0", item=(np.array([1, 2], np.int32), 1))
    scores = Scorer(micro.language_model(), prefix=1).score([([1], [])])
    nan = type(scores[0])(np.array([np.nan], np.float32), np.array([True]), np.zeros((1, 0)), np.zeros((1, 0)))
    assert "not numbers" in json.loads(records.render(record, nan))["error"]


def test_command(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"context": "The harbour", "continuation": " was quiet"}\n{\n')
    model = ["--model", str(golden.FOLDER / "T2-nvfp4"), "--dtype", "float32", "--tokens", "128", "--batch-invariant"]
    command = ["score", *model, "--input", str(source), "--output", str(target)]
    assert main(command) == 2
    assert "in.jsonl, line 2: not JSON" in capsys.readouterr().err
    assert main([*command, "--on-error", "skip"]) == 0
    first, second = read(target)
    lm = golden.language_model("T2-nvfp4", "serving")
    head, whole = lm.tokenizer.encode("The harbour"), lm.tokenizer.encode("The harbour was quiet")
    want = np.asarray(lm.logits([whole]))[0].astype(np.float64)
    want -= np.log(np.exp(want).sum(-1, keepdims=True))
    rows = np.arange(len(head) - 1, len(whole) - 1)
    np.testing.assert_allclose(first["logprobs"], want[rows, whole[len(head) :]], atol=2e-5)
    assert second["error"].startswith("not JSON")


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--prefix", "x"], "--prefix x"),
        (["--input", "nowhere"], "nowhere"),
        (["--input", "folder"], "folder is no ordinary file"),
        (["--output", "folder"], "folder is no ordinary file"),
        (["--output", "/dev/null"], "/dev/null is no ordinary file"),
        (["--output", "missing/out"], "missing: no such folder for the output out; make it first"),
        (["--output", "in"], "in is the input and the output"),
        (["--output", "in", "--overwrite"], "in is the input and the output"),
        (["--output", "notes"], "notes exists and its last line is no record of a scoring run"),
        (["--output", "locked"], "another process is writing locked"),
        (["--max-length", "0"], "--max-length: 0: need a whole number from 1"),
        (["--tokens", "0"], "--tokens: 0: need a multiple of 64 from 64"),
        (["--tokens", "100"], "--tokens: 100: need a multiple of 64"),
        (["--tokens", "x"], "--tokens: x: need a multiple of 64"),
        (["--batch", "0"], "--batch: 0: need a whole number from 1"),
        (["--top-k", "-1"], "--top-k: -1: need a whole number from 0"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(flags, match, tmp_path, capsys, monkeypatch):
    """And no file is changed or made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in (("in", '{"text": [1, 2]}\n'), ("notes", "precious"), ("locked", "")):
        (tmp_path / name).write_text(text)
    before = {p.name: p.is_file() and p.read_text() for p in tmp_path.iterdir()}
    monkeypatch.setattr("flint_jax.__main__._load", lambda args: pytest.fail("the model was loaded"))
    with open(tmp_path / "locked") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert main(["score", "--input", "in", "--output", "out", *flags]) == 2
    assert match in capsys.readouterr().err
    assert {p.name: p.is_file() and p.read_text() for p in tmp_path.iterdir()} == before


def test_an_output_outlives_a_model_that_does_not_load(tmp_path, capsys):
    (tmp_path / "in").write_text('{"text": [1, 2]}\n')
    (tmp_path / "out").write_text("the scores of last week")
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--overwrite"]
    assert main(["score", "--model", str(tmp_path / "no.gguf"), *files]) == 2
    assert "no.gguf" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "the scores of last week"


def test_errors_are_the_users_to_mend():
    assert issubclass(ScoringError, ValueError)
    assert not issubclass(ScoringError, RequestError)


@pytest.mark.parametrize("content", [b"precious", b"two\nlines", b'{"line": 1}\n{"lin', b'{"text": "a"}'])
def test_a_file_of_something_else_is_left_as_it_was(scorer, paths, content):
    """Without an end of its last line, too: that is not taken for a torn record."""
    paths[1].write_bytes(content)
    with pytest.raises(ScoringError, match="no record of a scoring run"):
        run(scorer, paths)
    assert paths[1].read_bytes() == content


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_input_is_not_the_output(scorer, paths, overwrite):
    whole = paths[0].read_bytes()
    paths[1].symlink_to(paths[0])
    with pytest.raises(ScoringError, match="is the input and the output"):
        run(scorer, paths, overwrite=overwrite)
    assert paths[0].read_bytes() == whole
