"""The chat page in a real browser, against the real server with scripted replies."""

import json
import threading

import pytest

from tests.server.browser import PHONE, WIDE, needs_browser, open_browser, screenshot
from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import call, running, tokenizer, wait_until

pytestmark = needs_browser

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}])
LONG = "\n\n".join(f"Paragraph {i} of a long answer." for i in range(40))


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def _server():
    with running(engine=FakeEngine(max_model_len=8192)) as server:
        yield server


@pytest.fixture
def server(_server):
    _server.reset()
    yield _server
    _server.reset()


@pytest.fixture
def opened(browser, server):
    """Open the page: ``opened()``; it must end without an error in its console."""
    contexts, problems = [], []

    def go(size=WIDE, url=None, **options):
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if "Content Security Policy" in m.text else None)
        page.goto(url or server.url)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture(scope="module")
def bare(browser, _server):
    """One page for tests of what its script computes."""
    page = browser.new_page()
    page.goto(_server.url)
    yield page
    page.close()


def send(page, text, *, wait=True):
    page.locator("#input").fill(text)
    page.keyboard.press("Enter")
    if wait:
        idle(page)


def idle(page):
    page.locator("#send").wait_for(state="visible")


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def answers(server, *replies, **how):
    """Reply by reply; the last one again and again."""
    left = [tokenizer().encode(r) for r in replies]
    server.engine.script = lambda prompt, params: Script(left.pop(0) if len(left) > 1 else left[0], **how)


def sent(server) -> str:
    return tokenizer().decode(server.engine.submitted[-1].prompt)


# -- following ---------------------------------------------------------------------------------------------------------


def from_the_end(page) -> float:
    return page.evaluate("() => { const c = get('chat'); return c.scrollHeight - c.scrollTop - c.clientHeight; }")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_it_follows_through_many_messages(server, opened, size):
    page = opened(size)
    answers(server, LONG[:400], burst=20)
    for i in range(6):
        send(page, f"Question {i}: " + "why " * 30)
        assert from_the_end(page) < 2
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"many-{size['width']}")


def test_it_stays_where_the_reader_scrolled_to(server, opened):
    page = opened()
    gate = threading.Event()
    answers(server, LONG, burst=20)
    send(page, "first")
    answers(server, LONG, burst=20, gate=gate)
    send(page, "second", wait=False)
    page.locator(".wait").wait_for()
    page.locator("#chat").hover()
    page.mouse.wheel(0, -400)
    page.locator("#down").wait_for(state="visible")
    before = page.evaluate("get('chat').scrollTop")
    gate.set()
    idle(page)
    assert page.evaluate("get('chat').scrollTop") == before
    assert from_the_end(page) > 400
    page.locator("#down").click()
    page.wait_for_function("() => { const c = get('chat'); return c.scrollHeight - c.scrollTop - c.clientHeight < 2; }")
    assert page.locator("#down").is_hidden()


# -- Markdown ----------------------------------------------------------------------------------------------------------

MARKDOWN = """# Title

Some **bold**, *slanted*, `code <b>` and [a link](https://example.org/x_(y)).
1. one
2. two
   - inner

| a | b |
|---|---|
| 1 | `x|y` |

> quoted

```python
def f():
    return "<script>"
```
"""


