"""The HTTP server: right answers to many clients at once, and no row is lost whatever clients do."""

import contextlib
import dataclasses
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import kvjax
from kvjax import contexts, policies
from kvjax.cache import Limits
from kvjax.checkpoint import sandbox
from kvjax.generation.decoding import CHUNK
from kvjax.serve import Runner
from tests.conftest import ROOT
from tests.serve import strange_template
from tests.tiny import spoiled, tiny

uvicorn = pytest.importorskip("uvicorn", reason="the server needs kvjax[serve]")
pytest.importorskip("starlette", reason="the server needs kvjax[serve]")
from kvjax.serve import __main__ as command  # noqa: E402
from kvjax.serve import address, bodies, listening, program  # noqa: E402
from kvjax.serve import app as pages  # noqa: E402
from kvjax.serve.api_errors import ApiError  # noqa: E402
from kvjax.serve.engine import Engine  # noqa: E402
from kvjax.serve.preemption import SWAP_BYTES  # noqa: E402
from kvjax.serve.protocol import ServerInfo  # noqa: E402

WAIT = 300  # seconds, where programs are compiled beside other tests
LIMITS = Limits(prompt=64, new_tokens=100)
POLICY = policies.h2o(16)
TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer:"
PROMPTS = ["Anna put the red ball", "It was a bright cold day, and the", "Once", "The ship left the harbour and"]


