"""From settings to a served model: the one place where the server meets jax, and only when it is called."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flint_jax.chat import ChatTemplate
from flint_jax.errors import ConfigError, FlintError
from flint_jax.phases import Phases
from flint_jax.server import words
from flint_jax.server.flags import ModelSettings, main_parse
from flint_jax.server.run import StartError, address, bind, one_line, serve
from flint_jax.server.settings import ServerSettings
from flint_jax.server.state import ServedModel

# ``--generation-config none``: no filter, as in OpenAI's API.
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def main(argv: Sequence[str] | None = None, program: str = "serve.py") -> int:
    """What ``python serve.py`` does; returns the exit code. program: what it is called in errors."""
    words.program = program
    model, server = main_parse(sys.argv[1:] if argv is None else argv)
    sock = None
    try:
        check_path(model)
        sock = bind(server.host, server.port)
    except (StartError, FlintError) as e:
        print(f"{words.program}: error: {one_line(e)}", file=sys.stderr)
        return 2
    _show_log(server.log_level)
    url = address(sock)
    print(f"Listening on {url}; it answers 503 until the model is loaded.", flush=True)
    return serve(
        server,
        sock,
        load=lambda progress: load(model, progress),
        on_ready=lambda served: print(banner(served, model, server, url), flush=True),
    )


def _show_log(level: str) -> None:
    """Our own loggers to standard error; those of libraries keep their settings."""
    log = logging.getLogger("flint_jax")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
        log.addHandler(handler)
    log.setLevel({"trace": logging.DEBUG}.get(level) or level.upper())


def check_path(model: ModelSettings) -> None:
    """Read the headers of a local checkpoint, so that a wrong or damaged one is refused before the port opens; for the
    same reason compile a template of the command line.

    Raises StartError or FlintError.
    """
    if model.chat_template is not None:
        ChatTemplate(model.chat_template)
    from loaders import describe_checkpoint, embedded_checkpoint, open_checkpoint

    path = embedded_checkpoint() if model.model is None else Path(model.model).expanduser()
    dummy = model.load_format == "dummy"
    if path.exists() or dummy:
        look = describe_checkpoint if dummy else open_checkpoint
        found = look(path, config=model.config, tokenizer=model.tokenizer)
        longest = found.config.max_position_embeddings
        if model.max_model_len is not None and model.max_model_len > longest:
            raise StartError(f"--max-model-len {model.max_model_len}: the model's own context is {longest} tokens")
    elif path.is_absolute() or model.model.count("/") != 1 or model.model.startswith((".", "~")) or _names_a_file(path):
        raise StartError(f"{model.model}: no such file or folder, and not a hub id of the form owner/name")
    elif importlib.util.find_spec("huggingface_hub") is None:
        raise StartError(f"{model.model}: no such file or folder; as a hub id it needs pip install 'flint-jax[hub]'")


def _names_a_file(path: Path) -> bool:
    """Whether a name that is not there was meant for a file and not for a repository: by its ending, or because its
    folder is there."""
    return path.suffix in (".gguf", ".safetensors", ".json", ".orbax") or path.parent.is_dir()


def load(settings: ModelSettings, progress: Callable[[str], None]) -> ServedModel:
    """Load, compile and start the engine. Raises FlintError or StartError with a message for the user."""
    phases = Phases()
    phases.done("start of Python and the server")
    progress("importing jax")
    from flint_jax import compilations, compile_cache, memory
    from flint_jax import lm as loading
    from flint_jax.sampling_params import SamplingParams, resolve

    counted = compilations.watch()
    compile_cache.enable()
    try:  # before minutes of loading
        resolve(_silent(SamplingParams), settings.override_generation)
    except ConfigError as e:
        raise StartError(f"--override-generation-config: {e.__cause__}") from None
    memory.prepare_process()
    phases.done("imports")
    progress("reading the checkpoint's headers")
    opened = loading.open_model(
        settings.model,
        dtype="bfloat16" if settings.dtype == "auto" else settings.dtype,
        numerics=settings.numerics,
        kernels=settings.kernels,
        config=settings.config,
        tokenizer=settings.tokenizer,
        dummy=settings.load_format == "dummy",
        weight_format=settings.weight_format,
        seed=settings.seed,
    )
    if settings.load_format == "dummy":
        logging.getLogger("flint_jax.server").warning(
            "--load-format dummy: random %s weights; what the model says means nothing", opened.checkpoint.weight_format
        )
    if opened.checkpoint.tokenizer is None:
        raise StartError(
            f"{settings.model} has no tokenizer; give a folder that has one with --tokenizer, or --tokenizer bytes for "
            "one token a byte"
        )
    phases.done("headers, tokenizer and GPU")
    sizes = {
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_prefill_ms": settings.max_prefill_ms,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "prefix_snapshots": settings.prefix_snapshots,
        "seed": settings.seed,
    }
    sketch = opened.sketch()
    build = None
    if sketch is not None:  # what cannot fit is refused here, before a weight is read
        build = _Build(sketch.plan_engine(**sizes), progress)
        phases.done("memory plan")
    progress("loading weights")
    try:
        lm, detail = _load_weights(opened)
    except BaseException:
        if build is not None:
            build.abandon()
        raise
    phases.done("weights", detail)
    source = settings.chat_template or lm.chat_template
    template = ChatTemplate.from_tokenizer(lm.tokenizer, source) if source else None
    generation = dict(lm.generation) if settings.use_generation_config else _NEUTRAL
    generation = {**generation, **settings.override_generation}
    resolve(_silent(SamplingParams), generation)  # a bad generation config is refused now
    progress("preparing grammars")
    constrain = _constrain(lm)
    phases.done("grammars")
    if build is None:
        build = _Build(lm.plan_engine(**sizes), progress)
    planned = build.result()
    phases.done("waiting for programs", _told(planned.seconds))
    progress("first steps")
    engine = planned.finish(lm.model)
    phases.done("KV cache and warm-up")
    engine.start()
    counted.mark_ready()
    logging.getLogger("flint_jax.server").info("%s", phases)
    return ServedModel(
        names=settings.served_names or (lm.name,),
        engine=engine,
        tokenizer=lm.tokenizer,
        template=template,
        generation=generation,
        params=SamplingParams,
        resolve=resolve,
        vocab_size=lm.config.vocab_size,
        max_num_seqs=engine.stats()["slots"],
        constrain=constrain,
        compilations=counted,
    )


def _constrain(lm: Any) -> Callable[[Any], Any] | None:
    """What holds output to a grammar; None where llguidance is missing or the vocabulary has no end token."""
    try:
        from flint_jax.guided import Compiler, Vocabulary

        return Compiler(Vocabulary(lm.tokenizer, lm.config.vocab_size, lm.eos_ids))
    except (ImportError, FlintError) as e:
        logging.getLogger("flint_jax.server").warning("no structured output and no forced tool calls: %s", e)
        return None


def _load_weights(opened: Any) -> tuple[Any, str]:
    """The loaded model, and for the log how long reading and laying out took."""
    times = [time.monotonic()]
    lm = opened.load(on_read=lambda: times.append(time.monotonic()))
    times.append(time.monotonic())
    return lm, f"reading {times[1] - times[0]:.1f} s, laying out {times[2] - times[1]:.1f} s"


def _told(seconds: dict[str, float]) -> str:
    return (
        f"all {seconds['wall']:.1f} s after their beginning, beside the weights; summed over programs lowering "
        f"{seconds['lower']:.1f} s, compiling {seconds['compile']:.1f} s"
    )


class _Abandoned(Exception):
    """Nobody waits for the programs any more."""


class _Build:
    """Compiles the programs of a planned engine on a thread of its own."""

    def __init__(self, planned: Any, progress: Callable[[str], None]):
        self._planned, self._bar = planned, _CompileBar(progress)
        self._abandoned = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._planned.build(self._step)
        except BaseException as error:
            self._error = error

    def _step(self, name: str, done: int, total: int) -> None:
        if self._abandoned:
            raise _Abandoned
        self._bar(name, done, total)

    def abandon(self) -> None:
        """Start no further program; those that compile already are not interrupted."""
        self._abandoned = True

    def result(self) -> Any:
        """The planned engine, compiled. Raises what building raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._bar.close()
        return self._planned


