"""Flags of ``vllm serve`` that are not ours: which are taken silently or with a word, which are refused, and why.

The names are those of vLLM 0.33 and before; ``sort_out`` takes them out of a command line, so that the parser of our
own flags never sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

# What is always so here. name -> (number of values, why nothing has to be done)
IGNORED: dict[str, tuple[int, str]] = {
    "--enable-auto-tool-choice": (0, "tools are always offered to the model"),
    "--tool-call-parser": (1, "the model's own format is built in"),
    "--reasoning-parser": (1, "the model's own format is built in"),
    "--trust-remote-code": (0, "no code of a checkpoint is ever run"),
    "--enable-chunked-prefill": (0, "prefill is always chunked"),
    "--config-format": (1, "the format is read from the files"),
    "--model-impl": (1, "there is one implementation of the model"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-server-load-tracking": (0, "/load always tells it"),
    "--enable-request-id-headers": (0, "x-request-id is always sent back"),
    "--enable-log-deltas": (0, "what is said is never logged"),
    "--max-log-len": (1, "what is said is never logged"),
    "--log-error-stack": (0, "faults of the server are always logged with their stack"),
    "--async-scheduling": (0, "results are always read one step behind"),
    "--enforce-eager": (0, "steps are always compiled"),
    "--generation-config-path": (1, "use --generation-config"),
    "--use-tqdm-on-load": (0, "progress is always shown"),
    "--language-model-only": (0, "this model reads text only"),
    "--prefix-caching-hash-algo": (1, "prefixes are compared token by token"),
    "--disable-fastapi-docs": (0, "there is only /openapi.json"),
    "--enable-offline-docs": (0, "there is only /openapi.json"),
    "--h11-max-incomplete-event-size": (1, "headers have a fixed limit; bodies have --max-request-bytes"),
    "--h11-max-header-count": (1, "headers have a fixed limit"),
    "--structured-outputs-config": (1, "llguidance is built in"),
    "--guided-decoding-backend": (1, "llguidance is built in"),
    "--fail-on-environ-validation": (0, "no environment variable of vllm is read"),
}

# What we lack, and why.
REFUSED: dict[str, str] = {
    "--tensor-parallel-size": "this server runs on one GPU",
    "--pipeline-parallel-size": "this server runs on one GPU",
    "--data-parallel-size": "this server runs on one GPU; start one server per GPU",
    "--enable-expert-parallel": "this server runs on one GPU",
    "--api-server-count": "there is one HTTP process",
    "--headless": "there is one process",
    "--kv-cache-dtype": "the KV cache has the compute dtype",
    "--kv-cache-memory-bytes": "use --gpu-memory-utilization and --max-model-len",
    "--num-gpu-blocks-override": "use --gpu-memory-utilization and --max-model-len",
    "--block-size": "the page size of the KV cache is fixed",
    "--cpu-offload-gb": "weights stay on the GPU",
    "--swap-space": "a request that runs out of pages is computed again, not swapped",
    "--speculative-config": "there is no speculative decoding",
    "--tokenizer-mode": "there is one tokenizer implementation",
    "--tokenizer-revision": "download the revision first and give its folder to --tokenizer",
    "--revision": "download the revision first and give its folder",
    "--code-revision": "no code of a checkpoint is ever run",
    "--hf-overrides": "give a folder with another config.json to --hf-config-path",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--download-dir": "set the environment variable HF_HOME",
    "--rope-scaling": "the published positions are used as they are",
    "--config": "put the flags on the command line",
    "--uds": "listen on --host and --port",
    "--task": "this model generates text only",
    "--runner": "this model generates text only",
    "--convert": "this model generates text only",
    "--device": "JAX picks the device; set JAX_PLATFORMS",
    "--attention-backend": "use --kernels",
    "--scheduling-policy": "requests are served in the order of arrival",
    "--stream-interval": "every step is sent at once",
    "--enable-sleep-mode": "weights stay on the GPU",
    "--enable-prompt-embeds": "prompts are text or token ids",
    "--skip-tokenizer-init": "text routes need the tokenizer; --tokenizer bytes has one token a byte",
    "--logits-processors": "no foreign code is run",
    "--middleware": "no foreign code is run",
    "--tool-parser-plugin": "no foreign code is run",
    "--reasoning-parser-plugin": "no foreign code is run",
    "--tool-server": "tools are run by the client",
    "--trust-request-chat-template": "templates of requests are not run; give --chat-template",
    "--chat-template-content-format": "text parts are joined, as most templates expect",
    "--return-tokens-as-token-ids": "ask /tokenize for ids",
    "--compilation-config": "steps are compiled by XLA; set XLA_FLAGS",
    "--optimization-level": "steps are compiled by XLA; set XLA_FLAGS",
    "--logprobs-mode": "log-probabilities are those of the raw logits",
    "--response-role": "the role is assistant",
    "--enable-log-outputs": "what is said is never logged",
    "--log-config-file": "use --uvicorn-log-level",
    "--tokens-only": "use /v1/completions with token ids",
    "--disable-sliding-window": "the model's window layers cannot do without it",
    "--max-num-partial-prefills": "one prompt is read at a time, chunk by chunk",
}

# Values of refused flags that ask for what is so anyway.
HARMLESS: dict[str, frozenset[str]] = {
    "--tensor-parallel-size": frozenset({"1"}),
    "--pipeline-parallel-size": frozenset({"1"}),
    "--data-parallel-size": frozenset({"1"}),
    "--api-server-count": frozenset({"1"}),
    "--kv-cache-dtype": frozenset({"auto"}),
    "--cpu-offload-gb": frozenset({"0"}),
    "--swap-space": frozenset({"0"}),
    "--tokenizer-mode": frozenset({"auto", "hf"}),
    "--revision": frozenset({"main"}),
    "--task": frozenset({"auto", "generate"}),
    "--runner": frozenset({"auto", "generate"}),
    "--convert": frozenset({"auto", "none"}),
    "--device": frozenset({"auto"}),
    "--scheduling-policy": frozenset({"fcfs"}),
    "--stream-interval": frozenset({"1"}),
    "--chat-template-content-format": frozenset({"auto", "string", "openai"}),
    "--logprobs-mode": frozenset({"raw_logprobs"}),
    "--response-role": frozenset({"assistant"}),
    "--max-num-partial-prefills": frozenset({"1"}),
}

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
}

# Families of flags, by how they begin: checked last. why -> beginnings
_FAMILIES = {
    "this model reads text only": "--mm- --limit-mm- --media- --allowed-local-media --allowed-media --enable-mm- "
    "--video- --interleave-mm --skip-mm- --image- --audio-",
    "there are no LoRA adapters": "--lora- --max-lora --max-cpu-lora --enable-lora --fully-sharded-lora",
    "put a TLS proxy in front": "--ssl- --enable-ssl-",
    "this server runs on one GPU": "--data-parallel- --distributed- --master- --nnodes --node- --dcp- "
    "--decode-context- --prefill-context- --cp-kv- --all2all- --enable-eplb --eplb- --enable-elastic --ray- "
    "--expert-placement --disable-custom-all-reduce --enable-dbo --dbo- --worker- --ubatch- --num-redundant-experts "
    "--max-parallel-loading",
    "all stays on the GPU": "--offload- --kv-offloading- --cpu-offload- --kv-transfer- --ec-transfer-",
    "there is no tracing; /metrics has the numbers": "--otlp- --collect-detailed- --show-hidden-metrics",
    "there is no speculative decoding": "--speculative- --spec- --num-speculative-",
    "this model has nothing of the kind": "--mamba- --gdn- --pooler- --io-processor-",
    "steps are compiled by XLA; set XLA_FLAGS": "--compilation- --cudagraph- -O",
}
FAMILIES = tuple((tuple(starts.split()), why) for why, starts in _FAMILIES.items())


class Foreign(Exception):
    """A flag of vllm serve that cannot be obeyed; the message is one line."""


def sort_out(argv: Sequence[str], ours: frozenset[str]) -> tuple[list[str], list[str]]:
    """(the command line without foreign flags, warnings). ours: flags that the parser knows. Raises Foreign."""
    rest, warnings, i = [], [], 0
    while i < len(argv):
        arg = argv[i]
        name, equals, value = arg.partition("=")
        short, dot, part = name.partition(".")
        name = SHORT[short] + dot + part if short in SHORT else name
        i += 1
        if not name.startswith("-") or name in ours:
            rest.append(arg)
            continue
        positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        follows = argv[i] if i < len(argv) and not argv[i].startswith("--") else None
        if positive in IGNORED:
            count, why = IGNORED[positive]
            i += count and not equals and name == positive and follows is not None
            warnings.append(f"{name} is ignored: {why}")
        elif why := _why(positive):
            if name != positive:  # "no" to something that we lack anyway
                warnings.append(f"{name} is ignored: {why}")
                continue
            given = value if equals else follows
            if given not in HARMLESS.get(name, ()):
                shown = f" {given}" if name in HARMLESS and given is not None else ""
                raise Foreign(f"{name}{shown} is not supported: {why}; leave it out")
            i += not equals
        else:
            rest.append(arg)
    return rest, warnings


def _why(name: str) -> str | None:
    """Why we lack a flag, or None for one that is not known; ``--x.y`` is part of ``--x``."""
    name = name.partition(".")[0]
    if name in REFUSED:
        return REFUSED[name]
    return next((why for starts, why in FAMILIES if name.startswith(starts)), None)
