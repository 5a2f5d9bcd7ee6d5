"""A real browser on the page. After every test: no error in the page, no request left the host."""

import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from app import LAUNCH
from explorer.lm import ModelSpec
from explorer.ui.build import build
from tests.tiny import tiny_checkpoint

QUIET = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()

expect.set_options(timeout=30_000)


@pytest.fixture(scope="session")
def spec(tmp_path_factory):
    """The model the page opens with."""
    return ModelSpec(tiny_checkpoint(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def url(spec, tmp_path_factory):
    demo = build(spec, tmp_path_factory.mktemp("data"))
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield url
    demo.close()


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, url):
    """Open the page as a new visitor: visit(width, theme)."""
    faults, contexts = [], []

    def watch(request):
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            faults.append(f"left the host: {request.url}")

    def visit(width: int = 1280, theme: str = "light", address: str = url):
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"error in the page: {error}"))
        page.on("request", watch)
        page.goto(f"{address}?__theme={theme}")
        expect(page.locator("#model-badge")).to_contain_text("precision")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not faults
