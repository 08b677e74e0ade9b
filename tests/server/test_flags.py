"""The command line: names and values of vllm serve, and clear refusals."""

import json
import re
from pathlib import Path

import pytest

from flint_jax.sampling_params import MODEL_DEFAULTS
from flint_jax.server.flag_parser import make_parser
from flint_jax.server.flag_types import GENERATION
from flint_jax.server.flags import FlagError, parse
from flint_jax.server.launch import load
from flint_jax.server.run import StartError
from flint_jax.server.vllm_flags import FAMILIES, HARMLESS, IGNORED, REFUSED


def test_defaults():
    model, server, warnings = parse([])
    assert model.model is None
    assert (server.host, server.port) == ("127.0.0.1", 8000)
    assert server.api_keys == ()
    assert model.max_model_len is model.max_num_seqs is None
    assert not warnings


def test_model_by_position_or_by_flag():
    assert parse(["m"])[0].model == parse(["--model", "m"])[0].model == parse(["--model=m"])[0].model == "m"
    assert parse(["m", "--model", "m"])[0].model == "m"
    with pytest.raises(FlagError, match="twice"):
        parse(["m", "--model", "other"])


def test_a_copied_vllm_command_works():
    argv = (
        "org/flint --host 0.0.0.0 --port 9000 --served-model-name flint f2 --max-model-len 64k --max-num-seqs 8 "
        "--max_num_batched_tokens 4096 --gpu-memory-utilization 0.85 --dtype bfloat16 --seed 3 "
        "--enable-auto-tool-choice --tool-call-parser glm47 --reasoning-parser glm45 --trust-remote-code "
        "--tensor-parallel-size 1 --api-key a b --enable-chunked-prefill"
    )
    model, server, warnings = parse(argv.split())
    assert (model.model, model.served_names, model.max_model_len) == ("org/flint", ("flint", "f2"), 64_000)
    assert (model.max_num_seqs, model.max_num_batched_tokens, model.gpu_memory_utilization) == (8, 4096, 0.85)
    assert (server.host, server.port, server.api_keys) == ("0.0.0.0", 9000, ("a", "b"))
    assert len(warnings) == 5
    assert all("is ignored: " in w for w in warnings)


@pytest.mark.parametrize(("given", "value"), [((), 40.0), (("25.5",), 25.5), (("0",), None)])
def test_milliseconds_of_prefill_beside_a_stream(given, value):
    model, _, _ = parse(["m", *(x for v in given for x in ("--max-prefill-ms", v))])
    assert model.max_prefill_ms == value


def test_milliseconds_of_prefill_are_a_time():
    with pytest.raises(FlagError, match="milliseconds from 0 to 60000"):
        parse(["m", "--max-prefill-ms", "-1"])


@pytest.mark.parametrize(
    ("text", "length"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("1M", 1 << 20), ("auto", None)],
)
def test_lengths(text, length):
    assert parse(["--max-model-len", text])[0].max_model_len == length


def test_a_value_may_be_spelled_like_a_flag_that_we_lack():
    assert parse(["task", "--served-model-name", "device"])[0].model == "task"


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("form", ["{} 7", "{}=7", "{}.part 7", "{}"])
def test_known_flags_that_we_lack_say_why(name, form):
    with pytest.raises(FlagError, match="is not supported: ") as caught:
        parse(form.format(name).split())
    assert REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_saying_no_to_what_we_lack_is_no_error():
    assert parse(["--no-enable-sleep-mode", "--no-enable-lora", "m"])[0].model == "m"
    assert parse(["--no-enable-chunked-prefill"])[2] == [
        "--no-enable-chunked-prefill is ignored: prefill is always chunked"
    ]


def test_values_that_ask_for_what_is_so_are_silent():
    for name, values in HARMLESS.items():
        for value in values:
            assert parse([name, value, "m"]) == parse([f"{name}={value}", "m"])
            assert parse([name, value, "m"])[0].model == "m"
            assert not parse([name, value])[2]
    assert parse(["-tp", "1", "-q", "nvfp4", "m"])[0].model == "m"


