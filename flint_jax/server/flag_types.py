"""Types of the values of serve.py's flags: each takes the text and says what is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import json
import re

from flint_jax.chat import RESERVED

# The sampling defaults that a checkpoint or the command line can set (flint_jax.sampling_params.MODEL_DEFAULTS)
GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


NVFP4_NAMES = ("nvfp4", "modelopt", "modelopt_fp4")


def whole(low: int, high: int):
    """A whole number in [low, high]."""

    def whole(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,20}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: need a whole number from {low} to {high}")
        return int(text)

    return whole


def load_format(text: str) -> str:
    """ "dummy", or "auto" for vLLM's names of what is read from the files anyway."""
    if text == "dummy":
        return text
    if text in ("auto", "hf", "safetensors", "gguf", "pt", "npcache", "mistral"):
        return "auto"
    raise argparse.ArgumentTypeError(f"{text!r}: need auto or dummy")


def quantization(text: str) -> str:
    """A format of weights by vLLM's names; "none" for BF16."""
    if text in (*NVFP4_NAMES, "none", "gguf", "compressed-tensors"):
        return text
    raise argparse.ArgumentTypeError(
        f"{text} is not supported: the format is read from the checkpoint; quantise it beforehand"
    )


def number(text: str) -> float:
    """Any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: need a number") from None


def fraction(text: str) -> float:
    """A number in (0, 1]."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: need more than 0 and at most 1")
    return value


def milliseconds(text: str) -> float:
    """Milliseconds, at most a minute."""
    value = number(text)
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r}: need milliseconds from 0 to 60000")
    return value


def seconds(text: str) -> float:
    """Seconds, at most a day."""
    value = number(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: need seconds from 0 to 86400")
    return value


def length(text: str) -> int | None:
    """A number of tokens; k, m are thousands and millions, K, M their binary kin, as in vllm; auto and -1 decide."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmM]?)", text)
    value = float(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}[match[2]] if match else 0
    if value < 2 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r}: need a number of tokens such as 32768, 32k or auto")
    return int(value)


def json_object(text: str) -> dict:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise argparse.ArgumentTypeError(
            f"{text!r:.200} is not JSON ({e}); need an object in quotes for the shell, such as '{{\"key\": 1}}'"
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.200}: need a JSON object such as '{{\"key\": 1}}'")
    return value


def template_kwargs(text: str) -> dict:
    """A JSON object of arguments for a chat template, none of which every request brings itself."""
    value = json_object(text)
    taken = [key for key in RESERVED if key in value]
    if taken:
        raise argparse.ArgumentTypeError(f"{', '.join(taken)}: every request brings that itself; leave it out")
    return value


def generation(text: str) -> dict:
    """A JSON object of sampling defaults: keys of GENERATION, numbers (null for the checkpoint's own)."""
    value = json_object(text)
    for key, given in value.items():
        if key not in GENERATION:
            near = difflib.get_close_matches(key.lower(), GENERATION, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentTypeError(f"unknown key {key!r:.64}{hint} (known: {', '.join(GENERATION)})")
        if isinstance(given, bool) or not isinstance(given, int | float | None):
            raise argparse.ArgumentTypeError(f"{key} is {json.dumps(given):.64}; need a number")
    return value


def strings(text: str) -> tuple[str, ...]:
    """A JSON array of strings, or strings with commas between."""
    if not text.startswith("["):
        return tuple(text.split(","))
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise argparse.ArgumentTypeError(f"{text!r}: need a JSON array of strings")
    return tuple(value)


def prefix(text: str) -> str:
    """What names of metrics begin with."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: need letters, digits and underscores")
    return text
