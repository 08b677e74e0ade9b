"""Talking to the model in a terminal: replies as they are written, thoughts dimmed, lines edited and remembered."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from flint_jax.errors import FlintError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = """\
/new            forget the conversation        /system TEXT   set the system message (and begin anew); alone: show it
/tools FILE     offer the tools of a JSON file, a list as in OpenAI's API; /tools off: none; alone: show them
/think on|off   whether the model may think    /bye, Ctrl-D   leave
A line that ends with \\ goes on in the next one. Ctrl-C ends a reply that is being written, or drops the line."""


def visible(text: str) -> str:
    """Text without control characters, which could make a terminal do things; newlines and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


class Printer:
    """Writes the pieces of one reply. thoughts: show them, dimmed (only where the output is a terminal)."""

    def __init__(self, out: TextIO, thoughts: bool = True):
        self._out = out
        self._terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._terminal and not os.environ.get("NO_COLOR")
        self._thoughts = thoughts and self._terminal
        self._thinking = self._begun = False

    def write(self, piece) -> None:
        """One piece of a stream."""
        if piece.reasoning and self._thoughts:
            if not self._thinking and self._colour:
                self._out.write(_DIM)
            self._thinking = True
            self._out.write(visible(piece.reasoning))
        if piece.text:
            self._end_thought()
            self._out.write(visible(piece.text) if self._terminal else piece.text)
            self._begun = True
        for call in piece.tool_calls:
            self._end_thought()
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            self._out.write(f"{'\n' if self._begun else ''}[{visible(call.name)} {visible(arguments)}]")
            self._begun = True
        self._out.flush()

    def close(self) -> None:
        """End the reply with a line break, and the dimming."""
        self._end_thought(last=True)
        self._out.write("\n")
        self._out.flush()

    def _end_thought(self, last: bool = False) -> None:
        if self._thinking:
            self._out.write((_PLAIN if self._colour else "") + ("" if last else "\n"))
            self._thinking = False


class Chat:
    """The loop of ``flint chat``. lm: a LanguageModel. settings: keywords of ``lm.chat``."""

    def __init__(
        self, lm, params, *, system: str | None = None, thinking: bool | None = None, tools: str | None = None
    ):
        self.lm, self.params = lm, params
        self.thinking = thinking
        self.system = system
        self.tools: list[dict[str, Any]] = read_tools(tools) if tools else []
        self.messages: list[dict[str, Any]] = []
        self._new()

    def run(self, ask: Callable[[str], str] | None = None) -> int:
        """Until the end of input or /bye; returns the exit code. ask: reads a line after a prompt."""
        ask = ask or _reader()
        if sys.stdin.isatty():
            _say("Type a message; /help lists what else. Ctrl-D leaves.")
        while True:
            try:
                line = _whole_line(ask, "> ")
            except EOFError:
                return 0
            except KeyboardInterrupt:
                _say("\n(Ctrl-D or /bye leaves)")
                continue
            if not line.strip():
                continue
            if line.startswith("/"):
                if line.split()[0] in ("/bye", "/quit", "/exit"):
                    return 0
                self._command(line)
                continue
            try:
                self._turn(line, ask)
            except EOFError:
                return 0

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/help", "/?"):
            _say(_HELP)
        elif name == "/new":
            self._new()
            _say("(a new conversation)")
        elif name == "/system":
            if rest:
                self.system = rest
                self._new()
            _say(f"(system message: {self.system or 'none'})")
        elif name == "/tools":
            try:
                self.tools = self.tools if not rest else [] if rest == "off" else read_tools(rest)
            except FlintError as error:
                _say(str(error))
                return
            _say(f"(tools: {', '.join(t['function']['name'] for t in self.tools) or 'none'})")
        elif name == "/think":
            if rest in ("on", "off"):
                self.thinking = rest == "on"
            _say(f"(thinking: {'as the model likes' if self.thinking is None else 'on' if self.thinking else 'off'})")
        else:
            _say(f"there is no {name}; /help lists what there is")

    def _new(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _turn(self, line: str, ask: Callable[[str], str]) -> None:
        """One message of the user, and what follows until the model has answered it."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": line})
        try:
            while (reply := self._reply()) is not None and reply.tool_calls:
                for call in reply.tool_calls:
                    result = ask(f"result of {call.name}: ")
                    self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        except KeyboardInterrupt:  # while a result was asked for: a call without one cannot stay
            del self.messages[before:]
            _say("\n(the question is taken back)")
        except FlintError as error:
            del self.messages[before:]
            _say(f"{error}" + (" /new begins anew." if getattr(error, "code", "") == "context_length_exceeded" else ""))

    def _reply(self):
        """Print and keep a reply; None when Ctrl-C ended it."""
        printer = Printer(sys.stdout)
        said = ""
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        stream = self.lm.chat(self.messages, self.params, stream=True, tools=self.tools or None, **options)
        try:
            with stream:
                for piece in stream:
                    said += piece.text
                    printer.write(piece)
        except KeyboardInterrupt:
            printer.close()
            _say("(interrupted)")
            self.messages.append({"role": "assistant", "content": said})
            return None
        printer.close()
        reply = stream.generation
        if reply.finish_reason == "length":
            _say("(cut: --max-tokens, or the end of the context)")
        self.messages.append(reply.message)
        return reply


def read_tools(path: str) -> list[dict[str, Any]]:
    """Tool definitions of a JSON file. Raises FlintError."""
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlintError(f"{path}: {getattr(error, 'strerror', None) or f'not JSON: {error}'}") from None
    found = found if isinstance(found, list) else [found]
    for tool in found:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FlintError(
                f'{path}: need a list of {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            )
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _whole_line(ask: Callable[[str], str], prompt: str) -> str:
    line = ask(prompt)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + ask("  ")
    return line


def _reader() -> Callable[[str], str]:
    """Reads lines: with editing and a history that is kept, in a terminal; else without a prompt."""
    if not sys.stdin.isatty():

        def plain(prompt: str) -> str:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")

        return plain
    with contextlib.suppress(ImportError):
        import atexit
        import readline

        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        history = base / "flint_jax" / "history"
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if history.exists():
                readline.read_history_file(history)
            else:
                history.touch(mode=0o600)
        readline.set_history_length(1000)

        def keep() -> None:
            with contextlib.suppress(OSError):
                readline.write_history_file(history)

        atexit.register(keep)
    return input
