"""The command line of serve.py: vllm serve's words where the thing is the same, a reason where we lack it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flint_jax.server.settings import ServerSettings

API_KEY_VARIABLE = "FLINT_API_KEY"


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """What to load and how much of it at once; None means that the loader decides."""

    model: str | None
    tokenizer: str | None
    config: str | None
    served_names: tuple[str, ...]
    chat_template: str | None  # the template's source
    use_generation_config: bool
    dtype: str
    numerics: str
    kernels: str
    seed: int
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    prefix_snapshots: int | None


# Flags of vllm serve that ask for what is always so here: accepted, so that copied commands work.
# name -> (number of values: 0, 1 or None for any; why nothing has to be done)
IGNORED: dict[str, tuple[int | None, str]] = {
    "--enable-auto-tool-choice": (0, "tools are always offered to the model"),
    "--tool-call-parser": (1, "the model's own format is built in"),
    "--reasoning-parser": (1, "the model's own format is built in"),
    "--trust-remote-code": (0, "no code of a checkpoint is ever run"),
    "--enable-chunked-prefill": (0, "prefill is always chunked"),
    "--load-format": (1, "the format is read from the files"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--disable-log-requests": (0, "requests are not logged"),
    "--no-enable-log-requests": (0, "requests are not logged"),
    "--async-scheduling": (0, "results are always read one step behind"),
    "--enforce-eager": (0, "steps are always compiled"),
    "--generation-config-path": (1, "use --generation-config"),
}

# Flags of vllm serve that we lack, and why.
REFUSED: dict[str, str] = {
    "--quantization": "the format is read from the checkpoint; quantise it beforehand",
    "--pipeline-parallel-size": "this server runs on one GPU",
    "--data-parallel-size": "this server runs on one GPU; start one server per GPU",
    "--enable-expert-parallel": "this server runs on one GPU",
    "--kv-cache-dtype": "the KV cache has the compute dtype",
    "--block-size": "the page size of the KV cache is fixed",
    "--cpu-offload-gb": "weights stay on the GPU",
    "--swap-space": "a request that runs out of pages is computed again, not swapped",
    "--speculative-config": "there is no speculative decoding",
    "--enable-lora": "there are no LoRA adapters",
    "--lora-modules": "there are no LoRA adapters",
    "--tokenizer-mode": "there is one tokenizer implementation",
    "--revision": "download the revision first and give its folder",
    "--hf-overrides": "give a folder with another config.json to --hf-config-path",
    "--rope-scaling": "the published positions are used as they are",
    "--config": "put the flags on the command line",
    "--uds": "listen on --host and --port",
    "--ssl-keyfile": "put a TLS proxy in front",
    "--ssl-certfile": "put a TLS proxy in front",
    "--structured-outputs-config": "there is no structured output yet",
    "--guided-decoding-backend": "there is no structured output yet",
    "--limit-mm-per-prompt": "this model reads text only",
    "--task": "this model generates text only",
    "--runner": "this model generates text only",
    "--device": "JAX picks the device; set JAX_PLATFORMS",
    "--enable-sleep-mode": "weights stay on the GPU",
    "--logits-processors": "no foreign code is run",
    "--middleware": "no foreign code is run",
    "--compilation-config": "steps are compiled by XLA; set XLA_FLAGS",
    "--logprobs-mode": "log-probabilities are those of the raw logits",
    "--response-role": "the role is assistant",
}


class FlagError(Exception):
    """A command line that cannot be obeyed; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


