import pytest

from tests.server.browser import WIDE, open_browser
from tests.server.fake_engine import FakeEngine
from tests.server.harness import SHOW, Server, running


@pytest.fixture(scope="session")
def _shared_server():
    with running() as server:
        yield server


def _idle(server: Server):
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def server(_shared_server) -> Server:
    """One server for most tests; each gets it idle, and must leave it idle."""
    yield from _idle(_shared_server)


@pytest.fixture(scope="session")
def _show():
    with running(template=SHOW, engine=FakeEngine(max_model_len=4096)) as server:
        yield server


@pytest.fixture
def show(_show) -> Server:
    """The same with a template that prints the conversation; see ``harness.prompt_of``."""
    yield from _idle(_show)


@pytest.fixture(scope="session")
def _page_server():
    with running(engine=FakeEngine(max_model_len=8192)) as server:
        yield server


@pytest.fixture
def page_server(_page_server) -> Server:
    """The same with room for long conversations."""
    yield from _idle(_page_server)


@pytest.fixture(scope="module")
def browser():
    """A real browser. Of a module and no longer: while it is open, this thread can run no other event loop."""
    with open_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser, page_server):
    """Open the chat page: ``opened()``; no script of it may fail and no policy stop it."""
    contexts, problems = [], []

    def go(size=WIDE, url=None, **options):
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if "Content Security Policy" in m.text else None)
        page.goto(url or page_server.url)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture(scope="module")
def bare(browser, _page_server):
    """One page for tests of what its script computes."""
    page = browser.new_page()
    page.goto(_page_server.url)
    yield page
    page.close()
