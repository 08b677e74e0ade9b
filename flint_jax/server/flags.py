"""The command line of serve.py: vllm serve's words where the thing is the same, a reason where we lack it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flint_jax.command_line import near
from flint_jax.server import words
from flint_jax.server.flag_parser import API_KEY_VARIABLE, FlagError, make_parser
from flint_jax.server.flag_types import NVFP4_NAMES
from flint_jax.server.settings import ServerSettings
from flint_jax.server.vllm_flags import IGNORED, REFUSED, Foreign, sort_out


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """What to load and how much of it at once; None means that the loader decides."""

    model: str | None
    tokenizer: str | None
    config: str | None
    served_names: tuple[str, ...]
    chat_template: str | None  # the template's source
    use_generation_config: bool
    override_generation: dict[str, Any]
    dtype: str
    numerics: str
    kernels: str
    seed: int
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_prefill_ms: float | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    prefix_snapshots: int | None
    load_format: str = "auto"  # or "dummy"
    weight_format: str | None = None  # of dummy weights: "bf16" or "nvfp4"


def parse(argv: Sequence[str]) -> tuple[ModelSettings, ServerSettings, list[str]]:
    """(model, server, warnings) from a command line without the program's name. Raises FlagError."""
    argv = [re.sub(r"^--[^=]+", lambda m: m[0].replace("_", "-"), a) if a.startswith("--") else a for a in argv]
    parser = make_parser()
    try:
        argv, warnings = sort_out(argv, frozenset(parser._option_string_actions))
    except Foreign as e:
        raise FlagError(str(e)) from None
    args, rest = parser.parse_known_args(argv)
    if rest:
        raise FlagError(_unknown(rest[0], parser))
    if args.model and args.model_tag and args.model != args.model_tag:
        raise FlagError(f"MODEL is given twice: {args.model_tag!r} and --model {args.model!r}")
    model = args.model or args.model_tag
    for flag, values in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
        if model is None and len(values) > 1 and Path(values[-1]).exists():
            raise FlagError(f"{flag} took {values[-1]!r} for one of its values; put MODEL before it")
    keys = args.api_key or _keys_of_the_environment()
    model_settings = ModelSettings(
        model=model,
        tokenizer=args.tokenizer,
        config=args.hf_config_path,
        served_names=tuple(dict.fromkeys(args.served_model_name)),
        chat_template=_template(args.chat_template),
        use_generation_config=args.generation_config == "auto",
        override_generation=args.override_generation_config,
        dtype=args.dtype,
        numerics=args.numerics,
        kernels=args.kernels,
        seed=args.seed,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_prefill_ms=args.max_prefill_ms or None,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        prefix_snapshots=args.prefix_snapshots,
        load_format=args.load_format,
        weight_format=_dummy_format(args.load_format, args.quantization),
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
        stall_timeout_s=args.stall_timeout,
        max_queued=args.max_num_queued_reqs,
        max_logprobs=args.max_logprobs,
        force_usage=args.enable_force_include_usage,
        template_kwargs=args.default_chat_template_kwargs,
        exclude_tools_when_none=args.exclude_tools_when_tool_choice_none,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        unlogged_paths=args.disable_access_log_for_endpoints,
        log_requests=args.enable_log_requests,
        log_stats_s=0.0 if args.disable_log_stats else args.log_stats_interval,
        metrics_prefix=args.metrics_prefix,
        open_metrics=args.metrics_without_key,
        tokenizer_info=args.enable_tokenizer_info_endpoint,
        allow_credentials=args.allow_credentials,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
    )
    return model_settings, server_settings, warnings


def _dummy_format(load_format: str, quantization: str | None) -> str | None:
    """The format of dummy weights, None for the checkpoint's own. Raises FlagError for a format of real weights."""
    if quantization == "none":
        if load_format != "dummy":
            raise FlagError("--quantization none is for --load-format dummy; the format is read from the checkpoint")
        return "bf16"
    return "nvfp4" if load_format == "dummy" and quantization in NVFP4_NAMES else None


def _keys_of_the_environment() -> list[str]:
    """Ours, else vllm's: whoever copies a command with a key must not end up with an open server."""
    text = os.environ.get(API_KEY_VARIABLE) or os.environ.get("VLLM_API_KEY") or ""
    return [k.strip() for k in text.split(",")]


def _unknown(arg: str, parser: argparse.ArgumentParser) -> str:
    name = arg.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {arg!r}; quote values that contain spaces"
    ours = [s for action in parser._actions for s in action.option_strings]
    meant = near(name, ours) or near(name, [*ours, *IGNORED, *REFUSED])
    return f"unknown flag {name}" + (f"; did you mean {meant}?" if meant else "; see --help")


def _template(given: str | None) -> str | None:
    """A template's source from a file name or the source itself, which has braces."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise FlagError(f"--chat-template {given}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}") from None


def main_parse(argv: Sequence[str]) -> tuple[ModelSettings, ServerSettings]:
    """``parse`` that prints warnings, and ends the process with code 2 and one line when it cannot obey."""
    try:
        model, server, warnings = parse(argv)
    except FlagError as e:
        print(f"{words.program}: error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    for warning in warnings:
        print(f"{words.program}: warning: {warning}", file=sys.stderr)
    return model, server
