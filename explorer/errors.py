"""The one exception a visitor is meant to read."""

from __future__ import annotations


class ExplorerError(Exception):
    """Something the visitor can put right; `hint` says how."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint

    def __reduce__(self):  # a process boundary (ZeroGPU) must not lose the hint
        return type(self), (*self.args, self.hint)