def chat_model(layers=1):
    """kvjax-tiny's first layers, with a chat template."""
    whole = kvjax.load("kvjax-tiny")
    tokenizer = dataclasses.replace(whole.tokenizer, files={**whole.tokenizer.files, "chat_template.jinja": TEMPLATE})
    config = dataclasses.replace(whole.config, num_layers=layers, windows=())
    return dataclasses.replace(whole, config=config, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model():
    return chat_model()


@dataclasses.dataclass
class Server:
    """A server that runs in a thread of this process."""

    port: int
    runner: Runner
    engine: Engine
    running: listening.Server

    def ask(self, method, path, body=None, headers=None):
        """Returns the status, the headers and the body of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        with contextlib.closing(connection):
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {"content-type": "application/json"} if content is not None else {}
            connection.request(method, path, content, given | (headers or {}))
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def complete(self, prompt, **body):
        """Returns the first choice of a completion."""
        status, _, content = self.ask("POST", "/v1/completions", {"prompt": prompt, "temperature": 0} | body)
        assert status == 200, content
        return json.loads(content)["choices"][0]

    def health(self):
        return json.loads(self.ask("GET", "/health")[2])

    def begin(self, **body):
        """A socket on which a request was sent."""
        content = json.dumps({"prompt": PROMPTS[0], "temperature": 0} | body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def wait_until_idle(self):
        deadline = time.monotonic() + WAIT
        while (held := self.health())["running"] or held["waiting"]:
            assert time.monotonic() < deadline, held
            time.sleep(0.01)


@contextlib.contextmanager
def serving(model, *, policy=POLICY, waiting=300, step=None, store=None, by_priority=False, **options):
    """A server of its own; `step` replaces that of its runner, which it is given."""
    runner = Runner(model, policy, rows=4, limits=LIMITS, chunk=8, prefix_store=store)
    if step is not None:
        whole = runner.step
        runner.step = lambda: step(whole)
    prefixes = {"anna": runner.prefix(model.tokenizer.encode(PROMPTS[0]))}
    engine = Engine(runner, most_waiting=waiting)
    served = ServerInfo(model, "tiny", prefixes, LIMITS.prompt, LIMITS.new_tokens, by_priority)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    app = pages.make_app(engine, served, **({"hosts": ("localhost", "127.0.0.1")} | options))
    server = listening.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=WAIT), engine, grace=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Server(listener.getsockname()[1], runner, engine, server)
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(model):
    with serving(model) as made:
        made.complete("x", max_tokens=2)  # compiles
        yield made


def alone(model, prompt, tokens, **options):
    ids = model.tokenizer.encode(prompt)
    made = kvjax.generate(model, ids, POLICY, max_new_tokens=tokens, limits=LIMITS, **options)
    return model.tokenizer.decode(made.tokens[0])


@pytest.mark.sampled(0)
def test_two_hundred_clients(server, model):
    """Greedy and sampled, whole and as streams: each answer is that of the request alone."""
    drawn = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
    tokens = [5, 12, 20, 30]
    expected = {}
    for number, prompt in enumerate(PROMPTS):
        expected[number, False] = alone(model, prompt, tokens[number])
        sampler = kvjax.Sample(temperature=0.9, top_p=0.9)
        expected[number, True] = alone(
            model, prompt, tokens[number], sampler=sampler, key=jax.random.key(7), requests=[0]
        )

    def client(number):
        which, sampled, stream = number % 4, bool(number // 4 % 2), bool(number // 8 % 2)
        body = {"prompt": PROMPTS[which], "max_tokens": tokens[which], "temperature": 0} | (drawn if sampled else {})
        status, headers, content = server.ask("POST", "/v1/completions", body | {"stream": stream})
        assert status == 200
        if stream:
            assert headers["content-type"].startswith("text/event-stream")
            events = [line[6:] for line in content.decode().split("\n\n") if line]
            assert events.pop() == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
            assert [each["finish_reason"] for each in choices][-1] == "length"
            text = "".join(each["text"] for each in choices)
        else:
            choice = json.loads(content)["choices"][0]
            text, usage = choice["text"], json.loads(content)["usage"]
            assert choice["finish_reason"] == "length" and usage["completion_tokens"] == tokens[which]
        assert text == expected[which, sampled]

    with ThreadPoolExecutor(200) as clients:
        list(clients.map(client, range(200)))
    server.wait_until_idle()
    health = server.health()
    assert health["status"] == "ok" and not server.runner.load.running and health["prefix_cache"] is None


def events_of(content):
    """The JSON of a stream's events; `NaN` and `Infinity`, which are no JSON, fail."""
    lines = [line[6:] for line in content.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_a_request_of_nan_ends_with_an_error_and_others_go_on(model, sampling):
    token = model.tokenizer.encode("#")[-1]
    with serving(spoiled(model, token)) as server:
        ids = model.tokenizer.encode(PROMPTS[0])
        expected = server.complete(ids, max_tokens=12, **sampling)

        def client(number):
            bad, stream = number % 2 == 1, number % 4 > 1
            body = {"prompt": [*ids, token] if bad else ids, "max_tokens": 12, "logprobs": 0, "stream": stream}
            status, _, content = server.ask("POST", "/v1/completions", body | sampling)
            if not bad:
                parts = events_of(content) if stream else [json.loads(content)]
                assert status == 200 and "".join(each["choices"][0]["text"] for each in parts) == expected["text"]
                return
            # Nothing of a stream was sent before the error, so that it has a status too.
            error = json.loads(content, parse_constant=pytest.fail)["error"]
            assert status == 500 and (error["type"], error["code"]) == ("server_error", "not_finite")
            assert "not finite, after 0 new tokens of this request" in error["message"]

        with ThreadPoolExecutor(12) as clients:
            list(clients.map(client, range(12)))
        server.wait_until_idle()
        health = server.health()
        assert health["status"] == "ok" and health["not_finite"] == 6 and health["requests"] == 13
        assert health["rounds"] == health["drafted"] == health["accepted"] == 0


def test_a_stream_that_becomes_nan_ends_with_an_event(model):
    ids = model.tokenizer.encode(PROMPTS[0])
    sampling = {"sampler": kvjax.Sample(temperature=1.5), "key": jax.random.key(3), "requests": [0]}
    made = kvjax.generate(model, ids, POLICY, max_new_tokens=40, limits=LIMITS, **sampling).tokens[0].tolist()
    at = next(i for i in range(12, 39) if made[i] not in ids + made[:i])
    with serving(spoiled(model, made[at])) as server:
        body = {"prompt": ids, "max_tokens": 40, "temperature": 1.5, "seed": 3, "stream": True, "logprobs": 0}
        status, _, content = server.ask("POST", "/v1/completions", body)
        events = events_of(content)
        assert status == 200 and b"[DONE]" not in content
        assert events[-1]["error"]["code"] == "not_finite"
        tokens = [x for each in events[:-1] for x in each["choices"][0]["logprobs"]["token_logprobs"]]
        assert len(tokens) == at + 1
        assert server.ask("POST", "/v1/completions", body | {"stream": False})[0] == 500


def test_the_openai_package(server, model):
    openai = pytest.importorskip("openai", reason="compares with the client that the server is for")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    whole = client.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=12, temperature=0, logprobs=0)
    assert whole.choices[0].text == alone(model, PROMPTS[1], 12)
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens == 12
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
    talk = [
        {"role": "user", "content": "Where is the ball?"},
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
    ]
    asked = {"model": "tiny", "messages": talk, "max_completion_tokens": 9, "temperature": 2, "seed": 3, "n": 2}
    said = client.chat.completions.create(**asked, logprobs=True, extra_body={"top_k": 200})
    assert len(said.choices[1].logprobs.content) == 9 and said.choices[0].message.role == "assistant"
    parts = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 200}
        )
    )
    texts = ["", ""]
    for part in parts[:-1]:
        texts[part.choices[0].index] += part.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in said.choices] and texts[0] != texts[1]
    assert parts[-1].usage == said.usage and said.usage.completion_tokens == 18
    prompt = "user: Where is the ball?\nuser: ?\nanswer:"
    assert said.usage.prompt_tokens == len(model.tokenizer.encode(prompt, bos=False))
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])
    # A stream that the client leaves.
    with client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()


