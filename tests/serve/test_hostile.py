"""The server as a process, under everything that clients may do at once: one that behaves is answered, and rightly.

`ATTACKS` is a table: each attack runs until it is ended, in a thread of its own, and returns what it saw that is wrong.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import Limits
from tests.conftest import ROOT
from tests.serve import strange_template

pytest.importorskip("uvicorn", reason="the server needs kvjax[serve]")
pytest.importorskip("starlette", reason="the server needs kvjax[serve]")

START_SECONDS = 240  # in which programs are compiled beside other tests
ANSWER_SECONDS = 30  # in which a client that behaves is answered
END_SECONDS = 5
FILES = 64  # that the server may open beside those that it has when it is attacked
GROWTH_BYTES = 150 << 20  # of the server's memory under attack: bodies take 32 MiB, and twice as much to be read
POLICY, LIMITS = policies.h2o(16), Limits(prompt=64, new_tokens=32)
PROMPTS = ["Anna put the red ball", "It was a bright cold day, and the", "Once", "The ship left the harbour and"]
NEW_TOKENS = 24
#: Runs the server on a model of which a token makes NaN. A checkpoint may hold no such weights.
PROGRAM = """
import sys
from kvjax.serve import __main__ as command
from kvjax.serve import program
from tests.tiny import spoiled

load = program.load
program.load = lambda *given, **options: spoiled(load(*given, **options), {token})
sys.exit(command.main())
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclasses.dataclass
class Server:
    """A server of this test.

    Attributes:
      port: that it listens on.
      process: its process.
      texts: what it must answer to each prompt.
      greeting: what it must answer to "Hello".
      spoiled: a token of which the model makes NaN.
    """

    port: int
    process: subprocess.Popen
    texts: dict[str, str]
    greeting: str
    spoiled: int

    def connect(self, seconds=ANSWER_SECONDS):
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def ask(self, prompt, *, key="", **options):
        """Returns the status and the JSON of a response to a prompt."""
        return self.send("POST", "/v1/completions", asked(prompt), key=key, **options)

    def chat(self, content, *, key=""):
        """Returns the status and the JSON of a response to a message."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS, "temperature": 0}
        return self.send("POST", "/v1/chat/completions", body, key=key)

    def send(self, method, path, body=None, *, key="", seconds=ANSWER_SECONDS):
        """Returns the status and the JSON of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with contextlib.closing(connection):
            body = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def memory(self):
        """Bytes of memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_of(number):
    """The numbers of the processes that a process has started."""
    return [
        child for each in Path(f"/proc/{number}/task").iterdir() for child in (each / "children").read_text().split()
    ]


def asked(prompt, **more):
    return {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True} | more


def whole(prompt, **more):
    """The bytes of a request."""
    body = json.dumps(asked(prompt, **more)).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_all(connection):
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def is_error(answer):
    """Whether a response is an error as the API has it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return b"application/json" in head.lower() and bool(json.loads(body)["error"]["message"])


# Attacks. Each takes the server and an event that ends it, and returns a list of what was wrong.


def silent(server, ended):
    """Connections on which nothing, or half a line, is sent: more than the server may have files."""
    with contextlib.ExitStack() as held:
        for number in range(90):
            with contextlib.suppress(OSError):
                connection = held.enter_context(server.connect(5))
                connection.sendall(b"POST /v1/comp" if number % 2 else b"")
        ended.wait()
    return []