@pytest.mark.parametrize(
    "argv", ["--limit-mm-per-prompt {}", "--lora-modules a=b", "--ssl-keyfile k", "-O3", "-cc.mode 3", "-dp 2"]
)
def test_families_of_flags_that_we_lack(argv):
    with pytest.raises(FlagError, match=r"is not supported: .*; leave it out"):
        parse(argv.split())


def test_no_flag_of_ours_is_taken_for_a_foreign_one():
    own = set(make_parser()._option_string_actions)
    assert not own & (set(IGNORED) | set(REFUSED))
    assert not [name for name in own for starts, _ in FAMILIES if name.startswith(starts)]


def test_ignored_flags_all_warn():
    for name, (values, _) in IGNORED.items():
        _, _, warnings = parse([name] if values == 0 else [name, "x"])
        assert len(warnings) == 1
        assert warnings[0].startswith(name)
        argv = [name, "m"] if values == 0 else [name, "x", "m"]
        assert parse(argv)[0].model == parse([f"{name}=x", "m"])[0].model == "m"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "0 to 65535"),
        (["--port", "70000"], "0 to 65535"),
        (["--port", "-1"], "--port"),
        (["--max-model-len", "1.5"], "number of tokens"),
        (["--max-model-len", "0"], "number of tokens"),
        (["--max-num-seqs", "0"], "1 to"),
        (["--gpu-memory-utilization", "1.5"], "at most 1"),
        (["--gpu-memory-utilization", "nan"], "at most 1"),
        (["--dtype", "float16"], "bfloat16"),
        (["--tensor-parallel-size", "2"], "one GPU"),
        (["--default-chat-template-kwargs", "[1]"], "JSON object"),
        (["--allowed-origins", "[1]"], "JSON array"),
        (["--chat-template", "/no/such.jinja"], "No such file"),
        (["--sse-keep-alive-interval", "-1"], "seconds"),
        (["--metrics-prefix", "a:b"], "underscores"),
        (["--default-chat-template-kwargs", "{enable_thinking: false}"], "is not JSON (Expecting property name"),
        (["--default-chat-template-kwargs", "{enable_thinking: false}"], "in quotes for the shell"),
        (["--default-chat-template-kwargs", '{"tools": []}'], "tools: every request brings that itself"),
        (["--override-generation-config", "[]"], "JSON object"),
        (["--override-generation-config", "0.7"], "JSON object"),
        (["--override-generation-config", '{"temprature": 1}'], "'temprature'; did you mean temperature? (known: "),
        (["--override-generation-config", '{"Top-K": 1}'], "did you mean top_k? (known: temperature, top_p, top_k, "),
        (["--override-generation-config", '{"zzz": 1}'], "unknown key 'zzz' (known: "),
        (["--override-generation-config", '{"top_k": "20"}'], 'top_k is "20"; need a number'),
        (["--override-generation-config", '{"top_p": true}'], "top_p is true; need a number"),
        (["--nonsense"], "unknown flag --nonsense"),
        (["m", "extra"], "unexpected argument 'extra'"),
        (["--api-key", "k", "."], "put MODEL before it"),
        (["--port"], "expected one argument"),
    ],
)
def test_values_that_make_no_sense(argv, words):
    with pytest.raises(FlagError, match=r".*") as caught:
        parse(argv)
    assert words in str(caught.value)
    assert argv[0].lstrip("-") in str(caught.value) or "argument" in str(caught.value)


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("FLINT_API_KEY", "one, two,")
    assert parse([])[1].api_keys == ("one", "two")
    assert parse(["--api-key", "flag"])[1].api_keys == ("flag",)
    monkeypatch.delenv("FLINT_API_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert parse([])[1].api_keys == ("theirs",)


def test_logs_metrics_and_origins_under_vllms_names():
    argv = (
        "--enable-log-requests --disable-access-log-for-endpoints /health,/metrics --disable-log-stats "
        "--no-enable-tokenizer-info-endpoint --allow-credentials --metrics-prefix flint --no-enable-prefix-caching"
    )
    model, server, warnings = parse([*argv.split(), "--allowed-methods", '["GET"]', "--allowed-headers", "x-a,x-b"])
    assert server.log_requests
    assert server.unlogged_paths == ("/health", "/metrics")
    assert (server.log_stats_s, server.tokenizer_info, server.metrics_prefix) == (0.0, False, "flint")
    assert (server.allow_credentials, server.allowed_methods, server.allowed_headers) == (
        True,
        ("GET",),
        ("x-a", "x-b"),
    )
    assert not model.enable_prefix_caching
    assert not warnings
    assert not parse(["--disable-log-requests"])[1].log_requests
    assert not parse(["--no-enable-log-requests"])[1].log_requests
    assert parse([])[1].log_stats_s == 10


def test_the_commands_of_the_readme_are_understood():
    text = (Path(__file__).parents[2] / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"\./run serve([^\n#`]*)|vllm-openai:latest([^\n]*)", text)
    assert len(commands) > 5
    for ours, theirs in commands:
        argv = (ours or theirs).split()
        model = parse(argv)[0]
        if theirs:
            assert (model.model, model.max_model_len, model.served_names) == ("RecursiveSI/flint", 262_144, ("flint",))
    assert any(theirs for _, theirs in commands)


def test_sampling_defaults_from_the_command_line():
    argv = ["--override-generation-config", '{"temperature": 0.5}']
    assert parse(argv)[0].override_generation == {"temperature": 0.5}
    all_of_them = json.dumps(dict.fromkeys(MODEL_DEFAULTS, 1) | {"min_p": None})
    assert parse(["--override-generation-config", all_of_them])[0].override_generation.keys() == MODEL_DEFAULTS.keys()
    assert tuple(MODEL_DEFAULTS) == GENERATION


def test_a_sampling_default_out_of_range_is_said_before_anything_is_loaded():
    model = parse(["--override-generation-config", '{"top_p": 3}', "/no/such"])[0]
    with pytest.raises(StartError, match=r"--override-generation-config: top_p must be .*got 3"):
        load(model, lambda words: None)


def test_origins_and_template(tmp_path):
    assert parse(["--allowed-origins", '["*"]'])[1].allowed_origins == ("*",)
    assert parse(["--allowed-origins", "http://a,http://b"])[1].allowed_origins == ("http://a", "http://b")
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert parse(["--chat-template", str(file)])[0].chat_template == "{{ messages }}"
    assert parse(["--chat-template", "{{ x }}"])[0].chat_template == "{{ x }}"


def test_prefix_caching_is_on_unless_told_otherwise():
    model, *_ = parse([])
    assert (model.enable_prefix_caching, model.prefix_snapshots) == (True, None)
    model, *_ = parse(["--no-enable-prefix-caching", "--prefix-snapshots", "12"])
    assert (model.enable_prefix_caching, model.prefix_snapshots) == (False, 12)
    assert parse(["--enable-prefix-caching"])[0].enable_prefix_caching


def test_the_format_of_dummy_weights():
    assert parse(["m"])[0].load_format == "auto"
    assert parse(["--load-format", "safetensors", "m"])[0].load_format == "auto"
    for argv, wanted in [([], None), (["-q", "nvfp4"], "nvfp4"), (["-q", "none"], "bf16"), (["-q", "gguf"], None)]:
        model = parse(["m", "--load-format", "dummy", *argv])[0]
        assert (model.load_format, model.weight_format) == ("dummy", wanted)
    assert parse(["-q", "nvfp4", "m"])[0].weight_format is None
    with pytest.raises(FlagError, match="--load-format dummy"):
        parse(["m", "-q", "none"])
    with pytest.raises(FlagError, match="fp8 is not supported"):
        parse(["m", "-q", "fp8"])
    with pytest.raises(FlagError, match="auto or dummy"):
        parse(["m", "--load-format", "bitsandbytes"])