def test_stop_texts_and_prefixes(server, model):
    whole = server.complete(PROMPTS[3], max_tokens=60)["text"]
    stop = whole[20:26]
    stopped = server.complete(PROMPTS[3], max_tokens=60, stop=[stop, "never there"])
    assert stopped["text"] == whole[: whole.index(stop)] and stopped["finish_reason"] == "stop"
    continued = server.complete(" into", max_tokens=10, prefix="anna")["text"]
    ids = model.tokenizer.encode(" into", bos=False)
    asked = contexts.extend(model, server.runner.prefix(model.tokenizer.encode(PROMPTS[0])), ids, block=1)
    expected = contexts.decode(model, asked, max_new_tokens=10)
    assert continued == model.tokenizer.decode(expected.tokens[0])
    # Of several prompts, each has its choices.
    body = {"prompt": [PROMPTS[0], PROMPTS[2]], "max_tokens": 5, "temperature": 0, "n": 2}
    status, _, content = server.ask("POST", "/v1/completions", body)
    texts = [choice["text"] for choice in json.loads(content)["choices"]]
    assert status == 200 and texts[0] == texts[1] == alone(model, PROMPTS[0], 5) and texts[2] == texts[3]


LONG = [1] * (LIMITS.prompt + 1)
BAD = [
    (b"{", 400, None),
    (b"[]", 400, None),
    (b"\xff\xfe", 400, None),
    (b"[" * 100_000, 400, None),
    ({}, 400, None),
    ({"prompt": []}, 400, None),
    ({"prompt": [[]]}, 400, None),
    ({"prompt": LONG}, 400, "context_length_exceeded"),
    ({"prompt": "word " * 500}, 400, "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": LIMITS.new_tokens + 1}, 400, "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 0}, 400, None),
    ({"prompt": "x", "max_tokens": "7"}, 400, None),
    ({"prompt": [2048]}, 400, "invalid_value"),
    ({"prompt": [-1]}, 400, "invalid_value"),
    ({"prompt": [True]}, 400, None),
    ({"prompt": ["x", 7]}, 400, None),
    ({"prompt": "word " * 3_000_000}, 400, "context_length_exceeded"),
    (b'{"prompt": "a\\ud800b"}', 400, None),
    ({"prompt": "x", "temperature": -1}, 400, None),
    ({"prompt": "x", "temperature": 1e-40}, 400, None),
    ({"prompt": "x", "temperature": 10**400}, 400, None),
    ({"prompt": "x", "top_p": 1e-300}, 400, None),
    ({"prompt": "x", "repetition_penalty": 10**400}, 400, None),
    ({"prompt": "x", "temperature": float("nan")}, 400, None),
    ({"prompt": "x", "top_p": 0}, 400, None),
    ({"prompt": "x", "n": 1000}, 400, None),
    ({"prompt": "x", "priority": 0.5}, 400, None),
    ({"prompt": "x", "priority": 1}, 400, None),  # the server was not started for priorities
    ({"prompt": "x", "seed": 1 << 40}, 400, None),
    ({"prompt": "x", "stop": [""]}, 400, None),
    ({"prompt": "x", "stop_token_ids": list(range(40))}, 400, "invalid_value"),
    ({"prompt": "x", "stop_token_ids": [2**32 + 263]}, 400, "invalid_value"),
    ({"prompt": "x", "stream": "yes"}, 400, None),
    ({"prompt": "x", "logprobs": 5}, 400, None),
    ({"prompt": "x", "logprobs": 1}, 400, None),
    ({"prompt": "x", "logprobs": True}, 400, None),
    ({"prompt": "x", "presence_penalty": 0.5}, 400, "unsupported_parameter"),
    ({"prompt": "x", "wrong": 1}, 400, "unknown_parameter"),
    ({"prompt": "x", "model": "other"}, 404, "model_not_found"),
    ({"prompt": "x", "prefix": "none"}, 404, None),
]


