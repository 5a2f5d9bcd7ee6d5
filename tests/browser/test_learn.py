"""Learn: every lesson by keyboard alone, at a phone's width, and at an address of its own."""

import re

import pytest
from playwright.sync_api import expect

from explorer.lessons import answer, lessons, result_of, start
from tests.browser.test_look import alt, look


def open_learn(page):
    page.get_by_role("tab", name="Learn").click()
    expect(page.locator("#learn-question")).to_be_visible()


def press_until(page, key, selector, times=60):
    """Press a key until something within `selector` has the focus."""
    for _ in range(times):
        page.keyboard.press(key)
        if page.evaluate(f"!!document.activeElement.closest('{selector}')"):
            return
    raise AssertionError(f"{selector} cannot be reached with {key}")


@pytest.mark.parametrize("number", range(1, 6))
def test_a_lesson_runs_by_keyboard_alone(visit, number):
    page = visit()
    page.get_by_role("tab", name="Learn").focus()
    page.keyboard.press("Enter")
    lesson = lessons()[number - 1]
    press_until(page, "Tab", "#learn-step")
    for _ in range(number - 1):  # every choice is a stop of its own in Gradio's radio
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.locator("#learn-text h2")).to_have_text(f"{number} · {lesson.title}")
    expect(page.locator("#learn-figure")).to_contain_text("first guess")
    press_until(page, "Tab", "#learn-x")
    before = page.locator("#learn-question").inner_text()
    page.keyboard.press("ArrowLeft")
    if "{" in lesson.question:
        expect(page.locator("#learn-question")).not_to_have_text(before)
    press_until(page, "Tab", "#learn-guess")
    page.keyboard.press("Space")
    expect(page.locator("#learn-verdict .verdict")).to_be_visible()
    expect(page.locator("#learn-figure .main-svg").first).to_be_visible()
    x, y = start(number, result_of(number))
    right = lesson.choices[answer(number, result_of(number), x - 1, y)]
    said = page.locator("#learn-verdict .verdict").inner_text()
    assert ("Yes" in said) == (right == lesson.choices[0])
    assert "Yes" in said or right in said
    assert re.search(r"\d", alt(page, "learn-figure"))
    if number == len(lessons()):
        expect(page.locator("#learn-next")).to_be_hidden()
        return
    press_until(page, "Tab", "#learn-next")
    page.keyboard.press("Enter")
    expect(page.locator("#learn-text h2")).to_have_text(f"{number + 1} · {lessons()[number].title}")
    expect(page.locator("#learn-text")).to_be_focused()
    expect(page.locator("#learn-step")).to_be_in_viewport()


def test_no_guess_is_made_while_the_next_step_is_on_its_way(visit):
    page = visit()
    open_learn(page)
    held = []
    page.route("**/gradio_api/run/**", lambda route: held.append(route))
    page.route("**/gradio_api/queue/join*", lambda route: held.append(route))
    page.locator("#learn-step input").nth(1).check()
    expect(page.locator("#learn-guess")).to_be_hidden()
    for _ in range(50):
        if held:
            break
        page.wait_for_timeout(100)
    for route in held:
        route.continue_()
    page.unroute_all()
    expect(page.locator("#learn-guess")).to_be_visible()
    expect(page.locator("#learn-guess")).to_contain_text(lessons()[1].choices[0])


def test_an_address_opens_a_lesson_in_its_state(visit, url):
    page = visit()
    page.goto(f"{url}?lesson=2&x=4&y=0")
    expect(page.locator("#learn-text h2")).to_have_text(f"2 · {lessons()[1].title}")
    expect(page.locator("#learn-question")).to_contain_text("32 slots against a text of 8 tokens")
    page.locator("#learn-guess input").last.check()
    expect(page.locator("#learn-verdict .verdict")).to_be_visible()
    link = page.locator("#learn-source a")
    assert link.get_attribute("href") == "?lesson=2&x=4&y=0"


def test_an_address_with_nonsense_opens_the_page(visit, url):
    page = visit()
    page.goto(f"{url}?lesson=99&x=-1&y=abc")
    expect(page.locator("#learn-text h2")).to_have_text(f"5 · {lessons()[4].title}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_a_lesson_without_scrolling_sideways(visit, theme):
    page = visit(390, theme)
    open_learn(page)
    for number in range(5):
        page.locator("#learn-step input").nth(number).check()
        title = f"{number + 1} · {lessons()[number].title}"
        expect(page.locator("#learn-text h2")).to_have_text(title)
        page.locator("#learn-guess input").first.check()
        expect(page.locator("#learn-figure .main-svg").first).to_be_visible()
        page.wait_for_function("document.documentElement.scrollWidth <= 390")


def test_a_lesson_is_measured_on_the_loaded_model_and_put_back(visit):
    page = visit()
    open_learn(page)
    page.get_by_role("button", name="Run it on the loaded model").click()
    expect(page.locator("#learn-source")).to_contain_text("Measured just now")
    page.get_by_role("button", name="Back to the cached numbers").click()
    expect(page.locator("#learn-source")).to_contain_text("kept with the program")


def test_the_panels_of_look_draw_what_was_looked_at(visit):
    page = visit()
    look(page)
    expect(page.locator("#look-row .main-svg").first).to_be_visible()
    for name, plot in [("Heads: sorted", "look-sorted"), ("While it wrote", "look-written")]:
        page.get_by_role("button", name=name).click()
        expect(page.locator(f"#{plot} .main-svg").first).to_be_visible()
    page.locator("#look-find").click()
    expect(page.locator("#look-found .main-svg").first).to_be_visible()
    page.get_by_role("button", name="Mark a group").click()
    page.locator("#look-tokens button").nth(2).click()
    expect(page.locator("#look-summary")).to_contain_text("position 2")
    page.locator("#look-tokens button").nth(4).click(modifiers=["Shift"])
    expect(page.locator("#look-marks").get_by_role("textbox")).to_have_value("2-4")
    page.get_by_role("button", name="Mark and look").click()
    expect(page.locator("#look-group")).to_contain_text("my words")
    expect(page.locator("#look-tokens button.marked")).to_have_count(3)


def test_a_token_tells_its_number_and_its_bytes(visit):
    page = visit()
    look(page)
    title = page.locator("#look-tokens button").nth(1).get_attribute("title")
    assert re.fullmatch(r"position 1 · prompt · id \d+ · bytes 20 63 61 74", title)


def test_figures_can_be_saved_as_svg(visit):
    page = visit()
    open_learn(page)
    page.locator("#learn-guess input").first.check()
    expect(page.locator("#learn-figure .main-svg").first).to_be_visible()
    page.locator("#learn-figure").hover()
    with page.expect_download() as saved:
        page.locator("#learn-figure [data-title*='SVG'], #learn-figure [aria-label*='SVG']").click()
    drawn = saved.value.path().read_text(encoding="utf-8")
    assert saved.value.suggested_filename.endswith(".svg")
    row = result_of(1)["rows"][-1]
    assert f"{row['shares']['prefix']:.0%}" in drawn
