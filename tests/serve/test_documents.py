"""Documents of requests: tokens are those of `kvjax.reuse.blend`, and caches are shared, bounded and never leak."""

import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, contexts, policies, reuse, storage
from kvjax.cache import Limits
from kvjax.errors import InputError
from kvjax.generation.context import CHUNKS
from kvjax.reuse import ChunkCache
from kvjax.serve import Documents, Request, Runner
from kvjax.serve.documents import checked_documents
from tests.tiny import random_tokens, tiny

LIMITS = Limits(prompt=256, new_tokens=16)  # more than a block of a question
TEXT = random_tokens(1, 64, seed=3)[0]
BEGIN, FIRST, SECOND, QUESTION = TEXT[:2], TEXT[2:20], TEXT[20:41], TEXT[41:49]


@pytest.fixture(scope="module")
def model():
    return tiny(layers=3).model


def runner(model, policy=None, **options):
    return Runner(model, policy or policies.full(), rows=2, limits=LIMITS, **options)


def ask(runner, chunks=(FIRST, SECOND), begin=BEGIN, ratio=0.15, **options):
    """Returns the result of a request."""
    given = {"tokens": QUESTION, "max_new_tokens": 5, "documents": Documents(list(chunks), begin, ratio)} | options
    number = runner.submit(Request(**given))
    (result,) = (each for each in runner if each.id == number)
    return result


def blended(model, chunks, policy=None, **options):
    """Returns what `kvjax.reuse` makes of documents, and an answer."""
    prefix = reuse.compute(model, BEGIN)
    made = reuse.blend(model, [reuse.compute(model, each, prefix) for each in chunks], QUESTION, policy, **options)
    return contexts.decode(model, made.context, max_new_tokens=5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [policies.full(), policies.snapkv(16, window=4)], ids=["full", "snapkv"])
def test_tokens_are_those_of_blend(model, policy):
    """Also beside rows without documents, which are not changed."""
    made = runner(model, policy)
    other = made.submit(Request(tokens=TEXT[:30], max_new_tokens=5))
    numbers = {
        made.submit(Request(tokens=QUESTION, max_new_tokens=5, documents=Documents(chunks, BEGIN))): chunks
        for chunks in ([FIRST, SECOND], [SECOND, FIRST, SECOND[:9]])
    }
    results = {each.id: each for each in made}
    for number, chunks in numbers.items():
        expected = blended(model, chunks, policy)
        np.testing.assert_array_equal(results[number].tokens, expected.tokens[0])
        np.testing.assert_allclose(results[number].logprobs, expected.logprobs[0], atol=1e-4)
        assert results[number].prompt == 2 + 8 + sum(map(len, chunks))
    alone = kvjax.generate(model, TEXT[None, :30], policy, max_new_tokens=5)
    np.testing.assert_allclose(results[other].logprobs, alone.logprobs[0], atol=1e-4)
    # The two requests had two documents in common, the second of which found them.
    assert [results[number].found for number in numbers] == [0, 39]


def test_the_question_chooses_tokens(model):
    result = ask(runner(model), documents=Documents([FIRST, SECOND], BEGIN, 0.4, by_question=0.5))
    expected = blended(model, [FIRST, SECOND], ratio=0.4, by_question=0.5)
    np.testing.assert_array_equal(result.tokens, expected.tokens[0])
    np.testing.assert_allclose(result.logprobs, expected.logprobs[0], atol=1e-4)
    # No token of a short document is recomputed.
    assert ask(runner(model), documents=Documents([FIRST[:3]], BEGIN, by_question=1.0)).tokens.shape == (5,)
    others = blended(model, [FIRST, SECOND], ratio=0.4)
    assert np.abs(result.logprobs - others.logprobs[0]).max() > 1e-3


def test_all_recomputed_is_a_prompt(model):
    whole = kvjax.generate(model, TEXT[None, :49], policies.full(), max_new_tokens=5)
    made = ask(runner(model), ratio=1.0)
    np.testing.assert_array_equal(made.tokens, whole.tokens[0])
    np.testing.assert_allclose(made.logprobs, whole.logprobs[0], atol=1e-4)
    less = ask(runner(model), ratio=0.0)
    assert np.abs(less.logprobs - whole.logprobs[0]).max() > 1e-3, "documents have not seen each other"


def test_a_context_is_kept_and_continued(model):
    made = runner(model)
    result = ask(made, keep_context=True)
    expected = blended(model, [FIRST, SECOND]).context
    np.testing.assert_allclose(result.context.logits, expected.logits, atol=1e-4)
    assert [span.turn for span in result.context.boundaries[0]] == [CHUNKS, "prompt", "prompt"]
    np.testing.assert_array_equal(result.context.text[0], expected.text[0])
    made.submit(Request(tokens=TEXT[50:54], max_new_tokens=3, prefix=result.context))
    (after,) = made
    expected = contexts.decode(model, contexts.extend(model, expected, TEXT[50:54], block=1), max_new_tokens=3)
    np.testing.assert_array_equal(after.tokens, expected.tokens[0])
    with pytest.raises(InputError, match="caches of chunks"):
        kvjax.PrefixStore(1 << 20).add(result.context)


