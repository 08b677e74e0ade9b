"""The state that the prompt leaves the output in."""

import pytest

from flint_jax.grammar import State, start_state, thinking_enabled
from tests.grammar.outputs import parts

OLD = "<|system|>\nBe kind.<|user|>\nhi<|assistant|>\n<think>old</think>yes<|user|>\nand <think>?<|assistant|>\n"
PROMPTS = {"nothing": OLD, "open": OLD + "<think>", "closed": OLD + "<think></think>"}


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("nothing", "<think>abc</think>def", ("abc", "def")),
        ("nothing", "abc</think>def", (None, "abcdef")),
        ("nothing", "def", (None, "def")),
        ("open", "<think>abc</think>def", ("abc", "def")),
        ("open", "abc</think>def", ("abc", "def")),
        ("open", "def", ("def", None)),
        ("closed", "<think>abc</think>def", ("abc", "def")),
        ("closed", "abc</think>def", (None, "abcdef")),
        ("closed", "def", (None, "def")),
    ],
)
def test_output_is_read_from_where_the_prompt_ends(prompt, output, expected):
    assert parts(output, start=start_state(PROMPTS[prompt]))[:2] == expected


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("", False),
        ("hello", False),
        ("im_start assistant\n<think>\n", True),
        ("user: what is <think>? assistant:", False),
        ("<think>old</think> im_start assistant\n", False),
        ("<|user|>what is <think>", False),
        ("<|assistant|><think>\n", True),
        ("<|assistant|><think>half a thou", True),
        ("<|assistant|><think>a</think>half an ans", False),
        ("<|assistant|><think>a</think>b<think>c", True),
        ("<|assistant|><think>a<tool_call>f</tool_call>", False),
        ("<|assistant|><think>a<|observation|>", False),
        ("<|assistant|><think>a<|system|>", False),
    ],
)
def test_start_state(prompt, opens):
    assert start_state(prompt) is (State.REASONING if opens else State.CONTENT)


def test_other_turn_marks():
    assert start_state("[user]<think>[bot]<think>x", ["[user]", "[bot]"]) is State.REASONING
    assert start_state("[user]<think>[bot]", ["[user]", "[bot]"]) is State.CONTENT


@pytest.mark.parametrize(
    ("kwargs", "on"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": False}, False),
        ({"enable_thinking": False, "thinking": True}, True),
        ({"enable_thinking": None}, True),
        ({"other": False}, True),
    ],
)
def test_thinking_switch(kwargs, on):
    assert thinking_enabled(kwargs) is on
