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

from flint_jax import sampling_params, tiles
from flint_jax.chat import ChatTemplate, encode_chat
from flint_jax.config import FlintConfig
from flint_jax.engine import Engine, Event, TokenLogprob
from flint_jax.errors import RequestError, TokenizerError
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.planned_engine import PlannedEngine
from flint_jax.sampling_params import SamplingParams
from flint_jax.scoring import Scorer
from flint_jax.scoring.inputs import two
from flint_jax.text import Detokenizer, StopStrings

log = logging.getLogger("flint_jax")

KERNELS = ("auto", "xla", "pallas")


@dataclasses.dataclass(frozen=True)
class Generation:
    """Result of ``LanguageModel.generate``. text is None without a tokenizer; finish_reason: "stop" or "length"."""

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_token_ids: tuple[int, ...]


class LanguageModel:
    """A loaded Flint.

    config: FlintConfig. model: the live ``flint_jax.model.Flint`` NNX module. tokenizer: a loaders Tokenizer or None.
    generation: the checkpoint's own sampling defaults. chat_template: its template source or None.
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
    ):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.config: FlintConfig = model.config
        self.generation = dict(generation or {})
        self.chat_template = chat_template
        self.max_context = self.config.max_position_embeddings if max_context is None else max_context
        self._engine: Engine | None = None
        self._lock = threading.Lock()

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
        return self._forward(self._leaves(), jnp.asarray(padded), jnp.asarray(lengths))[:, :width]

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
        return tuple(jax.tree.leaves(nnx.state(self.model)))

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

        template: keyword arguments of the chat template (tools, enable_thinking, ...).
        """
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt, add_special_tokens=True)
        prompt = list(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            tok = self._tokenizer()
            return encode_chat(tok, ChatTemplate.from_tokenizer(tok, self.chat_template), prompt, **template)
        return [int(t) for t in prompt]

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template: Any,
    ) -> Generation:
        """Continue a prompt: text, token ids, or chat messages.

        params: default is the checkpoint's own sampling; None fields of given params mean the checkpoint's defaults.
        Raises RequestError for prompts and params the model cannot take; TokenizerError when text needs a tokenizer.
        """
        params = params or SamplingParams(temperature=None, top_k=None, top_p=None, min_p=None, repetition_penalty=None)
        params = sampling_params.resolve(params, self.generation)
        if params.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids")
        ids = self.encode(prompt, **template)
        collector = _Collector(self.tokenizer, params.stop)
        engine = self.engine()
        with self._lock:
            collector.name = engine.submit(ids, params, on_event=collector)
            collector.engine = engine
            while not collector.done:
                engine.step()
        return collector.result(tuple(ids))

    def engine(self) -> Engine:
        """The small engine behind ``generate``: one slot, compiled as it goes. The server makes its own."""
        if self._engine is None:
            self._engine = self.make_engine(max_num_seqs=1, compile_ahead=False, enable_prefix_caching=False)
        return self._engine

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

        max_model_len: longest prompt + output, default the most the memory allows. max_num_seqs: slots.
        max_num_batched_tokens: most tokens of one prefill step. max_prefill_ms: what a prefill step may take while
        something decodes, in milliseconds; None for any time. enable_prefix_caching: take up prompts where an
        earlier request had the same beginning. prefix_snapshots: places it may keep to do so, by default as many as
        fit in a tenth of the cache's memory, at most eight a slot. Raises ConfigError when nothing fits.
        """
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
        leaves = jax.tree.leaves(nnx.state(self.model))
        pending = [a for a in leaves if isinstance(a, jax.ShapeDtypeStruct)]
        return PlannedEngine(
            self.model,
            eos_ids=self.eos_ids,
            seed=seed,
            max_prefill_ms=max_prefill_ms,
            pending=[math.prod(a.shape) * a.dtype.itemsize for a in pending],
            max_model_len=self.max_context if max_model_len is None else min(max_model_len, self.max_context),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            utilization=gpu_memory_utilization,
            prefix_caching=enable_prefix_caching,
            prefix_snapshots=prefix_snapshots,
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


class _Collector:
    """Gathers one request's events; ends it on a stop string."""

    def __init__(self, tokenizer, stops: Sequence[str]):
        self.ids: list[int] = []
        self.scores: list[TokenLogprob] = []
        self.text = None if tokenizer is None else Detokenizer(tokenizer)
        self.stops = StopStrings(list(stops))
        self.parts: list[str] = []
        self.reason: str | None = None
        self.error: str | None = None
        self.hit = self.done = False

    def __call__(self, event: Event) -> None:
        if not self.hit:
            self.ids.extend(event.token_ids)
            self.scores.extend(event.logprobs or ())
            for token in event.token_ids:
                self._say(self.text.push(token) if self.text else "")
            if event.finish_reason is not None and self.text and not self.hit:
                self._say(self.text.flush())
                if not self.hit:
                    self.parts.append(self.stops.flush())
        if event.finish_reason is not None:
            self.done = True
            self.reason = "stop" if self.hit else event.finish_reason
            self.error = event.error

    def _say(self, text: str) -> None:
        safe, self.hit = self.stops.push(text)
        self.parts.append(safe)
        if self.hit and not self.done:
            self.engine.abort(self.name)

    def result(self, prompt: tuple[int, ...]) -> Generation:
        if self.reason == "error":
            raise RuntimeError(f"generation failed: {self.error}")
        text = "".join(self.parts) if self.text else None
        return Generation(tuple(self.ids), text, self.reason, tuple(self.scores) or None, prompt)


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
    model's own save memory. config, tokenizer: folders that win over what the checkpoint holds. sharding: only of an
    Orbax folder, where its arrays go: a jax Sharding, or a function of (array name, ShapeDtypeStruct) that gives one;
    every device reads its own shards.

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
) -> Opened:
    """``load`` up to the weights: the checkpoint is open, everything is checked, no weight is read."""
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
    path = loaders.embedded_checkpoint() if path is None else path
    checkpoint = loaders.open_checkpoint(path, config=config, tokenizer=tokenizer)
    c = checkpoint.config
    whole = isinstance(max_context, int | np.integer) and not isinstance(max_context, bool)
    if max_context is not None and not (whole and 1 <= max_context <= c.max_position_embeddings):
        raise RequestError(
            f"max_context = {max_context!r:.60}: need 1 to {c.max_position_embeddings}, the model's own context",
            param="max_context",
        )
    return Opened(checkpoint, rules, max_context, sharding is None and tiles.wanted(c, rules, kernels), sharding)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are still to be read. tiled: whether they are laid out for the kernels."""

    checkpoint: Any
    rules: Numerics
    max_context: int | None
    tiled: bool
    sharding: Any = None

    def sketch(self) -> LanguageModel | None:
        """The model with shapes for weights: to plan memory and to compile. None where only loading tells the shapes.

        Its tree is that of ``load``, array by array.
        """
        import loaders

        if self.sharding is not None:
            return None
        tree = loaders.weight_shapes(self.checkpoint, **self._dtypes)
        if tree is None:
            return None
        return self._model(jax.eval_shape(tiles.tile_weights, tree) if self.tiled else tree)

    def load(self, *, progress: bool = True, on_read: Callable[[], None] = lambda: None) -> LanguageModel:
        """Read the weights and lay them out. on_read: called when they are read. Raises CheckpointError."""
        import loaders

        weights = loaders.load_weights(self.checkpoint, **self._dtypes, progress=progress, sharding=self.sharding)
        on_read()
        return self._model(tiles.tile_weights(weights) if self.tiled else weights)

    @property
    def _dtypes(self) -> dict[str, str]:
        return {"dtype": self.rules.dtype_name, "router_dtype": jnp.dtype(self.rules.router_dtype).name}

    def _model(self, weights) -> LanguageModel:
        found = self.checkpoint
        return LanguageModel(
            Flint(found.config, weights, self.rules, max_positions=self.max_context),
            found.tokenizer,
            generation=found.generation,
            chat_template=found.chat_template,
            name=found.name,
            max_context=self.max_context,
        )