def test_caches_are_shared_within_a_namespace_and_a_beginning(model):
    made = runner(model)
    assert ask(made, namespace="one").found == 0
    assert ask(made, [SECOND, FIRST], namespace="one").found == 39
    assert ask(made, namespace="other").found == 0
    assert ask(made, begin=BEGIN[:1], namespace="one").found == 0
    assert ask(made, begin=(), namespace="one").found == 0
    # Two documents, and what is before them, behind three beginnings, one of which has no tokens.
    assert made.documents.counts("one").states == 3 + 3 + 2 and made.documents.counts("other").states == 3


def test_room_is_bounded(model):
    vector = 2 * 4 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
    made = runner(model, document_bytes=25 * vector)
    wanted = ask(runner(model))
    for _ in range(2):
        result = ask(made)
        np.testing.assert_array_equal(result.tokens, wanted.tokens)
        assert made.documents.counts(None).nbytes <= 25 * vector
    assert sum(made.documents.find(None, BEGIN, each) is not None for each in (FIRST, SECOND)) == 1


def test_a_document_is_computed_once(model, monkeypatch):
    from kvjax.serve import documents

    computed = []

    def compute(model, tokens, prefix=None) -> ChunkCache:
        computed.append(len(tokens))
        return reuse.compute(model, tokens, prefix)

    monkeypatch.setattr(documents, "compute", compute)
    made = runner(model)
    ask(made, [FIRST, FIRST])
    ask(made, [FIRST, SECOND])
    assert computed == [2, 18, 21]


def test_other_rows_go_on_between_documents(model):
    """At the most one part of a prompt with documents is run before the rows go on."""
    made = runner(model, turn_tokens=40, chunk=1)  # one part and its padding
    made.submit(Request(tokens=TEXT[:20], max_new_tokens=8))
    made.step()
    made.submit(Request(tokens=QUESTION, max_new_tokens=1, documents=Documents([FIRST, SECOND], BEGIN)))
    steps = 0
    while not any(each.id == 1 and each.tokens.size for each in made.step()):
        steps += 1
    assert 3 <= steps <= 8


def test_an_error_is_of_one_request(model, monkeypatch):
    """Such as too little memory for a cache. So is a request that is cancelled between two documents."""
    from kvjax.serve import documents

    made = runner(model, turn_tokens=40, chunk=1)
    made.submit(Request(tokens=TEXT[:20], max_new_tokens=8))
    made.step()
    asked = Request(tokens=QUESTION, max_new_tokens=2, documents=Documents([FIRST, SECOND], BEGIN))
    cancelled = made.submit(asked)
    made.step()
    assert made.cancel(cancelled)

    def compute(model, tokens, prefix=None):
        raise MemoryError("no room")

    monkeypatch.setattr(documents, "compute", compute)
    failed = made.submit(dataclasses.replace(asked, namespace="other"))
    results = {each.id: each for each in made}
    assert [results[number].reason for number in (0, cancelled, failed)] == ["length", "cancelled", "error"]
    assert isinstance(results[failed].error, MemoryError) and made.counts.not_finite == 0 and made.idle


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"documents": Documents([])}, "at least one chunk"),
        ({"documents": Documents([[]])}, "at least one token"),
        ({"documents": Documents([[1, 10**12]])}, "outside the model's vocabulary"),
        ({"documents": Documents([[1]], ratio=1.5)}, "from 0 to 1; got 1.5"),
        ({"documents": [[1]]}, "kvjax.serve.Documents"),
        ({"documents": Documents([[1]], beginning=5)}, "beginning must be one row"),
        ({"documents": Documents([[1]]), "tokens": []}, "at least one token after them"),
        ({"documents": Documents([[1] * 250])}, "do not fit"),
    ],
)  # fmt: skip
def test_documents_that_are_not_valid_are_refused(model, change, says):
    with pytest.raises(InputError, match=says):
        runner(model).submit(Request(**{"tokens": QUESTION, "max_new_tokens": 2} | change))


def test_caches_that_cannot_take_documents_refuse_them(model):
    request = Request(tokens=QUESTION, max_new_tokens=2, documents=Documents([FIRST]))
    for policy in (policies.h2o(16), CacheSpec(policies.full(), storage.int8()), policies.snapkv(16, window=12)):
        with pytest.raises(InputError, match="chunks"):
            runner(model, policy).submit(request)
    with pytest.raises(InputError, match="document_bytes"):
        runner(model, document_bytes=0).submit(request)
    with pytest.raises(InputError, match="document_bytes must be"):
        runner(model, document_bytes=-1)
    with pytest.raises(InputError, match="two layers"):
        runner(tiny(layers=1).model).submit(request)
    rope = dataclasses.replace(model.config.rope, scaling="dynamic", factor=2.0, original_max_positions=64)
    with pytest.raises(InputError, match="dynamic RoPE"):
        checked_documents(dataclasses.replace(model.config, rope=rope), request.documents)
    made = runner(model)
    both = dataclasses.replace(request, prefix=made.prefix(TEXT[:9]))
    with pytest.raises(InputError, match="both a prefix and documents"):
        made.submit(both)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("uvicorn", reason="the server needs kvjax[serve]")
    pytest.importorskip("starlette", reason="the server needs kvjax[serve]")
    from kvjax.serve.conversations import Conversations
    from tests.serve.test_server import chat_model, serving

    options = {"policy": policies.full(), "conversations": Conversations(1 << 30)}
    with serving(chat_model(layers=2), **options) as made:
        yield made


