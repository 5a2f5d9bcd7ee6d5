"""Start the page as on ZeroGPU, in this process: `python -m tests.space --model … --port …`.

The wrapper is the platform's own, from the package spaces: it forks, pickles, cuts exceptions down
to their names. Of CUDA, which is not needed for that, it gets what it looks for at import; the
scheduler it asks is the test's.
"""

from __future__ import annotations

import torch

torch.version.cuda = torch.version.cuda or "12.8"
torch._C._cuda_init = getattr(torch._C, "_cuda_init", lambda: None)
torch.cuda._is_in_bad_fork = bool

import spaces.zero.torch  # noqa: E402

from app import main  # noqa: E402


def nothing(*_, **__) -> None:
    """A process that starts has no GPU to take, and no weights to move to it."""


if __name__ == "__main__":
    spaces.zero.torch.init = spaces.zero.torch.move = nothing
    main()