class _Help(argparse.HelpFormatter):
    """Shows the default after each help text."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        boring = action.default in (None, False, argparse.SUPPRESS, [], ()) or "default" in text
        return text if boring else f"{text} (default: %(default)s)"


def make_parser() -> argparse.ArgumentParser:
    """The parser, with its flags in groups."""
    parser = _Parser(
        prog="serve.py",
        description="Serve a Flint checkpoint over an OpenAI-compatible HTTP API.",
        epilog="Without MODEL a tiny embedded model is served; its answers are nonsense, all else works.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    g = parser.add_argument_group("model")
    g.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id (owner/name)")
    g.add_argument("--model", metavar="PATH", help="the same as MODEL")
    g.add_argument(
        "--tokenizer", metavar="PATH", help="folder with tokenizer.json, or .gguf (default: the checkpoint's)"
    )
    g.add_argument("--hf-config-path", metavar="PATH", help="config.json or its folder (default: the checkpoint's)")
    g.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names that clients may use, the first is shown in replies (default: the checkpoint's name)",
    )
    g.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="compute dtype")
    g.add_argument("--numerics", choices=["serving", "transformers"], default="serving", help="rounding contract")
    g.add_argument("--kernels", choices=["auto", "xla", "pallas"], default="auto", help="implementation of the hot ops")
    g.add_argument("--seed", type=_whole(0, 2**63 - 1), default=0, help="for requests that bring no seed")

    g = parser.add_argument_group("capacity")
    g.add_argument(
        "--max-model-len",
        type=_length,
        metavar="N",
        help="most tokens of prompt and output, e.g. 32768, 32k or auto (default: what fits, at most the model's own)",
    )
    g.add_argument(
        "--max-num-seqs", type=_whole(1, 1024), metavar="N", help="requests that run together (default: by memory)"
    )
    g.add_argument(
        "--max-num-batched-tokens",
        type=_whole(1, 1 << 20),
        metavar="N",
        help="most prompt tokens read between two decode steps (default: one prefill chunk)",
    )
    g.add_argument(
        "--gpu-memory-utilization",
        type=_fraction,
        default=0.9,
        metavar="F",
        help="share of the GPU's memory to use",
    )
    g.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do not compute again what prompts have in common with earlier ones",
    )
    g.add_argument(
        "--prefix-snapshots",
        type=_whole(0, 1 << 16),
        metavar="N",
        help="points in earlier requests that prompts can be taken up from, 40 MB each at full size "
        "(default: a tenth of the cache's memory, at most eight for each of --max-num-seqs)",
    )
    g.add_argument(
        "--max-num-queued-reqs",
        type=_whole(0, 1 << 20),
        metavar="N",
        help="requests that may wait; more get a 429 (default: no limit)",
    )

    g = parser.add_argument_group("replies")
    g.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file, or the template itself (default: the checkpoint's)"
    )
    g.add_argument(
        "--default-chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="arguments of the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    g.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="leave the tools out of the prompt when tool_choice is none (default: they stay, which keeps the prefix)",
    )
    g.add_argument(
        "--generation-config",
        choices=["auto", "none", "vllm"],
        default="auto",
        help="auto: sampling defaults from the checkpoint; none (or vllm): temperature 1, top_p 1, no top_k",
    )
    g.add_argument("--max-logprobs", type=_whole(0, 20), default=20, metavar="N", help="most alternatives per token")
    g.add_argument("--strict-model", action="store_true", help="404 for a model name that is not served")
    g.add_argument("--enable-force-include-usage", action="store_true", help="send usage in every stream")

    g = parser.add_argument_group("HTTP")
    g.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    g.add_argument("--port", type=_whole(0, 65535), default=8000, help="port to listen on; 0 picks a free one")
    g.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help=f"ask for one of these keys on all routes but /health (default: ${API_KEY_VARIABLE}, comma-separated)",
    )
    g.add_argument(
        "--allowed-origins",
        type=_origins,
        default=(),
        metavar="JSON",
        help="""web origins that may call from a browser, e.g. '["*"]' (default: pages of this machine)""",
    )
    g.add_argument("--root-path", default="", metavar="PREFIX", help="path prefix that a proxy in front strips")
    g.add_argument(
        "--max-request-bytes", type=_whole(1024, 1 << 40), default=64 << 20, metavar="N", help="largest request body"
    )
    g.add_argument(
        "--sse-keep-alive-interval",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds of silence after which a stream gets a comment line; 0 never",
    )
    g.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=8.0,
        metavar="S",
        help="seconds that running requests get to finish after SIGTERM",
    )
    g.add_argument(
        "--uvicorn-log-level",
        choices=["critical", "error", "warning", "info", "debug", "trace"],
        default="info",
        help="how much the HTTP server logs",
    )
    g.add_argument("--disable-uvicorn-access-log", action="store_true", help="no log line for each request")

    g = parser.add_argument_group("accepted so that copied vllm commands work, no effect")
    g.add_argument("--tensor-parallel-size", "-tp", type=_one, help="only 1")
    for name, (values, why) in IGNORED.items():
        kind: dict[str, Any] = {"action": "store_true"} if values == 0 else {"metavar": "X"}
        g.add_argument(name, dest=f"ignored:{name}", default=None, help=why, **kind)
    return parser


def parse(argv: Sequence[str]) -> tuple[ModelSettings, ServerSettings, list[str]]:
    """(model, server, warnings) from a command line without the program's name. Raises FlagError."""
    argv = [re.sub(r"^--[^=]+", lambda m: m[0].replace("_", "-"), a) if a.startswith("--") else a for a in argv]
    for arg in argv:
        name = arg.partition("=")[0]
        if name in REFUSED or (name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in REFUSED):
            raise FlagError(f"{name} is not supported: {REFUSED[name.replace('--no-', '--')]}")
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        raise FlagError(_unknown(rest[0], parser))
    if args.model and args.model_tag and args.model != args.model_tag:
        raise FlagError(f"MODEL is given twice: {args.model_tag!r} and --model {args.model!r}")
    model = args.model or args.model_tag
    for flag, values in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
        if model is None and len(values) > 1 and Path(values[-1]).exists():
            raise FlagError(f"{flag} took {values[-1]!r} for one of its values; put MODEL before it")
    warnings = [
        f"{name} is ignored: {why}"
        for name, (_, why) in IGNORED.items()
        if getattr(args, f"ignored:{name}") not in (None, False)
    ]
    keys = args.api_key or [k.strip() for k in os.environ.get(API_KEY_VARIABLE, "").split(",")]
    model_settings = ModelSettings(
        model=model,
        tokenizer=args.tokenizer,
        config=args.hf_config_path,
        served_names=tuple(dict.fromkeys(args.served_model_name)),
        chat_template=_template(args.chat_template),
        use_generation_config=args.generation_config == "auto",
        dtype=args.dtype,
        numerics=args.numerics,
        kernels=args.kernels,
        seed=args.seed,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        prefix_snapshots=args.prefix_snapshots,
    )
    server_settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=tuple(k for k in keys if k),
        allowed_origins=args.allowed_origins,
        root_path=args.root_path.rstrip("/"),
        strict_model=args.strict_model,
        max_request_bytes=args.max_request_bytes,
        keep_alive_s=args.sse_keep_alive_interval,
        shutdown_timeout_s=args.shutdown_timeout,
        max_queued=args.max_num_queued_reqs,
        max_logprobs=args.max_logprobs,
        force_usage=args.enable_force_include_usage,
        template_kwargs=args.default_chat_template_kwargs,
        exclude_tools_when_none=args.exclude_tools_when_tool_choice_none,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
    )
    return model_settings, server_settings, warnings


