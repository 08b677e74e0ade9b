"""The chat page in a real browser, against the real server with scripted replies."""

import threading

import pytest

from tests.server.browser import (
    MARKDOWN,
    PHONE,
    WIDE,
    answers,
    idle,
    needs_browser,
    screenshot,
    send,
    texts,
    with_tools,
)
from tests.server.harness import call, prompt_of

pytestmark = needs_browser

LONG = "\n\n".join(f"Paragraph {i} of a long answer." for i in range(40))


# -- following ---------------------------------------------------------------------------------------------------------


def from_the_end(page) -> float:
    return page.evaluate("() => { const c = get('chat'); return c.scrollHeight - c.scrollTop - c.clientHeight; }")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_it_follows_through_many_messages(page_server, opened, size):
    page = opened(size)
    answers(page_server, LONG[:400], burst=20)
    for i in range(6):
        send(page, f"Question {i}: " + "why " * 30)
        assert from_the_end(page) < 2
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"many-{size['width']}")


def test_it_stays_where_the_reader_scrolled_to(page_server, opened):
    page = opened()
    gate = threading.Event()
    answers(page_server, LONG, burst=20)
    send(page, "first")
    answers(page_server, LONG, burst=20, gate=gate)
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


# -- thoughts and tools ------------------------------------------------------------------------------------------------


def test_several_calls_are_answered_together_each_under_its_name(page_server, opened):
    page = opened()
    with_tools(page)
    answers(page_server, "<think>hm</think>Looking." + call("look", at="sea") + call("look", at="sky"), "so be it")
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
    assert len(page_server.engine.submitted) == 1
    page.get_by_label(labels[1]).fill("grey")
    page.keyboard.press("Enter")
    page.locator("#turns").get_by_text("so be it").wait_for()
    prompt = prompt_of(page_server)
    assert prompt.index("<|observation|>\nblue") < prompt.index("<|observation|>\ngrey")
    assert "grey" in texts(page, ".call")[1]
    assert not page.locator(".call label").count()


def test_a_message_after_a_call_is_a_message(page_server, opened):
    page = opened()
    with_tools(page)
    answers(page_server, call("look", at="sea"), "fine")
    send(page, "hello")
    assert page.locator("#input").get_attribute("placeholder") == "Or go on without the results"
    send(page, "never mind")
    prompt = prompt_of(page_server)
    assert "<|user|>\nnever mind" in prompt
    assert prompt.index("(no result: the user went on without it)") < prompt.index("never mind")


def test_a_thought_without_an_answer_is_no_longer_thinking(page_server, opened):
    page = opened()
    answers(page_server, "<think>only this")
    send(page, "hello")
    assert texts(page, "summary")[0].startswith("Thought")
    assert texts(page, ".assistant > .note") == ["(no answer)"]


def test_the_thought_is_over_once_the_answer_begins(page_server, opened):
    page = opened()
    answers(page_server, "<think>hm, let me see</think>" + "word " * 100, token_s=0.03)
    send(page, "hello", wait=False)
    page.locator("summary", has_text="Thinking").wait_for()
    page.locator("summary").click()
    page.locator(".md", has_text="word word").wait_for()
    assert texts(page, "summary")[0].startswith("Thought for ")
    page.locator("#stop").click()
    idle(page)
    assert page.locator("details .text").inner_text() == "hm, let me see"  # still unfolded


def test_wrong_tools_keep_the_message(page_server, opened):
    page = opened()
    page.locator("#open").click()
    page.locator("#tools").fill("{")
    page.get_by_role("button", name="Done").click()
    send(page, "hello", wait=False)
    assert "Tools are no JSON" in page.locator("#tools-error").inner_text()
    assert page.locator("#input").input_value() == "hello"
    assert not page_server.engine.submitted


# -- everyone ----------------------------------------------------------------------------------------------------------


def test_it_is_used_by_keyboard_and_named_for_screen_readers(page_server, opened):
    page = opened()
    page.wait_for_function("() => document.activeElement === get('input')")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    idle(page)
    assert "hello\nthere" in prompt_of(page_server)
    page.wait_for_function("() => document.activeElement === get('input')")
    page.wait_for_function("() => get('announce').textContent.startsWith('Reply: ')")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, textarea, input, section")].filter((e) =>
          !(e.getAttribute("aria-label") || e.labels?.length || (e.tagName === "BUTTON" && e.textContent.trim())))
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []


def test_the_phone_has_drawers(page_server, opened):
    page = opened(PHONE, has_touch=True)
    screenshot(page, "phone-empty")
    assert page.locator("#chats").is_hidden()
    answers(page_server, MARKDOWN, burst=7)
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
