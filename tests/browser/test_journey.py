"""The main job on real weights, as one visitor does it: load, Look, Force, Look at that, Train."""

import re

import pytest
from playwright.sync_api import expect

from app import LAUNCH
from explorer.ui.build import build

PATIENT = 300_000  # milliseconds; a small machine trains slowly


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    demo = build(data=tmp_path_factory.mktemp("data"))
    _, address, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield address
    demo.close()


def test_load_look_force_and_train(visit, address):
    page = visit(address=address)
    status = page.locator("#status-line")
    expect(page.locator("#model-badge")).to_contain_text("30 × 9", timeout=PATIENT)

    page.get_by_role("button", name="A plain sentence").click()
    expect(status).to_contain_text("Looking: done", timeout=PATIENT)
    expect(page.locator("#look-tokens")).to_contain_text("Paris")
    expect(page.locator("#look-map .main-svg").first).to_be_visible()

    page.get_by_role("tab", name="Force").click()
    page.get_by_role("button", name="Whatever you ask").click()
    expect(status).to_contain_text("Forcing: done", timeout=PATIENT)
    expect(page.locator("#force-proof")).to_contain_text("Forced")
    expect(page.locator("#force-with")).to_contain_text("Please bring a towel.")
    expect(page.locator("#force-without")).to_contain_text("Paris")

    page.get_by_role("tab", name="Look").click()
    page.get_by_label("In front of it").click()
    page.get_by_role("option", name="solved prefix").click()
    page.get_by_role("button", name="A question").click()
    expect(page.locator("#look-summary")).to_contain_text("In front: solved prefix")
    expect(page.locator("#look-tokens")).to_contain_text("towel", timeout=PATIENT)

    page.get_by_role("tab", name="Train").click()
    page.locator("#train-go").click()
    expect(status.locator(".running")).to_be_visible()
    page.locator("#stop").click()
    expect(status.locator(".stopped")).to_contain_text("stopped", timeout=PATIENT)

    page.get_by_label("number input for Steps").fill("3")
    page.get_by_role("button", name="Data and prompt template").click()
    page.get_by_label("number input for Rows to test on").fill("4")
    page.locator("#train-go").click()
    expect(page.locator("#train-loss .main-svg").first).to_be_visible(timeout=PATIENT)
    box = page.locator("#train-loss .main-svg").first.bounding_box()
    assert box["width"] > 600
    expect(status.locator(".done")).to_contain_text(re.compile("Train", re.I), timeout=PATIENT)
    expect(page.locator("#train-files")).to_contain_text(".safetensors")

    page.set_viewport_size({"width": 390, "height": 844})
    for tab in ("Look", "Force", "Train"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_function("document.documentElement.scrollWidth <= 390")
