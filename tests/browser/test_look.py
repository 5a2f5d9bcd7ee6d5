"""Look, as a visitor meets it. The model is tiny, the browser is real."""

import json
import re

import pytest
from playwright.sync_api import expect

from app import LAUNCH
from explorer.lm import ModelSpec
from explorer.session import look as look_session
from explorer.session import look_views
from explorer.ui.build import build
from explorer.ui.token_strip import WINDOW
from tests.tiny import tiny_checkpoint

TEXT = "the cat sat on the mat ."


def look(page, text=TEXT):
    page.locator("#look-prompt textarea").fill(text)
    page.get_by_role("button", name="Look", exact=True).click()
    expect(page.locator("#status-line")).to_contain_text("Looking: done")
    expect(page.locator("#look-map .main-svg").first).to_be_visible()


def alt(page, plot):
    return page.locator(f"#{plot} .plot").get_attribute("aria-label")


SHAPES = "name => document.querySelector(`#${name} .plot`).layout.shapes"


def framed(page, plot):
    """The corner of the cell that is framed: x0, y0."""
    shape = page.evaluate(SHAPES, plot)[0]
    return [shape["x0"], shape["y0"]]


def click_cell(page, plot, layer, head):
    """Click a cell of a map of the tiny model, 3 layers by 8 heads."""
    page.locator(f"#{plot}").scroll_into_view_if_needed()
    area = page.locator(f"#{plot} .plot .nsewdrag").bounding_box()
    x, y = area["width"] * (head + 0.5) / 8, area["height"] * (layer + 0.5) / 3
    page.mouse.click(area["x"] + x, area["y"] + y)


def test_a_file_comes_at_the_first_click_and_is_of_what_is_shown(visit):
    page = visit()
    look(page)
    page.get_by_role("button", name="Numbers").click()
    for position in (1, 3):
        page.locator("#look-tokens button").nth(position).click()
        expect(page.locator("#look-summary")).to_contain_text(f"position {position}")
        with page.expect_download() as saved:
            page.locator("#look-csv").click()
        assert saved.value.suggested_filename == "shares.csv"
        header, *lines = saved.value.path().read_text(encoding="utf-8").splitlines()
        at = header.split(",").index("position")
        assert {line.split(",")[at] for line in lines} == {str(position)}
    with page.expect_download() as saved:
        page.locator("#look-json").click()
    assert json.loads(saved.value.path().read_text(encoding="utf-8"))["position"] == 3


def test_what_was_found_in_another_text_does_not_stay(visit):
    page = visit()
    look(page)
    page.get_by_role("button", name="Heads: sorted").click()
    page.locator("#look-find").click()
    expect(page.locator("#look-found .main-svg").first).to_be_visible()
    look(page, "a dog ran by the sea .")
    expect(page.locator("#look-found .main-svg")).to_have_count(0)
    page.get_by_role("tab", name="Force").click()
    page.locator("#force-target textarea").fill("the cat")
    page.locator("#force-prompt textarea").fill("a dog")
    page.locator("#places").get_by_label("As a chat message").last.uncheck()
    page.locator("#force-go").click()
    expect(page.locator("#force-proof")).to_contain_text("Forced")
    page.get_by_role("button", name="More prompts").click()
    page.get_by_role("button", name="Try them all").click()
    expect(page.locator("#force-trials")).to_contain_text("of 3 forced")
    page.locator("#force-go").click()
    expect(page.locator("#force-trials")).to_contain_text("One line for each prompt")