def _unknown(arg: str, parser: argparse.ArgumentParser) -> str:
    name = arg.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {arg!r}; quote values that contain spaces"
    known = [s for action in parser._actions for s in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _template(given: str | None) -> str | None:
    """A template's source from a file name or the source itself, which has braces."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise FlagError(f"--chat-template {given}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}") from None


# -- types of values -------------------------------------------------------------------------------------------------


def _whole(low: int, high: int):
    def whole(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,20}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: need a whole number from {low} to {high}")
        return int(text)

    return whole


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: need a number") from None


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: need more than 0 and at most 1")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: need seconds from 0 to 86400")
    return value


def _length(text: str) -> int | None:
    """A number of tokens; k, m are thousands and millions, K, M their binary kin, as in vllm; auto and -1 decide."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmM]?)", text)
    value = float(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}[match[2]] if match else 0
    if value < 2 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r}: need a number of tokens such as 32768, 32k or auto")
    return int(value)


def _one(text: str) -> int:
    if text != "1":
        raise argparse.ArgumentTypeError(f"{text!r}: this server runs on one GPU; leave the flag out")
    return 1


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: need a JSON object")
    return value


def _origins(text: str) -> tuple[str, ...]:
    """A JSON array of origins, or one origin as it is."""
    if not text.startswith("["):
        return tuple(text.split(","))
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise argparse.ArgumentTypeError(f"{text!r}: need a JSON array of strings")
    return tuple(value)


def main_parse(argv: Sequence[str]) -> tuple[ModelSettings, ServerSettings]:
    """``parse`` that prints warnings, and ends the process with code 2 and one line when it cannot obey."""
    try:
        model, server, warnings = parse(argv)
    except FlagError as e:
        print(f"serve.py: error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    for warning in warnings:
        print(f"serve.py: warning: {warning}", file=sys.stderr)
    return model, server
