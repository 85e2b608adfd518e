"""An HTTP server with OpenAI's API over one model: text and chat completions, whole or as a stream.

  python -m kvjax.serve --model=kvjax-tiny --policy=h2o --budget=0.2

  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

It answers on this machine only, unless --host says otherwise. /health tells what it is doing.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.typing import IMPLEMENTATIONS

USAGE_ERROR = 2


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog=sys.argv[0] if sys.argv[0].startswith("kvjax ") else "python -m kvjax.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--model", required=True, help="a folder, the name of a model on the Hugging Face hub, or kvjax-tiny")
    add("--name", help="what requests call the model; else the last part of --model")
    add("--policy", default="full", help="which slots the cache keeps, such as h2o or 'roco(guard=4)'")
    add("--budget", type=_number, help="slots of a head; or a fraction of each prompt, but no fewer than 32 slots")
    add("--storage", default="dense", help="how slots are held, such as int8")
    add("--selection", default="everything", help="which slots a query reads, such as 'quest(page=16, budget=512)'")
    add("--calibration", help="a file of python -m experiments.calibrate, if the storage needs one")
    add("--dtype", help="of weights and cache")
    add("--weights", help="what the projections are quantised to, such as int4")
    add("--mesh", help="devices that share the work, such as data:2,model:4")
    add("--rules", default="", help="over which axes of the mesh dimensions are divided, such as mlp=model")
    add("--implementation", default="auto", choices=IMPLEMENTATIONS, help="of attention and eviction")
    add("--rows", type=int, default=8, help="requests that are answered at the same time")
    add(
        "--waiting",
        type=int,
        default=64,
        help="requests that may wait in addition to these; others are refused with a Retry-After",
    )
    add("--prompt", type=int, default=2048, help="tokens of a prompt at the most")
    add("--new-tokens", type=int, default=1024, help="new tokens of a request at the most")
    add("--prefill-block", type=_block, default="auto", help="tokens of a block of a prompt, none, or auto")
    add("--chunk", type=int, default=16, help="tokens after which what has come is sent, 1 to 64")
    add("--prefix", action="append", default=[], metavar="NAME=FOLDER", help="a saved state that requests may continue")
    add("--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0 = all of this machine's")
    add("--port", type=_port, default=8000, help="0 to 65535; 0 = one that is free")
    add("--connections", type=int, help="at the same time; else 1024, or four times --rows and --waiting; fewer if the "
        "limit of open files is lower")  # fmt: skip
    add("--api-key", help="what clients must send as a bearer token; @FILE for one of the keys in the file's lines")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is interrupted. Errors of the user are one paragraph."""
    flags = parser().parse_args(argv)
    # It imports jax, which `--help` does without.
    from kvjax.serve.program import serve

    try:
        return serve(flags)
    except KvjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _number(text: str) -> Any:
    """Slots as a whole number, or a fraction with a decimal point."""
    return float(text) if "." in text else int(text)


def _port(text: str) -> int:
    if not 0 <= (port := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535; got {port}")
    return port


def _block(text: str) -> Any:
    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else int(text)


if __name__ == "__main__":
    sys.exit(main())