def test_markdown_is_shown_and_code_is_copied(server, opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    answers(server, MARKDOWN, burst=7)
    send(page, "show me")
    md = page.locator(".md")
    assert md.locator("h3").inner_text() == "Title"
    assert md.locator("strong").inner_text() == "bold"
    assert md.locator("em").inner_text() == "slanted"
    assert md.locator("p code").inner_text() == "code <b>"
    assert md.locator("a").get_attribute("href") == "https://example.org/x_(y)"
    assert md.locator("a").get_attribute("rel") == "noopener noreferrer"
    assert md.locator("ol > li").count() == 2
    assert md.locator("ol ul li").inner_text() == "inner"
    assert texts(page, ".md td") == ["1", "x|y"]
    assert md.locator("blockquote").inner_text() == "quoted"
    md.get_by_role("button", name="Copy this code").click()
    assert page.evaluate("navigator.clipboard.readText()") == 'def f():\n    return "<script>"'
    page.get_by_role("button", name="Copy this reply").click()
    page.wait_for_function("async (want) => await navigator.clipboard.readText() === want", arg=MARKDOWN.rstrip("\n"))
    screenshot(page, "markdown")


@pytest.mark.parametrize(
    "hostile",
    [
        '<img src=x onerror="window.hit=1">',
        "<script>window.hit=1</script>",
        "[x](javascript:window.hit=1)",
        "[x](JaVaScRiPt:window.hit=1)",
        "[x](data:text/html,<script>window.hit=1</script>)",
        "![x](https://example.org/spy.png)",
        '```html"><img src=x onerror=window.hit=1>\nx\n```',
        '[a](https://example.org/"onmouseover="window.hit=1)',
        "[x](vbscript:window.hit=1)",
    ],
)
def test_nothing_of_a_reply_becomes_a_script_or_a_picture(server, opened, hostile):
    page = opened()
    answers(server, hostile)
    send(page, hostile)
    assert page.evaluate("window.hit") is None
    shown = page.evaluate(
        "() => [...get('turns').querySelectorAll('*')].map((e) => [e.tagName, ...e.getAttributeNames()])"
    )
    assert not {tag for tag, *_ in shown} & {"IMG", "SCRIPT", "IFRAME", "STYLE", "OBJECT"}
    assert not [name for _, *names in shown for name in names if name.startswith("on")]
    for href in page.evaluate("() => [...get('turns').querySelectorAll('a')].map((a) => a.href)"):
        assert href.startswith("https://example.org/")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("***both***", "<p><em>|<strong>both"),
        ("2 * 3 * 4", "<p>2 * 3 * 4"),
        ("snake_case_name", "<p>snake_case_name"),
        ("**open", "<p>**open"),
        ("a\nb", "<p>a<br>b"),
        ("`a``b`", "<p><code>a``b"),
        ("\\*not\\*", "<p>*not*"),
        ("- a\n\n  b\n- c", "<ul><li><p>a</p><p>b</p></li><li><p>c"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b'),
        ("- a\n1. b", "<ul><li>a</li></ul><ol><li>b"),
        ("see https://example.org/a_b).", '<p>see <a href="https://example.org/a_b"'),
        ("Text\n```\ncode\n```\nmore", "<pre><code>code"),
        ("```\nunclosed", "<pre><code>unclosed"),
        ("- x\n  ```\n  - y\n  ```\n- z", "<pre><code>- y"),
        ("####### seven", "<p>####### seven"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b"),
    ],
)
def test_markdown_case_by_case(bare, source, shown):
    html = bare.evaluate("(t) => { const m = new Markdown(); m.show(t); return m.element.innerHTML; }", source)
    html = html.replace(' tabindex="0"', "")
    if "|<" in shown:
        assert html in ("<p><em><strong>both</strong></em></p>", "<p><strong><em>both</em></strong></p>")
    else:
        assert shown in html


@pytest.mark.parametrize(
    "piece", ["*a ", "[", "`", "**", "_a", "> ", "- ", "| a |\n|", "[a](", "``x`", "~~", "<", "\\"]
)
def test_no_text_hangs_the_page(bare, piece):
    took = bare.evaluate(
        "(t) => { const began = performance.now(); new Markdown().show(t); return performance.now() - began; }",
        piece * (40000 // len(piece)),
    )
    assert took < 3000


def test_a_growing_text_keeps_the_nodes_that_did_not_change(opened):
    page = opened()
    assert page.evaluate(
        """() => {
          const m = new Markdown();
          m.show("one\\n\\ntwo");
          const first = m.element.firstChild;
          m.show("one\\n\\ntwo and more\\n\\nthree");
          return first === m.element.firstChild && m.element.children.length === 3;
        }"""
    )


# -- thoughts and tools ------------------------------------------------------------------------------------------------


def with_tools(page):
    page.locator("#open").click()
    page.locator("#tools").fill(TOOLS)
    page.get_by_role("button", name="Done").click()


def test_several_calls_are_answered_together_each_under_its_name(server, opened):
    page = opened()
    with_tools(page)
    answers(server, "<think>hm</think>Looking." + call("look", at="sea") + call("look", at="sky"), "so be it")
    send(page, "hello")
    assert texts(page, "summary")[0].startswith("Thought")  # and not "Thinking", though the reply ended with a call
    assert texts(page, ".call .name") == ["Tool call: look"] * 2
    labels = texts(page, ".call label")
    assert labels == ["Result of look (1 of 2)", "Result of look (2 of 2)"]
    assert page.evaluate("() => document.activeElement.dataset.call")
    results = page.get_by_role("button", name="Send 2 results")
    assert results.is_disabled()
    screenshot(page, "calls")
    page.get_by_label(labels[0]).fill("blue")
    page.keyboard.press("Enter")  # the second is still empty: nothing goes out alone
    assert len(server.engine.submitted) == 1
    page.get_by_label(labels[1]).fill("grey")
    page.keyboard.press("Enter")
    page.locator("#turns").get_by_text("so be it").wait_for()
    prompt = sent(server)
    assert prompt.index("<|observation|>\nblue") < prompt.index("<|observation|>\ngrey")
    assert "grey" in texts(page, ".call")[1]
    assert not page.locator(".call label").count()


def test_a_message_after_a_call_is_a_message(server, opened):
    page = opened()
    with_tools(page)
    answers(server, call("look", at="sea"), "fine")
    send(page, "hello")
    assert page.locator("#input").get_attribute("placeholder") == "Or go on without the results"
    send(page, "never mind")
    prompt = sent(server)
    assert "<|user|>\nnever mind" in prompt
    assert prompt.index("(no result: the user went on without it)") < prompt.index("never mind")


def test_a_thought_without_an_answer_is_no_longer_thinking(server, opened):
    page = opened()
    answers(server, "<think>only this")
    send(page, "hello")
    assert texts(page, "summary")[0].startswith("Thought")


def test_the_thought_is_over_once_the_answer_begins(server, opened):
    page = opened()
    answers(server, "<think>hm, let me see</think>" + "word " * 100, token_s=0.03)
    send(page, "hello", wait=False)
    page.locator("summary", has_text="Thinking").wait_for()
    page.locator("summary").click()
    page.locator(".md", has_text="word word").wait_for()
    assert texts(page, "summary")[0].startswith("Thought for ")
    page.locator("#stop").click()
    idle(page)
    assert page.locator("details .text").inner_text() == "hm, let me see"  # still unfolded


def test_wrong_tools_keep_the_message(server, opened):
    page = opened()
    page.locator("#open").click()
    page.locator("#tools").fill("{")
    page.get_by_role("button", name="Done").click()
    send(page, "hello", wait=False)
    assert "Tools are no JSON" in page.locator("#tools-error").inner_text()
    assert page.locator("#input").input_value() == "hello"
    assert not server.engine.submitted


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_new_chat_during_a_reply_leaves_the_reply_where_it_belongs(server, opened):
    page = opened()
    gate = threading.Event()
    answers(server, "the first answer", gate=gate)
    send(page, "first question", wait=False)
    page.locator(".wait").wait_for()
    page.get_by_role("button", name="New chat").click()
    gate.set()
    wait_until(server.engine.idle)
    page.wait_for_function("() => !get('list').textContent.includes('…')")
    assert page.locator("#turns").inner_text() == ""
    answers(server, "the second answer")
    send(page, "second question")
    assert "first" not in sent(server)
    assert "first question" not in page.locator("#turns").inner_text()
    page.locator("#list .chat", has_text="first question").click()
    assert "the first answer" in page.locator("#turns").inner_text()
    assert "second" not in page.locator("#turns").inner_text()


def test_a_reload_loses_nothing(server, opened):
    page = opened()
    page.locator("#open").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.25")
    page.keyboard.press("Escape")
    answers(server, "<think>hm</think>kept **well**")
    send(page, "keep this")
    page.reload()
    page.locator("#list .chat", has_text="keep this").click()
    assert page.locator(".md strong").inner_text() == "well"
    assert page.locator("#system").input_value() == "Be brief."
    send(page, "and this")
    prompt = sent(server)
    assert (
        prompt.index("Be brief.") < prompt.index("keep this") < prompt.index("kept **well**") < prompt.index("and this")
    )
    assert server.engine.submitted[-1].params.temperature == 0.25


def test_a_reply_that_a_reload_cuts_is_kept_as_far_as_it_came(server, opened):
    page = opened()
    answers(server, "word " * 400, token_s=0.02)
    send(page, "go on", wait=False)
    page.locator(".md", has_text="word word").wait_for()
    page.reload()
    page.locator("#list .chat").click()
    assert "word word" in page.locator(".md").inner_text()
    assert "stopped" in page.locator(".note").inner_text()


def test_a_conversation_is_deleted(server, opened):
    page = opened()
    page.on("dialog", lambda dialog: dialog.accept())
    send(page, "to be gone")
    page.get_by_role("button", name="Delete to be gone").click()
    assert page.locator("#list li").count() == 0
    page.reload()
    assert page.locator("#list li").count() == 0
    assert page.locator("#empty").is_visible()


def test_a_full_browser_is_told_of_and_loses_nothing_older(server, opened):
    page = opened()
    send(page, "older")
    page.evaluate(
        """() => {
          let text = "x".repeat(1 << 20);
          for (let i = 0; text; i += 1) {
            try { localStorage.setItem("filler" + i, text); } catch { text = text.slice(text.length / 2 + 1); }
          }
        }"""
    )
    page.get_by_role("button", name="New chat").click()
    send(page, "newer " * 20)
    assert "no room" in page.locator("#notice").inner_text()
    assert "bcd" in page.locator("#turns").inner_text() or "abc" in page.locator("#turns").inner_text()
    page.evaluate(
        "Object.keys(localStorage).filter((k) => k.startsWith('filler')).forEach((k) => delete localStorage[k])"
    )
    send(page, "again")
    assert page.locator("#notice").inner_text() == ""
    assert page.locator("#list .chat").count() == 2


def test_edit_and_regenerate(server, opened):
    page = opened()
    answers(server, "one", "two", "three")
    send(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#turns").get_by_text("two", exact=True).wait_for()
    idle(page)
    assert texts(page, ".md") == ["two"]
    assert "one" not in sent(server)
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit message").fill("better")
    page.keyboard.press("Enter")
    page.locator("#turns").get_by_text("three", exact=True).wait_for()
    assert texts(page, ".user .text") == ["better"]
    assert "first" not in sent(server)
    assert "two" not in sent(server)


def test_what_was_to_be_replaced_stays_when_that_fails(server, opened):
    page = opened()
    answers(server, "the old answer")
    send(page, "first")
    answers(server, "x", fail_after=0)
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#notice", has_text="as it was").wait_for()
    assert texts(page, ".md") == ["the old answer"]
    page.locator("#input").focus()
    page.keyboard.press("ArrowUp")
    page.get_by_label("Edit message").fill("better")
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="as it was").wait_for()
    assert page.get_by_label("Edit message").input_value() == "better"
    page.keyboard.press("Escape")
    assert texts(page, ".user .text") == ["first"]
    page.reload()
    page.locator("#list .chat").click()
    assert texts(page, ".md") == ["the old answer"]


def test_two_tabs_do_not_write_over_each_other(server, opened):
    page = opened()
    send(page, "from the first")
    other = page.context.new_page()
    other.goto(server.url)
    other.locator("#list .chat").click()
    send(other, "from the second")
    page.locator("#turns", has_text="from the second").wait_for()
    send(page, "again the first")
    assert sent(server).index("from the second") < sent(server).index("again the first")


def test_entries_that_the_page_did_not_write_are_passed_over(server, opened):
    page = opened()
    page.evaluate(
        """() => {
          localStorage.setItem("flint-chat-a", "{");
          localStorage.setItem("flint-chat-b", '{"id": "b", "messages": [null, {"role": 5}]}');
          localStorage.setItem("flint-settings", "[");
        }"""
    )
    page.reload()
    send(page, "hello")
    assert page.locator("#list .chat").count() == 1


# -- failures, waiting, counts -----------------------------------------------------------------------------------------


def test_a_failed_message_is_tried_again_and_never_silently_sent_with_the_next(server, opened):
    page = opened()
    answers(server, "x", fail_after=0)
    send(page, "bad one")
    assert page.get_by_role("alert").first.is_visible()
    answers(server, "fine now")
    page.get_by_role("button", name="Try again").click()
    page.locator("#turns").get_by_text("fine now").wait_for()
    answers(server, "x", fail_after=0)
    send(page, "bad two")
    answers(server, "good")
    send(page, "good two")
    assert "bad one" in sent(server)
    assert "bad two" not in sent(server)
    assert "bad two" not in page.locator("#turns").inner_text()


def test_a_reply_that_breaks_off_is_kept_and_said_to_be(server, opened):
    page = opened()
    answers(server, "half of it and more", fail_after=6, token_s=0.01)
    send(page, "hello")
    half = texts(page, ".md")[0]
    assert half
    assert page.get_by_role("alert").first.inner_text()
    answers(server, "whole")
    page.get_by_role("button", name="Try again").click()
    page.locator("#turns").get_by_text("whole").wait_for()
    assert texts(page, ".md") == ["whole"]
    assert half not in sent(server)


def test_results_that_got_no_answer_are_sent_again(server, opened):
    page = opened()
    with_tools(page)
    answers(server, call("look", at="sea"))
    send(page, "hello")
    answers(server, "x", fail_after=0)
    page.get_by_label("Result of look").fill("blue")
    page.keyboard.press("Enter")
    idle(page)
    answers(server, "so it is")
    page.get_by_role("button", name="Try again").click()
    page.locator("#turns").get_by_text("so it is").wait_for()
    assert sent(server).count("blue") == 1


def test_half_a_call_is_not_to_be_answered(server, opened):
    page = opened()
    with_tools(page)
    text = "Looking." + call("look", at="the sea " * 30)
    answers(server, text, fail_after=len(tokenizer().encode(text)) - 20, token_s=0.005)
    send(page, "hello")
    assert not page.locator("textarea[data-call]").count()
    assert "Looking." in page.locator(".md").inner_text()


def test_stop_keeps_what_was_said(server, opened):
    page = opened()
    answers(server, "word " * 400, token_s=0.02)
    send(page, "go on", wait=False)
    page.locator(".md", has_text="word word").wait_for()
    page.keyboard.press("Escape")
    idle(page)
    assert "word word" in page.locator(".md").inner_text()
    assert "stopped" in page.locator(".note").last.inner_text()
    wait_until(server.engine.idle)
    answers(server, "ok")
    send(page, "more")
    assert "word word" in sent(server)


def test_progress_of_a_long_prompt(server, opened):
    page = opened()
    answers(server, "done", token_s=0.4)
    send(page, "long " * 500, wait=False)
    bar = page.locator(".wait progress")
    bar.wait_for()
    assert "Reading the prompt: " in page.locator(".wait").inner_text()
    screenshot(page, "progress")
    idle(page)
    assert not page.locator(".wait").count()


def test_counts_and_speed_are_true(server, opened):
    page = opened()
    tokens = tokenizer().encode("a reply of some length, told slowly, token by token")
    server.engine.script = lambda prompt, params: Script(tokens, token_s=0.02)
    send(page, "hello")
    note = page.locator(".assistant .note").inner_text()
    parts = dict(reversed(p.split(" ", 1)) for p in note.split(" · ") if p[0].isdigit())
    assert int(parts["prompt tokens"]) == len(server.engine.submitted[-1].prompt)
    assert abs(int(parts["tokens"]) - len(tokens)) <= 1  # the end token
    assert 10 < float(parts["tokens/s"]) <= 55


def test_a_reply_that_something_between_held_back_has_no_speed(opened):
    page = opened()
    chunks = [
        {
            "choices": [{"index": 0, "delta": {"content": f"word {i} "}, "finish_reason": None}],
            "usage": {"prompt_tokens": 3, "completion_tokens": i},
        }
        for i in range(1, 200)
    ]
    body = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    send(page, "hello")
    note = page.locator(".assistant .note").inner_text()
    assert "199 tokens" in note
    assert "tokens/s" not in note


def test_one_burst_has_no_speed(server, opened):
    page = opened()
    answers(server, "all of it at once", burst=100)
    send(page, "hello")
    note = page.locator(".assistant .note").inner_text()
    assert "tokens" in note
    assert "tokens/s" not in note


def test_it_says_what_the_model_is_and_finds_a_server_that_comes_back(browser, opened):
    with running(loaded=False) as server:
        page = opened(url=server.url)
        page.locator("#status.bad").wait_for()
        screenshot(page, "loading")
        server.state.set_ready(server.served)
        page.wait_for_function("() => get('status').textContent === 'flint-test, context 256'")
        assert page.locator("#what").inner_text() == "flint-test"
        assert "256 tokens" in page.locator("#about").inner_text()
        page.route("**/*", lambda route: route.abort())  # away
        send(page, "hello?")
        assert "does not answer" in page.get_by_role("alert").first.inner_text()
        page.locator("#status.bad").wait_for()
        screenshot(page, "away")
        page.unroute("**/*")
        page.wait_for_function("() => get('status').textContent === 'flint-test, context 256'")
        page.get_by_role("button", name="Try again").click()
        page.locator("#turns").get_by_text("bcd").wait_for()


def test_a_key_is_asked_for_and_used(opened):
    with running(api_keys=("k",)) as server:
        page = opened(url=server.url)
        page.wait_for_function("() => get('status').textContent.includes('asks for an API key')")
        page.locator("#open").click()
        page.locator("#key").fill("k")
        page.keyboard.press("Tab")
        page.wait_for_function("() => get('status').textContent === 'flint-test, context 256'")
        page.keyboard.press("Escape")
        send(page, "hi")
        assert texts(page, ".md") == ["bcd"]
        assert page.evaluate("() => JSON.stringify(localStorage).includes('\"k\"')") is False


# -- everyone ----------------------------------------------------------------------------------------------------------


def test_it_is_used_by_keyboard_and_named_for_screen_readers(server, opened):
    page = opened()
    page.wait_for_function("() => document.activeElement === get('input')")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    idle(page)
    assert "hello\nthere" in sent(server)
    page.wait_for_function("() => document.activeElement === get('input')")
    page.wait_for_function("() => get('announce').textContent.startsWith('Reply: ')")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, textarea, input, section")].filter((e) =>
          !(e.getAttribute("aria-label") || e.labels?.length || (e.tagName === "BUTTON" && e.textContent.trim())))
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []


def test_the_phone_has_drawers(server, opened):
    page = opened(PHONE, has_touch=True)
    screenshot(page, "phone-empty")
    assert page.locator("#chats").is_hidden()
    answers(server, MARKDOWN, burst=7)
    page.locator("#input").fill("hello " + "x" * 300)
    page.locator("#input").press("Enter")  # breaks the line here
    assert page.locator("#input").input_value().endswith("x\n")
    page.locator("#send").tap()
    idle(page)
    screenshot(page, "phone-chat")
    page.get_by_role("button", name="Conversations").tap()
    page.locator("#list .chat").wait_for()
    screenshot(page, "phone-chats")
    page.keyboard.press("Escape")
    assert page.locator("#chats").is_hidden()
    page.locator("#open").tap()
    screenshot(page, "phone-settings")
    page.get_by_role("button", name="Done").tap()
    assert not page.locator("#settings").is_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_it_looks_right_empty_and_in_the_dark(opened):
    page = opened(color_scheme="dark")
    page.wait_for_function("() => get('what').textContent === 'flint-test'")
    screenshot(page, "dark-empty")
    page.locator("#open").click()
    screenshot(page, "dark-settings")
    assert page.locator("#ideas button").count() == 3