class _CompileBar:
    """Shows how far compiling is, on the terminal and in /health."""

    def __init__(self, progress: Callable[[str], None]):
        self._progress, self._bar = progress, None

    def __call__(self, step: str, done: int, total: int) -> None:
        from tqdm import tqdm

        self._progress(f"compiling {step}, {done} of {total}")
        self._bar = self._bar or tqdm(total=total, desc="compiling", unit="step")
        self._bar.set_postfix_str(step, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        """Finish the bar."""
        if self._bar:
            self._bar.update(self._bar.total - self._bar.n)
            self._bar.close()


def _silent(params: Any) -> Any:
    return params(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)


def banner(served: ServedModel, model: ModelSettings, server: ServerSettings, url: str) -> str:
    """What the user reads when the server is ready."""
    engine = served.engine
    source = model.model or "the package: small talk, sums, look-ups and tool calls; docs/tiny.md says more"
    if model.load_format == "dummy":
        source = f"random weights of the shapes of {model.model or 'the package'} (--load-format dummy)"
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    lines = [
        f"Ready: {served.names[0]}, {engine.config.num_parameters:,} parameters in {dtype}, from {source}",
        "Device memory:",
        engine.memory.table(),
    ]
    defaults = ", ".join(f"{k} {v}" for k, v in _sampling_defaults(served).items())
    key = ' -H "Authorization: Bearer $KEY"' if server.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    return "\n".join(
        [
            *lines,
            f"Context {served.max_model_len} tokens, {served.max_num_seqs} requests at a time. "
            f"Sampling defaults: {defaults}.",
            f"OpenAI base URL: {url}{server.root_path}/v1, Anthropic base URL: {url}{server.root_path}",
            f"Try:  curl {url}/v1/chat/completions{key} -d '{body}'",
        ]
    )


def _sampling_defaults(served: ServedModel) -> dict[str, Any]:
    params = served.resolve(_silent(served.params), served.generation)
    return {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}


def entry() -> None:
    """Run and leave with the exit code; a reader that closes our output early is no error."""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:  # before the server could take the signal itself
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
