"""The state machine that reads the output: thought, answer and tool calls, whatever the size of the pieces.

Streaming and whole replies use the same machine, and each character or tag is decided by what came before it alone, so
both give the same message at every split. A call is held until it is closed: what is cut is no call, and stays as it
was written. Of other text only the beginning of a tag is held back, a word that may be a tool's name, and white space
that may turn out to be next to a call or at the end of a thought. A character costs a constant number of steps.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Sequence

from flint_jax.grammar.arguments import ArgumentWriter
from flint_jax.grammar.blocks import Block, Part, first_text, read_block
from flint_jax.grammar.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Problem, Reasoning
from flint_jax.grammar.pieces import Gap, LastWord, Pieces
from flint_jax.grammar.tags import BLOCK_TAGS, CALL, END_CALL, END_THINK, KEY, LONGEST, THINK, Tags
from flint_jax.grammar.tools import Tool


class State(enum.Enum):
    """Where in the grammar the output is."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()  # in a block, which is read when it is closed


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
    thinking: False makes ``<think>`` and ``</think>`` plain text, and the output starts as content; only a whole
        thought at its beginning is left out.
    calls: FIRST ends the output at the end of the first call, see ``full``. NONE makes blocks text.
    new_id: makes the id of a call.

    Attributes:
        state: where the output is now.
        calls: calls so far.
        reasoning_tokens: tokens spent on thinking, tags included.
        full: all the calls that the request wants are there; what comes later is ignored.
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
        self.full = False
        self._tags = tags
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._wanted = calls
        self._new_id = new_id or (lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")
        self._thinking = thinking
        self._by_text = frozenset(BLOCK_TAGS).difference(tags.block.values())
        self._held = ""  # the end of the text that may turn out to begin a tag
        self._thought_gap, self._answer_gap = Gap(), Gap()
        self._word = LastWord(self._tools if self._tools and calls is not Calls.NONE else ())
        self._answer_begun = False
        self._said = False  # whether content has come since the last thought or call
        self._thought_over = False
        self._quoted = False  # in a block where none may come, which is text with all its tags
        self._hidden: list[str] | None = None  # a thought of a request that does not think
        self._block: list[str | Part] = []
        self._raw: list[str] = []  # the block as it was written
        self._out = Pieces()

    def push(self, token_id: int | None, text: str) -> list[Delta]:
        """What becomes certain with a token.

        text: what the detokeniser, and stop strings after it, let through with this token: earlier characters may be
            in front. For a tag's token it ends with the tag, or lacks it when special tokens are left out.
        token_id: None for text without a token, such as what a detokeniser had held back.
        """
        was_reasoning = self.state is State.REASONING
        tag = self._tags.block.get(token_id) or self._tags.argument.get(token_id)
        if tag is None:
            self._read(text)
        else:
            self._read(text.removesuffix(tag))
            self._release()
            if not self.full:
                self._act(tag, sure=True)
        if token_id is not None:
            is_reasoning = self.state is State.REASONING
            self.reasoning_tokens += is_reasoning or (was_reasoning and tag != CALL)
        return self._out.take()

    def finish(self, reason: str) -> list[Delta]:
        """What was held back, at the end of the output. A block that is still open is no call, but text.

        reason: why the output ended. After ``stop`` the model meant the name that it wrote; else that may be cut.
        """
        self._release()
        if self.state is State.CALL:
            kind = "open_call"
            if self._tool(first_text(self._block)) is None:
                kind = "unknown_tool" if reason == "stop" else "cut_name"
            self._give_up(kind, "a tool call was not closed; what there is of it is left in the content")
        elif self.state is State.CONTENT:
            self._answer(self._word.take())
        elif self._hidden is not None:
            self._answer(THINK + "".join(self._hidden))
        if not self.calls:
            self._out.add(Content, self._answer_gap.take())
        return self._out.take()

    # -- tags --------------------------------------------------------------------------------------------------------

    def _watched(self) -> frozenset[str]:
        """The tags that act by their characters here."""
        if self.full:
            return frozenset()
        if self.state is State.CALL:
            return self._by_text & _IN_CALL
        if self.state is State.REASONING:
            return self._by_text & _IN_THOUGHT
        if self._quoted:
            return self._by_text & {END_CALL}
        found = self._by_text & _IN_THOUGHT
        if not self._thinking:
            found &= {CALL} if self._said or self._word.text else {CALL, THINK}
        if self._word.whole:
            found |= {KEY} | (self._by_text & {END_CALL})
        elif self.calls and not self._said and not self._word.text:
            found |= self._by_text & {END_CALL}
        return found

    def _act(self, tag: str, *, sure: bool) -> None:
        match self.state:
            case State.CALL:
                self._act_in_call(tag, sure)
            case State.REASONING if tag in _IN_THOUGHT:
                self._act_in_thought(tag)
            case State.CONTENT:
                self._act_in_content(tag, sure)
            case _:
                self._text(tag)

    def _act_in_call(self, tag: str, sure: bool) -> None:
        if tag == END_CALL:
            self._close_call(tag)
        elif tag == CALL:
            self._reopen_call()
        else:
            self._raw.append(tag)
            self._block.append(tag if tag in _IN_THOUGHT else Part(tag, tag=True, sure=sure))

    def _act_in_thought(self, tag: str) -> None:
        if tag == THINK:
            return
        self._to_content()
        if tag == CALL:
            self._act_in_content(tag, sure=True)
        else:
            self._thought_over = True

    def _to_content(self) -> None:
        self.state, self._hidden, self._said = State.CONTENT, None, False

    def _act_in_content(self, tag: str, sure: bool) -> None:
        if self._quoted or (tag == CALL and self._wanted is Calls.NONE):
            self._quoted = tag != END_CALL
            self._text(tag)
        elif tag == CALL:
            self._answer(self._word.take())
            self._open_call(tag)
        elif tag == THINK and (self._thinking or not (self._answer_begun or self._word.text or self.calls)):
            self._answer(self._word.take())
            self.state, self._hidden = State.REASONING, None if self._thinking else []
        elif tag == END_THINK and self._thinking and not (self._thought_over and (self._said or self._word.text)):
            self._answer(self._word.take())
            self._thought_over = True
        elif tag in (KEY, END_CALL) and self._word.whole:  # <tool_call> is missing
            name = self._word.take()
            self._open_call("", name)
            self._act_in_call(tag, sure)
        elif tag == END_CALL and self.calls and not self._said and not self._word.text:
            self._problem("stray_text", "a second </tool_call> was ignored")
        else:
            self._text(tag)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _open_call(self, tag: str, name: str = "") -> None:
        self.state, self._block, self._raw = State.CALL, [name] if name else [], [tag, name]

    def _read_block(self) -> Block | None:
        tools = () if self._tools is None else tuple(self._tools.values())
        return read_block(self._block, self._tool, tools)

    def _close_call(self, tag: str) -> None:
        block = self._read_block()
        if block is not None:
            self._call(block)
            return
        self._raw.append(tag)
        name = first_text(self._block)
        said = f"a tool call names no tool of the request, or cannot be read: {name!r:.100}"
        said = said if name else "a tool call has no name"
        self._give_up("unknown_tool", said + "; its text is left in the content")

    def _reopen_call(self) -> None:
        """``<tool_call>`` in a block: the block lacks ``</tool_call>``, or is one that begins twice."""
        block = self._read_block()
        if block is not None and block.whole and (block.members or not (block.tool.parameters or {}).get("required")):
            self._problem("open_call", "a tool call ended without </tool_call> where the next one began", self.calls)
            self._call(block)
        elif any(not isinstance(p, str) or p.strip() for p in self._block):
            self._give_up("open_call", "a tool call was not closed before the next one; it is left in the content")
        else:
            self._problem("cut_name", "a doubled <tool_call> was ignored")
        if not self.full:
            self._open_call(CALL)

    def _give_up(self, kind: str, message: str) -> None:
        self._problem(kind, message)
        self.state = State.CONTENT
        self._answer("".join(self._raw))

    def _call(self, block: Block) -> None:
        index, writer = self.calls, ArgumentWriter(block.tool)
        self._out.put(CallStart(index, self._new_id(), block.tool.name))
        for key, value in block.members:
            self._out.add(CallArguments, writer.open(key) + writer.write(value) + writer.close(), index)
        self._out.add(CallArguments, writer.end(), index)
        for kind, message in block.problems:
            self._problem(kind, message, index)
        self._out.put(CallEnd(index))
        self.calls += 1
        self.full = self._wanted is Calls.FIRST
        self.state, self._said = State.CONTENT, False

    def _tool(self, name: str) -> Tool | None:
        if self._tools is not None:
            return self._tools.get(name)
        return Tool(name) if len(name.split()) == 1 else None

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
            self._text(text[done:at])
            done = at
            watched = self._watched()
            tag = next((t for t in watched if here.startswith(t)), None)
            if tag is not None:
                self._act(tag, sure=False)
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
        if not text or self.full:
            return
        match self.state:
            case State.REASONING if self._hidden is not None:
                self._hidden.append(text)
            case State.REASONING:
                self._out.add(Reasoning, self._thought_gap.pass_on(text))
            case State.CONTENT:
                self._answer(self._word.pass_on(text))
            case State.CALL:
                self._raw.append(text)
                self._block.append(text)

    def _answer(self, text: str) -> None:
        """Content. White space next to a call is neither its beginning nor its end."""
        self._said = self._said or bool(text.strip())
        text = self._answer_gap.pass_on(text)
        if self.calls and not self._answer_begun:
            text = text.lstrip()
        self._answer_begun = self._answer_begun or bool(text)
        self._out.add(Content, text)


_IN_THOUGHT = frozenset({CALL, THINK, END_THINK})
_IN_CALL = frozenset({CALL, END_CALL})
