"""Chat messages to a prompt: the checkpoint's own Jinja template, in the sandbox and with the habits of transformers.

Control tokens of a prompt come only from the template. A message that spells ``<|user|>`` is text about that token and
is encoded as ordinary characters, so that nobody forges a turn by pasting one (``encode_chat``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flint_jax.errors import RequestError, TokenizerError

# names that a request brings itself, so that no ``chat_template_kwargs`` may set them
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_THINK_TAGS = ("<think>", "</think>")
_LEADING_THOUGHT = re.compile(r"\s*<think>(?:.*?</think>)?", re.DOTALL)


class ChatTokenizer(Protocol):
    """The part of a tokenizer that encoding a chat needs."""

    added_tokens: dict[str, int]

    def encode(self, text: str, *, special: bool = True, add_special_tokens: bool = False) -> list[int]: ...
    def pieces(self, text: str) -> list[int | str]: ...


# -- the template ----------------------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the text to train on; for a prompt only its contents matter."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    source: Jinja text. The special tokens (``bos_token="<s>"`` ...) are variables for it.
    Raises TokenizerError when the source does not compile.
    """

    def __init__(self, source: str | None, **special_tokens: str | None):
        if not source:
            raise TokenizerError(
                "the checkpoint has no chat template; need one to turn messages into a prompt. "
                "Put chat_template.jinja beside the tokenizer, give one on the command line, or use plain completions."
            )
        self.source = source
        self.special_tokens = {k: v for k, v in special_tokens.items() if v is not None}
        self._knows_developer = "developer" in source
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"the chat template does not compile: line {e.lineno}: {e.message}") from e
        except Exception as e:
            raise TokenizerError(f"the chat template does not compile: {e}") from e

    @classmethod
    def from_tokenizer(cls, tokenizer, source: str | None = None) -> ChatTemplate:
        """With the tokenizer's own template (unless ``source`` is given) and its special tokens."""
        names = ("bos_token", "eos_token", "pad_token")
        return cls(source or tokenizer.chat_template, **{name: getattr(tokenizer, name, None) for name in names})

    @functools.cached_property
    def has_thinking_switch(self) -> bool:
        """Whether ``enable_thinking`` changes the prompt of a plain question: some templates ignore it."""
        question = [{"role": "user", "content": "?"}]
        try:
            on, off = (self.render(question, enable_thinking=value, thinking=value) for value in (True, False))
        except RequestError:
            return False
        return on != off

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Prompt text. ``kwargs`` (``enable_thinking`` ...) are variables for the template; one not given is undefined.

        Raises RequestError with the template's own words when it refuses the messages.
        """
        return self._render(normalise_messages(messages), tools, documents, add_generation_prompt, kwargs)

    def _render(self, messages, tools, documents, add_generation_prompt, kwargs) -> str:
        """Like ``render`` for messages that are normal already."""
        values = self.special_tokens | dict(kwargs)
        values |= {"tools": list(tools) if tools else None, "documents": list(documents) if documents else None}
        as_system = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        tries = [messages, as_system] if self._knows_developer and as_system != messages else [as_system]
        for n, attempt in enumerate(tries, 1):
            try:
                return self._template.render(values, messages=attempt, add_generation_prompt=add_generation_prompt)
            except Exception as e:  # a template can raise anything: it is a program
                if n == len(tries):
                    raise _refusal(e) from e
        raise AssertionError("unreachable")


def _refusal(error: Exception) -> RequestError:
    said = str(error) or type(error).__name__
    if type(error) is jinja2.TemplateError:  # what raise_exception raises
        text = f"the chat template refused these messages: {said}"
    else:
        text = f"the chat template failed on these messages: {type(error).__name__}: {said}"
    return RequestError(text, param="messages", code="chat_template_error")


def _raise_exception(message):
    raise jinja2.TemplateError(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # a break mark must stay one character, or it would be left in the prompt as an escape
        text = text.replace(f"\\u{ord(_MARK):04x}", _MARK)
    return text


# -- messages --------------------------------------------------------------------------------------------------------


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one form that templates expect; the input is not changed.

    content: text parts are joined with nothing between them; null or missing becomes "". Reasoning under either name
    (``reasoning``, ``reasoning_content``, a thinking part) is there under both. Arguments of tool calls are objects.
    Other fields are kept. Raises RequestError that names the field.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", param="messages")
    return [_normalise(m, f"messages[{n}]") for n, m in enumerate(messages)]


def _normalise(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string, got {role!r}", param=f"{where}.role")
    out = dict(message)
    out["content"], thought = _content(message.get("content"), f"{where}.content")
    for name in ("reasoning", "reasoning_content"):
        given = out.pop(name, None)
        if given is not None and not isinstance(given, str):
            raise RequestError(f"{where}.{name} must be a string, got {type(given).__name__}", param=f"{where}.{name}")
        thought = given if given else thought
    if thought is not None:
        out["reasoning"] = out["reasoning_content"] = thought
    calls = out.pop("tool_calls", None)
    if calls:
        if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
            raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{n}]") for n, c in enumerate(calls)]
    return out


def _content(content: Any, where: str) -> tuple[str, str | None]:
    """(text, reasoning of thinking parts or None)."""
    if content is None:
        return "", None
    if isinstance(content, str):
        return content, None
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(
            f"{where} must be a string, a list of parts or null, got {type(content).__name__}", param=where
        )
    texts, thoughts = [], []
    for n, part in enumerate(content):
        at = f"{where}[{n}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = kind if kind in ("thinking", "refusal") else "text"
        if isinstance(part, str):
            text = part
        elif kind in ("text", "input_text", "output_text", "refusal", "thinking"):
            text = part.get(key)
        else:
            given = repr(kind) if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{at} is of type {given}; this model takes text parts only", param=at)
        if not isinstance(text, str):
            raise RequestError(f"{at}.{key} must be a string, got {type(text).__name__}", param=f"{at}.{key}")
        (thoughts if kind == "thinking" else texts).append(text)
    return "".join(texts), "".join(thoughts) if thoughts else None


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have function.name and function.arguments", param=where)
    arguments, at = function.get("arguments"), f"{where}.function.arguments"
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as e:
            raise RequestError(f"{at} is not JSON: {e}", param=at) from e
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{at} must be a JSON object, got {type(arguments).__name__}", param=at)
    return dict(call) | {"function": dict(function) | {"arguments": dict(arguments)}}


# -- ids: control tokens from the template only ----------------------------------------------------------------------

# How a control token in a message is made harmless: a mark goes inside its spelling before rendering, so that in the
# rendered text only the template's own control tokens are whole. What lies between those is encoded as plain text, the
# marks removed. The template may strip, split or join the strings as it likes. The mark is a noncharacter that text
# has no business with; one that is there all the same is removed from it.
_MARK = "\ufdd0"
_LARGE = 1 << 18  # characters of messages from which on their length is looked at twice
_CUT = "\ufdd1"  # ends a message that the output is to continue; what the template writes after it is left out


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A rendered prompt: its text, and its token ids."""

    text: str
    ids: list[int]


