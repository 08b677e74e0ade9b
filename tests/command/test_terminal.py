"""``flint chat`` and the printing of replies: what is said, what is kept, what Ctrl-C ends. The model is scripted."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from flint_jax import terminal
from flint_jax.errors import FlintError, RequestError
from flint_jax.generation import Generation, Piece, ToolCall

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Scripted:
    """A model that says what the script has, piece by piece; a KeyboardInterrupt or an error in it is raised."""

    def __init__(self, *replies):
        self.replies, self.seen, self.options, self.closed = list(replies), [], [], 0

    def chat(self, messages, params, *, stream, **options):
        assert stream
        self.seen.append([dict(m) for m in messages])
        self.options.append(options)
        script = self.replies.pop(0)
        if isinstance(script, Exception):
            raise script
        return _Stream(self, script)


class _Stream:
    def __init__(self, owner, script):
        self.owner, self.script = owner, script

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.owner.closed += 1

    def __iter__(self):
        for piece in self.script:
            if isinstance(piece, type):
                raise piece
            yield piece if isinstance(piece, Piece) else Piece(piece)

    @property
    def generation(self):
        pieces = [p if isinstance(p, Piece) else Piece(p) for p in self.script]
        calls = tuple(c for p in pieces for c in p.tool_calls)
        text, thought = "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)
        return Generation((), text, "tool_calls" if calls else "stop", None, (), thought or None, calls)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def talk(model, *lines, **options):
    """The chat after these lines; an exception class among them is raised instead."""
    chat = terminal.Chat(model, None, **options)
    left = iter(lines)

    def ask(prompt):
        line = next(left, EOFError)
        if isinstance(line, type):
            raise line
        return line

    assert chat.run(ask) == 0
    return chat


def test_a_conversation_is_kept_with_thoughts(capsys):
    model = Scripted([Piece("", "hm"), "Hel", "lo"], ["Bye"])
    talk(model, "Hi", "", "   ", "and\\", "so on", system="Be kind")
    out, _ = capsys.readouterr()
    assert out == "Hello\nBye\n"  # no thoughts where the output is no terminal, and an empty line is no end
    assert [m["role"] for m in model.seen[1]] == ["system", "user", "assistant", "user"]
    assert model.seen[1][2] == {"role": "assistant", "content": "Hello", "reasoning": "hm"}
    assert model.seen[1][3]["content"] == "and\nso on"
    assert model.closed == 2


def test_ctrl_c_ends_the_reply_only(capsys):
    model = Scripted(["One ", "two ", KeyboardInterrupt], ["three"])
    talk(model, KeyboardInterrupt, "Count", "Go on")
    out, err = capsys.readouterr()
    assert out == "One two \nthree\n"
    assert "(interrupted)" in err
    assert "Ctrl-D" in err
    assert model.seen[1][1] == {"role": "assistant", "content": "One two "}
    assert model.closed == 2


def test_a_refused_message_is_taken_back(capsys):
    model = Scripted(RequestError("too long", code="context_length_exceeded"), ["fine"])
    chat = talk(model, "x" * 99, "short")
    assert model.seen[1] == [{"role": "user", "content": "short"}]
    assert "too long /new begins anew." in capsys.readouterr().err
    assert len(chat.messages) == 2


def test_commands(capsys, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([WEATHER]))
    model = Scripted(["a"], ["b"], ["c"])
    talk(model, "one", "/new", "two", "/system Short", "/think off", f"/tools {file}", "three", "/bye", "never")
    err = capsys.readouterr().err
    assert model.seen == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
        [{"role": "system", "content": "Short"}, {"role": "user", "content": "three"}],
    ]
    assert model.options[:2] == [{"tools": None}] * 2
    assert model.options[2] == {"tools": [WEATHER], "enable_thinking": False}
    assert "(tools: weather)" in err
    talk(Scripted(), "/help", "/nothing", "/tools /no/such/file", "/system", "/think", "/tools off", "/tools")
    err = capsys.readouterr().err
    assert "there is no /nothing" in err
    assert "/no/such/file: No such file" in err
    assert all(word in err for word in ("/new  ", "/system TEXT", "/tools FILE", "/think on|off", "/bye"))


@pytest.mark.parametrize("text", ["", "[1]", '[{"function": {}}]', '{"name": "f"}'])
def test_a_file_of_tools_that_is_none(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(FlintError, match=r"not JSON|need a list of"):
        terminal.read_tools(str(tmp_path / "t"))


def test_a_call_asks_for_its_result(capsys, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(WEATHER))
    call = ToolCall("c1", "weather", {"city": "Paris"})
    model = Scripted([Piece(tool_calls=(call,))], ["It is 18."], [Piece(tool_calls=(call,))])
    chat = talk(model, "Weather?", "18", "Again?", KeyboardInterrupt, tools=str(file))
    assert '[weather {"city": "Paris"}]' in capsys.readouterr().out
    assert model.seen[1][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert model.seen[1][2] == {"role": "tool", "tool_call_id": "c1", "content": "18"}
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]  # "Again?" is taken back


def test_thoughts_are_dimmed_in_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    printer = terminal.Printer(out)
    for piece in (Piece("", "let "), Piece("", "me see"), Piece("Yes"), Piece("\x1b]0;x\x07!\n")):
        printer.write(piece)
    printer.close()
    assert out.getvalue() == "\x1b[2mlet me see\x1b[0m\nYes]0;x!\n\n"
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    printer = terminal.Printer(out)
    printer.write(Piece("", "cut"))
    printer.close()
    assert out.getvalue() == "cut\n"


SESSION = """
import fcntl, signal, termios, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C in it is a signal for us
from flint_jax import terminal
from flint_jax.generation import Piece
from tests.command.test_terminal import Scripted

def slow():
    for n in range(200):
        yield Piece(f"word{n} ")
        time.sleep(0.05)

raise SystemExit(terminal.Chat(Scripted(slow(), ["the end"]), None).run())
"""


def test_a_session_on_a_real_terminal(tmp_path):
    """Prompt, streaming, Ctrl-C as a signal, the line before by the up key, Ctrl-D, and a history that is kept."""
    parent, child = pty.openpty()
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdin=child,
        stdout=child,
        stderr=child,
        env=env,
        start_new_session=True,
    )
    os.close(child)
    seen = ""

    def until(text, seconds=120.0):  # a start on two busy cores has taken more than 30
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([parent], [], [], 0.2)[0]:
                seen += os.read(parent, 4096).decode()

    try:
        until("> ")
        os.write(parent, b"Count\n")
        until("word2 ")
        os.write(parent, b"\x03")
        until("(interrupted)")
        os.write(parent, b"\x1b[A\n")  # up: the line before
        until("the end")
        os.write(parent, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()  # else the next test hears of it
        os.close(parent)
    assert seen.count("Count") >= 2
    assert "word150" not in seen
    assert (tmp_path / "flint_jax" / "history").read_text() == "Count\n"
