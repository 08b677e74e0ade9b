"""What each output means: thoughts, answers, calls, and calls that are not what they should be."""

import json

import pytest

from flint_jax.grammar import Calls, Lexer, State, Tags, collect, finish_reason
from tests.grammar.outputs import IDS, TOKENS, TOOLS, WORD, call, in_ones, kinds, parts, read, run, tokens, whole

HARD = '東京 🗼 "quoted" \\ back\nnl'


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "I think</think>Sure." + call("get_weather", city="Paris", days="3"),
            ("I think", "Sure.", [("get_weather", '{"city": "Paris", "days": 3}')]),
        ),
        (
            "I think\n</think>Sure.\n<tool_call>\nget_weather\n"
            "<arg_key>\ncity\n</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key> days </arg_key>\n<arg_value>\n3\n</arg_value>\n</tool_call>\n",
            ("I think", "Sure.", [("get_weather", '{"city": "Paris", "days": 3}')]),
        ),
        ("r</think>" + call("noargs"), ("r", None, [("noargs", "{}")])),
        (
            "r</think>" + call("noargs") + "\n" + call("get_weather", city="A"),
            ("r", None, [("noargs", "{}"), ("get_weather", '{"city": "A"}')]),
        ),
        (
            "still thinking " + call("get_weather", city="Z"),
            ("still thinking", None, [("get_weather", '{"city": "Z"}')]),
        ),
        (
            "r</think>" + call("get_weather", city=HARD),
            ("r", None, [("get_weather", '{"city": "東京 🗼 \\"quoted\\" \\\\ back\\nnl"}')]),
        ),
        ("abc</think>def</think>ghi", ("abc", "def</think>ghi", [])),
        ("abc</thi", ("abc</thi", None, [])),
        ("a<</think><b</<tool_call>noargs</tool_call>", ("a<", "<b</", [("noargs", "{}")])),
        ("all of it is thought", ("all of it is thought", None, [])),
        ("", (None, None, [])),
        ("</think>", (None, None, [])),
        ("<think>opened again</think>x", ("opened again", "x", [])),
        ("a</think>b<think>c</think>d", ("ac", "bd", [])),
        ("r</think>shown </tool_call> as text <arg_key>", ("r", "shown </tool_call> as text <arg_key>", [])),
    ],
)
def test_well_formed(output, expected):
    assert parts(output) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("  hi \n", ("  hi", None)),
        ("  hi \n</think>c", ("  hi", "c")),
        ("a \n</think>c<think> b ", ("a \n b", "c")),
        ("r</think>\n\nhello \n", ("r", "\n\nhello \n")),
        ("r</think> \n", ("r", " \n")),
        ("r</think>before " + call("noargs") + " after\n", ("r", "before  after")),
        ("r</think>\n" + call("noargs") + "\nafter ", ("r", "after")),
        ("r</think>\n" + call("noargs") + "\n" + call("noargs") + "\n", ("r", None)),
    ],
)
def test_white_space_and_text_around_calls(output, expected):
    assert parts(output)[:2] == expected


def test_a_problem_names_its_call():
    message = read(
        "</think>"
        + call("noargs")
        + call("bogus")
        + call("get_weather", city="A").replace("<arg_value>", "!<arg_value>")
    )
    assert [(p.kind, p.index) for p in message.problems] == [("unknown_tool", None), ("stray_text", 1)]


def test_three_calls_of_one_tool_have_their_own_index_and_id():
    message = read("</think>" + "".join(call("get_weather", city=c) for c in ("Oslo", "Quito", "Hanoi")))
    assert [json.loads(c.arguments)["city"] for c in message.calls] == ["Oslo", "Quito", "Hanoi"]
    assert [c.id for c in message.calls] == ["id-0", "id-1", "id-2"]


def test_ids_are_unique_by_default():
    lexer = Lexer(State.CONTENT, TOKENS, TOOLS)
    deltas = [d for t in tokens(call("noargs") * 3, in_ones) for d in lexer.push(*t)]
    ids = [c.id for c in collect(deltas).calls]
    assert len(set(ids)) == 3
    assert all(i.startswith("chatcmpl-tool-") for i in ids)


CITY = "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>"


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par</arg_v",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>12",
        "<tool_call>get_weather<arg_key>ci",
        "<tool_call>get_weather<arg_key>city</arg_key>",
        "<tool_call>get_weather",
        "<tool_call>get_weather\n<arg_",
        "<tool_call>get_wea",
        "<tool_call>",
    ],
)
def test_a_call_that_the_end_of_the_output_cuts_is_no_call_and_stays_visible(block, reason):
    assert parts("r</think>hi " + block, reason=reason) == ("r", "hi " + block, [])
    assert kinds("r</think>hi " + block, reason=reason)[0] in ("open_call", "cut_name", "unknown_tool")
    whole_call = call("noargs")
    assert parts(f"r</think>{whole_call}{block}", reason=reason) == ("r", block, [("noargs", "{}")])


