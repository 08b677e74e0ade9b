"""Flint as a model of lm-evaluation-harness (0.4.11 and later), in this process and without torch.

    python -m flint_jax.integrations.lm_eval run --model flint_jax --model_args pretrained=flint.gguf --tasks arc_easy

is the harness' own command line with one more model; in Python, ``simple_evaluate(model=FlintLM(lm=lm), ...)``. The
harness is no dependency of this package: install it with ``pip install lm_eval``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - the harness fills its registry only while that is empty, so before we add to it
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from flint_jax.chat import ChatTemplate, prepare_chat
from flint_jax.errors import ConfigError, RequestError
from flint_jax.generation import Reader
from flint_jax.lm import LanguageModel, load
from flint_jax.sampling_params import SamplingParams
from flint_jax.scoring import Scorer

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# What the harness' other fields of a generation request are called here.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@register_model("flint_jax")
class FlintLM(TemplateLM):
    """Requests of the harness, answered by a LanguageModel.

    pretrained: folder, .gguf file or hub id; or lm: a loaded model. dtype, numerics, kernels, max_length, tokenizer,
    config: as in ``flint_jax.load``. batch_size: requests generated at once ("auto" is 16); scoring packs its own.
    prefix_token_id: token before texts and empty contexts, default BOS, else EOS. add_bos_token: whether texts begin
    with BOS; default: what the tokenizer's own configuration says. batch_invariant: see ``Scorer``. max_gen_toks: for
    tasks that name no length. think_end: text up to and with it is cut from generated text ("</think>"). device: the
    harness always names one; JAX chooses (JAX_PLATFORMS says what it may choose from), so it is ignored.

    Raises ConfigError without a model or a tokenizer, or for arguments it does not know.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        lm: LanguageModel | None = None,
        dtype: str = "bfloat16",
        numerics: str = "serving",
        kernels: str = "auto",
        max_length: int | None = None,
        config: str | None = None,
        tokenizer: str | None = None,
        batch_size: int | str = "auto",
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        batch_invariant: bool = False,
        max_gen_toks: int = 256,
        think_end: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            raise ConfigError(f"unknown model arguments: {', '.join(sorted(unknown))}")
        if lm is None:
            if pretrained is None:
                raise ConfigError("need a model: pretrained=PATH (a folder, a .gguf file, a hub id), or lm=")
            options = {"dtype": dtype, "numerics": numerics, "kernels": kernels, "config": config}
            lm = load(pretrained, **options, max_context=max_length, tokenizer=tokenizer)
        if lm.tokenizer is None:
            raise ConfigError("the checkpoint has no tokenizer, and tasks are text; give tokenizer=FOLDER")
        self.lm, self.tokenizer = lm, lm.tokenizer
        self.max_length = lm.max_context if max_length is None else min(max_length, lm.max_context)
        self.max_gen_toks, self.think_end, self.add_bos_token = int(max_gen_toks), think_end, add_bos_token
        if str(batch_size).startswith("auto"):
            batch_size = 16 if max_batch_size is None else max_batch_size
        self.slots = int(batch_size)
        self.scorer = Scorer(
            lm,
            max_length=max_length,
            batch_invariant=batch_invariant,
            prefix="auto" if prefix_token_id is None else int(prefix_token_id),
            progress=True,
        )
        self._engine = None

    # -- text ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        """An id that ends a text."""
        return self.lm.eos_ids[0] if self.lm.eos_ids else None

    @property
    def prefix_token_id(self) -> int:
        """Token before texts and empty contexts."""
        if self.scorer.prefix is None:
            raise ConfigError("this model names no BOS and no EOS; give prefix_token_id=ID")
        return self.scorer.prefix

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness' caches."""
        return self.lm.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids. By default as the tokenizer's configuration says, but never a second BOS."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = self.tokenizer.add_bos if self.add_bos_token is None else self.add_bos_token
            add_special_tokens = add_special_tokens and not (bos and string.startswith(bos))
        ids = list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))
        if add_special_tokens and self.add_bos_token and not self.tokenizer.add_bos and bos:
            ids.insert(0, self.tokenizer.token_id(bos))
        return ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for the harness' records; None when the run uses none."""
        if not chat_template:
            return None
        return self.lm.chat_template or self.tokenizer.chat_template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as prompt text. Without a generation prompt the last message is left open, to be gone on with."""
        template = ChatTemplate.from_tokenizer(self.tokenizer, self.lm.chat_template)
        return prepare_chat(
            self.tokenizer,
            template,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            parse_special_in_content=True,
        ).text

    # -- scores ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding gives the continuation) of each request.

        A context too long is cut at its beginning, as the harness' other models do; a continuation too long to be read
        at once is read in windows. Raises RequestError when the harness' rule leaves no token of a continuation that
        has text (a sum of 0.0 would be the best of all).
        """
        items = []
        for key, context, continuation in requests:
            if key is not None and key[1] and not len(continuation):
                raise RequestError(
                    f"the tokenizer joins the end of the context, {key[0][-20:]!r}, and the whole continuation, "
                    f"{key[1][:20]!r}, so that no token of the continuation is left to score; the task should put the "
                    "boundary between words (target_delimiter)"
                )
            room = max(self.max_length + 1 - len(continuation), 1)
            context = context[-room:]
            items.append((np.asarray([*context, *continuation], np.int32), len(context)))
        self.scorer.progress = not disable_tqdm
        out = []
        for (key, _, _), score in zip(requests, self.scorer.score_ids(items, long=True), strict=True):
            out.append((score.total, score.is_greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, out[-1])
        return out

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Sum of the log-probabilities of each text behind the prefix token, in windows with as much context as fits.

        The tokenizer adds nothing of its own, so that there is one BOS and not two.
        """
        texts = [request.args[0] for request in requests]
        self.scorer.progress = not disable_tqdm
        ids = [self.tok_encode(text, add_special_tokens=False) for text in texts]
        out = [score.total for score in self.scorer.score_texts(ids, prefix=self.prefix_token_id)]
        for text, total in zip(texts, out, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return out

    # -- text again ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Text that follows each context, up to a stop string, an end-of-turn token or the length asked for."""
        if self._engine is None:
            self._engine = self.lm.make_engine(
                max_num_seqs=self.slots, max_model_len=self.max_length, compile_ahead=False
            )
        engine, made, stops = self._engine, [], []
        engine.set_weights(self.lm.model)
        for request in requests:
            context, fields = request.args
            params, until = self._params(dict(fields))
            room = min(self.max_length, engine.max_model_len) - params.max_tokens
            if room < 1:
                raise RequestError(
                    f"max_gen_toks = {params.max_tokens} leaves no room for a prompt in {self.max_length} tokens; "
                    "give --gen_kwargs max_gen_toks=N"
                )
            ids = self.tok_encode(context)[-room:]
            reader = Reader(self.tokenizer, params.stop, ids)

            def hear(event, reader=reader):
                reader.push(event)
                if reader.hit and not reader.done:
                    engine.abort(event.request_id)

            engine.submit(ids, params, on_event=hear)
            made.append(reader)
            stops.append(until)
        done = 0
        with tqdm(total=len(made), desc="generate", disable=disable_tqdm) as bar:
            while done < len(made):
                engine.step()
                now = sum(reader.done for reader in made)
                bar.update(now - done)
                done = now
        out = [self._cut(reader.result().text, until) for reader, until in zip(made, stops, strict=True)]
        for request, text in zip(requests, out, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return out

    def _params(self, fields: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
        """The harness' generation fields, and the stop strings. Greedy unless ``do_sample`` or a temperature is there.

        With thoughts, stop strings are not given to the engine: they must not end a thought (``_cut`` applies them).
        """
        until = fields.pop("until", None) or []
        until = [s for s in ([until] if isinstance(until, str) else until) if s]
        lengths = [fields.pop(name) for name in LENGTHS if name in fields]
        sample = fields.pop("do_sample", None)
        if sample is False or (sample is None and not fields.get("temperature")):
            fields["temperature"] = 0.0
        unknown = sorted(set(fields) - set(SAMPLING))
        if unknown:
            raise RequestError(f"generation fields that this model does not know: {', '.join(unknown)}")
        params = SamplingParams(
            max_tokens=int(next((n for n in lengths if n is not None), self.max_gen_toks)),
            stop=tuple(until) if self.think_end is None else (),
            **{name: value for name, value in fields.items() if value is not None},
        )
        return params, until

    def _cut(self, text: str, until: Sequence[str]) -> str:
        """Drop the thoughts, then what follows a stop string."""
        if self.think_end is None:
            return text
        text = text.rpartition(self.think_end)[2].lstrip()
        return text[: min((at for s in until if (at := text.find(s)) >= 0), default=len(text))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
