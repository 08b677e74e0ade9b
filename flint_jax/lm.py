"""The library's front door: ``load`` a checkpoint, then ask for logits, scores or text."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flint_jax import compile_cache, executables, grammar, memory, sampling_params, tiles
from flint_jax.cache import PAGE
from flint_jax.chat import ChatTemplate, prepare_chat
from flint_jax.config import FlintConfig
from flint_jax.engine import Engine
from flint_jax.errors import ConfigError, RequestError, TokenizerError
from flint_jax.generation import Generation, Reader, Stream, Word, read_keywords
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.planned_engine import PlannedEngine
from flint_jax.random_weights import random_stack
from flint_jax.sampling_params import SamplingParams
from flint_jax.scoring import Scorer
from flint_jax.scoring.inputs import two
from flint_jax.step import Steps
from flint_jax.weights import shapes

log = logging.getLogger("flint_jax")

KERNELS = ("auto", "xla", "pallas")


class LanguageModel:
    """A loaded Flint.

    config: FlintConfig. model: the live ``flint_jax.model.Flint`` NNX module. tokenizer: a loaders Tokenizer or None.
    generation: the checkpoint's own sampling defaults. chat_template: its template source or None. progress: whether
    to say on standard error that something is being compiled.
    """

    def __init__(
        self,
        model: Flint,
        tokenizer: Any = None,
        *,
        generation: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        name: str = "flint",
        max_context: int | None = None,
        progress: bool = False,
    ):
        self.model, self.tokenizer, self.name, self.progress = model, tokenizer, name, progress
        self.config: FlintConfig = model.config
        self.generation = dict(generation or {})
        self.chat_template = chat_template
        self.max_context = self.config.max_position_embeddings if max_context is None else max_context
        self._engine: Engine | None = None
        self._lock = threading.RLock()
        self._ran: set[tuple] = set()  # programs of the engine that have run, by their sizes
        self._structure: Any = None  # of the model's state, when programs were last made for it

    # -- whole sequences -------------------------------------------------------------------------------------------

    def logits(
        self, tokens: Int[Array, "B T"] | Sequence[Sequence[int]], lengths: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T V"]:
        """float32 logits of every position of right-padded rows.

        tokens: int [B, T]. lengths: real tokens of each row, default T; logits past them mean nothing. Raises
        RequestError for other shapes, ids outside the vocabulary, or more than ``max_context`` tokens.
        """
        tokens, lengths = self._rows(tokens, lengths)
        width = tokens.shape[1]
        padded = np.zeros((tokens.shape[0], _bucket(width)), np.int32)
        padded[:, :width] = tokens
        leaves = self._leaves()  # first: it may have programs made anew
        return self._forward(leaves, jnp.asarray(padded), jnp.asarray(lengths))[:, :width]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Float[np.ndarray, " T"]]:
        """log p of each continuation token given everything before it, natural logarithm, float32.

        pairs: (context ids, continuation ids), used as they are (nothing is prepended). With an empty context the
        first continuation token has nothing to be predicted from and gets 0. Raises RequestError as ``logits`` does.
        """
        scorer = self.scorer
        items = []
        for i, pair in enumerate(pairs):
            context, continuation = two(pair, f"pair {i}")
            ids = scorer.check_ids(context, f"the context of pair {i}")
            more = scorer.check_ids(continuation, f"the continuation of pair {i}")
            items.append((np.concatenate([ids, more]), len(ids)))
        return [found.logprobs for found in scorer.score_ids(items)]

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The ``flint_jax.scoring.Scorer`` behind ``score``; make your own for its other modes and for large jobs."""
        return Scorer(self)

    def _rows(self, tokens, lengths) -> tuple[np.ndarray, np.ndarray]:
        try:
            tokens = np.asarray(tokens)
        except ValueError as error:
            raise RequestError(f"tokens must be a rectangle [B, T]; pad the rows and pass lengths ({error})") from None
        if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise RequestError(f"tokens must be integers [B, T] with at least one, got {tokens.dtype} {tokens.shape}")
        if tokens.shape[1] > self.max_context:
            raise RequestError(
                f"This model's maximum context length is {self.max_context} tokens. However, a row has "
                f"{tokens.shape[1]} tokens.",
                code="context_length_exceeded",
            )
        if lengths is None:
            lengths = np.full(tokens.shape[0], tokens.shape[1], np.int32)
        lengths = np.asarray(lengths)
        if lengths.shape != tokens.shape[:1] or lengths.min() < 1 or lengths.max() > tokens.shape[1]:
            raise RequestError(f"lengths must be [B] from 1 to {tokens.shape[1]}, got {lengths.tolist()!r:.80}")
        real = np.arange(tokens.shape[1])[None] < lengths[:, None]
        bad = tokens[real & ((tokens < 0) | (tokens >= self.config.vocab_size))]
        if bad.size:
            raise RequestError(f"token id {int(bad[0])} is outside the vocabulary, 0 to {self.config.vocab_size - 1}")
        return np.where(real, tokens, 0).astype(np.int32), lengths.astype(np.int32)

    def _leaves(self):
        """The model's current weights: changes that research made to the live module are seen."""
        state = nnx.state(self.model)
        structure = jax.tree.structure(state)
        if self._structure is None or structure != self._structure:
            # A matrix became one of another kind: programs for the old one do not fit.
            self._structure = structure
            for made in ("_merge", "_forward", "scorer"):
                self.__dict__.pop(made, None)
        return tuple(jax.tree.leaves(state))

    @functools.cached_property
    def _merge(self):
        graph, state = nnx.split(self.model)
        structure = jax.tree.structure(state)
        return lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves))

    @functools.cached_property
    def _forward(self):
        return jax.jit(lambda leaves, tokens, lengths: self._merge(leaves)(tokens, lengths))

    # -- generation ------------------------------------------------------------------------------------------------

    def encode(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a prompt: ids as they are, text through the tokenizer, chat messages through the template.

        template: options of the chat template: tools, enable_thinking, ... (``generation.TEMPLATE``).
        """
        return self._encode(prompt, template)[0]

    def _encode(self, prompt: Any, template: Mapping[str, Any]) -> tuple[list[int], str | None]:
        """(token ids, text of the prompt of a chat)."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if template and not chat:
            raise RequestError(
                f"{', '.join(template)}: only for chat messages; the prompt is {type(prompt).__name__}. "
                "Pass a list of messages, or use chat()",
                param=next(iter(template)),
            )
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt, add_special_tokens=True), None
        if not chat:
            return _token_ids(prompt), None
        tok = self._tokenizer()
        options = dict(template)
        thinks = options.pop("enable_thinking", None)
        if thinks is not None:  # under both names that templates use
            given = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **given}
        made = prepare_chat(tok, ChatTemplate.from_tokenizer(tok, self.chat_template), prompt, **options)
        return made.ids, made.text

    def generate(
        self, prompt: Any, params: SamplingParams | None = None, *, stream: bool = False, **keywords: Any
    ) -> Generation | list[Generation] | Stream:
        """Continue a prompt: text, token ids, or chat messages; or a list of prompts, which run together.

        params, or keywords named as the fields of SamplingParams (``temperature=0, max_tokens=32``), which win over it;
        what is None or not given is the checkpoint's default. More keywords, for chats: tools, enable_thinking,
        documents, chat_template_kwargs and the other options of ``prepare_chat``.

        Returns a Generation, for a list of prompts a list of them, and with n above 1 a list of n in the place of each;
        with stream=True (one prompt, one choice) a Stream of pieces. Changes to the live weights count from the next
        call on. An interruption (Ctrl-C) ends all of the call's requests.

        Raises RequestError for prompts, keywords and values that the model cannot take; TokenizerError when text needs
        a tokenizer.
        """
        params, template = read_keywords(params, keywords)
        params = sampling_params.resolve(params, self.generation)
        if params.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids")
        many = _is_many(prompt)
        if stream and (many or params.n > 1):
            raise RequestError("stream=True is for one prompt and n=1; make one stream each", param="stream")
        encoded = [self._encode(p, template) for p in (prompt if many else [prompt])]
        choices = params.choices()
        with self._lock:
            engine = self._ready_engine(len(encoded) * len(choices))
            streams: list[Stream] = []
            try:
                for ids, text in encoded:
                    streams += [self._stream(engine, ids, text, one, template) for one in choices]
            except BaseException:
                for made in streams:
                    made.close()
                raise
        if stream:
            return streams[0]
        try:
            replies = [s.generation for s in streams]
        finally:
            for made in streams:
                made.close()
        if params.n > 1:
            replies = [replies[i : i + params.n] for i in range(0, len(replies), params.n)]
        return replies if many else replies[0]

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **keywords: Any,
    ) -> Generation | list[Generation] | Stream:
        """``generate`` for a conversation; a string is one message of the user. ``reply.message`` continues it:

        messages += [reply.message, {"role": "user", "content": "And then?"}]
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        first = messages[0] if isinstance(messages, Sequence) and messages else None
        if isinstance(first, Sequence) and not isinstance(first, str) and first:
            first = first[0]
        if not isinstance(first, Mapping):
            raise RequestError(
                f"messages = {messages!r:.80}: need a string, or a list of messages such as "
                '{"role": "user", "content": "Hello"}',
                param="messages",
            )
        return self.generate(messages, params, stream=stream, **keywords)

    def _stream(
        self, engine: Engine, ids: list[int], text: str | None, params: SamplingParams, template: Mapping[str, Any]
    ) -> Stream:
        lexer = None if text is None else self._lexer(text, template)
        sizes = engine.steps.sizes
        chunks = {sizes.chunk(len(ids)), sizes.chunk(len(ids) % sizes.chunks[-1] or 1)}
        new = (id(engine), *sorted(chunks)) not in self._ran
        self._ran.add((id(engine), *sorted(chunks)))
        kept = "" if compile_cache.folder() is None else f", kept in {compile_cache.folder()}"
        word = Word(f"flint_jax: compiling the steps for this length of prompt (once{kept}) ...")
        reader = Reader(self.tokenizer, params.stop, ids, lexer)
        return Stream(
            engine, self._lock, reader, ids, params, word=word if new and self.progress else None, broken=self._forget
        )

    def _lexer(self, prompt: str, template: Mapping[str, Any]) -> grammar.Lexer:
        tools = [grammar.Tool.of(t) for t in template.get("tools") or ()]
        kwargs = dict(template.get("chat_template_kwargs") or {})
        if "enable_thinking" in template:
            kwargs.setdefault("enable_thinking", template["enable_thinking"])
        return grammar.Lexer(
            grammar.start_state(prompt),
            grammar.Tags.of(self.tokenizer.added_tokens),
            tools,
            thinking=grammar.thinking_enabled(kwargs),
            calls=grammar.Calls.ALL if tools else grammar.Calls.NONE,
        )

    def engine(self) -> Engine:
        """The small engine behind ``generate``: one slot until lists ask for more; compiled as it goes. The server
        makes its own."""
        return self._ready_engine(1)

    def _ready_engine(self, requests: int) -> Engine:
        """The engine with the model's present weights, and slots for so many requests or for as many as is usual."""
        with self._lock:
            engine = self._engine
            usual = 4 if jax.default_backend() == "cpu" else 16
            if engine is not None and engine.steps.sizes.slots < min(requests, usual):
                engine = self._engine = None
            if engine is not None:
                try:
                    engine.set_weights(self.model)
                except ConfigError:  # matrices of another kind: the programs do not fit
                    engine = self._engine = None
            if engine is None:
                engine = self._engine = self._library_engine(usual if requests > 1 else 1)
            return engine

    def _library_engine(self, slots: int) -> Engine:
        """Few programs, no prefix cache, and pages for two requests of full length: the rest of the memory is the
        caller's."""
        plan = memory.plan(self.config, self.model.numerics, max_model_len=self.max_context, max_num_seqs=slots)
        pages = min(plan.sizes.pages, min(slots, 2) * -(-(self.max_context + 1) // PAGE))
        sizes = dataclasses.replace(plan.sizes, pages=max(pages, slots), batches=tuple(sorted({1, slots})))
        engine = Engine(Steps(self.model, sizes), eos_ids=self.eos_ids)
        engine.memory = dataclasses.replace(plan, sizes=sizes)
        return engine

    def _forget(self, engine: Engine) -> None:
        if self._engine is engine:
            self._engine = None

    def make_engine(
        self,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_prefill_ms: float | None = 40.0,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        prefix_snapshots: int | None = None,
        seed: int = 0,
        compile_ahead: bool = True,
        progress=None,
    ) -> Engine:
        """An engine over this model; its KV cache is sized from free device memory (``engine.memory`` says how).

        It goes on with the weights of now; ``engine.set_weights(lm.model)`` takes up later changes.
        max_model_len: longest prompt + output, default the most the memory allows. max_num_seqs: slots.
        max_num_batched_tokens: most tokens of one prefill step. max_prefill_ms: what a prefill step may take while
        something decodes, in milliseconds; None for any time. enable_prefix_caching: take up prompts where an
        earlier request had the same beginning. prefix_snapshots: places it may keep to do so, by default as many as
        fit in a tenth of the cache's memory, at most eight a slot. Raises ConfigError when nothing fits, for a
        max_model_len beyond the model's, and for compile_ahead over weights that lie on several devices.
        """
        if compile_ahead:
            self._check_one_device()
        planned = self.plan_engine(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_ms=max_prefill_ms,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            prefix_snapshots=prefix_snapshots,
            seed=seed,
        )
        if compile_ahead:
            planned.build(progress)
        return planned.finish(self.model)

    def plan_engine(
        self,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_prefill_ms: float | None = 40.0,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        prefix_snapshots: int | None = None,
        seed: int = 0,
    ) -> PlannedEngine:
        """``make_engine`` in steps, for a model whose weights may still be shapes (``Opened.sketch``)."""
        if max_model_len is not None and max_model_len > self.max_context:
            raise ConfigError(
                f"max_model_len {max_model_len}: the model's context is {self.max_context} tokens; ask for at most that"
            )
        leaves = jax.tree.leaves(nnx.state(self.model))
        pending = [a for a in leaves if isinstance(a, jax.ShapeDtypeStruct)]
        return PlannedEngine(
            self.model,
            eos_ids=self.eos_ids,
            seed=seed,
            max_prefill_ms=max_prefill_ms,
            pending=[math.prod(a.shape) * a.dtype.itemsize for a in pending],
            max_model_len=self.max_context if max_model_len is None else max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            utilization=gpu_memory_utilization,
            prefix_caching=enable_prefix_caching,
            prefix_snapshots=prefix_snapshots,
        )

    def _check_one_device(self) -> None:
        devices = {d for leaf in self._leaves() for d in leaf.devices()}
        if len(devices) > 1:
            raise ConfigError(
                f"the weights lie on {len(devices)} devices (load(sharding=...)), and the serving engine runs on one; "
                "load without sharding to serve. logits, score and generate take sharded weights"
            )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: of the generation config, else the config, and those the tokenizer names."""
        ids = self.generation.get("eos_token_id", self.config.eos_token_ids)
        ids = [ids] if isinstance(ids, int) else list(ids or ())
        if self.tokenizer is not None:
            ids += list(self.tokenizer.eog_ids)
        return tuple(sorted({int(i) for i in ids}))

    def _tokenizer(self):
        if self.tokenizer is None:
            raise TokenizerError("the checkpoint has no tokenizer; pass token ids, or load with tokenizer=FOLDER")
        return self.tokenizer


def _is_many(prompt: Any) -> bool:
    """Whether it is a list of prompts. Raises RequestError for what is neither that nor a prompt."""
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, Mapping | bytes) or not (isinstance(prompt, Sequence) or hasattr(prompt, "__array__")):
        raise RequestError(
            f"the prompt is {type(prompt).__name__}; need text, token ids, chat messages, or a list of such",
            param="prompt",
        )
    kinds = {_kind(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError(
            f"the prompt mixes {' and '.join(sorted(kinds))}; need token ids, messages, or a list of prompts",
            param="prompt",
        )
    return kinds == {"prompts"}


def _kind(item: Any) -> str:
    if isinstance(item, Mapping):
        return "messages"
    return "prompts" if isinstance(item, str | Sequence) or np.ndim(item) else "token ids"


def _token_ids(prompt: Any) -> list[int]:
    for t in prompt:
        whole = isinstance(t, int | np.integer) or (hasattr(t, "dtype") and np.issubdtype(t.dtype, np.integer))
        if isinstance(t, bool) or not whole:
            raise RequestError(f"{t!r:.60} is no token id; need whole numbers", param="prompt")
    return [int(t) for t in prompt]


def _bucket(length: int) -> int:
    """Power of two at least 128: few shapes, few compilations."""
    return max(128, 1 << (length - 1).bit_length())


def load(
    path: str | os.PathLike | None = None,
    *,
    dtype: str = "bfloat16",
    numerics: str = "serving",
    kernels: str = "auto",
    max_context: int | None = None,
    config: str | os.PathLike | None = None,
    tokenizer: str | os.PathLike | None = None,
    progress: bool = True,
    sharding: Any = None,
) -> LanguageModel:
    """Load a checkpoint: a folder of config.json + safetensors, a .gguf file or its folder, an Orbax folder, a hub id;
    without a path the small trained model of the package (``loaders.embedded_checkpoint``).

    dtype: "bfloat16", or "float32" (stored weights upcast, float32 compute; for parity work). numerics: "serving" or
    "transformers" (see flint_jax.numerics). kernels: "auto", "xla" or "pallas". max_context: shorter contexts than the
    model's own save memory. progress: bars, and a word while something compiles, on standard error.
    config, tokenizer: folders that win over what the checkpoint holds. sharding: only of an Orbax folder, where its
    arrays go: a jax Sharding, or a function of (array name, ShapeDtypeStruct) that gives one; every device reads its
    own shards. Compiled programs are kept on disk (see ``compile_cache``); a folder that JAX's own configuration names
    stays.

    Raises CheckpointError, ConfigError or TokenizerError, each saying what was given, what is needed, what to do.
    """
    opened = open_model(
        path,
        dtype=dtype,
        numerics=numerics,
        kernels=kernels,
        max_context=max_context,
        config=config,
        tokenizer=tokenizer,
        sharding=sharding,
    )
    return opened.load(progress=progress)


def open_model(
    path: str | os.PathLike | None = None,
    *,
    dtype: str = "bfloat16",
    numerics: str = "serving",
    kernels: str = "auto",
    max_context: int | None = None,
    config: str | os.PathLike | None = None,
    tokenizer: str | os.PathLike | None = None,
    sharding: Any = None,
    dummy: bool = False,
    weight_format: str | None = None,
    seed: int = 0,
) -> Opened:
    """``load`` up to the weights: the checkpoint is open, everything is checked, no weight is read.

    dummy: the weights will be random ones of the config's shapes, made on the device; no file of weights is needed.
    weight_format: of such weights, "bf16" or "nvfp4" (default: that of a GGUF, else "bf16"). seed: of such weights.
    """
    import loaders  # the layer of checkpoint formats; the model itself never knows one

    rules = Numerics(numerics, dtype)
    if kernels not in KERNELS:
        raise RequestError(f"kernels = {kernels!r}: need one of {', '.join(KERNELS)}", param="kernels")
    places = isinstance(sharding, jax.sharding.Sharding) or callable(sharding)
    if sharding is not None and (not places or isinstance(sharding, jax.sharding.Mesh)):  # a Mesh can be called, too
        raise RequestError(
            f"sharding = {sharding!r:.80}: need a jax.sharding.Sharding (such as NamedSharding(mesh, spec)), or a "
            "function of (array name, ShapeDtypeStruct) that gives one",
            param="sharding",
        )
    compile_cache.enable(unless_set=True)
    path = loaders.embedded_checkpoint() if path is None else path
    if dummy:
        checkpoint = loaders.describe_checkpoint(path, config=config, tokenizer=tokenizer, weight_format=weight_format)
    else:
        checkpoint = loaders.open_checkpoint(path, config=config, tokenizer=tokenizer)
    c = checkpoint.config
    whole = isinstance(max_context, int | np.integer) and not isinstance(max_context, bool)
    if max_context is not None and not (whole and 1 <= max_context <= c.max_position_embeddings):
        raise RequestError(
            f"max_context = {max_context!r:.60}: need 1 to {c.max_position_embeddings}, the model's own context",
            param="max_context",
        )
    tiled = sharding is None and tiles.wanted(c, rules, kernels)
    if tiled:
        executables.check_kernels()
    return Opened(checkpoint, rules, max_context, tiled, sharding, seed if dummy else None)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are still to be read. tiled: whether they are laid out for the kernels.

    dummy: the seed of random weights that are made instead of reading any; None to read them.
    """

    checkpoint: Any
    rules: Numerics
    max_context: int | None
    tiled: bool
    sharding: Any = None
    dummy: int | None = None

    def sketch(self) -> LanguageModel | None:
        """The model with shapes for weights: to plan memory and to compile. None where only loading tells the shapes.

        Its tree is that of ``load``, array by array.
        """
        import loaders

        if self.sharding is not None:
            return None
        if self.dummy is not None:
            return self._model(jax.eval_shape(self._random))
        tree = loaders.weight_shapes(self.checkpoint, **self._dtypes)
        if tree is None:
            return None
        return self._model(jax.eval_shape(tiles.tile_weights, tree) if self.tiled else tree)

    def load(self, *, progress: bool = True, on_read: Callable[[], None] = lambda: None) -> LanguageModel:
        """Read the weights and lay them out. on_read: called when they are read. Raises CheckpointError."""
        import loaders

        if self.dummy is not None:
            weights = self._random()
            on_read()
            return self._model(weights, progress)
        weights = loaders.load_weights(self.checkpoint, **self._dtypes, progress=progress, sharding=self.sharding)
        on_read()
        return self._model(tiles.tile_weights(weights) if self.tiled else weights, progress)

    def _random(self) -> dict[str, Any]:
        """Random weights, laid out. The largest stack comes first, so that the peak is the model, or twice that stack
        where it is more than half of the model."""
        from loaders.synthetic import spread

        found = self.checkpoint
        out: dict[str, Any] = {}
        for name in sorted(shapes(found.config), key=lambda n: -math.prod(shapes(found.config)[n].shape)):
            stack = random_stack(
                name, found.config, self.rules, weight_format=found.weight_format, spread=spread, seed=self.dummy
            )
            tree = {name: stack}
            del stack  # laying out frees it
            out |= tiles.tile_weights(tree) if self.tiled else tree
        return {name: out[name] for name in shapes(found.config)}

    @property
    def _dtypes(self) -> dict[str, str]:
        return {"dtype": self.rules.dtype_name, "router_dtype": jnp.dtype(self.rules.router_dtype).name}

    def _model(self, weights, progress: bool = False) -> LanguageModel:
        found = self.checkpoint
        return LanguageModel(
            Flint(found.config, weights, self.rules, max_positions=self.max_context),
            found.tokenizer,
            generation=found.generation,
            chat_template=found.chat_template,
            name=found.name,
            max_context=self.max_context,
            progress=progress,
        )