def encode_chat(
    tokenizer: ChatTokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a chat: ``prepare_chat(...).ids``."""
    return prepare_chat(tokenizer, template, messages, **options).ids


def prepare_chat(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    parse_special_in_content: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    accept: Callable[[str], None] | None = None,
) -> ChatPrompt:
    """Render and encode a chat. Nothing is put in front but what the template writes.

    continue_final_message: end the prompt with the last message's content, so that the output goes on with it; not
    together with a generation prompt.

    parse_special_in_content: True encodes the rendered text as a whole, so that control tokens in messages and tool
    definitions act as such (transformers' way). False encodes them as ordinary text; only ``<think>`` and ``</think>``
    keep their meaning, and only around a thought that an assistant message's content begins with, where clients send
    earlier thoughts back; later ones are text about the tags.
    chat_template_kwargs: further template variables, such as ``enable_thinking``. accept: called with the rendered
    text before it is encoded, which takes much longer; raises for one that is too long.

    Raises RequestError for messages that are malformed or that the template refuses.
    """
    kwargs = dict(chat_template_kwargs or {})
    taken = sorted(k for k in kwargs if not isinstance(k, str) or k in RESERVED)
    if taken:
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(map(str, taken))}: give that as a field of the request",
            param="chat_template_kwargs",
        )
    normal = normalise_messages(messages)
    if continue_final_message:
        normal = _open_ended(normal, add_generation_prompt)
    if parse_special_in_content:
        text = _cut(template._render(normal, tools, documents, add_generation_prompt, kwargs), continue_final_message)
        if accept is not None:
            accept(text)
        return ChatPrompt(text, tokenizer.encode(text))
    if accept is not None and _characters(normal, _LARGE) > _LARGE:
        # Breaking control tokens costs more than rendering: what is too long without the marks is not broken.
        plain = template._render(normal, tools, documents, add_generation_prompt, kwargs)
        accept(_cut(plain, continue_final_message))
    breaker = _Breaker(tokenizer.added_tokens)
    marked = template._render(
        [breaker.message(m) for m in normal],
        breaker.value(tools or []),
        breaker.value(documents or []),
        add_generation_prompt,
        {k: breaker.value(v, edges=False) for k, v in kwargs.items()},
    )
    marked = _cut(marked, continue_final_message)
    text = marked.replace(_MARK, "")
    if accept is not None:
        accept(text)
    if not breaker.used:
        return ChatPrompt(text, tokenizer.encode(text))
    ids: list[int] = []
    for piece in tokenizer.pieces(marked):
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece.replace(_MARK, ""), special=False)
    return ChatPrompt(text, ids)


def _characters(value: Any, enough: int) -> int:
    """Characters in all strings of a value, or more than ``enough``."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    total = 0
    for item in items:
        total += _characters(item, enough - total)
        if total > enough:
            break
    return total


def _open_ended(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[dict[str, Any]]:
    param = "continue_final_message"
    if add_generation_prompt:
        raise RequestError(f"{param} needs add_generation_prompt: false, there is one or the other", param=param)
    if not messages or messages[-1].get("tool_calls"):
        raise RequestError(f"{param} needs a last message that has no tool calls", param=param)
    return [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + _CUT}]


def _cut(text: str, wanted: bool) -> str:
    if not wanted:
        return text
    head, found, _ = text.rpartition(_CUT)
    if not found:
        raise RequestError(
            "continue_final_message: the chat template leaves the last message's content out",
            param="continue_final_message",
        )
    return head


class _Breaker:
    """Puts marks into strings so that none of them spells a control token, alone or joined to its neighbours."""

    def __init__(self, tokens: Mapping[str, int]):
        names = [t for t in tokens if len(t.strip()) > 1]  # runs of spaces are text, wherever they come from
        self._whole = _any_of(names)
        self._whole_but_think = _any_of([t for t in names if t not in _THINK_TAGS])
        # A string that ends in the beginning of a token, begins with its end or is its middle could be completed by
        # what the template puts beside it.
        self._heads = {t[:n] for t in names for n in range(1, len(t))}
        self._tails = {t[n:] for t in names for n in range(1, len(t))}
        self._middles = {t[a:b] for t in names for a in range(1, len(t) - 1) for b in range(a + 1, len(t))}
        self._longest = max(map(len, names), default=0)
        self.used = False

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        out = {k: v if k == "role" else self.value(v) for k, v in message.items()}
        if message["role"] == "assistant":
            content = message["content"]
            lead = _LEADING_THOUGHT.match(content)
            at = lead.end() if lead else 0
            thought = self._text(content[:at], self._whole_but_think, edges=True)
            out["content"] = thought + self._text(content[at:], self._whole, edges=True)
        return out

    def value(self, value: Any, *, edges: bool = True) -> Any:
        """The same value with all its strings broken, except those under ``type``, which templates compare."""
        if isinstance(value, str):
            return self._text(value, self._whole, edges)
        if isinstance(value, Mapping):
            return {
                self._text(k, self._whole, edges=False) if isinstance(k, str) else k: (
                    self.value(v, edges=edges and k != "type")
                )
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(v, edges=edges) for v in value]
        return value

    def _text(self, text: str, whole: re.Pattern | None, edges: bool) -> str:
        if whole is None:
            return text
        out = text.replace(_MARK, "")
        while whole.search(out):  # again, because a token may hold the spelling of another
            out = whole.sub(lambda m: m[0][0] + _MARK + m[0][1:], out)
        if edges and out:
            near = range(1, min(len(out), self._longest) + 1)
            if any(out[:n] in self._tails for n in near) or out in self._middles:
                out = _MARK + out
            if any(out[-n:] in self._heads for n in near):
                out = out + _MARK
        self.used = self.used or out != text
        return out


def _any_of(names: Sequence[str]) -> re.Pattern | None:
    return re.compile("|".join(re.escape(t) for t in sorted(names, key=len, reverse=True))) if names else None
