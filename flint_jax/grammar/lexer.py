"""The state machine that reads the output: thought, answer and tool calls, whatever the size of the pieces.

Streaming and whole replies use the same machine, and each character or tag is decided by what came before it alone, so
both give the same message at every split. A character costs a constant number of steps, however long the output is:
of plain text only the beginning of a tag is held back, at most 11 characters, and white space that may turn out to be
next to a call or at the end of a thought.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Sequence

from flint_jax.grammar.arguments import ArgumentWriter
from flint_jax.grammar.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Problem, Reasoning
from flint_jax.grammar.pieces import Gap, Pieces
from flint_jax.grammar.tags import (
    CALL,
    END_CALL,
    END_KEY,
    END_THINK,
    END_VALUE,
    KEY,
    LONGEST,
    THINK,
    VALUE,
    Tags,
)
from flint_jax.grammar.tools import Tool


class State(enum.Enum):
    """Where in the grammar the output is."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    NAME = enum.auto()  # after <tool_call>: nothing is said before the name is whole
    BETWEEN = enum.auto()  # in a call, outside of a key and a value
    KEY = enum.auto()
    AFTER_KEY = enum.auto()
    VALUE = enum.auto()
    NO_CALL = enum.auto()  # in a block that names no tool: its text is content
    DROPPED = enum.auto()  # in a block that may not be a call


_IN_BLOCK = frozenset(State) - {State.REASONING, State.CONTENT}


class Calls(enum.Enum):
    """How many calls the request wants: any number, at most one (no parallel calls), none (``tool_choice: none``)."""

    ALL = enum.auto()
    FIRST = enum.auto()
    NONE = enum.auto()