def test_malformed_bodies(server):
    for body, status, code in BAD:
        found, _, content = server.ask("POST", "/v1/completions", body)
        error = json.loads(content)["error"]
        assert (found, error["code"]) == (status, code), (body, error)
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
        if isinstance(body, dict) and "stream" not in body:
            # A stream that is refused has a status too.
            assert server.ask("POST", "/v1/completions", body | {"stream": True})[0] == status
    for messages in (None, [], "x", [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], [7]):
        assert server.ask("POST", "/v1/chat/completions", {"messages": messages})[0] == 400
    server.wait_until_idle()


def test_other_requests(server, monkeypatch):
    """Every error is the API's, whoever has found it."""
    monkeypatch.setattr(bodies, "MAX_BYTES", 1000)
    body = {"prompt": "x"}
    for expected, method, path, content, headers in (
        (413, "POST", "/v1/completions", {"prompt": "x" * 1000}, {}),
        (415, "POST", "/v1/completions", body, {"content-type": "text/plain"}),
        (415, "POST", "/v1/completions", body, {"content-encoding": "gzip"}),
        (400, "POST", "/v1/completions", body, {"content-length": "15", "transfer-encoding": "chunked"}),
        (405, "GET", "/v1/completions", None, {}),
        (405, "BREW", "/health", None, {}),
        (404, "GET", "/v1/none", None, {}),
        (404, "GET", "/health/", None, {}),
        (404, "GET", "/v1/models/none", None, {}),
        (404, "GET", "/v1/models/%ff%00", None, {}),
        (400, "GET", "/health", None, {"host": "a-page-of-somebody-else.com"}),
        (400, "GET", "/health", None, {"host": "\xe9"}),
        (200, "GET", "/health", None, {"host": "localhost:1"}),
        (200, "GET", "/health", None, {"host": "LOCALHOST."}),
    ):
        status, found, answer = server.ask(method, path, content, headers)
        assert (status, found["content-type"]) == (expected, "application/json"), path
        if status != 200:
            assert json.loads(answer)["error"]["message"], path
        assert status != 405 or found["allow"]
    for error, expected in ((ZeroDivisionError("x"), 500), (RecursionError("x"), 400)):

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(pages, "read", fail)
            status, found, answer = server.ask("POST", "/v1/completions", body)
            assert (status, found["content-type"]) == (expected, "application/json")
            assert json.loads(answer)["error"]["type"] == (
                "server_error" if expected == 500 else "invalid_request_error"
            )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
    with contextlib.closing(connection):
        connection.sendall(b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 505 ") and b"HTTP 2.0 is not supported" in answer
    # What is wrong is not sent back whole.
    status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "x", "y" * 900: 1})
    assert status == 400 and len(answer) < 3000