@pytest.mark.parametrize(
    "output",
    [
        "<tool_call>get_wea",
        CITY[8:] + "A",
        CITY[8:-11],
    ],
)
def test_a_call_that_is_cut_by_the_next_one_is_none(output):
    assert parts(f"</think>{output}{call('noargs')}", reason="length") == (None, output, [("noargs", "{}")])
    assert kinds(f"</think>{output}{call('noargs')}") == ["open_call"]


@pytest.mark.parametrize(
    ("output", "calls", "problems"),
    [
        # a second <tool_call> begins anew
        ("</think><tool_call>" + call("noargs"), ["{}"], ["cut_name"]),
        ("</think><tool_call>noargs" + call("get_weather", city="A"), ["{}", '{"city": "A"}'], ["open_call"]),
        (CITY + "A</arg_value>\n" + call("noargs"), ['{"city": "A"}', "{}"], ["open_call"]),
        # closing tags that are missing
        (CITY + "Par</tool_call>", ['{"city": "Par"}'], []),
        ("</think><tool_call>get_weather<arg_key>days</arg_key><arg_value>3\n</tool_call>", ['{"days": 3}'], []),
        ("</think><tool_call>get_weather<arg_key>city<arg_value>A</arg_value></tool_call>", ['{"city": "A"}'], []),
        (
            "</think><tool_call>get_weather<arg_key>ok</arg_key><arg_key>city</arg_key><arg_value>A</arg_value></tool_call>",
            ['{"city": "A"}'],
            ["missing_value"],
        ),
        ("</think><tool_call>get_weather<arg_key>ok</tool_call>", ["{}"], ["missing_value"]),
        (CITY[:-24] + CITY[30:] + "A</arg_value></tool_call>", ['{"city": "A"}'], ["missing_value"]),
        # tags without a meaning where they are, and text that belongs nowhere
        (CITY + "<arg_key></think><think></arg_value></tool_call>", ['{"city": "<arg_key></think><think>"}'], []),
        (CITY[:-11] + " junk <arg_value>A</arg_value></tool_call>", ['{"city": "A"}'], ["stray_text"]),
        # repeated keys: the first value counts
        (CITY + "A</arg_value>" + CITY[30:] + "B</arg_value></tool_call>", ['{"city": "A"}'], ["repeated_key"]),
        (
            f"{CITY}A</arg_value>{CITY[30:]}B</arg_value><arg_key>days</arg_key><arg_value>1</arg_value></tool_call>",
            ['{"city": "A", "days": 1}'],
            ["repeated_key"],
        ),
        (
            "</think><tool_call>get_weather" + "<arg_key>days</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>",
            ['{"days": 1}'],
            ["repeated_key"],
        ),
    ],
)
def test_malformed_calls_stay_valid_json_and_are_reported(output, calls, problems):
    message = read(output, reason="length")
    assert [c.arguments for c in message.calls] == calls
    assert [p.kind for p in message.problems] == problems
    assert (message.reasoning, message.content) == (None, None)


@pytest.mark.parametrize(
    "block",
    [
        call("bogus", city="A <b> \n", days="1"),
        call("bogus"),
        "<tool_call> get_weather junk\n<arg_key>city</arg_key><arg_value>A</arg_value></tool_call>",
        "<tool_call>get</think>_weather</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>bogus<arg_key>cut",
        "<tool_call>get_wea",
        "<tool_call>get_wea<arg_",
    ],
)
def test_a_block_that_names_no_tool_stays_as_text_and_is_reported(block):
    assert parts("r</think>hello " + block) == ("r", "hello " + block, [])
    assert kinds("r</think>hello " + block) == ["unknown_tool"]


def test_after_a_block_that_names_no_tool_all_is_normal_again():
    bogus = call("bogus", a="1")
    expected = ("r", f"{bogus} x", [("noargs", "{}"), ("noargs", "{}")])
    assert parts(f"r</think>{bogus}{call('noargs')} x<think></think>{call('noargs')}") == expected
    assert parts(f"r</think><tool_call>bogus<arg_key>{call('noargs')}")[2] == [("noargs", "{}")]
    assert parts(f"r</think>{bogus}<think>s</think>x</think>")[:2] == ("rs", f"{bogus}x</think>")
    assert "'bogus'" in read("r</think>" + bogus).problems[0].message
    assert "no name" in read("r</think>" + call(" ")).problems[0].message


def test_without_a_list_of_tools_any_name_is_one_and_values_are_strings():
    assert parts(call("what_ever", n="5"), tools=None) == (None, None, [("what_ever", '{"n": "5"}')])
    assert parts("</think>" + call("two words"), tools=None) == (None, call("two words"), [])
    assert parts("</think>" + call("noargs"), tools=[]) == (None, call("noargs"), [])


