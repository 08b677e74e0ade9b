"""The sampling fields that chat and text completions share, from JSON to settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from flint_jax.server.body import Fields
from flint_jax.server.choices import TextOptions
from flint_jax.server.lengths import check_length
from flint_jax.server.state import ServedModel

_MAX_STOPS = 64  # stop strings a request; each is watched for at every character
_MAX_STOP_LENGTH = 4096
_MAX_SALT = 1024


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What one request asks of the engine (``params``, defaults filled in) and of the text layer."""

    params: Any
    text: TextOptions
    n: int
    salt: str | None = None  # ``cache_salt``: only requests with the same one share cached prefixes
    prompt_logprobs: int | None = None  # alternatives to report for each token of the prompt

    def for_prompt(self, served: ServedModel, prompt_ids: list[int], *, param: str, generate: bool = True) -> list[Any]:
        """Settings of the ``n`` engine requests for one prompt, ``max_tokens`` cut to the room that is left.

        generate: False for a prompt that is only read, and needs no room for output.
        Raises ApiError 400 ``context_length_exceeded`` when there is no room for a single token.
        """
        room = max(served.max_model_len - len(prompt_ids), 1)
        check_length(served, len(prompt_ids), wanted=int(generate), param=param)
        wanted = self.params.max_tokens
        tokens = room if wanted is None else min(wanted, room)
        fitted = self.params.replace(max_tokens=tokens, min_tokens=min(self.params.min_tokens, tokens))
        return list(fitted.choices())


def read_sampling(
    fields: Fields,
    served: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    stop: str = "stop",
    one: bool = False,
) -> Sampling:
    """Sampling settings of a request; what it leaves out comes from the model's own defaults.

    max_tokens, logprobs, prompt_logprobs: already read by the endpoint, since endpoints name and default them
        differently, or lack them.
    stop: name of the field with stop strings. one: this protocol knows one choice only.
    Raises ApiError or RequestError, both naming the field.
    """
    stops = fields.strings(stop)
    if len(stops) > _MAX_STOPS or any(not 0 < len(s) <= _MAX_STOP_LENGTH for s in stops):
        raise fields.error(
            stop, f"needs at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_LENGTH} characters, none empty"
        )
    n = 1 if one else fields.integer("n", 1, 1, 128)
    params = served.params(
        temperature=fields.number("temperature", low=0),
        top_p=fields.number("top_p", low=0, high=1),
        top_k=fields.integer("top_k", low=-1),
        min_p=fields.number("min_p", low=0, high=1),
        repetition_penalty=fields.number("repetition_penalty", low=0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens", 0, 0),
        seed=fields.integer("seed"),
        stop_token_ids=_token_ids(fields, served),
        ignore_eos=fields.boolean("ignore_eos"),
        logit_bias=_logit_bias(fields, served),
        logprobs=logprobs,
        n=n,
    )
    # Fields of vLLM that change the prompt, the output or its form and that we lack: refusing beats ignoring.
    fields.unsupported("truncate_prompt_tokens", allowed=(-1,), hint="send the tokens that are to be kept")
    fields.unsupported("return_token_ids", hint="/tokenize gives those of a text")
    fields.unsupported("return_tokens_as_token_ids")
    fields.unsupported("best_of", allowed=(n,), hint="ask for n choices instead")
    fields.unsupported("use_beam_search")
    if prompt_logprobs is None:
        fields.unsupported("prompt_logprobs")
    fields.unsupported("bad_words")
    fields.unsupported("allowed_token_ids")
    fields.unsupported("logits_processors")
    text = TextOptions(
        stop=tuple(stops),
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )
    return Sampling(served.resolve(params, served.generation), text, n, _cache_salt(fields), prompt_logprobs)


def read_prompt_logprobs(fields: Fields, most: int, *, stream: bool) -> int | None:
    """vLLM's ``prompt_logprobs``: alternatives for each token of the prompt, 0 to ``most``. Raises ApiError."""
    wanted = fields.integer("prompt_logprobs", None, 0, most)
    if wanted is not None and stream:
        raise fields.error("prompt_logprobs", "come with whole replies only; leave stream out")
    return wanted


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.string("cache_salt")
    if salt is not None and not 0 < len(salt) <= _MAX_SALT:
        raise fields.error("cache_salt", f"needs 1 to {_MAX_SALT} characters")
    return salt


def _token_ids(fields: Fields, served: ServedModel) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids") or []
    check_token_ids(fields, "stop_token_ids", ids, served.vocab_size)
    return tuple(ids)


def check_token_ids(fields: Fields, name: str, ids: list[Any], vocab_size: int) -> None:
    """Raise ApiError unless all ``ids`` are rows of the model's head. 200,000 of them take 6 ms."""
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token_id in ids:
        _check_token_id(fields, name, token_id, vocab_size)


def _check_token_id(fields: Fields, name: str, token_id: Any, vocab_size: int) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        raise fields.error(name, "must hold whole numbers (token ids)", "invalid_type")
    if not 0 <= token_id < vocab_size:
        raise fields.error(name, f"holds token id {token_id!s:.40}; the vocabulary has ids 0 to {vocab_size - 1}")


def _logit_bias(fields: Fields, served: ServedModel) -> dict[int, float] | None:
    given = fields.object("logit_bias")
    if not given:
        return None
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < served.vocab_size):
            raise fields.error(
                "logit_bias", f"has the key {key!r:.40}; need token ids from 0 to {served.vocab_size - 1}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.error("logit_bias", f"of token {key} must be a number from -100 to 100", "invalid_type")
        if not -100 <= value <= 100:
            raise fields.error("logit_bias", f"of token {key} is {value!s:.40}; need -100 to 100")
        bias[int(key)] = float(value)
    return bias


def read_stream_options(fields: Fields, *, force_usage: bool) -> tuple[bool, bool, bool]:
    """(stream, usage chunk at the end, usage on every chunk)."""
    stream = fields.boolean("stream")
    given = fields.object("stream_options")
    if given is None:
        return stream, stream and force_usage, False
    if not stream:
        raise fields.error("stream_options", "is only allowed together with stream: true")
    options = Fields(given, prefix="stream_options.")
    usage = options.boolean("include_usage")
    every = options.boolean("continuous_usage_stats")
    return stream, usage or force_usage, usage and every