def test_an_error_is_short():
    error = ApiError(400, "x" * 10_000_000, param="y" * 10_000_000)
    assert len(json.dumps(error.body)) < 10_000


def test_keys_of_any_letters(model):
    """They are compared in UTF-8, and what is not UTF-8 is a wrong key."""
    with serving(model, api_keys=("s\xe9cret".encode(), b"two")) as server:
        for key, status in (
            ("s\xe9cret".encode(), 200),
            (b"two", 200),
            ("s\xe9cret".encode("latin-1"), 401),
            (b"\xff\xfe", 401),
            (b"", 401),
            (b"tw", 401),
        ):
            assert server.ask("GET", "/v1/models", None, {"authorization": b"Bearer " + key})[0] == status, key


def test_states_of_prompts_belong_to_a_key(model):
    """Neither answers nor counts of one key show what another one has asked; who has none is not told of any."""
    keys = b"one", b"two"
    with serving(model, api_keys=keys, store=kvjax.PrefixStore(1 << 24)) as server:

        def ask(key, prompt=PROMPTS[1]):
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 4}
            usage = json.loads(server.ask("POST", "/v1/completions", body, {"authorization": b"Bearer " + key})[2])
            return usage["choices"][0]["text"], usage["usage"].get("prompt_tokens_details")

        def counts(key):
            given = {} if key is None else {"authorization": b"Bearer " + key}
            return json.loads(server.ask("GET", "/health", None, given)[2])["prefix_cache"]

        length = len(model.tokenizer.encode(PROMPTS[1]))
        text, none = ask(b"one")
        assert none is None and counts(b"two")["bytes"] == counts(b"two")["misses"] == 0
        assert ask(b"two") == (text, None) and ask(b"one") == (text, {"cached_tokens": length})
        assert ask(b"one", PROMPTS[2])[1] is None
        one, two = map(counts, keys)
        assert (one["hits"], one["misses"], one["found_tokens"], one["states"]) == (1, 2, length, 2)
        assert (two["hits"], two["misses"], two["found_tokens"], two["states"]) == (0, 1, 0, 1)
        assert one["bytes"] > two["bytes"] > 0
        assert counts(None) == counts(b"three") == {"max_bytes": 1 << 24}
        assert server.runner.prefix_store.nbytes == one["bytes"] + two["bytes"] <= 1 << 24
        # Neither does what all have sent say which of it was found.
        assert server.health()["prompt_tokens"] == 3 * length + len(model.tokenizer.encode(PROMPTS[2]))


def test_bytes_of_the_prefix_cache():
    def given(*flags):
        return command.parser().parse_args(["--model=kvjax-tiny", *flags]).prefix_cache

    parsed = command.parser().parse_args(["--model=kvjax-tiny"])
    assert parsed.swap_bytes == SWAP_BYTES and "(default 4GB)" in command.parser().format_help()
    sizes = {"0": 0, "4096": 4096, "2GB": 2 * 10**9, "1.5 MB": 1_500_000, "3k": 3000}
    assert given() is None and {text: given(f"--prefix-cache={text}") for text in sizes} == sizes
    for wrong in ("-1", "much", "2GiB", "nan"):
        with pytest.raises(SystemExit):
            given(f"--prefix-cache={wrong}")


def test_caches_whose_prompts_are_stored_by_default(monkeypatch):
    """Full ones and compressors, whose states do not depend on what follows; a flag decides for the others too."""
    monkeypatch.setattr(program, "load", lambda *args, **options: tiny(layers=1).model)

    def store_of(*flags):
        given = ["--model=x", "--prompt=32", "--new-tokens=8", *flags]
        return program.runner_for(command.parser().parse_args(given)).prefix_store

    half = "--budget=0.5"
    chosen = ["--policy=full", "--selection=quest(4, 16)"]
    for flags in (["--policy=full"], ["--policy=snapkv(window=4)", half], chosen):
        assert store_of(*flags).max_bytes == 10**9, flags
    for flags in (["--policy=h2o", half], ["--policy=window", half], ["--policy=full", "--storage=int8"]):
        assert store_of(*flags) is None, flags
    assert store_of("--policy=h2o", half, "--prefix-cache=2MB").max_bytes == 2 * 10**6
    assert store_of("--policy=full", "--prefix-cache=0") is None


