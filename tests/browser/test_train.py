"""Train in the page: what a new page says, a run that is refused, and whose run is listed."""

from __future__ import annotations

import re

from playwright.sync_api import expect


def test_a_new_page_is_ready_and_a_run_is_named_and_listed(visit):
    page = visit()
    status = page.locator("#status-line")
    expect(status).to_contain_text(re.compile("Ready|Loading the model: done"))
    page.get_by_role("tab", name="Train").click()
    expect(page.locator("#train-result")).to_contain_text("appears here")
    page.wait_for_timeout(2000)
    expect(status.locator(".what")).to_have_text(re.compile(r"\S"))  # nothing has emptied it

    page.get_by_label("number input for Steps").fill("2")
    page.get_by_role("button", name="Data and prompt template").click()
    page.get_by_label("number input for Rows to test on").fill("4")
    page.locator("#train-go").click()
    expect(status.locator(".done")).to_contain_text("Training")
    told = page.locator("#train-loss .legendtitletext")
    expect(told).to_contain_text("on requests")
    run = re.search(r"Run (\w+)", told.text_content())[1]
    for figure, axis in (("loss", "y"), ("spectrum", "x"), ("spectrum", "y")):
        plot = page.locator(f"#train-{figure}")
        plot.scroll_into_view_if_needed()  # drawn when there is time, or here
        ticks = plot.locator(f".{axis}tick text")
        expect(ticks).not_to_have_count(0)
        written = ticks.all_text_contents()
        assert len(written) >= 3, (figure, axis, written)
        drawn = plot.evaluate(  # as many as the figure asks for: none was left out in the page
            f"element => element.querySelector('.plot').layout.{axis}axis.ticktext"
        )
        assert set(written) == set(drawn)
    for width in (390, 1280):  # turned and turned back: the legend stays above the plot
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1500)
        edges = page.locator("#train-loss").evaluate(
            "element => ['.legend', '.gridlayer'].map("
            "  name => element.querySelector(name).getBoundingClientRect())"
        )
        below = edges[0]["bottom"] - edges[1]["top"]
        assert below < 4, (width, below)
    page.get_by_role("button", name=re.compile("^Runs")).click()
    expect(page.locator("#train-runs")).to_contain_text(run)
    expect(page.get_by_label("Run", exact=True)).to_have_value(re.compile(f"^{run} · done"))

    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Delete it").click()
    page.wait_for_timeout(1000)
    expect(page.locator("#train-runs")).to_contain_text(run)

    for method in ("PMT, elu", "Zero-gate, linear"):
        page.get_by_label(method, exact=True).uncheck()
    page.locator("#train-go").click()
    expect(status.locator(".failed")).to_contain_text("No method is chosen")