def test_looking_draws_the_map_the_curve_and_the_tokens(visit):
    page = visit()
    expect(page.locator("#look-map")).to_contain_text("Press Look")
    look(page)
    for plot in ("look-map", "look-along"):
        box = page.locator(f"#{plot} .main-svg").first.bounding_box()
        assert box["height"] > 150
        assert box["width"] > 300
    assert alt(page, "look-map").startswith("share on prompt: 3 layers by 8 heads. Mean")
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
    click_cell(page, "look-map", 0, 2)
    expect(page.locator("#look-facts")).to_contain_text("Layer 0, head 2, seen from position 2")
    assert framed(page, "look-map") == [1.5, -0.5]  # the frame alone has moved
    page.evaluate("document.body.classList.toggle('dark')")  # and stays when all is drawn again
    page.wait_for_timeout(300)
    assert framed(page, "look-map") == [1.5, -0.5]
    click_cell(page, "look-map", 2, 7)
    expect(page.locator("#look-facts")).to_contain_text("Layer 2, head 7")
    page.locator("#look-tokens button").nth(3).click()
    expect(page.locator("#look-summary")).to_contain_text("position 3")
    assert framed(page, "look-map") == [6.5, 1.5]
    page.wait_for_function(f"({SHAPES})('look-along')[0].x0 === 2.5")
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


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_two_states_stand_side_by_side(visit, width, theme):
    page = visit(width, theme)
    look(page)
    page.get_by_role("button", name="Two states side by side").click()
    expect(page.locator("#pair-told")).to_contain_text("Nothing is compared yet")
    page.locator("#pair-prompt textarea").fill("a dog ran by the road and the sea .")
    page.locator("#pair-go").click()
    expect(page.locator("#status-line")).to_contain_text("Looking at both: done")
    maps = ("pair-a", "pair-b", "pair-change")
    for plot in maps:
        page.locator(f"#{plot}").scroll_into_view_if_needed()
        expect(page.locator(f"#{plot} .main-svg").first).to_be_visible()
    tops = {
        page.evaluate(f"document.querySelector('#{plot} .plot').data[0].zmax") for plot in maps[:2]
    }
    assert len(tops) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    click_cell(page, "pair-b", 1, 3)
    expect(page.locator("#pair-told")).to_contain_text("Chosen, layer 1, head 3")
    for plot in (*maps, "look-map"):
        page.wait_for_function(f"({SHAPES})('{plot}')[0].x0 === 2.5")
    for plot, name in (("pair-along-a", "A"), ("pair-along-b", "B")):
        page.locator(f"#{plot}").scroll_into_view_if_needed()
        told = re.compile(f"^{name}: layer 1, head 3")
        expect(page.locator(f"#{plot} .plot")).to_have_attribute("aria-label", told)
    page.locator("#pair-tokens button").nth(2).click()
    expect(page.locator("#pair-told")).to_contain_text("position 2")
    expect(page.locator("#look-tokens button[aria-pressed=true]")).not_to_have_text("·sat")


def test_what_is_shown_can_be_kept_as_the_other_state(visit):
    page = visit()
    look(page)
    page.get_by_role("button", name="Two states side by side").click()
    page.locator("#pair-keep").click()
    expect(page.locator("#pair-told")).to_contain_text("B − A on prompt: +0.0 points")
    look(page, "a dog ran by the road")
    expect(page.locator("#pair-told")).to_contain_text("A: a dog ran")
    expect(page.locator("#pair-told")).to_contain_text("B: the cat sat")


@pytest.fixture(scope="module")
def long_url(tmp_path_factory):
    """A page whose model reads longer texts and that keeps few rows of them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (look_session, look_views):
            patch.setattr(module, "ROWS", 24 * 3000)
        path = tiny_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=1024)
        demo = build(ModelSpec(path))
        _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
        yield url
        demo.close()


def test_a_long_text_is_shown_in_parts_and_its_rows_are_read_on_request(visit, long_url):
    page = visit(address=long_url)
    page.get_by_label("number input for Tokens to write").fill("0")
    look(page, "the cat sat on the mat and so " * 80)
    strip, pager = page.locator("#look-tokens"), page.locator("#look-tokens .pager")
    expect(pager).to_contain_text("tokens 385–640 of 640")
    expect(strip.locator("button.token")).to_have_count(WINDOW)
    expect(page.locator("#look-row .main-svg").first).to_be_visible()  # the last token's
    pager.get_by_role("button", name="earlier tokens").click()
    expect(pager).to_contain_text("tokens 129–384 of 640")
    strip.locator("button.token").first.click()
    expect(page.locator("#look-summary")).to_contain_text("position 128")
    expect(page.locator("#look-row")).to_contain_text("Read this row")
    page.locator("#look-read").click()
    expect(page.locator("#status-line")).to_contain_text("Reading a row: done")
    told = re.compile("position 128: most on")
    expect(page.locator("#look-row .plot")).to_have_attribute("aria-label", told)
    expect(strip.locator("button[aria-pressed=true]")).to_have_attribute("data-position", "128")
    goal = pager.get_by_label("look from position")
    goal.fill("5")
    goal.press("Enter")
    expect(page.locator("#look-summary")).to_contain_text("position 5")
    expect(pager).to_contain_text("tokens 1–256 of 640")
    expect(strip.locator("button.sink")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