@pytest.mark.sampled(0)
def test_a_flood_leaves_others_their_share(model):
    """Forty threads of one client, and one of another: a key, or neither of them with any."""

    def step(whole):
        time.sleep(0.005)
        return whole()

    with serving(model, waiting=2, step=step) as server:
        server.complete("x", max_tokens=2)
        body, ended = {"prompt": "x", "max_tokens": 8, "temperature": 0}, threading.Event()

        def flood(_):
            while not ended.is_set():
                server.ask("POST", "/v1/completions", body, {"authorization": "Bearer flood"})

        with ThreadPoolExecutor(40) as clients:
            running = [clients.submit(flood, number) for number in range(40)]
            time.sleep(1)
            answered = {}
            for key in ("patient", "flood"):
                begun, answered[key] = time.monotonic(), 0
                while time.monotonic() < begun + 3:
                    given = {"authorization": f"Bearer {key}"}
                    answered[key] += server.ask("POST", "/v1/completions", body, given)[0] == 200
            ended.set()
            assert [each.result() for each in running] and answered["flood"] >= 1
            assert answered["patient"] >= max(5, 3 * answered["flood"])
        server.wait_until_idle()


def test_clients_that_go(server, model):
    """Aborted streams, clients that do not wait, and bodies that never come free their rows."""
    connections = [server.begin(stream=True, max_tokens=100) for _ in range(6)]
    assert all(connection.recv(16).startswith(b"HTTP/1.1 200") for connection in connections[:3])
    connections += [server.begin(max_tokens=100) for _ in range(6)]
    half = socket.create_connection(("127.0.0.1", server.port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: 100\r\n\r\n{")  # fmt: skip
    for connection in [*connections, half]:
        connection.close()
    server.wait_until_idle()
    assert server.complete(PROMPTS[0], max_tokens=20)["text"] == alone(model, PROMPTS[0], 20)


def test_back_pressure(model):
    """More clients than rows and places to wait are told to come again, and the others are answered."""
    gate = threading.Event()

    def step(whole):
        gate.wait(WAIT)
        return whole()

    with serving(model, waiting=1, step=step, api_keys=(b"secret",), patience=0.1) as server:
        key = {"authorization": "Bearer secret"}
        body = {"prompt": "x", "max_tokens": 3}
        for wrong in ({}, {"authorization": "Bearer wrong"}):
            assert server.ask("POST", "/v1/completions", body, wrong)[0] == 401
        # More than there is ever room for.
        status, _, content = server.ask("POST", "/v1/completions", body | {"n": 6}, key)
        assert status == 400 and "the limit is 5" in json.loads(content)["error"]["message"]
        with ThreadPoolExecutor(5) as clients:
            asked = [clients.submit(server.ask, "POST", "/v1/completions", body, key) for _ in range(5)]
            while server.engine.load.waiting < 5:
                time.sleep(0.01)
            status, headers, content = server.ask("POST", "/v1/completions", body, key)
            assert status == 429 and headers["retry-after"] == "1"
            assert "no further request may wait" in json.loads(content)["error"]["message"]
            assert server.ask("GET", "/v1/models", None, key)[0] == 200 and server.health()["waiting"] == 5
            gate.set()
            assert [each.result()[0] for each in asked] == [200] * 5
        server.wait_until_idle()


def test_a_request_of_a_lower_number_takes_a_row(model):
    """As in vLLM; a request that loses its row has the same text, and many that wait are in nobody's way."""
    gate = threading.Event()

    def step(whole):
        gate.wait(WAIT)
        return whole()

    with serving(model, step=step, by_priority=True) as server, ThreadPoolExecutor(20) as clients:
        long = {"max_tokens": 90, "ignore_eos": True}
        slow = [clients.submit(server.complete, PROMPTS[n % 4], priority=3, **long) for n in range(14)]
        while server.engine.load.waiting < 14:
            time.sleep(0.01)
        gate.set()
        while server.health()["running"] < 4:
            time.sleep(0.01)
        assert server.complete("x", max_tokens=2, priority=-1)["finish_reason"] == "length"
        assert not all(each.done() for each in slow)
        made = [each.result()["text"] for each in slow]
        expected = [server.complete(prompt, **long)["text"] for prompt in PROMPTS]
        assert made == [expected[number % 4] for number in range(14)]
        server.wait_until_idle()
        health = server.health()
        assert health["preemptions"] >= 1 and health["swapped"] == health["swapped_bytes"] == 0


def test_requests_that_do_not_end_when_the_server_is_stopped(model):
    """Their clients are told, whether they wait for all or have had a part; a request that is refused ends alone."""
    gate = threading.Event()

    def step(whole):
        if gate.is_set():
            time.sleep(0.3)
        return whole()

    with serving(model, step=step) as server:
        submit = server.runner.submit
        server.runner.submit = lambda request: submit(request) if len(request.tokens) > 1 else 1 // 0
        assert server.ask("POST", "/v1/completions", {"prompt": [5]})[0] == 500
        server.complete(PROMPTS[0], max_tokens=2)
        gate.set()
        stream = server.begin(stream=True, max_tokens=100)
        assert stream.recv(16).startswith(b"HTTP/1.1 200")
        with ThreadPoolExecutor(1) as clients:
            whole = clients.submit(server.ask, "POST", "/v1/completions", {"prompt": PROMPTS[1], "max_tokens": 100})
            while server.health()["running"] < 2:
                time.sleep(0.01)
            server.running.should_exit = True
            status, _, content = whole.result()
            assert status == 503 and "it was stopped" in json.loads(content)["error"]["message"]
        told = b""
        while part := stream.recv(1 << 16):
            told += part
        assert b"the engine is not running: it was stopped" in told


def test_settings_that_are_refused_before_a_model_is_loaded(capsys, tmp_path):
    (tmp_path / "key").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flag, message in (
            ("--api-key=", "--api-key is empty"),
            ("--api-key= ", "--api-key is empty"),
            (f"--api-key=@{tmp_path}/key", "--api-key is empty"),
            (f"--api-key=@{tmp_path}/none", "No such file"),
            (f"--port={taken.getsockname()[1]}", "cannot be listened on: Address already in use"),
            ("--host=..", "cannot be listened on"),
        ):
            assert command.main(["--model=nowhere", flag]) == command.USAGE_ERROR
            assert message in capsys.readouterr().err
    for flag, valid in (
        ("--port=99999", "from 0 to 65535"),
        ("--waiting=-1", "at least 0"),
        ("--connections=0", "at least 1"),
        ("--rows=two", "at least 1"),
        ("--chunk=65", f"from 1 to {CHUNK}"),
    ):
        with pytest.raises(SystemExit):
            command.main(["--model=nowhere", flag])
        name, _, given = flag.partition("=")
        assert f"argument {name}: must be a whole number, {valid}; got '{given}'" in capsys.readouterr().err


INTERRUPTED = """
import socket, sys, types
from starlette.applications import Starlette
from kvjax.serve.listening import run

with socket.create_server(("127.0.0.1", 0)) as listener:
    run(Starlette(), types.SimpleNamespace(stop=lambda wait: None), listener)
print("ended", flush=True)
"""


def test_ctrl_c_ends_the_server_without_a_traceback():
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )  # fmt: skip
    assert "serving on http://127.0.0.1:" in child.stdout.readline()
    for line in child.stderr:
        if "startup complete" in line:
            break
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=WAIT)
    assert child.returncode == 0 and out == "ended\n" and "Traceback" not in errors, errors


def test_an_address_of_ipv6_is_called_by_its_name(model):
    with serving(model, hosts=(*address.LOCAL, "[::1]")) as server:
        for host, status in (("[::1]:8000", 200), ("localhost", 200), ("another", 400)):
            assert server.ask("GET", "/health", None, {"host": host})[0] == status


@pytest.mark.sampled(0)
def test_the_first_programs_are_compiled_under_every_policy():
    """Also under one that takes no prompt of a single token, and with room for one new token."""
    model = tiny().model
    for policy, new_tokens in ((policies.window(0.2), 4), (policies.h2o(8), 1)):
        store = kvjax.PrefixStore(1 << 24)
        runner = Runner(
            model, policy, rows=2, limits=Limits(prompt=32, new_tokens=new_tokens), prefix_store=store
        )  # fmt: skip
        program.warm_up(runner)
        assert runner.idle and runner.counts.prompt_tokens
        # Clients find a store in which nothing was asked.
        assert not len(store) and store.counts(None).misses == 0 < store.misses


@pytest.fixture(scope="module")
def strange(model):
    """A model with a chat template that fails, or does not end, for some messages."""
    files = model.tokenizer.files | {"chat_template.jinja": strange_template.SOURCE}
    return dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, files=files))


