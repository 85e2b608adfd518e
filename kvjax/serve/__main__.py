"""An HTTP server with OpenAI's API over one model: text and chat completions, whole or as a stream.

  python -m kvjax.serve --model=kvjax-tiny --policy=h2o --budget=0.2

  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

It answers on this machine only, unless --host says otherwise. /health tells what it is doing.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from kvjax.errors import KvjaxError, shown
from kvjax.specs import names
from kvjax.specs.names import DTYPES
from kvjax.typing import IMPLEMENTATIONS
from kvjax.units import parse_size

USAGE_ERROR = 2
WIDTH = 120  # columns of the help text


def _number(text: str) -> Any:
    """Slots as a whole number, or a fraction with a decimal point."""
    return float(text) if "." in text else int(text)


class _Whole:
    """Reads a whole number from `least` to `most`, which the help shows; None = any number from `least` on."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least, self.most = least, most

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = self.least - 1
        if number < self.least or (self.most is not None and number > self.most):
            raise argparse.ArgumentTypeError(f"must be a whole number, {self}; got {shown(text)}")
        return number


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, such as 2GB; got {text}") from None


def _block(text: str) -> Any:
    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else _Whole(1)(text)


#: Group -> flag -> its meaning, and how argparse reads it. A meaning says what holds where there is no default.
FLAGS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "model": {
        "model": ("a folder, a GGUF file, a Hugging Face hub id, or kvjax-tiny (must be given)", {"required": True}),
        "name": ("what requests call the model; else the last part of --model", {}),
        "dtype": ("of weights and cache; else float32 on a CPU, bfloat16 elsewhere", {"choices": DTYPES}),
        "weights": (
            "the codes to quantize the projections to, such as int4; stored = keep the codes of the checkpoint; "
            "without it exact weights",
            {},
        ),
        "mesh": ("devices that share the work, such as data:2,model:4; without it one device", {}),
        "rules": (
            "the axes of the mesh that dimensions are divided over, such as mlp=model; else those of kvjax.Rules",
            {"default": ""},
        ),
        "implementation": ("of attention and eviction", {"default": "auto", "choices": IMPLEMENTATIONS}),
    },
    "cache": {
        "policy": ("which slots the cache keeps, such as h2o or 'roco(guard=4)'", {"default": "full"}),
        "budget": (
            "slots per KV head (256), or a fraction of each prompt with a decimal point (0.2), but no fewer than 32 "
            "slots; without it the policy must need none, as full does, or be given its own",
            {"type": _number},
        ),
        "storage": ("how slots are held, such as int8", {"default": "dense"}),
        "selection": (
            "which slots a query reads, such as 'quest(page=16, budget=512)'",
            {"default": "everything"},
        ),
        "speculate": (
            "what drafts tokens that the model then accepts or not, under --policy=full: a selection such as "
            "'retrieval(chunk=8, budget=512)', or 'seen(POLICY)'; answers are the same; without it nothing",
            {"metavar": "DRAFT"},
        ),
        "gamma": ("the number of drafts of a round; else 4", {"type": _Whole(1)}),
        "calibration": ("a file of python -m experiments.calibrate; without it only storages that need none", {}),
        "prefix": (
            "a saved state that requests may continue; may be repeated",
            {"action": "append", "default": [], "metavar": "NAME=FOLDER"},
        ),
    },
    "requests": {
        "prefix-cache": (
            "bytes for the states of prompts, such as 4GB, so that what prompts of an API key have in common is "
            "computed once; 0 = none are kept; without it 1GB, or 0 if the policy evicts after each block of a prompt "
            "or the storage is not exact",
            {"type": _size, "metavar": "BYTES"},
        ),
        "document-cache": (
            "bytes of host memory for the caches of documents, which come before the prompts of requests in any order, "
            "such as 4GB; 0 = documents are refused",
            {"type": _size, "default": "1GB", "metavar": "BYTES"},
        ),
        "conversation-bytes": (
            "bytes of host memory for conversations, of which a request sends its new messages alone, such as 4GB; 0 = "
            "none are held; without it 4GB, or 0 if there can be none, such as with --speculate",
            {"type": _size, "metavar": "BYTES"},
        ),
        "rows": ("requests that are answered at the same time", {"type": _Whole(1), "default": 8}),
        "waiting": (
            "requests that may wait in addition to these; others are refused with a Retry-After",
            {"type": _Whole(0), "default": 64},
        ),
        "scheduling-policy": (
            "which requests get a row first: fcfs = as they come; priority = those whose field priority is lowest, "
            "and these take the rows of others",
            {"choices": ("fcfs", "priority"), "default": "fcfs"},
        ),
        "swap-bytes": (
            "bytes of host memory for the rows that requests lose to others, such as 500MB; 0 = none loses its row",
            {"type": _size, "default": "4GB", "metavar": "BYTES"},
        ),
        "prompt": ("the largest number of tokens of a prompt", {"type": _Whole(1), "default": 2048}),
        "new-tokens": ("the largest number of new tokens of a request", {"type": _Whole(1), "default": 1024}),
        "prefill-block": (
            "the number of tokens of a block of a prompt, at least 1; none for one block; or auto",
            {"type": _block, "default": "auto"},
        ),
        "chunk": (
            "the number of tokens after which an answer's text is sent",
            {"type": _Whole(1, 64), "default": 16},
        ),
    },
    "network": {
        "host": ("the address to listen on; 0.0.0.0 = all of this machine's", {"default": "127.0.0.1"}),
        "port": ("0 = one that is free", {"type": _Whole(0, 65535), "default": 8000}),
        "connections": (
            "the number of connections at the same time, fewer if the limit of open files is lower; else 1024, or four "
            "times --rows and --waiting if that is more",
            {"type": _Whole(1)},
        ),
        "api-key": (
            "what clients must send as a bearer token, or @FILE for one of the keys in a file's lines; without it none",
            {},
        ),
    },
}


class _Format(argparse.RawDescriptionHelpFormatter):
    """Wide lines, with the bounds of a number and the default after each meaning that has them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=WIDTH)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is argparse.SUPPRESS or not action.option_strings or action.required:
            return action.help
        empty = action.default is None or action.default in ("", [])
        described = "; else " in (action.help or "") or "; without it " in (action.help or "")
        notes = [str(action.type)] if isinstance(action.type, _Whole) else []
        if not (empty and described):
            notes.append(f"default {'none' if empty else action.default}")
        return f"{action.help} ({', '.join(notes)})" if notes else action.help


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags, which are in groups."""
    console = sys.argv[0].startswith("kvjax ")
    prog = sys.argv[0] if console else "python -m kvjax.serve"
    made = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} --model=MODEL [--FLAG=VALUE ...]",
        description=str(__doc__).replace("python -m kvjax.serve", prog), epilog=_names(), formatter_class=_Format,
    )  # fmt: skip
    for title, flags in FLAGS.items():
        group = made.add_argument_group(title)
        for name, (about, options) in flags.items():
            group.add_argument(f"--{name}", help=about, **options)
    return made


def _names() -> str:
    """Returns the names that flags take, in lines."""
    made = [f"{name}(...)" for kind in ("combinators", "head plans") for name in names.names(kind)]
    listed = {
        "policies, or FILE.py:factory": [*names.names("policies"), *made],
        "storages, or FILE.py:factory": names.names("storages"),
        "selections, or FILE.py:factory": names.names("selections"), "weights": [*names.names("weights"), "stored"],
    }  # fmt: skip
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n\n".join(f"{title}:\n{wrapper.fill(', '.join(each))}" for title, each in listed.items())


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


if __name__ == "__main__":
    sys.exit(main())
