"""Start the page: `python app.py`, then open the address it prints."""

from __future__ import annotations

import argparse
import logging
import os
import typing
from pathlib import Path

# Before torch is imported: on few cores its threads would wait for one another by spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A proxy set for the outside must not stand between the page and its own server.
os.environ.setdefault("NO_PROXY", "localhost,127.0.0.1,0.0.0.0")

if os.environ.get("SPACES_ZERO_GPU"):
    # It makes torch pretend to have a GPU here, so it comes before everything that imports torch.
    try:
        import spaces  # noqa: F401
    except ImportError:
        logging.getLogger(__name__).warning("on ZeroGPU, and the package spaces is not here")

from explorer.lm import Dtype, ModelSpec, Quantization
from explorer.ui.build import build
from explorer.ui.theme import CSS, theme

ICON = Path(__file__).parent / "assets" / "icon.svg"

# What launch() is given wherever the page is started from, tests included.
LAUNCH = {
    "theme": theme(),
    "css_paths": [CSS],
    "show_error": False,
    "run_history": False,
    "enable_monitoring": False,
    "footer_links": ["api", "settings"],
    "state_session_capacity": 100,
    "max_file_size": "64mb",
    "ssr_mode": False,
    "pwa": False,
}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Look inside prefixes of language models: a page in the browser.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="preset, hub id, local folder or GGUF file"
    )
    parser.add_argument("--revision", default="main", help="revision of a hub model")
    parser.add_argument("--quantization", default="none", choices=typing.get_args(Quantization))
    parser.add_argument("--dtype", default="auto", choices=typing.get_args(Dtype))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:0, mps")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let a model's own program code run"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, help="the first free one from 7860 if not given")
    parser.add_argument("--share", action="store_true", help="a public link through gradio.live")
    parser.add_argument("--auth", metavar="NAME:PASSWORD", help="ask visitors for this login")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder for saved runs")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    login = tuple(args.auth.split(":", 1)) if args.auth else None
    if login and len(login) != 2:
        parser.error("--auth takes NAME:PASSWORD")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    spec = ModelSpec(
        args.model,
        args.revision,
        args.quantization,
        args.dtype,
        args.device,
        args.trust_remote_code,
    )
    host = None if os.environ.get("SPACE_ID") else args.host
    demo = build(spec, args.data)
    demo.launch(
        server_name=host, server_port=args.port, share=args.share or None, auth=login, **LAUNCH
    )


if __name__ == "__main__":
    main()
