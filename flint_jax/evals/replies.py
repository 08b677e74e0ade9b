"""Asking a model: in this process, or any server that speaks the OpenAI protocol."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from flint_jax.errors import FlintError
from flint_jax.evals.item import Item
from flint_jax.evals.suite import Reply

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>", "</arg_key>", "</arg_value>")


def well_formed(content: str, calls: Sequence[Any], thought: str | None, finish_reason: str, thinking: bool) -> bool:
    """Whether a reply ended by itself, says or calls something, thought only when asked to, and shows no tags."""
    whole = finish_reason in ("stop", "tool_calls") and bool(content.strip() or calls)
    return whole and (thinking or not thought) and not any(tag in content + (thought or "") for tag in TAGS)


class LocalModel:
    """A LanguageModel in this process, many items at once. settings: sampling values; none of them means greedy."""

    def __init__(self, lm, *, settings: dict[str, Any] | None = None, max_tokens: int = 320, slots: int = 16):
        from flint_jax.sampling_params import SamplingParams, resolve

        values = settings if settings is not None else {"temperature": 0.0}
        self.lm = lm
        self.params = resolve(SamplingParams(max_tokens=max_tokens, **values), lm.generation)
        self.engine = lm.make_engine(max_num_seqs=slots, compile_ahead=False)

    def prompt(self, item: Item) -> tuple[str, list[int]]:
        """(text, ids) of an item's prompt."""
        from flint_jax.chat import ChatTemplate, prepare_chat

        tok = self.lm.tokenizer
        template = ChatTemplate.from_tokenizer(tok, self.lm.chat_template)
        made = prepare_chat(
            tok, template, item.messages, tools=list(item.tools) or None, chat_template_kwargs=_kwargs(item)
        )
        return made.text, made.ids

    def length(self, item: Item) -> int:
        """Tokens of an item's prompt."""
        return len(self.prompt(item)[1])

    def ask(self, items: Sequence[Item], tick: Callable[[], None] = lambda: None) -> list[Reply]:
        """Replies in the order of the items. tick: called after each."""
        outputs: dict[int, list[int]] = {}
        ended: dict[int, Any] = {}
        texts = {}
        for n, item in enumerate(items):
            texts[n], ids = self.prompt(item)
            outputs[n] = []

            def hear(event, n=n):
                outputs[n].extend(event.token_ids)
                if event.finish_reason is not None:
                    ended[n] = event
                    tick()

            self.engine.submit(ids, self.params.replace(seed=n), on_event=hear)
        while len(ended) < len(items):
            self.engine.step()
        return [self._reply(item, texts[n], outputs[n], ended[n]) for n, item in enumerate(items)]

    def _reply(self, item: Item, prompt: str, ids: Sequence[int], end) -> Reply:
        from flint_jax import grammar
        from flint_jax.text import Detokenizer

        tags = grammar.Tags.of(self.lm.tokenizer.added_tokens)
        tools = [grammar.Tool.of(t) for t in item.tools]
        calls = grammar.Calls.ALL if tools else grammar.Calls.NONE
        lexer = grammar.Lexer(grammar.start_state(prompt), tags, tools, thinking=True, calls=calls)
        detokenizer = Detokenizer(self.lm.tokenizer)
        deltas = [d for i in ids for d in lexer.push(i, detokenizer.push(i))]
        deltas += lexer.push(-1, detokenizer.flush()) + lexer.finish(end.finish_reason)
        message = grammar.collect(deltas)
        made = [(call.name, json.loads(call.arguments)) for call in message.calls]
        content = message.content or ""
        shape = well_formed(content, made, message.reasoning, end.finish_reason, item.thinking)
        return Reply(
            content, made, end.finish_reason, shape and not message.problems, end.error, bool(message.reasoning)
        )


class HttpModel:
    """A server with /v1/chat/completions. settings: fields of the request ({"temperature": 0} ...)."""

    def __init__(
        self, url: str, *, model: str | None = None, key: str = "none", settings=None, max_tokens=320, slots=8
    ):
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.key, self.settings, self.max_tokens, self.slots = key, settings, max_tokens, slots
        self.model = model or self._first_model()

    def ask(self, items: Sequence[Item], tick: Callable[[], None] = lambda: None) -> list[Reply]:
        """Replies in the order of the items. tick: called after each."""

        def one(numbered):
            reply = self._one(*numbered)
            tick()
            return reply

        with concurrent.futures.ThreadPoolExecutor(self.slots) as pool:
            return list(pool.map(one, enumerate(items)))

    def _first_model(self) -> str:
        try:
            return self._send("/models", None)["data"][0]["id"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise FlintError(f"{self.url}/models names no model ({error}); is a server running there?") from None

    def _one(self, n: int, item: Item) -> Reply:
        body = {"model": self.model, "messages": list(item.messages), "max_tokens": self.max_tokens, "seed": n}
        body |= {"temperature": 0} if self.settings is None else self.settings
        if item.tools:
            body["tools"] = list(item.tools)
        if _kwargs(item):
            body["chat_template_kwargs"] = _kwargs(item)
        try:
            choice = self._send("/chat/completions", body)["choices"][0]
        except urllib.error.HTTPError as error:
            return Reply("", [], "error", False, f"{error.code}: {error.read().decode(errors='replace')[:300]}")
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            return Reply("", [], "error", False, f"no answer: {error!r:.300}")
        message = choice["message"]
        calls = []
        for call in message.get("tool_calls") or []:
            try:
                calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
            except ValueError:
                calls.append((call["function"]["name"], call["function"]["arguments"]))
        content, thought = message.get("content") or "", message.get("reasoning") or message.get("reasoning_content")
        reason = choice["finish_reason"]
        shape = well_formed(content, calls, thought, reason, item.thinking)
        return Reply(content, calls, reason, shape, thought=bool(thought))

    def _send(self, path: str, body: dict | None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=600) as reply:
            return json.load(reply)


def _kwargs(item: Item) -> dict[str, Any]:
    return {} if item.thinking else {"enable_thinking": False}
