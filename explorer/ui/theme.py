"""One look, light and dark, with the fonts this machine has: no request leaves the host."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

CSS = Path(__file__).parents[2] / "assets" / "style.css"


def theme() -> gr.themes.Base:
    """Quiet surfaces, one accent, system fonts."""
    return gr.themes.Default(
        primary_hue=gr.themes.colors.blue,
        secondary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        font=["system-ui", "-apple-system", "Segoe UI", "Helvetica Neue", "Arial", "sans-serif"],
        font_mono=["ui-monospace", "Cascadia Mono", "Menlo", "Consolas", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        # Of radios and boxes: at least 3 to 1 against what is around them.
        checkbox_border_color="*neutral_500",
        checkbox_border_color_dark="*neutral_400",
        checkbox_border_color_hover="*neutral_700",
        checkbox_border_color_hover_dark="*neutral_200",
        block_shadow="none",
        block_border_width="1px",
        block_label_text_weight="600",
        block_title_text_weight="600",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_cancel_background_fill="#b91c1c",
        button_cancel_background_fill_hover="#991b1b",
        link_text_color_visited="*secondary_700",
        link_text_color_dark="*secondary_400",
        link_text_color_active_dark="*secondary_400",
        link_text_color_hover_dark="*secondary_300",
        link_text_color_visited_dark="*secondary_400",
    )
