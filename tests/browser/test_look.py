"""Look, as a visitor meets it. The model is tiny, the browser is real."""

import re

import pytest
from playwright.sync_api import expect

TEXT = "the cat sat on the mat ."


def look(page, text=TEXT):
    page.locator("#look-prompt textarea").fill(text)
    page.get_by_role("button", name="Look", exact=True).click()
    expect(page.locator("#status-line")).to_contain_text("Looking: done")
    expect(page.locator("#look-map .main-svg").first).to_be_visible()


def alt(page, plot):
    return page.locator(f"#{plot} .plot").get_attribute("aria-label")


def test_looking_draws_the_map_the_curve_and_the_tokens(visit):
    page = visit()
    expect(page.locator("#look-map")).to_contain_text("Press Look")
    look(page)
    for plot in ("look-map", "look-along"):
        box = page.locator(f"#{plot} .main-svg").first.bounding_box()
        assert box["height"] > 150
        assert box["width"] > 300
    assert alt(page, "look-map").startswith("Map of 3 layers by 8 heads: share of attention")
    expect(page.locator("#look-tokens button.sink")).to_have_count(1)
    expect(page.locator("#look-tokens")).not_to_contain_text("Ġ")
    expect(page.locator("#look-summary")).to_contain_text("No prefix is in front")


def test_a_token_a_cell_and_a_group_redraw_without_the_model(visit):
    page = visit()
    look(page)
    status = page.locator("#status-line").inner_text()
    page.locator("#look-tokens button").nth(2).click()
    expect(page.locator("#look-summary")).to_contain_text("position 2")
    expect(page.locator("#look-tokens button").nth(2)).to_have_attribute("aria-pressed", "true")
    page.get_by_label("sink", exact=True).check()
    expect(page.locator("#look-map .plot")).to_have_attribute("aria-label", re.compile("on sink"))
    page.locator("#look-map").scroll_into_view_if_needed()
    area = page.locator("#look-map .plot .nsewdrag").bounding_box()
    column, row = (2.5 / 8, 0.5 / 3)  # head 2 of layer 0
    page.mouse.click(area["x"] + column * area["width"], area["y"] + row * area["height"])
    expect(page.locator("#look-facts")).to_contain_text("Layer 0, head 2, seen from position 2")
    assert page.locator("#status-line").inner_text() == status


def test_zoom_survives_an_update_and_figures_follow_the_theme(visit):
    page = visit()
    look(page)
    shown = "document.querySelector('#look-along .plot')"
    whole = page.evaluate(f"{shown}._fullLayout.xaxis.range")
    page.locator("#look-facts").scroll_into_view_if_needed()
    area = page.locator("#look-along .plot .nsewdrag").bounding_box()
    page.mouse.move(area["x"] + 100, area["y"] + 50)
    page.mouse.down()
    page.mouse.move(area["x"] + 250, area["y"] + 50, steps=5)
    page.mouse.up()
    page.wait_for_function(f"{shown}._fullLayout.xaxis.range[0] > 0")
    zoomed = page.evaluate(f"{shown}._fullLayout.xaxis.range")
    page.locator("#look-tokens button").nth(2).click()
    expect(page.locator("#look-summary")).to_contain_text("position 2")
    assert page.evaluate(f"{shown}._fullLayout.xaxis.range") == zoomed != whole
    ink = page.evaluate(f"{shown}._fullLayout.font.color")
    page.evaluate("document.body.classList.toggle('dark')")
    page.wait_for_function(f"{shown}._fullLayout.font.color !== '{ink}'")


def test_an_example_works_in_one_click(visit):
    page = visit()
    page.get_by_role("button", name="A repetition").click()
    expect(page.locator("#look-map .main-svg").first).to_be_visible()
    expect(page.locator("#look-prompt textarea")).to_have_value(re.compile("red house"))


def test_an_empty_text_is_explained_and_nothing_is_lost(visit):
    page = visit()
    look(page)
    page.locator("#look-prompt textarea").fill("")
    page.get_by_role("button", name="Look", exact=True).click()
    expect(page.get_by_text("The prompt is empty").first).to_be_visible()
    expect(page.locator("#status-line .failed")).to_be_visible()
    expect(page.locator("#look-map .main-svg").first).to_be_visible()


def test_two_visitors_do_not_see_each_other(visit):
    mine, theirs = visit(), visit()
    look(mine, "the cat ran .")
    look(theirs, "a dog sat on")
    mine.locator("#look-tokens button").nth(1).click()
    expect(mine.locator("#look-summary")).to_contain_text("cat")
    expect(mine.locator("#look-tokens")).not_to_contain_text("dog")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(visit, theme):
    page = visit(390, theme)
    look(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for plot in ("look-map", "look-along"):
        box = page.locator(f"#{plot} .main-svg").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_a_wrong_model_says_why_and_the_page_goes_on(visit):
    page = visit()
    page.get_by_text("Change the model").click()
    name = page.get_by_label("Model", exact=True)
    name.fill("no/such-model")
    name.press("Enter")
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator("#status-line .failed")).to_contain_text("cannot be reached")
    look(page)


def test_the_numbers_are_there_on_demand(visit):
    page = visit()
    look(page)
    page.get_by_role("button", name="Numbers").click()
    expect(page.locator("#look-table td").nth(1)).to_be_visible()
    assert page.locator("#look-table tbody tr").count() == 3