def slow_bodies(server, ended):
    """Forty bodies of 15 MB, which come as slowly as is accepted, with and without their length."""

    def send(number):
        size = 15 << 20
        announced = b"Content-Length: %d\r\n\r\n" % size if number % 2 else b"Transfer-Encoding: chunked\r\n\r\n"
        chunk = b"x" * (32 << 10)
        part = chunk if number % 2 else b"%x\r\n%s\r\n" % (len(chunk), chunk)
        while not ended.is_set():
            with contextlib.suppress(OSError), server.connect(5) as connection:
                connection.sendall(HEAD + announced + b'{"prompt": "')
                for _ in range(size // len(chunk) - 1):
                    if ended.wait(0.2):
                        break
                    connection.sendall(part)

    with ThreadPoolExecutor(40) as clients:
        list(clients.map(send, range(40)))
    return []


def flood(server, ended):
    """Forty threads of one client, which ask again at once whatever they are answered."""

    def send(number):
        while not ended.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, answer = server.ask(PROMPTS[number % 4], key="flood")
                if status not in (200, 429, 503) or (status != 200 and "error" not in answer):
                    return [f"flood: {status} {answer}"]
        return []

    with ThreadPoolExecutor(40) as clients:
        return [each for wrong in clients.map(send, range(40)) for each in wrong]


MALFORMED = [
    b"\x00\xff\x80 nothing\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: somebody-else.com\r\nConnection: close\r\n\r\n",
    b"GET /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"DELETE /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    HEAD + b"Content-Length: -5\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Connection: close\r\nContent-Length: 3\r\n\r\n{\xff}",
    HEAD + b"Connection: close\r\nContent-Length: 99999999999999999999\r\n\r\n{",
    HEAD + b"Connection: close\r\nContent-Length: 3\r\nAuthorization: Bearer s\xe9cret\r\n\r\n{}x",
]


def malformed(server, ended):
    """Requests that are none, each answered with an error as the API has it."""
    wrong = []
    while not ended.wait(0.2):
        for content in MALFORMED:
            with contextlib.suppress(OSError), server.connect() as connection:
                connection.sendall(content)
                answer = read_all(connection)
                if answer and not is_error(answer):
                    wrong.append(f"malformed: {content[:60]!r} was answered {answer!r}")
    return wrong


def half_closed(server, ended):
    """Clients that close their side after their request, and wait for the answer."""
    wrong = []
    while not ended.wait(0.1):
        with contextlib.suppress(OSError), server.connect() as connection:
            connection.sendall(whole(PROMPTS[0]))
            connection.shutdown(socket.SHUT_WR)
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
            if b" 200 " in head and json.loads(body)["choices"][0]["text"] != server.texts[PROMPTS[0]]:
                wrong.append(f"half_closed: {body!r}")
            if b" 200 " not in head and not is_error(head + b"\r\n\r\n" + body) and not ended.is_set():
                wrong.append(f"half_closed: {head!r} {body!r}")
    return wrong


def leaving(server, ended):
    """Clients that leave without an answer, and others that take nothing of a stream."""
    with contextlib.ExitStack() as held:
        while not ended.wait(0.1):
            with contextlib.suppress(OSError), server.connect() as connection:
                connection.sendall(whole(PROMPTS[1]))
            with contextlib.suppress(OSError):
                connection = held.enter_context(server.connect())
                connection.sendall(whole(PROMPTS[2], stream=True))
    return []


def templates(server, ended):
    """Conversations for which the checkpoint's chat template fails, or does not end."""

    def send(number):
        wrong = []
        while not ended.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, answer = server.chat(("spin", "zero", "long", "half")[number], key="templates")
                if status not in (400, 429, 503) or not answer["error"]["message"]:
                    wrong.append(f"templates: {status} {answer}")
        return wrong

    with ThreadPoolExecutor(4) as clients:
        return [each for wrong in clients.map(send, range(4)) for each in wrong]


def not_finite(server, ended):
    """Prompts with a token of which the model makes NaN."""
    wrong = []
    while not ended.wait(0.05):
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, answer = server.ask([2, 3, server.spoiled], key="not_finite")
            code = answer["error"]["code"] if status != 200 else None
            if (status, code) not in ((500, "not_finite"), (429, "server_busy"), (503, "server_busy"), (503, None)):
                wrong.append(f"not_finite: {status} {answer}")
    return wrong


ATTACKS = {
    each.__name__: each for each in (silent, slow_bodies, flood, malformed, half_closed, leaving, templates, not_finite)
}


def conversing(server, ended):
    """A client that behaves, whose conversations need the templates' processes; returns what was wrong."""
    wrong, answered = [], 0
    while not ended.is_set():
        try:
            status, answer = server.chat("Hello", key="conversing")
        except (OSError, http.client.HTTPException) as error:
            status, answer = 0, repr(error)
        if status == 200 and answer["choices"][0]["message"]["content"] == server.greeting:
            answered += 1
        else:
            wrong.append(f"conversing: {status} {answer}")
    return wrong if answered else [*wrong, "conversing: no answer"]


@pytest.fixture(scope="module")
def model():
    """kvjax-tiny's first layer, with a chat template that does harm."""
    loaded = kvjax.load("kvjax-tiny")
    layer = {
        name: value for name, value in loaded.params.items() if not name.startswith("layers_") or name == "layers_0"
    }
    files = loaded.tokenizer.files | {"chat_template.jinja": strange_template.SOURCE}
    return dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, num_layers=1, windows=()),
        params=layer,
        tokenizer=dataclasses.replace(loaded.tokenizer, files=files),
    )


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    kvjax.save(model, folder / "tiny")
    options = {"max_new_tokens": NEW_TOKENS, "limits": LIMITS}
    texts = {prompt: kvjax.generate_text(model, prompt, POLICY, stop=(), **options).texts[0] for prompt in PROMPTS}
    greeting = kvjax.generate_text(model, [[{"role": "user", "content": "Hello"}]], POLICY, **options).texts[0]
    log, token = folder / "log", model.tokenizer.encode("#")[-1]
    flags = ["--policy=h2o", "--budget=16", "--rows=2", "--waiting=8", "--prompt=64", "--new-tokens=32", "--port=0"]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.read("jax_disable_most_optimizations")).lower(),
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(token=token), f"--model={folder}/tiny", *flags],
            stdout=out, stderr=out, cwd=ROOT, env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while "startup complete" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        port = log.read_text().partition("serving on http://127.0.0.1:")[2].partition(",")[0]
        yield Server(int(port), process, texts, greeting, token)
    finally:
        process.kill()
        process.wait()


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("resource"), "prlimit"), reason="the limit of files of another process")
def test_everything_at_once(server):
    """Two clients are answered rightly while all attacks go on, memory stays, and no process is left at the end."""
    import resource

    assert server.ask(PROMPTS[0])[1]["choices"][0]["text"] == server.texts[PROMPTS[0]]
    files = len(os.listdir(f"/proc/{server.process.pid}/fd")) + FILES
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files, files))
    before, most = server.memory(), 0
    #: All that there were: one that takes too long for a template is stopped, and the next starts when it is needed.
    children: set[str] = set()
    ended, enough = threading.Event(), threading.Event()
    with ThreadPoolExecutor(len(ATTACKS) + 1) as threads:
        attacks = [threads.submit(attack, server, ended) for attack in ATTACKS.values()]
        conversation = threads.submit(conversing, server, enough)
        try:
            time.sleep(2)
            begun, answered = time.monotonic(), 0
            while time.monotonic() < begun + 8:
                prompt = PROMPTS[answered % len(PROMPTS)]
                status, answer = server.ask(prompt, key="patient")
                assert status == 200 and answer["choices"][0]["text"] == server.texts[prompt], answer
                status, answer = server.send("GET", "/health")
                assert status == 200 and answer["status"] == "ok"
                answered, most = answered + 1, max(most, server.memory())
                children.update(children_of(server.process.pid))
            print(f"{answered} answers, {most - before:,} bytes more")
            enough.set()
            assert conversation.result() == []
            children.update(children_of(server.process.pid))
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(END_SECONDS)
            deadline = time.monotonic() + END_SECONDS
            while any(Path(f"/proc/{child}").exists() for child in children):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            enough.set()
            ended.set()
    assert answered >= 3 and most - before < GROWTH_BYTES
    assert children and [each for attack in attacks for each in attack.result()] == []
