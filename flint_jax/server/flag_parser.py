"""The flags of serve.py, in groups, with their help."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from flint_jax.server import words
from flint_jax.server.flag_types import (
    GENERATION,
    fraction,
    generation,
    length,
    load_format,
    milliseconds,
    prefix,
    quantization,
    seconds,
    strings,
    template_kwargs,
    whole,
)
from flint_jax.server.vllm_flags import IGNORED

API_KEY_VARIABLE = "FLINT_API_KEY"


class FlagError(Exception):
    """A command line that cannot be obeyed; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


class _Help(argparse.HelpFormatter):
    """Shows the default after each help text."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0].removeprefix("--")
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        boring = default in (None, argparse.SUPPRESS, [], (), {}, "") or "(default" in text
        return text if boring else f"{text} (default: {default})"


def make_parser() -> argparse.ArgumentParser:
    """The parser, with its flags in groups."""
    parser = _Parser(
        prog=words.program,
        usage=f"{words.program} [MODEL] [flags]",
        description="Serve a Flint checkpoint over an OpenAI-compatible HTTP API.",
        epilog="Without MODEL a small embedded model is served: small talk, sums, look-ups, tool calls (docs/tiny.md). "
        "Taken from copied vllm commands without effect: " + ", ".join(sorted(IGNORED)) + ". Other flags of vllm are "
        "refused with a reason, unless they ask for what is so anyway.",
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
    g.add_argument(
        "--load-format",
        type=load_format,
        default="auto",
        metavar="{auto,dummy}",
        help="dummy: random weights of the config's shapes, made on the device; MODEL may then be a folder with "
        "config.json and tokenizer alone",
    )
    g.add_argument(
        "-q",
        "--quantization",
        type=quantization,
        metavar="{nvfp4,none}",
        help="format of dummy weights (default: that of a GGUF, else BF16); that of others is read from the files",
    )
    g.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="compute dtype")
    g.add_argument("--numerics", choices=["serving", "transformers"], default="serving", help="rounding contract")
    g.add_argument("--kernels", choices=["auto", "xla", "pallas"], default="auto", help="implementation of the hot ops")
    g.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="for requests that bring no seed")

    g = parser.add_argument_group("capacity")
    g.add_argument(
        "--max-model-len",
        type=length,
        metavar="N",
        help="most tokens of prompt and output, e.g. 32768, 32k or auto (default: what fits, at most the model's own)",
    )
    g.add_argument(
        "--max-num-seqs", type=whole(1, 1024), metavar="N", help="requests that run together (default: by memory)"
    )
    g.add_argument(
        "--max-num-batched-tokens",
        type=whole(1, 1 << 20),
        metavar="N",
        help="most prompt tokens read in one prefill step (default and most: the largest that is compiled)",
    )
    g.add_argument(
        "--max-prefill-ms",
        type=milliseconds,
        default=40.0,
        metavar="MS",
        help="most time that prompts take between two decode steps while something decodes, by what was measured; "
        "at least 64 tokens are read (16 where steps are short); 0: no limit (default: 40)",
    )
    g.add_argument(
        "--gpu-memory-utilization",
        type=fraction,
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
        type=whole(0, 1 << 16),
        metavar="N",
        help="points in earlier requests that prompts can be taken up from, 40 MB each at full size "
        "(default: a tenth of the cache's memory, at most eight for each of --max-num-seqs)",
    )
    g.add_argument(
        "--max-num-queued-reqs",
        type=whole(0, 1 << 20),
        metavar="N",
        help="requests that may wait; more get a 429 (default: no limit)",
    )

    g = parser.add_argument_group("replies")
    g.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file, or the template itself (default: the checkpoint's)"
    )
    g.add_argument(
        "--default-chat-template-kwargs",
        type=template_kwargs,
        default={},
        metavar="JSON",
        help="arguments of the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    _switch(
        g,
        "--exclude-tools-when-tool-choice-none",
        help="leave the tools out of the prompt when tool_choice is none; off keeps the cached prefix (default: off)",
    )
    g.add_argument(
        "--generation-config",
        choices=["auto", "none", "vllm"],
        default="auto",
        help="auto: sampling defaults from the checkpoint; none (or vllm): temperature 1, top_p 1, no top_k "
        "(default: auto)",
    )
    g.add_argument(
        "--override-generation-config",
        type=generation,
        default={},
        metavar="JSON",
        help="sampling defaults that win over those of --generation-config, e.g. '{\"temperature\": 0.7}'; known: "
        + ", ".join(GENERATION),
    )
    g.add_argument("--max-logprobs", type=whole(0, 20), default=20, metavar="N", help="most alternatives per token")
    g.add_argument("--strict-model", action="store_true", help="404 for a model name that is not served")
    _switch(g, "--enable-force-include-usage", help="send usage in every stream")

    g = parser.add_argument_group("HTTP")
    g.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    g.add_argument("--port", type=whole(0, 65535), default=8000, help="port to listen on; 0 picks a free one")
    g.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help=f"ask for one of these keys on all routes but /health (default: ${API_KEY_VARIABLE} or $VLLM_API_KEY, "
        "comma-separated)",
    )
    g.add_argument(
        "--allowed-origins",
        type=strings,
        default=(),
        metavar="JSON",
        help="""web origins that may call from a browser, e.g. '["*"]' (default: pages of this machine)""",
    )
    g.add_argument(
        "--allowed-methods", type=strings, default=("*",), metavar="JSON", help="methods they may use (default: all)"
    )
    g.add_argument(
        "--allowed-headers", type=strings, default=("*",), metavar="JSON", help="headers they may send (default: all)"
    )
    _switch(g, "--allow-credentials", help="let them send cookies")
    g.add_argument("--root-path", default="", metavar="PREFIX", help="path prefix that a proxy in front strips")
    g.add_argument(
        "--max-request-bytes", type=whole(1024, 1 << 40), default=64 << 20, metavar="N", help="largest request body"
    )
    g.add_argument(
        "--sse-keep-alive-interval",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds of silence after which a stream gets a comment line; 0 never",
    )
    g.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=8.0,
        metavar="S",
        help="seconds that running requests get to finish after SIGTERM",
    )
    g.add_argument(
        "--stall-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds that the engine may do nothing while requests wait, until /health answers 503; 0 never",
    )
    _switch(g, "--enable-tokenizer-info-endpoint", default=True, help="tell the chat template at /tokenizer_info")

    g = parser.add_argument_group("logs and metrics")
    g.add_argument(
        "--uvicorn-log-level",
        choices=["critical", "error", "warning", "info", "debug", "trace"],
        default="info",
        help="how much is logged",
    )
    _switch(g, "--disable-uvicorn-access-log", help="no log line for each HTTP exchange")
    g.add_argument(
        "--disable-access-log-for-endpoints",
        type=strings,
        default=(),
        metavar="PATHS",
        help="no such line for these paths, e.g. /health,/metrics",
    )
    _switch(g, "--enable-log-requests", help="a line for each request: counts and times, never what was said")
    g.add_argument("--disable-log-requests", dest="enable_log_requests", action="store_false", help=argparse.SUPPRESS)
    g.add_argument(
        "--log-stats-interval",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds between lines of statistics while there is work; 0 never",
    )
    _switch(g, "--disable-log-stats", help="the same as --log-stats-interval 0")
    _switch(g, "--metrics-without-key", help="tell /metrics to anyone, whatever --api-key says")
    g.add_argument(
        "--metrics-prefix",
        type=prefix,
        default="vllm",
        metavar="NAME",
        help="what names of metrics begin with; dashboards made for vllm work with its own",
    )
    return parser


def _switch(group: Any, name: str, *, default: bool = False, help: str) -> None:
    """A flag with its ``--no-`` twin, as vllm has them."""
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=help)
