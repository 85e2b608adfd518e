"""Runs the HTTP server as flags say: loads the model, warms it up and listens; see `kvjax.serve.__main__`."""

import argparse
import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvjax import products
from kvjax.cache import Limits
from kvjax.checkpoint.chat import templates
from kvjax.checkpoint.huggingface import load
from kvjax.contexts.chats import next_turn
from kvjax.contexts.prefix_store import PrefixStore
from kvjax.errors import ConfigError, InputError, KvjaxError, PolicyError
from kvjax.lm_eval import options
from kvjax.models.calibrate import calibrated
from kvjax.parallel.rules import Rules
from kvjax.parallel.sharding import make_mesh
from kvjax.serve import address
from kvjax.serve.api_keys import read_keys
from kvjax.serve.conversations import CONVERSATION_BYTES, ENTRY_BYTES, Conversations, context_bytes
from kvjax.serve.prompts import changed_by_blocks
from kvjax.serve.request import Request
from kvjax.serve.runner import Runner
from kvjax.specs import parse
from kvjax.speculation.drafts import Level, level, seen
from kvjax.storage.calibration import load_calibration

PRIORITY = "priority"  # of --scheduling-policy
WARM_UP = object()  # the namespace of warm-up, so that no client finds its states
PREFIX_CACHE = 10**9  # bytes of the states of prompts, unless a flag says otherwise


def runner_for(flags: argparse.Namespace) -> Runner:
    """Loads the model.

    Raises:
      KvjaxError: a model that cannot be loaded, or settings that cannot work with it.
    """
    mesh = make_mesh(flags.mesh) if flags.mesh else None
    spec = options.spec(flags.policy, flags.budget, flags.storage, flags.selection)
    model = load(flags.model, dtype=flags.dtype, mesh=mesh, rules=Rules.parse(flags.rules), weights=flags.weights)
    if flags.calibration is not None:
        model = calibrated(model, spec, load_calibration(flags.calibration))
    if flags.gamma is not None and flags.speculate is None:
        raise ConfigError("--gamma is the number of drafts of a round, and nothing drafts; give --speculate too.")
    if (max_bytes := flags.prefix_cache) is None:
        max_bytes = 0 if changed_by_blocks(spec) else PREFIX_CACHE
    return Runner(
        model, spec, rows=flags.rows, limits=Limits(prompt=flags.prompt, new_tokens=flags.new_tokens),
        prefill_block=flags.prefill_block, chunk=flags.chunk, turn_tokens=max(512, flags.prompt // 8),
        document_bytes=flags.document_cache, swap_bytes=flags.swap_bytes,
        prefix_store=PrefixStore(max_bytes) if max_bytes else None,
        implementation=flags.implementation,
        speculate=None if flags.speculate is None else drafts(flags.speculate, flags.gamma),
    )  # fmt: skip


def drafts(text: str, gamma: int | None) -> Level:
    """Reads what drafts tokens.

    Args:
      text: a selection, or ``seen(POLICY)``, as texts of `kvjax.specs.parse`.
      gamma: the number of drafts of a round; None for `kvjax.speculation.drafts.GAMMA`.

    Raises:
      KvjaxError: a text that says nothing known.
    """
    ranked = re.fullmatch(r"\s*seen\((.*)\)\s*", text, re.DOTALL)
    return level(seen(parse.build("policy", ranked[1])) if ranked else parse.build("selection", text), gamma=gamma)


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
        conversations = conversations_for(flags, runner)
    name = flags.name or Path(flags.model).name
    limits = runner.prompts.limits
    by_priority = flags.scheduling_policy == PRIORITY
    served = ServerInfo(runner.model, name, prefixes, limits.prompt, limits.new_tokens, by_priority)
    engine = Engine(runner, most_waiting=flags.waiting)
    max_connections = flags.connections or max(MAX_CONNECTIONS, PLACES * (flags.rows + flags.waiting))
    connections, hosts = Connections(max_connections), address.names(listener, flags.host)
    if not (keys or address.is_local(listener)):
        print("warning: no --api-key is set, so that anyone who can reach this address can use the model", flush=True)
    app = make_app(engine, served, api_keys=keys, hosts=hosts, connections=connections, conversations=conversations)
    run(app, engine, listener, connections)
    return 0


def conversations_for(flags: argparse.Namespace, runner: Runner) -> Conversations:
    """Makes room for conversations, if there can be some, and says so.

    Programs of a turn of one token are compiled; those of longer ones, under full caches, when they come.

    Raises:
      ConfigError: a number of bytes was asked for, and there can be no conversation.
    """
    asked = flags.conversation_bytes
    if asked == 0:
        return Conversations(0)
    max_bytes = CONVERSATION_BYTES if asked is None else asked
    reason, nbytes = _against_conversations(flags, runner), 0
    if reason is None:
        nbytes = _conversation_bytes(runner)
        if not nbytes:
            reason = "a conversation of two turns does not fit, or has numbers that are not finite"
        elif nbytes > max_bytes:
            reason = f"one takes {nbytes} bytes"
    if reason is None:
        print(f"conversations: room for {max_bytes // nbytes}, {nbytes} bytes each", flush=True)
        return Conversations(max_bytes)
    if asked is not None:
        raise ConfigError(f"--conversation-bytes={asked}: there can be no conversations: {reason}.")
    print(f"conversations: none: {reason}", flush=True)
    return Conversations(0)


def _against_conversations(flags: argparse.Namespace, runner: Runner) -> str | None:
    """Returns why there can be no conversations, or None."""
    model = runner.model
    if flags.speculate is not None:
        return "rows that are drafted for (--speculate) continue no context"
    if model.tokenizer is None or not templates(model.tokenizer):
        return "the model has no chat template"
    try:
        next_turn(model, np.zeros(1, np.int32), [{"role": "user", "content": "message"}])
    except KvjaxError as error:
        return str(error).rstrip(".")
    return None


def _conversation_bytes(runner: Runner) -> int:
    """Runs two turns of a conversation, and returns the bytes that it takes; 0 if they cannot be run."""
    conversations = Conversations(sys.maxsize)
    conversation = conversations.begin(WARM_UP)
    assert conversation is not None
    limits, nbytes = runner.prompts.limits, 0
    tokens = [0] * max(1, min(limits.prompt, runner.model.config.max_positions - 4))
    try:
        for _ in range(2):
            taken = conversations.take(conversation.id, WARM_UP)
            runner.submit(
                Request(tokens=tokens, max_new_tokens=1, prefix=taken.context, keep_context=True, namespace=WARM_UP)
            )
            (result,) = runner
            if result.context is None:
                return 0
            conversations.put(taken, result.context)
            nbytes, tokens = ENTRY_BYTES + context_bytes(result.context), [0]
    except (InputError, PolicyError):
        return 0
    finally:
        if runner.prefix_store is not None:
            runner.prefix_store.clear()
    return nbytes


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
            # The second one finds states of the first one, if there is a store.
            for last in range(1 if runner.prefix_store is None else 2):
                tokens = [*[0] * (length - 1), last]
                runner.submit(Request(tokens=tokens, max_new_tokens=new_tokens, namespace=WARM_UP))
    list(runner)
    if runner.prefix_store is not None:
        runner.prefix_store.clear()