class TestRequestLimits:
    def test_no_parallel_calls_end_the_output_after_the_first(self):
        output = "</think>a " + call("noargs") + "b" + call("get_weather", city="A") + "c" + call("bogus") + "d"
        assert parts(output, calls=Calls.FIRST) == (None, "a", [("noargs", "{}")])
        assert kinds(output, calls=Calls.FIRST) == []

    def test_the_first_call_is_the_first_of_a_known_tool(self):
        output = "</think>" + call("bogus") + call("get_weather", city="A") + call("noargs")
        assert parts(output, calls=Calls.FIRST) == (None, call("bogus"), [("get_weather", '{"city": "A"}')])

    def test_where_no_calls_may_come_blocks_are_content(self):
        text = "hello " + call("bogus", a="x") + call("noargs") + "\nbye<tool_call>noargs<tool_call>get"
        assert parts("r</think>" + text, calls=Calls.NONE) == ("r", text, [])
        assert kinds("r</think>" + text, calls=Calls.NONE) == []
        assert parts("r" + call("noargs"), calls=Calls.NONE) == ("r", call("noargs"), [])


class TestThinkingOff:
    def test_tags_are_text(self):
        assert parts("a<think>b</think>c", thinking=False) == (None, "a<think>b</think>c", [])
        assert parts("a</thi", thinking=False) == (None, "a</thi", [])

    def test_calls_still_work(self):
        assert parts("</think>" + call("noargs"), thinking=False) == (None, "</think>", [("noargs", "{}")])


class TestTagTokens:
    """A tag that is a token acts as that token and not by its characters."""

    def test_lookalikes_are_text(self):
        output = f"about </think> and {call('noargs')}"
        pairs = list(tokens(output, in_ones, block_tags=False))
        assert collect(run(pairs)).reasoning == output
        pairs = [(IDS["<tool_call>"], "<tool_call>"), *tokens(output[6:], in_ones, block_tags=False)]
        message = collect(run([*pairs, (IDS["</tool_call>"], "</tool_call>")]))
        assert message.content == f"<tool_call>{output[6:]}</tool_call>"

    def test_lookalikes_inside_a_value_are_text(self):
        pairs = [*tokens(CITY, in_ones), *tokens("</tool_call><tool_call>", in_ones, block_tags=False)]
        pairs += tokens("</arg_value></tool_call>", in_ones, argument_tags=False)
        message = collect(run(pairs))
        assert [c.arguments for c in message.calls] == ['{"city": "</tool_call><tool_call>"}']
        assert message.problems == ()

    def test_one_tag_can_be_a_token_and_another_not(self):
        tags = Tags.of({"</think>": 3})
        pairs = [(WORD, "a</think>b<tool"), (3, "</think>"), (WORD, "c<tool_"), (WORD, "call>noargs</tool_call>")]
        message = collect(run(pairs, tags))
        assert (message.reasoning, message.content) == ("a</think>b<tool", "c")
        assert [c.name for c in message.calls] == ["noargs"]

    def test_a_tag_token_ends_what_might_have_become_a_tag(self):
        pairs = [*tokens(CITY, in_ones), (WORD, "A</arg"), (IDS["</tool_call>"], "</tool_call>"), (WORD, "_value>")]
        message = collect(run(pairs))
        assert [c.arguments for c in message.calls] == ['{"city": "A</arg"}']
        assert message.content == "_value>"

    def test_characters_held_by_the_detokeniser_come_before_the_tag(self):
        pairs = [(WORD, "a"), (IDS["</think>"], "\ufffd</think>"), (WORD, "b")]
        assert collect(run(pairs)).reasoning == "a\ufffd"

    @pytest.mark.parametrize("start", [State.REASONING, State.CONTENT])
    def test_tags_act_and_are_shown_though_the_detokeniser_leaves_them_out(self, start):
        output = "a</think>b" + call("get_weather", city="C</think>", days="2") + "</tool_call>"
        shown = collect(run(tokens(output, whole), start=start))
        pairs = [(i, "" if i != WORD else text) for i, text in tokens(output, whole)]
        assert collect(run(pairs, start=start)) == shown
        assert shown.content.endswith("b")  # the doubled </tool_call> is none
        assert shown.calls[0].arguments == '{"city": "C</think>", "days": 2}'

    def test_text_without_a_token_is_read_like_any(self):
        assert collect(run([(None, "a</think>")], Tags())).reasoning == "a"


def test_reasoning_tokens_count_the_tags_of_thinking_only():
    def count(pairs, start):
        lexer = Lexer(start, TOKENS, TOOLS)
        for pair in pairs:
            lexer.push(*pair)
        return lexer.reasoning_tokens

    assert count(tokens("<think>abc</think>de", in_ones), State.CONTENT) == 5
    assert count(tokens("abc</think>de", in_ones), State.REASONING) == 4
    assert count(tokens("abc" + call("noargs"), in_ones), State.REASONING) == 3
    assert count([(None, "abc")], State.REASONING) == 0


@pytest.mark.parametrize(
    ("engine", "calls", "named", "told"),
    [
        ("stop", True, False, "tool_calls"),
        ("stop", False, False, "stop"),
        ("stop", True, True, "stop"),
        ("length", True, False, "length"),
        ("length", False, False, "length"),
        ("abort", True, False, "abort"),
    ],
)
def test_finish_reason(engine, calls, named, told):
    assert finish_reason(engine, calls=calls, named=named) == told
