"""How the HTTP side behaves: the part of the command line that is not about the model."""

from __future__ import annotations

import dataclasses
from typing import Any

# Pages that the user opens on the same machine; others must be named with --allowed-origins.
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server.

    api_keys: accepted keys; empty means that no key is asked for.
    allowed_origins: web origins that may call from a browser; empty means pages of this machine; ("*",) means all.
    strict_model: answer 404 to a model name that is not served, instead of serving the one there is.
    max_request_bytes: largest request body.
    keep_alive_s: seconds of silence after which a stream gets a comment line; 0 never.
    shutdown_timeout_s: seconds that running requests get to finish; Docker kills after ten.
    stall_timeout_s: seconds that the engine may do nothing while requests wait, until /health says so; 0 never.
    max_queued: requests that may wait beyond those that run; None means any number.
    max_logprobs: largest number of alternatives per token.
    force_usage: send the usage chunk in every stream.
    template_kwargs: default arguments of the chat template.
    exclude_tools_when_none: leave tools out of the prompt of a request that may not call any.
    unlogged_paths: paths whose exchanges are not in the access log.
    log_requests: a log line for each request, without its content.
    log_stats_s: seconds between two lines of statistics while there is work; 0 never.
    metrics_prefix: what names of metrics begin with; "vllm" makes its public dashboards work as they are.
    open_metrics: whether /metrics is told without a key.
    tokenizer_info: whether /tokenizer_info tells the chat template and the special tokens.
    allow_credentials, allowed_methods, allowed_headers: what web origins may send.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    strict_model: bool = False
    max_request_bytes: int = 64 << 20
    keep_alive_s: float = 10.0
    shutdown_timeout_s: float = 8.0
    stall_timeout_s: float = 60.0
    max_queued: int | None = None
    max_logprobs: int = 20
    force_usage: bool = False
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    exclude_tools_when_none: bool = False
    log_level: str = "info"
    access_log: bool = True
    unlogged_paths: tuple[str, ...] = ()
    log_requests: bool = False
    log_stats_s: float = 10.0
    metrics_prefix: str = "vllm"
    open_metrics: bool = False
    tokenizer_info: bool = True
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
