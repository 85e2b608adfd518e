"""Conversations that a server holds are those of `kvjax.chat`, of their owner alone, and bounded."""

import dataclasses
import http.client
import json
import threading

import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import InputError
from kvjax.serve import Request, Runner
from kvjax.serve.conversations import ENTRY_BYTES, ConversationBusy, Conversations, NoConversation, context_bytes
from kvjax.serve.prefix import room_of
from tests.serve.test_server import LIMITS, chat_model, serving
from tests.tiny import random_tokens, random_weights, tiny

SMALL = Limits(prompt=40, new_tokens=30)
SPECS = {
    "full": CacheSpec(policies.full()),
    "h2o-int8-host": CacheSpec(policies.h2o(0.5), storage.int8(memory="host")),
    "snapkv-quest": CacheSpec(policies.snapkv(12, window=4), selection=selection.quest(page=4, budget=12)),
}
SAID = ["Anna put the red ball in the box.", "Where is the ball?", "And who put it there?"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_a_request_leaves_the_context_of_decode(name):
    """Also of a request that continues it, and with others beside it, whose programs are for several rows."""
    model, spec, text = tiny(layers=2).model, SPECS[name], random_tokens(2, 20, seed=3)
    runner = Runner(model, spec, rows=2, limits=SMALL, chunk=4)
    context, expected, more = None, contexts.prefill(model, text[:1], spec, limits=SMALL), text[0]
    for turn in range(3):
        if turn:
            more = text[1, : 2 * turn]
            expected = contexts.extend(model, expected, more, block=1)
        asked = Request(tokens=more, max_new_tokens=5 - turn, prefix=context, keep_context=True, number=turn)
        numbers = [runner.submit(asked), runner.submit(Request(tokens=text[1], max_new_tokens=9 + turn))]
        results = {result.id: result for result in runner}
        made = contexts.decode(model, expected, max_new_tokens=5 - turn, requests=[turn])
        np.testing.assert_array_equal(results[numbers[0]].tokens, made.tokens[0])
        assert results[numbers[1]].context is None
        context, expected = results[numbers[0]].context, made.context
        np.testing.assert_allclose(context.logits, expected.logits, atol=1e-4)
        np.testing.assert_array_equal(context.text[0], expected.text[0])
        assert context.boundaries == expected.boundaries and context.snapshots == ()
        for layer in range(2):
            for kept, right in zip(context.kept(layer), expected.kept(layer), strict=True):
                np.testing.assert_array_equal(kept, right)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("name", "rooms"),
    [("full", [30, 29, 18, 7]), ("h2o-int8-host", [30, 30, 30, 30]), ("snapkv-quest", [20, 9, None])],
)
def test_a_cache_that_evicts_has_room_for_any_number_of_turns(name, rooms):
    model, more = tiny(layers=1).model, random_tokens(1, 20, seed=3)[0]
    runner, context = Runner(model, SPECS[name], rows=1, limits=SMALL), None
    for room in rooms:
        asked = Request(tokens=more, max_new_tokens=10, prefix=context, keep_context=True)
        if room is None:
            with pytest.raises(InputError, match="has room for 9"):
                runner.submit(asked)
            break
        runner.submit(asked)
        ((context,), more) = [result.context for result in runner], [1]
        assert room_of(context, SMALL.new_tokens) == room


def test_what_the_host_ends_leaves_no_context():
    model, text = tiny(layers=1).model, random_tokens(1, 20, seed=3)[0]
    runner = Runner(model, SPECS["full"], rows=1, limits=SMALL)
    asked = {"tokens": text, "max_new_tokens": 20, "keep_context": True}
    runner.submit(Request(**asked, until=lambda tokens: 2))
    cancelled = runner.submit(Request(**asked))
    assert runner.cancel(cancelled)
    assert [result.context for result in runner] == [None, None]
    with pytest.raises(InputError, match="and 31 new ones do not fit"):
        runner.submit(Request(tokens=text, max_new_tokens=30, keep_context=True))
    drafted = Runner(model, SPECS["full"], rows=1, limits=SMALL, speculate=kvjax.speculation.seen(policies.h2o(8)))
    with pytest.raises(InputError, match="cannot continue a prefix"):
        drafted.submit(Request(**asked))


