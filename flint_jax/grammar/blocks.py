"""What a whole ``<tool_call>`` block says: its name and its arguments, also where a tag is missing or doubled.

A block is read when it is closed, never before: a call that was cut is no call. Each tag in it is sure (a token of the
vocabulary) or may be text (its characters, from ordinary tokens). Outside of a value both act. In a value that a sure
closer ends, all other tags are text. In one without, tags act by their characters where a well-formed block goes on:
``</arg_value>`` before ``<arg_key>``, the end, or a key that lacks its opener; ``<arg_key>`` before a whole key and
``<arg_value>``. So a value may hold the tags themselves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from flint_jax.grammar.tags import ARGUMENT_TAGS, END_KEY, END_VALUE, KEY, VALUE
from flint_jax.grammar.tools import Tool

_SPLIT = re.compile(f"({'|'.join(ARGUMENT_TAGS)})")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a block: a tag (sure: as a token) or text."""

    text: str
    tag: bool = False
    sure: bool = False


@dataclasses.dataclass
class Block:
    """A block that calls a tool. members: keys and raw values in order. problems: (kind, message).

    whole: its last value was closed; a block that ends without ``</tool_call>`` is only then a call.
    """

    tool: Tool
    members: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    whole: bool = True


def read_block(
    pieces: Sequence[str | Part], find: Callable[[str], Tool | None], names: Sequence[Tool] = ()
) -> Block | None:
    """The call of a block's text and sure tags; None when it names no tool or its arguments cannot be told apart.

    find: the tool of a name. names: the tools among which a name that lacks ``<arg_key>`` behind it is looked for.
    """
    return _Reader(_parts(pieces), find, names).read()


def first_text(pieces: Sequence[str | Part]) -> str:
    """What is written before the first tag."""
    parts = _parts(pieces)
    return parts[0].text.strip() if parts and not parts[0].tag else ""


def _parts(pieces: Sequence[str | Part]) -> list[Part]:
    """Text joined, and cut at the tags in it."""
    out: list[Part] = []
    text: list[str] = []
    for piece in [*pieces, None]:
        if isinstance(piece, str):
            text.append(piece)
            continue
        stretches = _SPLIT.split("".join(text))
        out += [Part(s, tag=n % 2 == 1) for n, s in enumerate(stretches) if s]
        text = []
        if piece is not None:
            out.append(piece)
    return out


class _Unreadable(Exception):
    pass


