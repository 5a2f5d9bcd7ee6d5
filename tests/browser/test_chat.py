"""The chat in the page: columns that go on, by keyboard alone, on a phone, and faithful to text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from playwright.sync_api import expect

from explorer import adapters, models
from tests.browser.test_axe import axe as axe  # a fixture
from tests.browser.test_axe import faults
from tests.test_methods import VARIANTS, stirred

HOSTILE = "the <b>cat</b> <|end|> sat\n    on &lt; a mat $$x$$ <script>1</script>"


@pytest.fixture(scope="module")
def files(spec, tmp_path_factory):
    """Two adapters of the page's model."""
    lm, paths = models.load(spec), []
    for label in ("PMT, elu", "Zero-gate, linear"):
        training = {"label": label, "wording": {"template": "{text} :", "chat": False}}
        adapter = stirred(lm, label)
        card = adapters.describe(lm, VARIANTS[label][0], adapter, training)
        path = tmp_path_factory.mktemp("adapters") / f"{VARIANTS[label][0].name}.safetensors"
        paths.append(str(adapters.save(path, adapter, card)))
    return paths


def open_chat(page, files):
    page.get_by_role("tab", name="Train").click()
    page.get_by_role("button", name="Chat with the adapters").click()
    page.locator("#train-open input[type=file]").set_input_files(files)
    expect(page.locator("#train-open")).to_contain_text("zero-gate")


def done(page, turns):
    """Wait until every column has so many turns, and the last answer has ended."""
    for column in range(3):
        expect(page.locator(f"#chat-{column} .message-row")).to_have_count(turns)
    expect(page.locator("#status-line .done")).to_contain_text("Chatting")
    expect(page.locator("#stop")).to_be_hidden()
    return [page.locator(f"#chat-{n} .message-row").all_inner_texts() for n in range(3)]


def test_a_conversation_goes_on_in_every_column_by_keyboard_alone(visit, files):
    page = visit()
    open_chat(page, files)
    message = page.locator("#chat-message textarea")
    message.fill("the cat")
    message.press("Enter")
    first = done(page, 2)
    assert message.input_value() == ""
    for column, label in enumerate(("model alone", "PMT, elu", "Zero-gate, linear")):
        box = page.get_by_role("log", name=f"Chat: {label}")
        expect(box).to_have_attribute("tabindex", "0")
        assert first[column][0].strip() == "the cat" and first[column][1].strip()
    expect(page.locator("#chat-3")).to_have_count(0)
    message.focus()
    page.keyboard.type("why not ?")
    page.keyboard.press("Tab")
    expect(page.locator("#chat-send")).to_be_focused()
    page.keyboard.press("Enter")
    second = done(page, 4)
    assert [column[:2] for column in second] == first
    expect(page.locator("#chat-notes")).to_contain_text("tokens read")
    page.locator("#chat-send").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".message-row")).to_have_count(0)
    expect(page.locator("#chat-notes")).not_to_contain_text("tokens read")


def test_what_was_written_is_shown_to_the_letter(visit, files):
    page = visit()
    open_chat(page, files)
    page.locator("#chat-message textarea").fill(HOSTILE)
    page.locator("#chat-message textarea").press("Enter")
    for column in done(page, 2):
        assert column[0].strip() == HOSTILE
    assert page.locator(".message-row b, .message-row script, .katex").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_phone_columns_stand_below_one_another(visit, files, theme):
    page = visit(390, theme)
    open_chat(page, files)
    page.locator("#chat-send").click()
    done(page, 2)
    places = [page.locator(f"#chat-{n}").bounding_box() for n in range(3)]
    for above, below in pairwise(places):
        assert below["y"] >= above["y"] + above["height"]
        assert above["width"] > 250
    page.wait_for_function("document.documentElement.scrollWidth <= 390")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_a_chat(visit, files, axe, theme):
    page = visit(theme=theme)
    open_chat(page, files)
    page.get_by_role("button", name="How messages are put").click()
    for turns in (2, 4, 6):
        page.locator("#chat-message textarea").fill("the cat sat on the mat and ran")
        page.locator("#chat-send").click()
        done(page, turns)
    gradios = ("common.upload", "download-link")  # in its list of files
    found = [fault for fault in faults(page, axe) if not any(own in fault for own in gradios)]
    assert not found, "\n".join(found)
