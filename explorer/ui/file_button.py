"""A button that makes a file and hands it over, at one click.

gr.DownloadButton hands over the file that it holds already: with a handler behind it the first
click gives nothing, and every later one the file of the click before. Here a plain button asks for
the file, and once that has come, a download button out of sight is clicked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
from gradio.processing_utils import save_file_to_cache

from explorer.ui.controls import shown
from explorer.ui.page import PRIVATE


@dataclass(frozen=True)
class FileButton:
    """Both buttons. made: the one out of sight"""

    button: gr.Button
    made: gr.DownloadButton

    def makes(self, handler: Callable, inputs: Sequence[gr.components.Component] = ()) -> None:
        """Let a click call `handler` (inputs …) → path of the file."""
        asked = self.button.click(shown(handler), list(inputs), self.made, queue=False, **PRIVATE)
        click = f"() => document.getElementById('{self.made.elem_id}').click()"
        asked.success(None, js=click, queue=False, **PRIVATE)


def file_button(label: str, elem_id: str) -> FileButton:
    """Lay it out."""
    button = gr.Button(label, size="sm", scale=0, min_width=90, elem_id=elem_id)
    made = gr.DownloadButton(label, elem_id=f"{elem_id}-file", elem_classes=["unseen"])
    return FileButton(button, made)


def offered(name: str, write: Callable[[Path], object]) -> str:
    """Write a file where Gradio serves it from and, after a day, deletes it. → its path"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return save_file_to_cache(path, gr.utils.get_upload_folder())
