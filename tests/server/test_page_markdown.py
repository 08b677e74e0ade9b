"""The chat page in a real browser: Markdown, and that nothing a model says becomes a script."""

import pytest

from tests.server.browser import MARKDOWN, answers, needs_browser, screenshot, send, texts

pytestmark = needs_browser


def test_markdown_is_shown_and_code_is_copied(page_server, opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    answers(page_server, MARKDOWN, burst=7)
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
def test_nothing_of_a_reply_becomes_a_script_or_a_picture(page_server, opened, hostile):
    page = opened()
    answers(page_server, hostile)
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
