"""Answers of the server, and of a batch, to tokens that are words, bytes and special tokens."""

import json

import pytest

import kvjax
from experiments.batch import requests
from experiments.programs.batch import described
from kvjax import policies
from kvjax.cache import Limits
from kvjax.serve import Runner
from tests import scripted
from tests.scripted import ids

pytest.importorskip("uvicorn", reason="the server needs kvjax[serve]")
pytest.importorskip("starlette", reason="the server needs kvjax[serve]")
from tests.serve.test_server import serving

MARK = "<|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scripted.load(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def server(model):
    with serving(model) as made:
        yield made


def streamed(server, path, **body):
    """The choices of the events of a stream."""
    status, _, content = server.ask("POST", path, {"temperature": 0, "stream": True} | body)
    assert status == 200, content
    events = [event[6:] for event in content.decode().split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def test_a_completion_begins_with_the_space_of_its_first_word(server, model):
    for prompt in ([1, *ids("x")], "x"):
        whole = server.complete(prompt, max_tokens=2)
        assert whole["text"] == " the end" and whole["finish_reason"] == "length"
        parts = streamed(server, "/v1/completions", prompt=prompt, max_tokens=2)
        assert "".join(part["text"] for part in parts) == " the end"
    found = kvjax.generate_text(model, "x", policies.full(), max_new_tokens=2).texts
    assert found == [" the end"]
    # A prefix is before the text too.
    assert server.complete(ids("x"), max_tokens=2, prefix="anna")["text"] == " the end"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ([MARK], " the end", 3),
        (["never", f"end{MARK}"], " the ", 3),
        (f"nd{MARK} On", " the e", 4),
        ([f"{MARK} Once upon"], " the end", 5),
    ],
)
def test_a_stop_text_may_be_or_hold_a_special_token(server, model, stop, text, tokens):
    asked = {"prompt": [1, *ids("x")], "max_tokens": 8, "stop": stop, "logprobs": 0}
    whole = server.complete(**asked)
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    assert len(whole["logprobs"]["tokens"]) == tokens and "".join(whole["logprobs"]["tokens"]) == text
    parts = streamed(server, "/v1/completions", **asked)
    assert "".join(part["text"] for part in parts) == text and parts[-1]["finish_reason"] == "stop"
    # The same in a file of requests.
    line = json.dumps({"prompt": [1, *ids("x")], "max_new_tokens": 8, "stop": stop}).encode()
    (asked,) = requests.read([(1, line)], model, requests.Defaults(8, {"temperature": 0}))
    runner = Runner(model, policies.full(), rows=1, limits=Limits(prompt=16, new_tokens=8))
    runner.submit(asked.request)
    (result,) = runner
    found = described(asked, result)
    assert (found["text"], found["reason"], found["new_tokens"]) == (text, "stop", tokens)


def test_without_stop_texts_special_tokens_are_left_out(server):
    whole = server.complete([1, *ids("x")], max_tokens=20, logprobs=0)
    assert (whole["text"], whole["finish_reason"]) == (" the end Once upona time", "stop")
    assert whole["logprobs"]["tokens"] == [" the", " end", "", " Once", " upon", "a", " time", ""]
    assert whole["logprobs"]["text_offset"] == [0, 4, 8, 8, 13, 18, 19, 24]


@pytest.mark.parametrize("tokens", range(1, 9))
def test_log_probabilities_of_bytes_stand_in_the_text(server, tokens):
    """Tokens that end anywhere, in a completion and in a chat, whole and as streams."""
    text = f"{scripted.CHARACTERS}! say"
    data = [bytes([byte]) for byte in scripted.CHARACTERS.encode()] + [b"!", b" say"]
    asked = {"max_tokens": tokens, "logprobs": True, "messages": [{"role": "user", "content": "b"}]}
    status, _, content = server.ask("POST", "/v1/chat/completions", asked | {"temperature": 0})
    whole = json.loads(content)["choices"][0]
    found = whole["logprobs"]["content"]
    assert status == 200 and [bytes(each["bytes"]) for each in found] == data[:tokens]
    said = whole["message"]["content"]
    assert "".join(each["token"] for each in found) == said
    assert said.rstrip("\ufffd") == b"".join(data[:tokens]).decode(errors="ignore") and text.startswith(
        said.rstrip("\ufffd")
    )
    parts = streamed(server, "/v1/chat/completions", **asked)
    assert "".join(part["delta"].get("content", "") for part in parts) == said
    assert [each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]] == found

    asked = {"prompt": [1, *ids("b")], "max_tokens": tokens, "logprobs": 0}
    whole = server.complete(**asked)
    told = whole["logprobs"]
    assert whole["text"] == said and "".join(told["tokens"]) == said
    for token, start in zip(told["tokens"], told["text_offset"], strict=True):
        assert said[start : start + len(token)] == token
    assert told["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 3][:tokens]
    assert len(told["token_logprobs"]) == tokens
    parts = streamed(server, "/v1/completions", **asked)
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in parts for each in part["logprobs"][name]] == told[name]


def test_the_prompt_ends_within_a_character(server):
    whole = server.complete([1, *ids("b", "<0xE1>")], max_tokens=3, logprobs=0)
    assert whole["text"].startswith("ခ") and "".join(whole["logprobs"]["tokens"]) == whole["text"]
