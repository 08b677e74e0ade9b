"""GET /metrics: Prometheus text, collected when it is asked for.

The engine's own counters are read from ``engine.stats()``, times come from the event loop's ``Timings``. Nothing is
counted twice and nothing is counted on the token path but two histogram buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from flint_jax import __version__
from flint_jax.server.records import Histogram
from flint_jax.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# name -> (key of engine.stats(), help)
_ENGINE_GAUGES = {
    "num_requests_running": ("running", "Requests in a slot."),
    "num_requests_waiting": ("waiting", "Requests waiting for a slot or for pages."),
}
_ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of all requests, cached ones included."),
    "prompt_tokens_cached": ("cached_tokens", "Prompt tokens that were not computed again."),
    "generation_tokens": ("generated_tokens", "Tokens drawn."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("preemptions", "Requests that gave their pages to older ones."),
}
# name -> (attribute of Timings, help)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token", "From the request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token", "Between two tokens of a request."),
    "e2e_request_latency_seconds": ("end_to_end", "From the request's arrival to its end, if it was not cut short."),
    "request_queue_time_seconds": ("queue", "From arrival to a slot."),
    "request_prefill_time_seconds": ("prefill", "From a slot to the first token."),
    "request_decode_time_seconds": ("decode", "From the first token to the last."),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of a request."),
    "request_generation_tokens": ("generation_tokens", "Tokens generated for a request."),
}


def cache_usage(stats: dict[str, Any]) -> float:
    """Share of the KV pages that running requests hold, 0 to 1. Pages that only the prefix cache holds are free."""
    pages = stats.get("pages", 0)
    if not pages:
        return 0.0
    return max(0.0, 1.0 - (stats.get("free_pages", 0) + stats.get("evictable_pages", 0)) / pages)


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self, state: ServerState):
        self._state = state
        self._prefix = state.settings.metrics_prefix
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU time and open files of this process

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        state = self._state
        served = state.served
        self._model = served.names[0] if served else ""
        stats = served.engine.stats() if served else {}
        yield from self._engine(stats)
        yield from self._requests()
        yield from self._compilations(served.compilations if served else None)
        yield self._gauge("ready", "Whether requests are answered.", state.healthy)
        info = GaugeMetricFamily(f"{self._prefix}:build_info", "The software.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info

    def _engine(self, stats: dict[str, Any]) -> Iterator[Metric]:
        for name, (key, text) in _ENGINE_GAUGES.items():
            yield self._gauge(name, text, stats.get(key, 0))
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pages in use, 1 is all.", cache_usage(stats))
        for name, (key, text) in _ENGINE_COUNTERS.items():
            yield self._counter(name, text, stats.get(key, 0))

    def _requests(self) -> Iterator[Metric]:
        timings = self._state.timings
        ended = CounterMetricFamily(
            f"{self._prefix}:request_success", "Requests by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in timings.ended.items():
            ended.add_metric([self._model, reason], count)
        yield ended
        yield self._counter("admission_rejections", "Requests refused because the queue was full.", timings.rejected)
        yield self._counter("corrupted_requests", "Requests failed because of NaN logits.", timings.corrupted)
        yield self._counter("unknown_request_fields", "Fields of requests that were ignored.", timings.unknown_fields)
        for name, (attribute, text) in _HISTOGRAMS.items():
            values: Histogram = getattr(timings, attribute)
            family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            family.add_metric([self._model], values.cumulative(), values.total)
            yield family

    def _compilations(self, compilations: Any) -> Iterator[Metric]:
        functions = compilations.snapshot() if compilations else {}
        counts = CounterMetricFamily(
            f"{self._prefix}:compilations", "Programs compiled, or read from the disk cache.", labels=["function"]
        )
        for function, (count, _) in sorted(functions.items()):
            counts.add_metric([function], count)
        yield counts
        seconds = sum(s for _, s in functions.values())
        yield self._counter("compile_seconds", "Time spent in the compiler.", seconds)
        late = compilations.after_ready if compilations else 0
        yield self._counter("recompilations", "Programs compiled after the server was ready; should stay 0.", late)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format; answered while loading, too."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)