class Lexer:
    """Tokens in, deltas out.

    start: REASONING or CONTENT, see ``start_state``.
    tags: which token ids are tags.
    tools: the tools of the request. A block that names another one is no call: it stays as content, with a Problem.
        None: any name is a tool, and all arguments are strings.
    thinking: False makes ``<think>`` and ``</think>`` plain text, and the output starts as content.
    calls: blocks beyond this many calls are removed from the content.
    new_id: makes the id of a call.

    Attributes:
        state: where the output is now.
        calls: calls so far.
        reasoning_tokens: tokens spent on thinking, tags included.
    """

    def __init__(
        self,
        start: State,
        tags: Tags,
        tools: Sequence[Tool] | None,
        *,
        thinking: bool = True,
        calls: Calls = Calls.ALL,
        new_id: Callable[[], str] | None = None,
    ):
        self.state = start if thinking else State.CONTENT
        self.calls = 0
        self.reasoning_tokens = 0
        self._tags = tags
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._limit = {Calls.ALL: float("inf"), Calls.FIRST: 1, Calls.NONE: 0}[calls]
        self._new_id = new_id or (lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")
        self._rules = _RULES if thinking else _RULES_WITHOUT_THINKING
        by_text = tags.by_text
        self._watched = {state: tuple(by_text & rules.keys()) for state, rules in self._rules.items()}
        self._held = ""  # the end of the text that may turn out to begin a tag
        self._thought_gap, self._answer_gap = Gap(), Gap()
        self._answer_begun = False
        self._block: list[str] = []  # text of a name or a key
        self._arguments: ArgumentWriter | None = None
        self._stray = False  # whether this call had text where none belongs
        self._out = Pieces()

    def push(self, token_id: int | None, text: str) -> list[Delta]:
        """What becomes certain with a token.

        text: what the detokeniser, and stop strings after it, let through with this token: earlier characters may be
            in front. For a tag's token it ends with the tag, or lacks it when special tokens are left out.
        token_id: None for text without a token, such as what a detokeniser had held back.
        """
        was_reasoning = self.state is State.REASONING
        tag = self._tags.block.get(token_id)
        if tag is not None:
            self._read(text.removesuffix(tag))
            self._release()
            self._act(tag)
        elif (tag := self._tags.argument.get(token_id)) is not None:
            self._read(text.removesuffix(tag) + tag)
        else:
            self._read(text)
        if token_id is not None:
            is_reasoning = self.state is State.REASONING
            self.reasoning_tokens += is_reasoning or (was_reasoning and tag != CALL)
        return self._out.take()

    def finish(self, reason: str) -> list[Delta]:
        """What was held back, at the end of the output; a call that is still open is closed as valid JSON.

        reason: why the output ended. After ``stop`` the model meant what it wrote; else a name may be cut.
        """
        if self.state is State.NAME:
            self._end_name(cut=reason != "stop")
        elif self.state in _IN_BLOCK - {State.NO_CALL}:
            self._held = ""  # of a tag that would have closed something, not of a value
            self._abandon()
        self._release()
        if not self.calls:
            self._out.add(Content, self._answer_gap.take())
        return self._out.take()

    # -- tags --------------------------------------------------------------------------------------------------------

    def _act(self, tag: str) -> None:
        rule = self._rules[self.state].get(tag)
        if rule is None:
            self._text(tag)
        else:
            rule(self, tag)

    def _swallow(self, tag: str) -> None:
        pass

    def _to_content(self, tag: str) -> None:
        self.state = State.CONTENT

    def _to_reasoning(self, tag: str) -> None:
        self.state = State.REASONING

    # -- a call's name -----------------------------------------------------------------------------------------------

    def _open_call(self, tag: str) -> None:
        if self.calls < self._limit:
            self.state, self._block = State.NAME, []
            return
        self.state = State.DROPPED
        self._problem("dropped_call", "a tool call that the request does not allow was removed")

    def _name_then_key(self, tag: str) -> None:
        if self._start_call():
            self._open_key(tag)
        else:
            self._keep_as_text(tag)
            self.state = State.NO_CALL

    def _name_then_end(self, tag: str) -> None:
        if self._start_call():
            self._close_call(tag)
        else:
            self._keep_as_text(tag)
            self.state = State.CONTENT

    def _restart_name(self, tag: str) -> None:
        self._end_name(cut=True)
        self._open_call(tag)

    def _end_name(self, *, cut: bool) -> None:
        """The output ends, or begins again, in a name: that of a tool is a call without arguments."""
        if self._start_call():
            self._held = ""
            self._abandon()
        elif cut:
            self._problem("cut_name", f"a tool call was cut in its name {self._name()!r:.100}")
        else:
            self._keep_as_text("")
            self.state = State.NO_CALL

    def _name(self) -> str:
        return "".join(self._block).strip()

    def _start_call(self) -> bool:
        """Announce the call if the name is that of a tool."""
        name = self._name()
        tool = self._tool(name)
        if tool is None:
            return False
        self._out.put(CallStart(self.calls, self._new_id(), name))
        self.calls += 1
        self._arguments, self._stray = ArgumentWriter(tool), False
        return True

    def _tool(self, name: str) -> Tool | None:
        if self._tools is not None:
            return self._tools.get(name)
        return Tool(name) if len(name.split()) == 1 else None

    def _keep_as_text(self, tag: str) -> None:
        name = self._name()
        said = f"the output calls {name!r:.100}, which is not among the tools" if name else "a tool call has no name"
        self._problem("unknown_tool", said + "; its text is left in the content")
        self._answer(CALL + "".join(self._block) + tag)

    def _end_no_call(self, tag: str) -> None:
        self._answer(tag)
        self.state = State.CONTENT

    # -- a call's arguments ------------------------------------------------------------------------------------------

    def _open_key(self, tag: str) -> None:
        if self.state in (State.KEY, State.AFTER_KEY):
            self._missing_value()
        self.state, self._block = State.KEY, []

    def _close_key(self, tag: str) -> None:
        self.state = State.AFTER_KEY

    def _open_value(self, tag: str) -> None:
        key = self._name()
        if self._arguments.has(key):
            self._call_problem("repeated_key", f"the argument {key!r:.100} is there again; its first value counts")
        self._json(self._arguments.open(key))
        self.state = State.VALUE

    def _close_value(self, tag: str) -> None:
        self._json(self._arguments.close())
        self.state = State.BETWEEN

    def _close_call(self, tag: str) -> None:
        """The call ends where it should, or its last value lacks the closing tag: then that ends here too."""
        if self.state is State.VALUE:
            self._json(self._arguments.close())
        elif self.state in (State.KEY, State.AFTER_KEY):
            self._missing_value()
        self._end_call()

    def _reopen_call(self, tag: str) -> None:
        self._abandon()
        self._open_call(tag)

    def _abandon(self) -> None:
        """The call ends where it should not."""
        if self.state is State.DROPPED:
            return
        if self.state is State.VALUE:
            self._json(self._arguments.cut())
            self._call_problem("cut_value", "the last argument was cut: of a string the beginning is kept")
        elif self.state in (State.KEY, State.AFTER_KEY):
            self._missing_value()
        self._call_problem("open_call", "the tool call was not closed")
        self._end_call()

    def _end_call(self) -> None:
        self._json(self._arguments.end())
        self._out.put(CallEnd(self.calls - 1))
        self.state = State.CONTENT

    def _missing_value(self) -> None:
        self._call_problem("missing_value", f"the argument {self._name()!r:.100} has no value")

    def _json(self, text: str) -> None:
        self._out.add(CallArguments, text, self.calls - 1)

    def _call_problem(self, kind: str, message: str) -> None:
        self._problem(kind, message, self.calls - 1)

    def _problem(self, kind: str, message: str, index: int | None = None) -> None:
        self._out.put(Problem(kind, message, index))

    # -- text --------------------------------------------------------------------------------------------------------

    def _read(self, text: str) -> None:
        """Text in which some tags act by their characters. No tag holds a second ``<``, so each is a fresh start."""
        text = self._held + text
        self._held = ""
        done = at = 0
        while (at := text.find("<", at)) >= 0:
            here = text[at : at + LONGEST]
            watched = self._watched[self.state]
            tag = next((t for t in watched if here.startswith(t)), None)
            if tag is not None:
                self._text(text[done:at])
                self._act(tag)
                done = at = at + len(tag)
            elif any(t.startswith(here) for t in watched):
                self._held = here
                break
            else:
                at += 1
        self._text(text[done : len(text) - len(self._held)])

    def _release(self) -> None:
        """What was held back begins no tag."""
        held, self._held = self._held, ""
        self._text(held)

    def _text(self, text: str) -> None:
        """Text of the current state."""
        if not text:
            return
        match self.state:
            case State.REASONING:
                self._out.add(Reasoning, self._thought_gap.pass_on(text))
            case State.CONTENT | State.NO_CALL:
                self._answer(text)
            case State.NAME | State.KEY:
                self._block.append(text)
            case State.VALUE:
                self._json(self._arguments.write(text))
            case State.BETWEEN | State.AFTER_KEY:
                if not self._stray and not text.isspace():
                    self._stray = True
                    self._call_problem("stray_text", "text between the arguments was ignored")

    def _answer(self, text: str) -> None:
        """Content. White space next to a call is neither its beginning nor its end."""
        text = self._answer_gap.pass_on(text)
        if self.calls and not self._answer_begun:
            text = text.lstrip()
        self._answer_begun = self._answer_begun or bool(text)
        self._out.add(Content, text)


_IN_CALL = {CALL: Lexer._reopen_call, END_CALL: Lexer._close_call}

# What each tag does in each state; a tag that is not listed is text there.
_RULES: dict[State, dict[str, Callable[[Lexer, str], None]]] = {
    State.REASONING: {CALL: Lexer._open_call, THINK: Lexer._swallow, END_THINK: Lexer._to_content},
    State.CONTENT: {CALL: Lexer._open_call, THINK: Lexer._to_reasoning, END_THINK: Lexer._swallow},
    State.NAME: {CALL: Lexer._restart_name, END_CALL: Lexer._name_then_end, KEY: Lexer._name_then_key},
    State.BETWEEN: _IN_CALL | {KEY: Lexer._open_key},
    State.KEY: _IN_CALL | {KEY: Lexer._open_key, END_KEY: Lexer._close_key, VALUE: Lexer._open_value},
    State.AFTER_KEY: _IN_CALL | {KEY: Lexer._open_key, VALUE: Lexer._open_value},
    State.VALUE: _IN_CALL | {END_VALUE: Lexer._close_value},
    State.NO_CALL: {CALL: Lexer._open_call, END_CALL: Lexer._end_no_call},
    State.DROPPED: {CALL: Lexer._open_call, END_CALL: Lexer._to_content},
}
_RULES_WITHOUT_THINKING = _RULES | {s: {CALL: Lexer._open_call} for s in (State.REASONING, State.CONTENT)}
