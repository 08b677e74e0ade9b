"""The chat page in a real browser: failures, waiting, counts and the server's comings and goings."""

import json

from tests.server.browser import answers, idle, needs_browser, screenshot, send, texts, with_tools
from tests.server.fake_engine import Script
from tests.server.harness import call, prompt_of, running, tokenizer, wait_until

pytestmark = needs_browser


def test_a_failed_message_is_tried_again_and_never_silently_sent_with_the_next(page_server, opened):
    page = opened()
    answers(page_server, "x", fail_after=0)
    send(page, "bad one")
    assert page.get_by_role("alert").first.is_visible()
    answers(page_server, "fine now")
    page.get_by_role("button", name="Try again").click()
    page.locator("#turns").get_by_text("fine now").wait_for()
    answers(page_server, "x", fail_after=0)
    send(page, "bad two")
    answers(page_server, "good")
    send(page, "good two")
    assert "bad one" in prompt_of(page_server)
    assert "bad two" not in prompt_of(page_server)
    assert "bad two" not in page.locator("#turns").inner_text()


def test_a_reply_that_breaks_off_is_kept_and_said_to_be(page_server, opened):
    page = opened()
    answers(page_server, "half of it and more", fail_after=6, token_s=0.01)
    send(page, "hello")
    half = texts(page, ".md")[0]
    assert half
    assert page.get_by_role("alert").first.inner_text()
    answers(page_server, "whole")
    page.get_by_role("button", name="Try again").click()
    page.locator("#turns").get_by_text("whole").wait_for()
    assert texts(page, ".md") == ["whole"]
    assert half not in prompt_of(page_server)


def test_results_that_got_no_answer_are_sent_again(page_server, opened):
    page = opened()
    with_tools(page)
    answers(page_server, call("look", at="sea"))
    send(page, "hello")
    answers(page_server, "x", fail_after=0)
    page.get_by_label("Result of look").fill("blue")
    page.keyboard.press("Enter")
    idle(page)
    answers(page_server, "so it is")
    page.get_by_role("button", name="Try again").click()
    page.locator("#turns").get_by_text("so it is").wait_for()
    assert prompt_of(page_server).count("blue") == 1


def test_half_a_call_is_not_to_be_answered(page_server, opened):
    page = opened()
    with_tools(page)
    text = "Looking." + call("look", at="the sea " * 30)
    answers(page_server, text, fail_after=len(tokenizer().encode(text)) - 20, token_s=0.005)
    send(page, "hello")
    assert not page.locator("textarea[data-call]").count()
    assert "Looking." in page.locator(".md").inner_text()


def test_stop_keeps_what_was_said(page_server, opened):
    page = opened()
    answers(page_server, "word " * 400, token_s=0.02)
    send(page, "go on", wait=False)
    page.locator(".md", has_text="word word").wait_for()
    page.keyboard.press("Escape")
    idle(page)
    assert "word word" in page.locator(".md").inner_text()
    assert "stopped" in page.locator(".note").last.inner_text()
    wait_until(page_server.engine.idle)
    answers(page_server, "ok")
    send(page, "more")
    assert "word word" in prompt_of(page_server)


def test_progress_of_a_long_prompt(page_server, opened):
    page = opened()
    answers(page_server, "done", token_s=0.4)
    send(page, "long " * 500, wait=False)
    bar = page.locator(".wait progress")
    bar.wait_for()
    assert "Reading the prompt: " in page.locator(".wait").inner_text()
    screenshot(page, "progress")
    idle(page)
    assert not page.locator(".wait").count()


def test_counts_and_speed_are_true(page_server, opened):
    page = opened()
    tokens = tokenizer().encode("a reply of some length, told slowly, token by token")
    page_server.engine.script = lambda prompt, params: Script(tokens, token_s=0.02)
    send(page, "hello")
    note = page.locator(".assistant .note").inner_text()
    parts = dict(reversed(p.split(" ", 1)) for p in note.split(" · ") if p[0].isdigit())
    assert int(parts["prompt tokens"]) == len(page_server.engine.submitted[-1].prompt)
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


def test_one_burst_has_no_speed(page_server, opened):
    page = opened()
    answers(page_server, "all of it at once", burst=100)
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