def chat(server, said, **body):
    talk = {"messages": [{"role": "user", "content": said}], "max_tokens": 2, "temperature": 0}
    status, _, content = server.ask("POST", "/v1/chat/completions", talk | body)
    return status, json.loads(content)


@pytest.mark.sampled(0)
def test_what_a_template_does_is_an_error_of_its_request(strange):
    deep: object = "x"
    for _ in range(900):
        deep = [deep]
    with serving(strange) as server:
        for said, message in (
            ("zero", "ZeroDivisionError"), ("long", "MemoryError|characters"), ("{a}", "KeyError"),
            ("half", "surrogate"), ("spin", "more than 1 s of processor time"),
        ):  # fmt: skip
            status, answer = chat(server, said)
            assert status == 400 and answer["error"]["param"] == "messages", answer
            assert re.search(message, answer["error"]["message"])
        talk = {"messages": [{"role": "user", "content": "x", "name": deep}], "max_tokens": 2}
        assert server.ask("POST", "/v1/chat/completions", talk)[0] in (200, 400)
        assert chat(server, "Hello")[0] == 200


def test_templates_that_spin_keep_no_other_request_waiting(strange):
    with serving(strange) as server, ThreadPoolExecutor(6) as pool:
        server.complete("x", max_tokens=2)
        spinning = [pool.submit(chat, server, "spin") for _ in range(6)]
        time.sleep(0.3)
        for _ in range(3):
            began = time.monotonic()
            server.complete("x", max_tokens=2)
            # All of them take three seconds of two processes.
            assert time.monotonic() - began < 3
        assert chat(server, "Hello")[0] == 200
        assert [each.result()[0] for each in spinning] == [400] * 6


