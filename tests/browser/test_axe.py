"""No serious fault for people who use a screen reader or a keyboard, in every place."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.test_look import look

PLACES = ("Look", "Force", "Train", "Learn")


@pytest.fixture(scope="module")
def axe():
    found = find_spec("axe_playwright_python")
    if found is None:
        pytest.skip("axe is not installed: pip install -r tests/requirements.txt")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def faults(page, axe) -> list[str]:
    """Serious and critical findings: rule, and the elements concerned."""
    page.evaluate(axe)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['html'][:140]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault(visit, axe, theme):
    page = visit(theme=theme)
    look(page)
    # As it looks while something runs.
    page.evaluate("document.querySelector('#stop').style.visibility = 'visible'")
    found = {}
    for place in PLACES:
        page.get_by_role("tab", name=place).click()
        if place == "Learn":
            page.locator("#learn-guess input").first.check()
            expect(page.locator("#learn-figure .main-svg").first).to_be_visible()
        found[place] = faults(page, axe)
    told = [f"{place}: {fault}" for place, some in found.items() for fault in some]
    assert not told, "\n".join(told)