def test_the_last_token_of_a_context_takes_a_position_too():
    config = dataclasses.replace(
        tiny(layers=1).model.config,
        family="opt",
        rope=None,
        learned_positions=True,
        position_offset=2,
        max_positions=24,
    )
    model = kvjax.Model(config, random_weights(config))
    runner = Runner(model, SPECS["full"], rows=1, limits=Limits(prompt=20, new_tokens=12))
    prefix = runner.prefix([5] * 20)
    for tokens, new in (([], 4), ([7], 3)):
        runner.submit(Request(tokens=tokens, max_new_tokens=new, prefix=prefix, keep_context=True))
        assert [len(result.context.text[0]) for result in runner] == [24]
        for more in ({"max_new_tokens": new + 1}, {"max_new_tokens": new + 2, "keep_context": False}):
            with pytest.raises(InputError, match="positions"):
                runner.submit(Request(**({"tokens": tokens, "prefix": prefix, "keep_context": True} | more)))


def test_an_error_of_a_context_is_of_its_request_alone(monkeypatch):
    model, text = tiny(layers=1).model, random_tokens(1, 20, seed=3)[0]
    runner = Runner(model, SPECS["full"], rows=2, limits=SMALL)

    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("kvjax.serve.prefix.after_request", fails)
    for keep in (True, False):
        runner.submit(Request(tokens=text, max_new_tokens=4, keep_context=keep))
    failed, other = sorted(runner, key=lambda result: result.id)
    assert failed.reason == "error" and "no room" in str(failed.error) and failed.context is None
    assert other.reason == "length" and other.error is None


def _context(model, tokens):
    return contexts.prefill(model, [tokens], policies.full(), limits=SMALL)


def test_conversations_are_bounded_and_each_owner_has_its_share():
    model = tiny(layers=1).model
    context = _context(model, [1, 2, 3])
    nbytes = ENTRY_BYTES + context_bytes(context)
    held = Conversations(3 * nbytes + 2 * ENTRY_BYTES)

    def answered(owner):
        made = held.begin(owner)
        taken = held.take(made.id, owner)
        held.put(taken, context)
        held.release(taken)
        return made.id

    def there(owner, names):
        found = []
        for name in names:
            try:
                found.append(held.find(name, owner).tokens == 3)
            except NoConversation:
                found.append(False)
        return found

    first = [answered("a") for _ in range(3)]
    taken = held.take(first[0], "a")
    np.testing.assert_array_equal(taken.context.logits, context.logits)
    with pytest.raises(ConversationBusy):
        held.take(first[0], "a")
    held.release(taken)
    # The least recently used one, of the owner that has the most.
    other = answered("b")
    assert there("a", first) == [True, False, True] and there("b", [other]) == [True]
    answered("a")
    assert there("a", first) == [True, False, False] and there("b", [other]) == [True]
    assert there("b", first) == [False] * 3 and there(None, [other]) == [False]
    assert held.counts("a") == (2, 2 * nbytes) and held.counts("b") == (1, nbytes) and held.counts("c") == (0, 0)
    # A conversation that is dropped while it is answered returns with the answer, unless it is removed before.
    for removed in (False, True):
        kept = answered("c")
        taken = held.take(kept, "c")
        for state in held._all(kept, "c"):
            held._states.remove(state)
        with pytest.raises(ConversationBusy):
            held.take(kept, "c")
        with pytest.raises(NoConversation):
            held.remove(kept, "a")
        if removed:
            held.remove(kept, "c")
        assert held.put(taken, context)
        assert there("c", [kept]) == [not removed]
        held.release(taken)
        if not removed:
            held.remove(kept, "c")
    # One that is removed while it is answered stays removed.
    taken = held.take(other, "b")
    held.remove(other, "b")
    held.put(taken, context)
    held.release(taken)
    assert held.counts("b") == (0, 0)
    for name in (other, "conv_", "x" * 10**6):
        with pytest.raises(NoConversation):
            held.remove(name, "b")
    small = Conversations(nbytes - 1)
    taken = small.take(small.begin("a").id, "a")
    assert not small.put(taken, context) and small.counts("a") == (0, 0)
    assert Conversations(ENTRY_BYTES - 1).begin("a") is None