DOCUMENTS = ["Anna put the red ball in the box.", {"text": " The lock code is 53."}]
ASKED = " Where is the ball?"


def test_a_completion_with_documents(server):
    model = server.runner.model
    tokens = model.tokenizer.encode("")
    for text in (DOCUMENTS[0], DOCUMENTS[1]["text"], ASKED):
        tokens = [*tokens, *model.tokenizer.encode(text, bos=False)]
    expected = kvjax.generate(model, np.array([tokens]), policies.full(), max_new_tokens=6)
    asked = {"prompt": ASKED, "documents": DOCUMENTS, "recompute_ratio": 1, "max_tokens": 6, "temperature": 0}
    answers = [json.loads(server.ask("POST", "/v1/completions", asked)[2]) for _ in range(2)]
    assert {each["choices"][0]["text"] for each in answers} == {
        model.tokenizer.decode(np.concatenate([tokens, expected.tokens[0]]))[len(model.tokenizer.decode(tokens)) :]
    }
    assert answers[0]["usage"]["prompt_tokens"] == len(tokens)
    found = len(tokens) - len(model.tokenizer.encode("")) - len(model.tokenizer.encode(ASKED, bos=False))
    assert answers[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": found}
    about = server.health()["documents"]
    assert about["caches"] == 3 and about["found_tokens"] > 0 and about["bytes"] < about["max_bytes"]


def test_a_chat_with_documents(server):
    """They come before the first message of a user, after that of the system."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    asked = {"messages": messages, "documents": DOCUMENTS, "max_tokens": 3, "temperature": 0}
    status, _, content = server.ask("POST", "/v1/chat/completions", asked)
    assert status == 200, content
    texts = ["system: Be brief.\nuser: ", DOCUMENTS[0], DOCUMENTS[1]["text"], f"{ASKED}\nanswer:"]
    tokenizer = server.runner.model.tokenizer
    count = sum(len(tokenizer.encode(text, bos=False)) for text in texts)
    assert json.loads(content)["usage"]["prompt_tokens"] == count
    # Fields that are null are absent.
    plain = asked | {"documents": None, "recompute_ratio": None}
    assert server.ask("POST", "/v1/chat/completions", plain)[0] == 200


def test_a_conversation_has_no_documents(server):
    """Not even its first turn, whose cache does not exist yet."""
    name = json.loads(server.ask("POST", "/v1/conversations", {})[2])["id"]
    asked = {"conversation": name, "messages": [{"role": "user", "content": ASKED}], "documents": DOCUMENTS}
    status, _, content = server.ask("POST", "/v1/chat/completions", asked)
    assert status == 400 and "documents cannot follow a conversation" in json.loads(content)["error"]["message"]


def test_each_choice_of_a_stream_has_the_documents(server):
    asked = {"prompt": ASKED, "documents": DOCUMENTS, "max_tokens": 2, "n": 2, "stream": True, "temperature": 0}
    status, _, content = server.ask("POST", "/v1/completions", asked)
    assert status == 200 and content.count(b'"index": 1') >= 1 and content.rstrip().endswith(b"[DONE]")


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        ("completions", {"documents": "one"}, "documents must be a list"),
        ("completions", {"documents": [""]}, "documents[0] must be a text"),
        ("completions", {"documents": [{"text": "a", "title": "b"}]}, "documents[0] must be a text"),
        ("completions", {"documents": ["a"], "recompute_ratio": 2}, "from 0 to 1; got 2"),
        ("completions", {"recompute_ratio": 0.5}, "there are none"),
        ("completions", {"documents": ["a"], "recompute_by_question": True}, "from 0 to 1; got True"),
        ("completions", {"documents": [[1, 10**12]]}, "outside the model's vocabulary"),
        ("completions", {"documents": ["long " * 200]}, "at most 64 are accepted"),
        ("completions", {"documents": ["a"], "prompt": ["a", [1, 2]]}, "all texts or all token ids"),
        ("chat/completions", {"documents": ["a"], "messages": [{"role": "u" * 200_000, "content": "a"},
                                                              {"role": "user", "content": "a"}]}, "characters"),
        ("chat/completions", {"documents": ["a"], "messages": [{"role": "system", "content": "a"}]}, "there is none"),
    ],
)  # fmt: skip
def test_bodies_that_are_not_valid_are_refused(server, path, change, says):
    body = {"prompt": "a"} if path == "completions" else {}
    status, _, content = server.ask("POST", f"/v1/{path}", {"max_tokens": 2} | body | change)
    assert status == 400 and says in json.loads(content)["error"]["message"], content
