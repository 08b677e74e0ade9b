"""/metrics, /load, the line of statistics, request logs, and the count of compilations."""

import logging
import threading

import jax
import jax.numpy as jnp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flint_jax.compilations import Compilations, watch
from flint_jax.server.interval_log import IntervalLog
from flint_jax.server.metrics import cache_usage
from flint_jax.server.records import ABORT, ERROR, LENGTH, STOP, TOOL_CALLS, Histogram, Record, Timings, decades
from tests.server.harness import running, wait_until
from tests.server.test_disconnect import Caller

NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
prompt_tokens_total prompt_tokens_cached_total generation_tokens_total request_success_total num_preemptions_total
admission_rejections_total corrupted_requests_total time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens unknown_request_fields_total compilations_total
compile_seconds_total recompilations_total build_info
"""


def read(server, prefix="vllm"):
    """{(name, labels that are no model name): value} of one scrape."""
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            samples[sample.name.removeprefix(f"{prefix}:"), *labels.values()] = sample.value
    return samples


def test_every_name_is_there_with_the_models_name():
    with running() as server:
        text = server.http.get("/metrics").text
        for name in NAMES.split():
            assert f"\n# TYPE vllm:{name.removesuffix('_total')}" in text or f"\n# TYPE vllm:{name} " in text, name
        assert 'vllm:num_requests_running{model_name="flint-test"} 0.0' in text
        assert "process_resident_memory_bytes" in text
    with running(metrics_prefix="flint") as server:
        text = server.http.get("/metrics").text
        assert "flint:num_requests_running{" in text
        assert "vllm:" not in text


def test_metrics_while_loading():
    with running(loaded=False) as server:
        assert read(server)["ready",] == 0
        assert read(server)["num_requests_running",] == 0
        server.state.set_ready(server.served)
        assert read(server)["ready",] == 1


def test_counts_follow_the_requests():
    with running() as server:
        server.says("abcde")
        server.engine.cached_tokens = 2
        assert server.chat().is_success
        assert server.chat(stream=True, max_tokens=3).is_success
        assert server.chat(stop="c").is_success
        assert server.post("/v1/completions", {"prompt": ["a", "bb"], "n": 2, "max_tokens": 4}).is_success
        got = read(server)
        assert got["request_success_total", STOP] == 2  # at an end token, at a stop string
        assert got["request_success_total", LENGTH] == 5
        names = (
            "time_to_first_token_seconds request_queue_time_seconds request_prompt_tokens e2e_request_latency_seconds"
        )
        for name in names.split():
            assert got[f"{name}_count",] == 7, name
            assert got[f"{name}_bucket", "+Inf"] == 7
        parts = ("queue", "prefill", "decode")
        total = sum(got[f"request_{part}_time_seconds_sum",] for part in parts)
        assert 0 < total <= got["e2e_request_latency_seconds_sum",]
        tokens = got["request_generation_tokens_sum",]
        assert tokens == 5 + 3 + 3 + 4 * 4
        assert got["inter_token_latency_seconds_count",] == tokens - 7
        assert 0 < got["time_to_first_token_seconds_sum",] <= got["e2e_request_latency_seconds_sum",]
        assert got["request_decode_time_seconds_sum",] <= got["e2e_request_latency_seconds_sum",]


def test_aborts_errors_and_refusals_are_counted():
    gate = threading.Event()
    with running(max_queued=0) as server:
        server.says("abc", gate=gate)
        callers = [Caller(server, "/v1/completions", {"prompt": "hi"}) for _ in range(4)]
        wait_until(lambda: server.engine.stats()["running"] == 4)
        assert read(server)["num_requests_running",] == 4
        assert server.http.get("/load").json() == {"server_load": 4}
        assert server.chat().status_code == 429
        for caller in callers:
            caller.hang_up()
        wait_until(lambda: not server.state.jobs)
        gate.set()
        server.says("abc", fail_after=1)
        assert server.chat().status_code == 500
        got = read(server)
        assert got["request_success_total", ABORT] == 4
        assert got["request_success_total", ERROR] == 1
        assert got["corrupted_requests_total",] == 1
        assert got["admission_rejections_total",] == 1
        assert server.http.get("/load").json() == {"server_load": 0}


def test_a_call_is_an_end_of_its_own(server):
    before = server.state.timings.ended[TOOL_CALLS]
    server.says("<tool_call>f</tool_call>")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for stream in (False, True):
        assert '"tool_calls"' in server.chat(tools=tools, stream=stream).text
    assert server.state.timings.ended[TOOL_CALLS] == before + 2


def test_cache_usage():
    assert cache_usage({}) == 0
    assert cache_usage({"pages": 8, "free_pages": 6}) == 0.25


def test_histograms():
    histogram = Histogram((1, 2, 5))
    for value, times in ((0.5, 1), (1, 1), (1.5, 3), (5, 1), (6, 2)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 5), ("5.0", 6), ("+Inf", 8)]
    assert histogram.total == 0.5 + 1 + 4.5 + 5 + 12
    assert decades(1e-3, 0.1) == (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


def test_times_of_a_request_add_up():
    timings = Timings()
    record = Record(arrived=100.0, prompt_tokens=7, admitted=101.0)
    timings.spoke(record, 1, 103.0)
    timings.spoke(record, 2, 104.0)
    record.reason = STOP
    timings.end(record, 105.0)
    sums = {name: h.total for name, h in vars(timings).items() if isinstance(h, Histogram)}
    assert sums == {
        "first_token": 3.0,
        "inter_token": 1.0,
        "end_to_end": 5.0,
        "queue": 1.0,
        "prefill": 2.0,
        "decode": 1.0,
        "prompt_tokens": 7,
        "generation_tokens": 3,
    }
    assert timings.inter_token.cumulative()[-1] == ("+Inf", 2)


def test_unknown_fields_are_counted(server):
    before = server.state.timings.unknown_fields
    assert server.chat(one=1, two=2, user="known").is_success
    assert server.post("/v1/completions", {"prompt": "a", "three": 3}).is_success
    assert server.state.timings.unknown_fields == before + 3
    assert read(server)["unknown_request_fields_total",] == before + 3


# -- logs --------------------------------------------------------------------------------------------------------------


def test_the_line_of_statistics_is_silent_when_nothing_runs(server):
    stats = {"running": 0, "waiting": 0, "pages": 10, "free_pages": 10}
    server.engine.stats, genuine = (lambda: dict(stats)), server.engine.stats
    try:
        log = IntervalLog(server.state)
        assert log.line(0.0) == ""
        stats |= {"running": 2, "waiting": 1, "free_pages": 5, "prompt_tokens": 300, "generated_tokens": 50}
        stats |= {"prefix_queries": 300, "prefix_hits": 120}
        words = log.line(10.0)
        assert words == (
            "running 2, waiting 1, KV cache 50.0 %, prompt 30.0 tok/s, generation 5.0 tok/s, prefix cache hits 40.0 %"
        )
        stats |= {"running": 0, "waiting": 0, "free_pages": 10, "generated_tokens": 60}
        assert "generation 1.0 tok/s, prefix cache hits -" in log.line(20.0)
        assert log.line(30.0) == ""
    finally:
        server.engine.stats = genuine


def test_the_line_counts_a_prompt_as_it_is_read(server):
    """Not in full when it is admitted, and then nothing: that looks like a hang. What was cached was not read."""
    stats = {"running": 1, "waiting": 0, "prompt_tokens": 4000, "prefilled_tokens": 0, "pages": 10, "free_pages": 5}
    server.engine.stats, genuine = (lambda: dict(stats)), server.engine.stats
    try:
        log = IntervalLog(server.state)
        for now, read, rate in ((0.0, 0, ""), (10.0, 1000, "100.0"), (20.0, 2500, "150.0"), (30.0, 3500, "100.0")):
            stats["prefilled_tokens"] = read
            line = log.line(now)
            assert f"prompt {rate or '0.0'} tok/s" in line
    finally:
        server.engine.stats = genuine


def test_statistics_are_logged_while_there_is_work(caplog):
    caplog.set_level(logging.INFO, "flint_jax.server")
    with running(log_stats_s=0.05) as server:
        server.says("abc", gate=(gate := threading.Event()))
        thread = threading.Thread(target=server.chat)
        thread.start()
        wait_until(lambda: "running 1, waiting 0" in caplog.text)
        gate.set()
        thread.join()


@pytest.mark.parametrize("on", [True, False])
def test_request_logs_have_counts_and_never_content(caplog, on):
    caplog.set_level(logging.INFO, "flint_jax.server")
    with running(log_requests=on) as server:
        server.says("secret answer")
        body = {"messages": [{"role": "user", "content": "secret question"}], "stream": True}
        reply = server.post("/v1/chat/completions", body, headers={"x-request-id": "my-id-7"})
        assert reply.headers["x-request-id"] == "my-id-7"
        wait_until(lambda: not server.state.jobs)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request ")]
    assert len(lines) == on
    if on:
        assert lines[0].startswith("request my-id-7: POST '/v1/chat/completions', ")
        assert "generated, stop, first token after 0." in lines[0]
    assert "secret" not in caplog.text


def test_a_route_in_the_log_cannot_forge_a_line(caplog):
    caplog.set_level(logging.INFO, "flint_jax.server")
    with running(log_requests=True) as server:
        server.http.post("/v1/chat/completions%0Arequest forged", json={})
        server.chat()
        wait_until(lambda: not server.state.jobs)
    assert all("\n" not in r.getMessage() for r in caplog.records)


# -- compilations ------------------------------------------------------------------------------------------------------


def test_compilations_are_counted_by_function():
    counted = watch()
    assert counted is watch()

    def fresh_function(x):
        return x * 3

    counted.mark_ready()
    fresh = jax.jit(fresh_function)
    for n in (3, 3, 4):
        fresh(jnp.ones(n)).block_until_ready()
    assert counted.snapshot()["jit(fresh_function)"][0] == 2
    assert counted.after_ready >= 2
    counted.mark_ready()
    fresh(jnp.ones(4)).block_until_ready()
    assert counted.after_ready == 0


def test_compilations_reach_the_metrics():
    with running() as server:
        counted = Compilations()
        object.__setattr__(server.served, "compilations", counted)
        counted.add("jit(decode)", 1.5)
        counted.mark_ready()
        assert read(server)["recompilations_total",] == 0
        counted.add("jit(decode)", 0.5)
        got = read(server)
        assert got["compilations_total", "jit(decode)"] == 2
        assert got["compile_seconds_total",] == 2.0
        assert got["recompilations_total",] == 1
