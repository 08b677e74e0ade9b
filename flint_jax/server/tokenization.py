"""POST /tokenize and /detokenize, GET /tokenizer_info, with vLLM's fields."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.server.body import read_object
from flint_jax.server.chat_prompt import read_conversation, render
from flint_jax.server.errors import ApiError, bad_request
from flint_jax.server.models import reply_name
from flint_jax.server.replies import JsonReply
from flint_jax.server.running import encode_text, off_loop
from flint_jax.server.sampling_fields import check_token_ids
from flint_jax.server.state import ServerState


async def tokenize(request: Request) -> Response:
    """Token ids of a ``prompt``, or of ``messages`` as the chat route would encode them."""
    state: ServerState = request.app.state.server
    served = state.served
    fields = await read_object(request, state)
    reply_name(fields, state)
    if fields.has("messages"):
        rendered = render(read_conversation(fields), served, state.settings)
        ids = (await state.preparing.run(rendered, request.receive)).ids
    else:
        prompt = fields.string("prompt")
        if prompt is None:
            raise bad_request("prompt or messages is missing", "prompt", "missing_required_parameter")
        encoded = encode_text(served, prompt, fields.boolean("add_special_tokens", True))
        ids = await state.preparing.run(encoded, request.receive)
    reply = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
    if fields.boolean("return_token_strs"):
        reply["token_strs"] = [served.tokenizer.token_string(i) for i in ids]
    return JsonReply(reply)


async def detokenize(request: Request) -> Response:
    """Text of ``tokens``, special tokens included."""
    state: ServerState = request.app.state.server
    served = state.served
    fields = await read_object(request, state)
    reply_name(fields, state)
    ids = fields.array("tokens")
    if ids is None:
        raise bad_request("tokens is missing", "tokens", "missing_required_parameter")
    check_token_ids(fields, "tokens", ids, served.vocab_size)
    return JsonReply({"prompt": await off_loop(len(ids), served.tokenizer.decode, ids)})


async def tokenizer_info(request: Request) -> Response:
    """What tokenizer_config.json would say: special tokens and the chat template in use.

    lm-eval and others configure themselves from it. 404 with ``--no-enable-tokenizer-info-endpoint``.
    """
    state: ServerState = request.app.state.server
    served = state.served
    if not state.settings.tokenizer_info:
        raise ApiError(404, "this server was started with --no-enable-tokenizer-info-endpoint", code="unknown_route")
    tokenizer = served.tokenizer
    added = {
        str(i): {
            "content": content,
            "special": i in tokenizer.special_ids,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for content, i in sorted(tokenizer.added_tokens.items(), key=lambda item: item[1])
    }
    return JsonReply(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "add_bos_token": tokenizer.add_bos,
            "added_tokens_decoder": added,
            "model_max_length": served.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": served.template.source if served.template else None,
        }
    )