class _Reader:
    """One pass over the parts; ``at`` is the next one."""

    def __init__(self, parts: list[Part], find: Callable[[str], Tool | None], names: Sequence[Tool]):
        self.parts, self.find, self.names = parts, find, names
        self.at = 0
        self.keys: set[str] = set()
        self.last_sure = max((n for n, p in enumerate(parts) if p.sure and p.text == END_VALUE), default=-1)
        self.block: Block | None = None

    def read(self) -> Block | None:
        try:
            key = self._name()
            while key is not None or self.at < len(self.parts):
                key = self._member(key if key is not None else self._key())
        except _Unreadable:
            return None
        return self.block

    # -- looking ahead -----------------------------------------------------------------------------------------------

    def _tag(self, at: int) -> str | None:
        """The tag at a place after white space; "" at the end, None for text."""
        while at < len(self.parts) and not self.parts[at].tag and self.parts[at].text.isspace():
            at += 1
        if at == len(self.parts):
            return ""
        return self.parts[at].text if self.parts[at].tag else None

    def _text(self) -> str:
        """The text that comes next, "" when a tag does."""
        if self.at < len(self.parts) and not self.parts[self.at].tag:
            self.at += 1
            return self.parts[self.at - 1].text
        return ""

    def _take(self, *tags: str) -> bool:
        """Go past one of these tags, doubled or not; whether there was any."""
        found = False
        while self._tag(self.at) in tags:
            found = True
            self._text()
            self.at += 1
        return found

    def _is_text(self, at: int) -> bool:
        return at < len(self.parts) and not self.parts[at].tag and not self.parts[at].text.isspace()

    # -- name, keys, values ------------------------------------------------------------------------------------------

    def _name(self) -> str | None:
        """The tool; and the first key, when its opener is missing so that it follows the name."""
        text = self._text().strip()
        tool, key = self.find(text), None
        if tool is None:
            tool, key = self._glued(text)
        self.block = Block(tool)
        return key

    def _glued(self, text: str) -> tuple[Tool, str]:
        """A name with a key behind it: told apart by white space, or by a property of the tool."""
        if self._tag(self.at) == END_KEY:
            found = []
            for tool in self.names:
                rest = text.removeprefix(tool.name)
                properties = (tool.parameters or {}).get("properties")
                known = rest.strip() in properties if isinstance(properties, dict) else False
                if rest != text and rest.strip() and (known or rest[0].isspace()):
                    found.append((known, len(tool.name), tool, rest.strip()))
            if found:
                self.block = None
                _, _, tool, key = max(found, key=lambda f: f[:2])
                return tool, key
        raise _Unreadable

    def _key(self) -> str | None:
        """The next key; its tags are left to ``_member``. None at the end, or where only a stray tag was."""
        text = self._text()
        tag = self._tag(self.at)
        if text.strip() and tag == END_KEY:  # its opener is missing
            return text.strip()
        if text.strip():
            self._stray()
        if not self._take(KEY):
            if tag and self._take(VALUE) | self._take(END_VALUE, END_KEY, VALUE) and self._is_text(self.at):
                raise _Unreadable  # a value of nobody knows which argument
            return None
        key = self._text().strip()
        if not key and self._take(END_VALUE, END_KEY):  # a stray closer before the key
            key = self._text().strip()
        if not key and self._tag(self.at) not in ("", KEY):
            raise _Unreadable
        return key or None

    def _member(self, key: str | None) -> None:
        """What comes after a key: ``</arg_key>``, ``<arg_value>``, its value and the closer."""
        if key is None:
            return
        closed = self._take(END_KEY)
        before = self._text()
        opened = self._tag(self.at) == VALUE
        if opened:
            if before.strip():
                self._stray()
            self._text()
            self.at += 1
            self._value(key, "")
        elif not closed and self._tag(self.at) == END_VALUE:
            raise _Unreadable  # key and value are one text
        elif before.strip() or self._tag(self.at) == END_VALUE:
            self._value(key, before.removeprefix("\n"))
        else:
            self._problem("missing_value", f"the argument {key!r:.100} has no value")
            self.block.whole = False

    def _value(self, key: str, begun: str) -> None:
        sure = self._sure_end()
        out, closed = [begun], False
        if not begun.strip():
            self._skip_strays(sure)
        while self.at < len(self.parts):
            part = self.parts[self.at]
            if sure is not None:
                if self.at == sure:
                    closed = True
                    self.at += 1
                    break
            elif part.tag and part.text == END_VALUE and (part.sure or self._closes(self.at + 1)):
                closed = True
                self.at += 1
                break
            elif part.tag and part.text == KEY and self._opens(self.at):
                break
            out.append(part.text)
            self.at += 1
        self._take(END_VALUE)  # doubled
        self.block.whole = closed
        value = "".join(out)
        if not closed:
            value = value.removesuffix("\n")  # of the line that the next tag is on
        if key in self.keys:
            self._problem("repeated_key", f"the argument {key!r:.100} is there again; its first value counts")
        self.keys.add(key)
        self.block.members.append((key, value))

    def _skip_strays(self, sure: int | None) -> None:
        """Go past a doubled ``<arg_value>`` or ``</arg_key>`` at the beginning of a value."""
        if self._tag(self.at) in (VALUE, END_KEY):
            at = next(n for n in range(self.at, len(self.parts)) if self.parts[n].tag)
            if self.parts[at].sure or sure is None:
                self.at = at + 1

    def _sure_end(self) -> int | None:
        """Where a sure closer ends the value: the last one before a sure key or the end, since a value may hold it."""
        found, said = None, False  # said: text since the closer that was found
        for at in range(self.at, self.last_sure + 1):
            part = self.parts[at]
            said = said or self._is_text(at)
            if not part.sure:
                continue
            if part.text == KEY and (found is not None or self._opens(at)):
                break
            if part.text in (END_KEY, VALUE) and found is not None:
                break  # the next argument's
            if part.text == END_VALUE and (found is None or said):
                found, said = at, False
        return found

    def _closes(self, at: int) -> bool:
        """Whether ``</arg_value>`` by characters, before this place, ends a value."""
        if self._tag(at) == END_VALUE:  # doubled
            at = next(n for n in range(at, len(self.parts)) if self.parts[n].tag) + 1
        if self._tag(at) in ("", KEY):
            return True
        return self._is_text(at) and self._tag(at + 1) == END_KEY and self._heads(at + 1)

    def _opens(self, at: int) -> bool:
        """Whether ``<arg_key>`` by characters, at this place, begins an argument."""
        at += 1
        if self._tag(at) == KEY:  # doubled
            at = next(n for n in range(at, len(self.parts)) if self.parts[n].tag) + 1
        return self._is_text(at) and self._tag(at + 1) == END_KEY and self._heads(at + 1)

    def _heads(self, at: int) -> bool:
        """Whether ``</arg_key>`` here has ``<arg_value>`` behind it."""
        for _ in range(2):
            if self._tag(at) == END_KEY:
                at = next(n for n in range(at, len(self.parts)) if self.parts[n].tag) + 1
        return self._tag(at) == VALUE

    def _stray(self) -> None:
        if not any(kind == "stray_text" for kind, _ in self.block.problems):
            self._problem("stray_text", "text between the arguments was ignored")

    def _problem(self, kind: str, message: str) -> None:
        self.block.problems.append((kind, message))