@pytest.mark.sampled(0)
def test_clients_that_have_gone_leave_no_template_waiting(strange):
    talk = json.dumps({"messages": [{"role": "user", "content": "spin"}]}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(strange) as server:
        for _ in range(50):  # they would take 25 seconds
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
                connection.sendall(f"{head}Content-Length: {len(talk)}\r\n\r\n".encode() + talk)
                time.sleep(0.01)
        began = time.monotonic()
        assert chat(server, "Hello")[0] == 200
        assert time.monotonic() - began < 15


@pytest.mark.sampled(0)
def test_the_end_of_a_server_waits_for_no_template(strange, monkeypatch):
    monkeypatch.setattr(sandbox, "SHARED", sandbox.Sandbox(processor_seconds=WAIT, seconds=WAIT))
    with ThreadPoolExecutor(4) as pool:
        with serving(strange) as server:
            spinning = [pool.submit(chat, server, "spin") for _ in range(4)]
            time.sleep(1)
            began = time.monotonic()
        assert time.monotonic() - began < 15  # of which 1 is the time that requests have to end
        assert {each.result()[0] for each in spinning} == {503}


def test_an_engine_that_fails_says_so(model):
    def step(whole):
        raise RuntimeError("out of memory")

    with serving(model, step=step) as server:
        body = {"prompt": "x", "max_tokens": 3}
        for stream in (True, False):
            status, _, content = server.ask("POST", "/v1/completions", body | {"stream": stream})
            assert status == 503 and "out of memory" in json.loads(content)["error"]["message"]
        status, _, content = server.ask("GET", "/health")
        assert status == 503 and json.loads(content)["status"] == "failed"
