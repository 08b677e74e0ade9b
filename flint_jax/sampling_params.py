"""What a request may ask for of the sampler, checked when it is made. No JAX: this is the host's side."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flint_jax.errors import ConfigError, RequestError
from pallas_kernels.sample.shapes import GREEDY_BELOW, MAX_STOP_IDS, MAX_TOP_K

MAX_LOGPROBS = 20  # alternatives reported per token; the limit of OpenAI's chat API
MAX_CHOICES = 128  # ``n``; the limit of OpenAI's API

# What Flint recommends, for whatever a checkpoint's generation config leaves out.
MODEL_DEFAULTS: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, under vLLM's names and with its meanings. Checked when made.

    temperature         >= 0. Below 1e-5 is greedy (filters are ignored); between that and 0.01 counts as 0.01,
                        above 1e6 as 1e6.
    top_k               keep the k best, ties with the k-th included; 0 and -1 switch it off.
    top_p               in [0, 1]: keep the fewest best tokens whose mass after temperature and top_k reaches it, at
                        least one; among equals the lower id stays. 1 switches it off, 0 keeps one token.
    min_p               in [0, 1]: keep tokens at least this fraction as likely as the best one; 0 switches it off.
    max_tokens          >= 1, or None for the rest of the context.
    min_tokens          no stop id is drawn before this many tokens. At most ``max_tokens``.
    seed                an integer of 64 bits; None or -1 lets the engine choose.
    stop                a string or several; handled by the text layer.
    stop_token_ids      ids that end the request; together with the model's own at most ``MAX_STOP_IDS`` (16).
    ignore_eos          the model's own end tokens do not end the request.
    logprobs            alternatives to report per token, 0 to 20; None reports nothing.
    presence_penalty, frequency_penalty    in [-2, 2], on the output only.
    repetition_penalty  in [0.001, 1000] (float32 stays finite there), on prompt and output; 1 switches it off.
    logit_bias          {token id: value in [-100, 100]}; ids may be decimal strings, as JSON keys are.
    n                   choices, 1 to 128: see ``choices()``.

    None for temperature, top_k, top_p, min_p or repetition_penalty means the model's default, which ``resolve`` fills
    in; None for any other field means the default shown here. Booleans and strings are not numbers.

    Raises RequestError whose ``param`` is the field.
    """

    temperature: float | None = 1.0
    top_k: int | None = 0
    top_p: float | None = 1.0
    min_p: float | None = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: Mapping[int, float] | None = None
    n: int = 1

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None and field.name not in MODEL_DEFAULTS:
                put(field.name, field.default)
        put("temperature", _real("temperature", self.temperature, 0.0, math.inf))
        put("top_k", _whole("top_k", self.top_k, -1))
        put("top_p", _real("top_p", self.top_p, 0.0, 1.0))
        put("min_p", _real("min_p", self.min_p, 0.0, 1.0))
        put("max_tokens", _whole("max_tokens", self.max_tokens, 1))
        put("min_tokens", _whole("min_tokens", self.min_tokens, 0))
        put("seed", _whole("seed", self.seed, -(2**63), 2**64 - 1))
        put("logprobs", _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        put("presence_penalty", _real("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, 1e-3, 1e3))
        put("n", _whole("n", self.n, 1, MAX_CHOICES))
        put("stop", _strings("stop", self.stop))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        put("logit_bias", _bias("logit_bias", self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise _wrong_type("ignore_eos", self.ignore_eos, "true or false")
        if self.seed == -1:
            put("seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; lower it",
                param="min_tokens",
                code="invalid_value",
            )
        self.stop_set(())

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax. Needs a temperature, so ``resolve`` first."""
        return self.temperature < GREEDY_BELOW

    @functools.cached_property
    def simple(self) -> bool:
        """Whether ``fast_path`` takes this request. Asked in every step, hence kept."""
        few = self.greedy or 1 <= self.top_k <= MAX_TOP_K
        return few and not needs((self,))["adjusted"]

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def choices(self) -> tuple[SamplingParams, ...]:
        """``n`` requests of one choice each. With a seed, choice i gets seed + i: reproducible, and members differ."""
        if self.seed is None:
            return (self.replace(n=1),) * self.n
        low = self.seed & (2**64 - 1)
        return tuple(self.replace(n=1, seed=self.seed if i == 0 else (low + i) % 2**64) for i in range(self.n))

    def stop_set(self, eos_ids: Iterable[int]) -> tuple[int, ...]:
        """Every id that ends this request: its own, and the model's ``eos_ids`` unless ``ignore_eos``. Ascending.

        Raises RequestError when there are more than ``MAX_STOP_IDS``.
        """
        ids = set(self.stop_token_ids) | (set() if self.ignore_eos else {int(i) for i in eos_ids})
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids and the model's end tokens are {len(ids)} ids, and at most {MAX_STOP_IDS} can be "
                "watched for; send fewer, or use stop strings",
                param="stop_token_ids",
                code="invalid_value",
            )
        return tuple(sorted(ids))

    def check_vocabulary(self, vocab: int) -> None:
        """Raises RequestError when ``logit_bias`` or ``stop_token_ids`` names a token outside [0, vocab)."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab:
                    raise RequestError(
                        f"{name} names token {token}, and the vocabulary has {vocab} tokens (0 to {vocab - 1})",
                        param=name,
                        code="invalid_value",
                    )


def resolve(params: SamplingParams, generation: Mapping[str, Any]) -> SamplingParams:
    """Fill the fields that are None from a checkpoint's generation config, else from ``MODEL_DEFAULTS``, one by one.

    A value that the request gave always wins, an explicit 1.0 or 0 too. Resolve ``SamplingParams(temperature=None,
    ...)`` once at load to learn about a bad generation config before any request does.

    Raises ConfigError when the generation config's value is not usable.
    """
    missing = [name for name in MODEL_DEFAULTS if getattr(params, name) is None]
    given = {name: generation.get(name) for name in missing}
    try:
        return params.replace(**{k: MODEL_DEFAULTS[k] if v is None else v for k, v in given.items()})
    except RequestError as error:
        raise ConfigError(f"the checkpoint's generation config cannot be used: {error}") from error


def needs(params: Iterable[SamplingParams]) -> dict[str, bool]:
    """Which of ``sample``'s stages a batch of resolved requests needs: its static keyword arguments."""
    params = tuple(params)
    return {
        "adjusted": any(
            p.logit_bias
            or p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1.0
            or (p.min_tokens and (p.stop_token_ids or not p.ignore_eos))
            for p in params
        ),
        "filtered": any(not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params),
        "drawn": any(not p.greedy for p in params),
    }


def fast_path(params: Iterable[SamplingParams]) -> bool:
    """Whether ``advance`` takes a batch of resolved requests: nothing adjusted, and few candidates in every row."""
    return all(p.simple for p in params)


# -- checks ----------------------------------------------------------------------------------------------------------


def _wrong_type(name: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {value!r:.80}", param=name, code="invalid_type")


def _real(name: str, value: Any, low: float, high: float) -> float | None:
    """A finite number in [low, high] as a float; None stays."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        wanted = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be {wanted}, got {value!r:.80}", param=name, code="invalid_value")
    return number


def _whole(name: str, value: Any, low: int, high: int | None = None) -> int | None:
    """An integer in [low, high] as an int; None stays."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong_type(name, value, "an integer")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {wanted}, got {value!r:.80}", param=name, code="invalid_value")
    return int(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or an iterable of strings, none empty, as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, bytes | Mapping) or not isinstance(items, Iterable):
        raise _wrong_type(name, value, "a string or a list of strings")
    items = tuple(items)
    for item in items:
        if not isinstance(item, str):
            raise _wrong_type(name, value, "a string or a list of strings")
        if not item:
            raise RequestError(f"{name} holds an empty string, which would match at once", param=name)
    return items


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """An iterable of token ids as a tuple. Their upper bound is the vocabulary's business."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong_type(name, value, "a list of token ids")
    ids = tuple(_whole(name, item, 0) for item in value)
    if None in ids:
        raise _wrong_type(name, value, "a list of token ids")
    return ids


def _bias(name: str, value: Any) -> dict[int, float] | None:
    """{token id: bias} with ids as ints; None and {} become None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "an object of token id to bias")
    bias = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if token is None or number is None:
            raise _wrong_type(name, {key: number}, "an object of token id to bias")
        bias[_whole(name, token, 0)] = _real(name, number, -100.0, 100.0)
    return bias or None
