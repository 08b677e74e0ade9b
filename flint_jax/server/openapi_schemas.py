"""What /openapi.json says of fields and answers, route by route."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _nullable(schema: Schema, text: str = "") -> Schema:
    """``schema`` or null, which means the same as leaving the field out."""
    described = {"description": text} if text else {}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"], **described}
    return {"anyOf": [schema, {"type": "null"}], **described}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _json_or_events(schema: Schema) -> dict[str, Any]:
    return _json(schema) | {"text/event-stream": {"schema": {"type": "object", "description": "one event"}}}


def _body(required: list[str], **fields: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": True}


def _number(low: float | None = None, high: float | None = None) -> Schema:
    return {"type": "number"} | _range(low, high)


def _integer(low: int | None = None, high: int | None = None) -> Schema:
    return {"type": "integer"} | _range(low, high)


def _range(low: float | None, high: float | None) -> Schema:
    return {k: v for k, v in (("minimum", low), ("maximum", high)) if v is not None}


_STRING, _BOOLEAN, _OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
_TOKEN = _integer(0, 2**31 - 1)
_TOKENS = {"type": "array", "items": _TOKEN}
_TEXTS = {"anyOf": [_STRING, {"type": "array", "items": _STRING}]}

SAMPLING: dict[str, Schema] = {
    "temperature": _nullable(_number(0), "default: the checkpoint's own, as for all filters"),
    "top_p": _nullable(_number(0, 1)),
    "top_k": _nullable(_integer(-1), "0 and -1 are off"),
    "min_p": _nullable(_number(0, 1)),
    "repetition_penalty": _nullable(_number(0)),
    "presence_penalty": _nullable(_number(-2, 2)),
    "frequency_penalty": _nullable(_number(-2, 2)),
    "max_tokens": _nullable(_integer(0), "cut to what the context leaves"),
    "min_tokens": _nullable(_integer(0)),
    "seed": _nullable(_integer(-(2**63), 2**63)),
    "stop": _nullable(_TEXTS, "at most 64 strings, none empty"),
    "stop_token_ids": _nullable(_TOKENS),
    "ignore_eos": _nullable(_BOOLEAN),
    "logit_bias": _nullable({"type": "object", "additionalProperties": _number(-100, 100)}),
    "n": _nullable(_integer(1, 128)),
    "include_stop_str_in_output": _nullable(_BOOLEAN),
    "skip_special_tokens": _nullable(_BOOLEAN),
}

STREAM: dict[str, Schema] = {
    "stream": _nullable(_BOOLEAN),
    "stream_options": _nullable(
        _body([], include_usage=_nullable(_BOOLEAN), continuous_usage_stats=_nullable(_BOOLEAN)), "only with stream"
    ),
}

_CONTENT = {"anyOf": [_STRING, {"type": "null"}, {"type": "array", "items": _ref("Part")}]}

CHAT: dict[str, Schema] = {
    "messages": {"type": "array", "minItems": 1, "items": _ref("Message")},
    "tools": _nullable({"type": "array", "items": _ref("Tool")}),
    "tool_choice": _nullable({"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]}),
    "parallel_tool_calls": _nullable(_BOOLEAN),
    "documents": _nullable({"type": "array", "items": _OBJECT}),
    "chat_template_kwargs": _nullable(_OBJECT),
    "reasoning_effort": _nullable({"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]}),
    "add_generation_prompt": _nullable(_BOOLEAN),
    "continue_final_message": _nullable(_BOOLEAN),
}

FORMAT: dict[str, Schema] = {
    "response_format": _nullable(_body(["type"], type={"enum": ["text", "json_object", "json_schema"]})),
    "structured_outputs": _nullable(_OBJECT, "one of json, json_object, regex, choice, grammar"),
    "guided_json": _nullable({"anyOf": [_OBJECT, _STRING]}, "a JSON schema"),
    "guided_regex": _nullable(_STRING),
    "guided_choice": _nullable({"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}),
    "guided_grammar": _nullable(_STRING, "Lark or GBNF"),
    "prompt_logprobs": _nullable(_integer(0, 20), "not with stream"),
}

COMPONENTS: dict[str, Schema] = {
    "Error": _body(
        ["error"],
        error=_body(
            ["message", "type", "param", "code"],
            message=_STRING,
            type=_STRING,
            param=_nullable(_STRING),
            code=_nullable(_STRING),
        ),
    ),
    "AnthropicError": _body(
        ["type", "error"], type={"const": "error"}, error=_body(["type", "message"], type=_STRING, message=_STRING)
    ),
    "AnthropicMessage": _body(
        ["role", "content"],
        role={"enum": ["user", "assistant"]},
        content={
            "anyOf": [
                _STRING,
                {"type": "array", "items": _body(["type", "text"], type={"const": "text"}, text=_STRING)},
            ]
        },
    ),
    "AnthropicTool": _body(
        ["name", "input_schema"], name={"type": "string", "minLength": 1}, description=_STRING, input_schema=_OBJECT
    ),
    "Part": {"anyOf": [_STRING, _body(["type", "text"], type={"enum": ["text"]}, text=_STRING)]},
    "Message": _body(
        ["role"],
        role={"enum": ["system", "developer", "user", "assistant", "tool"]},
        content=_CONTENT,
        reasoning=_nullable(_STRING),
        reasoning_content=_nullable(_STRING),
        tool_calls=_nullable({"type": "array", "items": _ref("ToolCall")}),
        tool_call_id=_nullable(_STRING),
    ),
    "ToolCall": _body(
        ["function"],
        id=_STRING,
        type={"const": "function"},
        function=_body(["name", "arguments"], name=_STRING, arguments=_STRING),
    ),
    "Tool": _body(
        ["type", "function"],
        type={"const": "function"},
        function=_body(["name"], name={"type": "string", "minLength": 1}, description=_STRING, parameters=_OBJECT),
    ),
    "Usage": _body(
        ["prompt_tokens", "completion_tokens", "total_tokens"],
        prompt_tokens=_integer(0),
        completion_tokens=_integer(0),
        total_tokens=_integer(0),
        prompt_tokens_details=_body(["cached_tokens"], cached_tokens=_integer(0)),
        completion_tokens_details=_body([], reasoning_tokens=_integer(0)),
    ),
    "ChatReply": _body(
        ["id", "object", "created", "model", "choices", "usage"],
        id=_STRING,
        object={"const": "chat.completion"},
        created=_integer(),
        model=_STRING,
        choices={
            "type": "array",
            "items": _body(
                ["index", "message", "finish_reason"],
                index=_integer(0),
                message=_body(["role", "content"], role={"const": "assistant"}, content=_nullable(_STRING)),
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            ),
        },
        usage=_ref("Usage"),
    ),
    "CompletionReply": _body(
        ["id", "object", "created", "model", "choices", "usage"],
        id=_STRING,
        object={"const": "text_completion"},
        created=_integer(),
        model=_STRING,
        choices={
            "type": "array",
            "items": _body(
                ["index", "text", "finish_reason"],
                index=_integer(0),
                text=_STRING,
                finish_reason={"enum": ["stop", "length"]},
            ),
        },
        usage=_ref("Usage"),
    ),
    "Model": _body(
        ["id", "object", "created", "owned_by", "max_model_len"],
        id=_STRING,
        object={"const": "model"},
        created=_integer(),
        owned_by=_STRING,
        max_model_len=_integer(1),
    ),
    "Health": _body(["status"], status={"enum": ["loading", "ready", "failed", "stopping"]}, detail=_STRING),
}

_MODEL = {"model": _nullable(_STRING, "any name is answered unless the server runs with --strict-model")}
_HEALTH = {
    "body": False,
    "answer": _json(_ref("Health")),
    "more": {"503": {"description": "not ready", "content": _json(_ref("Health"))}},
}
_TEXT = {"text/plain": {"schema": _STRING}}

# (method, path) -> body (False: none), answer (content by type), error schema, more responses
ROUTES: dict[tuple[str, str], dict[str, Any]] = {
    ("get", "/"): {"answer": {"text/html": {"schema": _STRING}}},
    ("get", "/health"): _HEALTH,
    ("get", "/ping"): _HEALTH,
    ("post", "/ping"): _HEALTH,
    ("get", "/load"): {"answer": _json(_body(["server_load"], server_load=_integer(0)))},
    ("get", "/version"): {"answer": _json(_body(["version"], version=_STRING))},
    ("get", "/metrics"): {"answer": _TEXT},
    ("get", "/openapi.json"): {"answer": _json(_body(["openapi", "paths"]))},
    ("get", "/v1/models"): {
        "answer": _json(_body(["object", "data"], data={"type": "array", "items": _ref("Model")})),
    },
    ("get", "/v1/models/{name}"): {"answer": _json(_ref("Model"))},
    ("post", "/v1/chat/completions"): {
        "body": _body(
            ["messages"],
            **_MODEL,
            **CHAT,
            **SAMPLING,
            **STREAM,
            **FORMAT,
            max_completion_tokens=_nullable(_integer(1)),
            logprobs=_nullable(_BOOLEAN),
            top_logprobs=_nullable(_integer(0, 20)),
            include_reasoning=_nullable(_BOOLEAN),
            thinking_token_budget=_nullable(_integer(0), "most tokens of the thoughts"),
            return_progress=_nullable(_BOOLEAN, "tell in the stream how far the prompt is"),
        ),
        "answer": _json_or_events(_ref("ChatReply")),
    },
    ("post", "/v1/completions"): {
        "body": _body(
            ["prompt"],
            **_MODEL,
            prompt={
                "anyOf": [
                    _STRING,
                    {**_TOKENS, "minItems": 1},
                    {"type": "array", "minItems": 1, "items": _STRING},
                    {"type": "array", "minItems": 1, "items": {**_TOKENS, "minItems": 1}},
                ]
            },
            **SAMPLING,
            **STREAM,
            **FORMAT,
            echo=_nullable(_BOOLEAN),
            logprobs=_nullable(_integer(0, 20)),
            suffix=_nullable(_STRING),
        ),
        "answer": _json_or_events(_ref("CompletionReply")),
    },
    ("post", "/v1/responses"): {
        "body": _body(
            ["input"],
            **_MODEL,
            input={"anyOf": [_STRING, {"type": "array", "items": _OBJECT}]},
            instructions=_nullable(_STRING),
            max_output_tokens=_nullable(_integer(1)),
            store=_nullable(_BOOLEAN, "default true: kept in memory for references to it, as long as there is room"),
            previous_response_id=_nullable(_STRING),
            stream=_nullable(_BOOLEAN),
            temperature=SAMPLING["temperature"],
            top_p=SAMPLING["top_p"],
            tools=_nullable({"type": "array", "items": _OBJECT}),
            tool_choice=CHAT["tool_choice"],
            reasoning=_nullable(_OBJECT),
            thinking_token_budget=_nullable(_integer(0), "most tokens of the thoughts"),
            text=_nullable(_OBJECT),
        ),
        "answer": _json_or_events(_body(["id", "object", "status", "output"])),
    },
    ("post", "/v1/messages"): {
        "body": _body(
            ["messages", "max_tokens"],
            **_MODEL,
            messages={"type": "array", "minItems": 1, "items": _ref("AnthropicMessage")},
            system=_nullable(_STRING, "or an array of text blocks"),
            max_tokens=_integer(1),
            stream=_nullable(_BOOLEAN),
            temperature=SAMPLING["temperature"],
            top_p=SAMPLING["top_p"],
            top_k=SAMPLING["top_k"],
            stop_sequences=_nullable({"type": "array", "items": _STRING}),
            tools=_nullable({"type": "array", "items": _ref("AnthropicTool")}),
            tool_choice=_nullable(_body(["type"], type={"enum": ["auto", "none"]}), "also any, and tool with a name"),
            thinking=_nullable(_body(["type"], type={"enum": ["disabled", "adaptive"]}), "or enabled with a budget"),
            thinking_token_budget=_nullable(_integer(0), "most tokens of the thoughts"),
        ),
        "answer": _json_or_events(_body(["id", "type", "role", "content"])),
        "error": _ref("AnthropicError"),
    },
    ("post", "/v1/messages/count_tokens"): {
        "body": _body(
            ["messages"],
            **_MODEL,
            messages={"type": "array", "minItems": 1, "items": _ref("AnthropicMessage")},
            system=_nullable(_STRING, "or an array of text blocks"),
            tools=_nullable({"type": "array", "items": _ref("AnthropicTool")}),
        ),
        "answer": _json(_body(["input_tokens"], input_tokens=_integer(0))),
        "error": _ref("AnthropicError"),
    },
    ("post", "/tokenize"): {
        "body": {
            "anyOf": [
                _body(
                    ["prompt"],
                    **_MODEL,
                    prompt=_STRING,
                    add_special_tokens=_nullable(_BOOLEAN),
                    return_token_strs=_nullable(_BOOLEAN),
                ),
                _body(["messages"], **_MODEL, **CHAT, return_token_strs=_nullable(_BOOLEAN)),
            ]
        },
        "answer": _json(
            _body(
                ["count", "max_model_len", "tokens"],
                count=_integer(0),
                max_model_len=_integer(1),
                tokens=_TOKENS,
                token_strs={"type": "array", "items": _STRING},
            )
        ),
    },
    ("post", "/detokenize"): {
        "body": _body(["tokens"], **_MODEL, tokens=_TOKENS),
        "answer": _json(_body(["prompt"], prompt=_STRING)),
    },
    ("get", "/tokenizer_info"): {"answer": _json(_body(["tokenizer_class", "eos_token", "chat_template"]))},
}
