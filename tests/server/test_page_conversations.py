"""The chat page in a real browser: conversations, kept, edited and apart from each other."""

import threading

from tests.server.browser import answers, idle, needs_browser, send, texts
from tests.server.harness import prompt_of, wait_until

pytestmark = needs_browser


def test_a_new_chat_during_a_reply_leaves_the_reply_where_it_belongs(page_server, opened):
    page = opened()
    gate = threading.Event()
    answers(page_server, "the first answer", gate=gate)
    send(page, "first question", wait=False)
    page.locator(".wait").wait_for()
    page.get_by_role("button", name="New chat").click()
    gate.set()
    wait_until(page_server.engine.idle)
    page.wait_for_function("() => !get('list').textContent.includes('…')")
    assert page.locator("#turns").inner_text() == ""
    answers(page_server, "the second answer")
    send(page, "second question")
    assert "first" not in prompt_of(page_server)
    assert "first question" not in page.locator("#turns").inner_text()
    page.locator("#list .chat", has_text="first question").click()
    assert "the first answer" in page.locator("#turns").inner_text()
    assert "second" not in page.locator("#turns").inner_text()


def test_a_reload_loses_nothing(page_server, opened):
    page = opened()
    page.locator("#open").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.25")
    page.keyboard.press("Escape")
    answers(page_server, "<think>hm</think>kept **well**")
    send(page, "keep this")
    page.reload()
    page.locator("#list .chat", has_text="keep this").click()
    assert page.locator(".md strong").inner_text() == "well"
    assert page.locator("#system").input_value() == "Be brief."
    send(page, "and this")
    prompt = prompt_of(page_server)
    assert (
        prompt.index("Be brief.") < prompt.index("keep this") < prompt.index("kept **well**") < prompt.index("and this")
    )
    assert page_server.engine.submitted[-1].params.temperature == 0.25


def test_a_reply_that_a_reload_cuts_is_kept_as_far_as_it_came(page_server, opened):
    page = opened()
    answers(page_server, "word " * 400, token_s=0.02)
    send(page, "go on", wait=False)
    page.locator(".md", has_text="word word").wait_for()
    page.reload()
    page.locator("#list .chat").click()
    assert "word word" in page.locator(".md").inner_text()
    assert "stopped" in page.locator(".note").inner_text()


def test_a_conversation_is_deleted(page_server, opened):
    page = opened()
    page.on("dialog", lambda dialog: dialog.accept())
    send(page, "to be gone")
    page.get_by_role("button", name="Delete to be gone").click()
    assert page.locator("#list li").count() == 0
    page.reload()
    assert page.locator("#list li").count() == 0
    assert page.locator("#empty").is_visible()


def test_a_full_browser_is_told_of_and_loses_nothing_older(page_server, opened):
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


def test_edit_and_regenerate(page_server, opened):
    page = opened()
    answers(page_server, "one", "two", "three")
    send(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#turns").get_by_text("two", exact=True).wait_for()
    idle(page)
    assert texts(page, ".md") == ["two"]
    assert "one" not in prompt_of(page_server)
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit message").fill("better")
    page.keyboard.press("Enter")
    page.locator("#turns").get_by_text("three", exact=True).wait_for()
    assert texts(page, ".user .text") == ["better"]
    assert "first" not in prompt_of(page_server)
    assert "two" not in prompt_of(page_server)


def test_what_was_to_be_replaced_stays_when_that_fails(page_server, opened):
    page = opened()
    answers(page_server, "the old answer")
    send(page, "first")
    answers(page_server, "x", fail_after=0)
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


def test_two_tabs_do_not_write_over_each_other(page_server, opened):
    page = opened()
    send(page, "from the first")
    other = page.context.new_page()
    other.goto(page_server.url)
    other.locator("#list .chat").click()
    send(other, "from the second")
    page.locator("#turns", has_text="from the second").wait_for()
    send(page, "again the first")
    assert prompt_of(page_server).index("from the second") < prompt_of(page_server).index("again the first")


def test_entries_that_the_page_did_not_write_are_passed_over(page_server, opened):
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