def test_the_number_of_new_conversations_is_bounded():
    held = Conversations(100 * ENTRY_BYTES)
    names = [held.begin("a").id for _ in range(150)]
    assert held.counts("a") == (100, 100 * ENTRY_BYTES) and len({*names}) == 150


@pytest.fixture(scope="module")
def model():
    return chat_model()


def ask(server, method="POST", path="/v1/chat/completions", body=None, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    status, _, content = server.ask(method, path, body, headers)
    return status, json.loads(content)


def begun(server, key=None):
    status, made = ask(server, path="/v1/conversations", body={}, key=key)
    assert status == 200 and made["object"] == "conversation", made
    return made["id"]


def say(server, name, text, *, key=None, **options):
    talk = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    return ask(server, body=talk | {"conversation": name} | options, key=key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [policies.h2o(48), policies.full()], ids=["h2o", "full"])
def test_each_message_is_a_turn_of_chat(model, policy):
    limits = Limits(prompt=LIMITS.prompt, new_tokens=LIMITS.new_tokens)
    reply, said = model, []
    for text in SAID:
        options = {"block": 1} if said else {"policy": policy, "limits": limits}
        made = kvjax.chat(reply, text, max_new_tokens=12, **options)
        said.append(made)
        reply = made.context
    with serving(model, policy=policy, conversations=Conversations(10**9)) as server:
        one, other = begun(server), begun(server)
        for number, text in enumerate(SAID):
            # By either form of the name, and two conversations side by side.
            status, answer = say(server, one if number else {"id": one}, text)
            assert status == 200, answer
            assert say(server, other, SAID[-1 - number])[0] == 200
            assert answer["choices"][0]["message"]["content"] == said[number].text
            assert answer["conversation"] == {"id": one}
            new = int(said[number].generation.lengths[0])
            assert answer["usage"]["prompt_tokens"] == len(said[number].context.text[0]) - new
            about = ask(server, "GET", f"/v1/conversations/{one}")[1]
            assert about["tokens"] == len(said[number].context.text[0])
        counts = server.health()["conversations"]
        assert counts["conversations"] == 2 and 0 < counts["bytes"] < counts["max_bytes"] == 10**9
        status, answer = ask(server, "DELETE", f"/v1/conversations/{one}")
        assert status == 200 and answer == {"id": one, "object": "conversation.deleted", "deleted": True}
        assert say(server, one, "Hello?")[0] == 404 and server.health()["conversations"]["conversations"] == 1


def test_a_stream_is_a_turn_too_and_one_that_is_left_is_none(model):
    with serving(model, conversations=Conversations(10**9)) as server:
        name = begun(server)
        status, _, content = server.ask(
            "POST", "/v1/chat/completions",
            {"messages": [{"role": "user", "content": SAID[0]}], "conversation": name, "stream": True,
             "max_tokens": 12, "temperature": 0},
        )  # fmt: skip
        parts = [json.loads(each[6:]) for each in content.decode().split("\n\n")[:-2]]
        assert status == 200 and all(part["conversation"] == {"id": name} for part in parts)
        tokens = ask(server, "GET", f"/v1/conversations/{name}")[1]["tokens"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        talk = {"messages": [{"role": "user", "content": SAID[1]}], "conversation": name, "stream": True}
        body = json.dumps(talk | {"ignore_eos": True}).encode()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.read(10)
        response.close()
        connection.close()
        server.wait_until_idle()
        assert ask(server, "GET", f"/v1/conversations/{name}")[1]["tokens"] == tokens
        assert say(server, name, SAID[2])[0] == 200
        assert ask(server, "GET", f"/v1/conversations/{name}")[1]["tokens"] > tokens


def test_other_keys_find_nothing(model):
    keys = [b"one", b"two"]
    with serving(model, conversations=Conversations(10**9), api_keys=keys) as server:
        name = begun(server, "one")
        assert say(server, name, SAID[0], key="one")[0] == 200
        for status, answer in (
            say(server, name, SAID[1], key="two"),
            ask(server, "GET", f"/v1/conversations/{name}", key="two"),
            ask(server, "DELETE", f"/v1/conversations/{name}", key="two"),
        ):
            assert status == 404 and answer["error"]["code"] == "conversation_not_found"
        assert ask(server, path="/v1/conversations", body={})[0] == 401
        assert ask(server, "GET", f"/v1/conversations/{name}")[0] == 401
        assert ask(server, "GET", "/health")[1]["conversations"] == {"max_bytes": 10**9}
        assert ask(server, "GET", "/health", key="one")[1]["conversations"]["conversations"] == 1
        assert ask(server, "GET", "/health", key="two")[1]["conversations"]["conversations"] == 0
        assert say(server, name, SAID[1], key="one")[0] == 200


def test_one_message_at_a_time(model):
    let, stepping = threading.Event(), threading.Event()

    def step(own):
        stepping.set()
        assert let.wait(60)
        return own()

    with serving(model, conversations=Conversations(10**9), step=step) as server:
        name, answers = begun(server), []
        thread = threading.Thread(target=lambda: answers.append(say(server, name, SAID[0])))
        thread.start()
        assert stepping.wait(60)
        status, answer = say(server, name, SAID[1])
        assert status == 409 and answer["error"]["code"] == "conversation_locked"
        let.set()
        thread.join()
        assert answers[0][0] == 200 and say(server, name, SAID[1])[0] == 200


def test_what_a_conversation_cannot_have(model):
    with serving(model, conversations=Conversations(10**9)) as server:
        name = begun(server)
        talk = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
        for options, status, message in (
            ({"n": 2}, 400, "n is not supported in a conversation"),
            ({"stop": "."}, 400, "stop is not supported in a conversation"),
            ({"conversation": 3}, 400, "conversation must be an id"),
            ({"conversation": {"id": name, "x": 1}}, 400, "conversation must be an id"),
            ({"conversation": {"id": None}}, 400, "conversation must be an id"),
            ({"conversation": "conv_0"}, 404, "there is no conversation 'conv_0'"),
            ({"max_tokens": LIMITS.new_tokens}, 400, f"at most {LIMITS.new_tokens - 1} fit"),
        ):
            got, answer = say(server, **({"name": name, "text": "x"} | options))
            assert got == status and message in answer["error"]["message"], (options, answer)
        # The first turn may be a whole conversation, and the next ones not.
        assert say(server, name, "x", messages=talk)[0] == 200
        status, answer = say(server, name, "x", messages=talk)
        assert status == 400 and "send the new messages alone" in answer["error"]["message"]
        status, answer = ask(server, path="/v1/conversations", body={"items": [{"role": "user"}]})
        assert status == 400 and answer["error"]["param"] == "items"
        assert ask(server, path="/v1/completions", body={"prompt": "x", "conversation": name})[0] == 400
    with serving(model) as server:
        status, answer = ask(server, path="/v1/conversations", body={})
        assert status == 400 and "holds no conversations" in answer["error"]["message"]
        assert server.health()["conversations"] is None
