"""Look: where every head's attention goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gradio as gr

if TYPE_CHECKING:
    from explorer.ui.page import Page


def look_tab(page: Page) -> None:
    gr.Markdown("soon")
