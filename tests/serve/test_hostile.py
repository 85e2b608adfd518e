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
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclasses.dataclass
class Server:
    """A server of this test.

    Attributes:
      port: that it listens on.
      process: its process.
      texts: what it must answer to each prompt.
    """

    port: int
    process: subprocess.Popen
    texts: dict[str, str]

    def connect(self, seconds=ANSWER_SECONDS):
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def ask(self, prompt, *, key="", method="POST", path="/v1/completions", seconds=ANSWER_SECONDS):
        """Returns the status and the JSON of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with contextlib.closing(connection):
            body = None if method == "GET" else json.dumps(asked(prompt)).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def memory(self):
        """Bytes of memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


ATTACKS = {
    each.__name__: each for each in (silent, slow_bodies, flood, malformed, half_closed, leaving)
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """kvjax-tiny's first layer."""
    loaded = kvjax.load("kvjax-tiny")
    layer = {
        name: value for name, value in loaded.params.items() if not name.startswith("layers_") or name == "layers_0"
    }
    return dataclasses.replace(
        loaded, config=dataclasses.replace(loaded.config, num_layers=1, windows=()), params=layer
    )


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    kvjax.save(model, folder / "tiny")
    texts = {
        prompt: kvjax.generate_text(model, prompt, POLICY, max_new_tokens=NEW_TOKENS, limits=LIMITS, stop=()).texts[0]
        for prompt in PROMPTS
    }
    log = folder / "log"
    flags = ["--policy=h2o", "--budget=16", "--rows=2", "--waiting=8", "--prompt=64", "--new-tokens=32", "--port=0"]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.read("jax_disable_most_optimizations")).lower(),
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvjax.serve", f"--model={folder}/tiny", *flags],
            stdout=out, stderr=out, cwd=ROOT, env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while "startup complete" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        port = log.read_text().partition("serving on http://127.0.0.1:")[2].partition(",")[0]
        yield Server(int(port), process, texts)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("resource"), "prlimit"), reason="the limit of files of another process")
def test_everything_at_once(server):
    """A client of its own key is answered rightly while all attacks go on, memory stays, and the process ends."""
    import resource

    assert server.ask(PROMPTS[0])[1]["choices"][0]["text"] == server.texts[PROMPTS[0]]
    files = len(os.listdir(f"/proc/{server.process.pid}/fd")) + FILES
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files, files))
    before, ended, most = server.memory(), threading.Event(), 0
    with ThreadPoolExecutor(len(ATTACKS)) as threads:
        attacks = [threads.submit(attack, server, ended) for attack in ATTACKS.values()]
        try:
            time.sleep(2)
            begun, answered = time.monotonic(), 0
            while time.monotonic() < begun + 8:
                prompt = PROMPTS[answered % len(PROMPTS)]
                status, answer = server.ask(prompt, key="patient")
                assert status == 200 and answer["choices"][0]["text"] == server.texts[prompt], answer
                status, answer = server.ask("", method="GET", path="/health")
                assert status == 200 and answer["status"] == "ok"
                answered, most = answered + 1, max(most, server.memory())
            print(f"{answered} answers, {most - before:,} bytes more")
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(END_SECONDS)
        finally:
            ended.set()
    assert answered >= 3 and most - before < GROWTH_BYTES
    assert [each for attack in attacks for each in attack.result()] == []
