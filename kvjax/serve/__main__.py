"""An HTTP server with OpenAI's API over one model: text and chat completions, whole or as a stream.

  python -m kvjax.serve --model=kvjax-tiny --policy=h2o --budget=0.2

  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

It answers on this machine only, unless --host says otherwise. /health tells what it is doing.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvjax import products
from kvjax.attention import IMPLEMENTATIONS
from kvjax.cache import Limits
from kvjax.checkpoint.huggingface import load
from kvjax.errors import ConfigError, KvjaxError, PolicyError
from kvjax.lm_eval import options
from kvjax.models.calibrate import calibrated
from kvjax.parallel.rules import Rules
from kvjax.parallel.sharding import make_mesh
from kvjax.serve import address
from kvjax.serve.api_keys import read_keys
from kvjax.serve.request import Request
from kvjax.serve.runner import Runner
from kvjax.storage.calibration import load_calibration

USAGE_ERROR = 2


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m kvjax.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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


def runner_for(flags: argparse.Namespace) -> Runner:
    """Loads the model.

    Raises:
      KvjaxError: a model that cannot be loaded, or settings that cannot work with it.
    """
    mesh = make_mesh(flags.mesh) if flags.mesh else None
    spec = options.spec(flags.policy, flags.budget, flags.storage, flags.selection)
    model = load(flags.model, dtype=flags.dtype, mesh=mesh, rules=Rules.parse(flags.rules), weights=flags.weights)
    if flags.calibration is not None:
        model = calibrated(model, spec.storage, load_calibration(flags.calibration))
    return Runner(
        model, spec, rows=flags.rows, limits=Limits(prompt=flags.prompt, new_tokens=flags.new_tokens),
        prefill_block=flags.prefill_block, chunk=flags.chunk, turn_tokens=max(512, flags.prompt // 8),
        implementation=flags.implementation,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is interrupted. Errors of the user are one paragraph."""
    flags = parser().parse_args(argv)
    try:
        return serve(flags)
    except KvjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def serve(flags: argparse.Namespace) -> int:
    """Runs the server.

    Raises:
      KvjaxError: see `runner_for`; also if a package is missing.
    """
    try:
        from kvjax.serve.admission import PLACES
        from kvjax.serve.app import make_app
        from kvjax.serve.connections import MAX_CONNECTIONS, Connections
        from kvjax.serve.listening import run
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'kvjax[serve]'.") from None
    from kvjax.serve.engine import Engine
    from kvjax.serve.protocol import ServerInfo

    products.await_native()
    if not flags.waiting >= 0:
        raise ConfigError(f"--waiting must be at least 0; got {flags.waiting}.")
    if flags.connections is not None and not flags.connections >= 1:
        raise ConfigError(f"--connections must be at least 1; got {flags.connections}.")
    keys, listener = read_keys(flags.api_key), address.bound(flags.host, flags.port)
    with _interruptible():
        runner = runner_for(flags)
        prefixes = {}
        for given in flags.prefix:
            name, equals, folder = given.partition("=")
            if not equals:
                raise ConfigError(f"--prefix={given!r} is not of the form NAME=FOLDER.")
            prefixes[name] = runner.load_prefix(folder)
        print(f"{runner.model}\n{runner.explain()}", flush=True)
        print("compiling ...", flush=True)
        warm_up(runner)
    name = flags.name or Path(flags.model).name
    limits = runner.prompts.limits
    served = ServerInfo(runner.model, name, prefixes, limits.prompt, limits.new_tokens)
    engine = Engine(runner, most_waiting=flags.waiting)
    max_connections = flags.connections or max(MAX_CONNECTIONS, PLACES * (flags.rows + flags.waiting))
    connections, hosts = Connections(max_connections), address.names(listener, flags.host)
    if not (keys or address.is_local(listener)):
        print("anybody who reaches this address can use the model: there is no --api-key", flush=True)
    app = make_app(engine, served, api_keys=keys, hosts=hosts, connections=connections)
    run(app, engine, listener, connections)
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets an interrupt end the process at once, also while a program is compiled, which Python does not interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def warm_up(runner: Runner) -> None:
    """Compiles the programs of the longest prompts, and of short ones where the policy takes these."""
    limits = runner.prompts.limits
    new_tokens = min(2, limits.new_tokens)
    longest = max(1, min(limits.prompt, runner.model.config.max_positions - new_tokens))
    for length in sorted({1, longest}):
        with contextlib.suppress(PolicyError):
            runner.submit(Request(tokens=[0] * length, max_new_tokens=new_tokens))
    list(runner)


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
