"""Text in and text out, on a random decoder with a tokenizer of a few words."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import kvjax
from kvjax import policies
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import InputError, NonFiniteError
from kvjax.generation.sampling import Greedy, Sample
from kvjax.models import generation_config
from tests.tiny import VOCAB, spoiled, tiny, untied

H2O = policies.h2o(budget=0.5)
TEXTS = ["w5 w9 w7 w8 w30", "w6 w11"]
TEMPLATE = "<s> {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> kvjax.Model:
    """Words w3 to w61, two roles, and special tokens 0 (pad), 1 (<s>) and 2 (</s>)."""
    folder = tmp_path_factory.mktemp("words")
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB - 2)), "user", "system"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:3])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    own = tiny(layers=1).model
    return dataclasses.replace(own, tokenizer=load_tokenizer(folder, own.config))


def templated(model, template, folder):
    """The model with another chat template."""
    for name, content in model.tokenizer.files.items():
        (folder / name).write_bytes(content)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return dataclasses.replace(model, tokenizer=load_tokenizer(folder, model.config))


def with_defaults(model, **raw):
    return dataclasses.replace(model, generation=generation_config.read(raw))


def test_a_batch_of_texts_is_each_text_by_itself(model):
    got = kvjax.generate_text(model, TEXTS, H2O, max_new_tokens=7, stop=())
    assert got.prompts.tokens.tolist() == [[1, 5, 9, 7, 8, 30], [1, 6, 11, -1, -1, -1]]
    for row, text in enumerate(TEXTS):
        alone = kvjax.generate_text(model, text, H2O, max_new_tokens=7, stop=())
        assert got.texts[row] == alone.texts[0]
        words = [w for i in got.generation.tokens[row] if i > 2 for w in [model.tokenizer.token(i)]]
        # The space between prompt and answer is part of the answer.
        assert got.texts[row] == "".join(f" {word}" for word in words)
    plain = kvjax.generate(model, got.prompts.tokens, H2O, lengths=got.prompts.lengths, max_new_tokens=7)
    np.testing.assert_array_equal(got.generation.tokens, plain.tokens)


def test_what_is_given_wins_over_the_file_and_the_file_over_the_config(model, monkeypatch):
    asked = {}

    def generate(*args, **options):
        asked.update(options)
        return kvjax.Generation(np.array([[9]]), np.array([1]), np.zeros((1, 1)), state=None)

    monkeypatch.setattr("kvjax.generation.text.generate", generate)

    def of(model, **options):
        assert kvjax.generate_text(model, TEXTS[:1], H2O, prefill_block=4, **options).texts == [" w9"]
        assert asked["prefill_block"] == 4
        return asked["max_new_tokens"], asked["sampler"], tuple(asked["stop"])

    assert of(model) == (256, Greedy(), (2,)), "the tokenizer's EOS, as the config has none"
    said = with_defaults(model, eos_token_id=[4, 5], do_sample=True, top_k=3, max_new_tokens=9)
    assert of(said) == (9, Sample(top_k=3), (4, 5))
    config = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=(7,)))
    assert of(config)[2] == (7,)
    given = {"max_new_tokens": 3, "sampler": Greedy(2.0), "stop": [8]}
    assert of(said, **given) == (3, Greedy(2.0), (8,))
    with pytest.warns(UserWarning, match="sets num_beams, which kvjax does not support"):
        of(with_defaults(model, num_beams=4))


def test_a_row_ends_at_eos_which_is_no_text(model):
    free = kvjax.generate_text(model, TEXTS, H2O, max_new_tokens=7, stop=())
    third = int(free.generation.tokens[0, 2])
    got = kvjax.generate_text(with_defaults(model, eos_token_id=third), TEXTS, H2O, max_new_tokens=7)
    end = free.generation.tokens[0].tolist().index(third) + 1
    assert got.generation.lengths[0] == end <= 3
    assert free.texts[0].startswith(got.texts[0])


def test_conversations(model):
    talk = [{"role": "user", "content": "w5 w9"}]
    one = kvjax.generate_text(model, talk, H2O, max_new_tokens=7, stop=())
    assert one.prompts.tokens.tolist() == [[1, VOCAB - 2, 5, 9]]
    assert not one.texts[0].startswith(" ")
    both = kvjax.generate_text(model, [talk, "w7"], H2O, max_new_tokens=7, stop=())
    assert both.prompts.tokens[1].tolist() == [1, 7, -1, -1] and both.texts[0] == one.texts[0]


TURNS = (
    "<s> {% for m in messages %}{{ 'w3' if m.role == 'assistant' else m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}w3 {% endif %}"
)


def test_a_conversation_is_one_text(model, tmp_path):
    """Turn by turn, its tokens are those that the template writes for all of it, whether or not answers have ended."""
    talker = templated(model, TURNS, tmp_path)
    said = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w9 w7"}]
    first = kvjax.chat(talker, said, policies.full(), max_new_tokens=5, stop=())
    # This answer ends with a token that is then the template's.
    stop = int(first.generation.tokens[0, 1])
    word = talker.tokenizer.token(stop)
    other = with_defaults(templated(model, TURNS.replace("</s>", word), tmp_path), eos_token_id=stop)
    for own, start in ((talker, first), (other, kvjax.chat(other, said, policies.full(), max_new_tokens=9))):
        second = kvjax.chat(start.context, "w8", max_new_tokens=4, stop=())
        third = kvjax.chat(second.context, {"role": "user", "content": "w6 w11"}, max_new_tokens=3)
        talk = list(said)
        for reply, message in ((start, "w8"), (second, "w6 w11")):
            text = reply.text.removesuffix(word) if own is other else reply.text
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": message}]
        whole = own.tokenizer.encode(own.tokenizer.apply_chat_template(talk), bos=False)
        assert third.context.text[0].tolist()[: len(whole)] == whole
        asked = kvjax.generate(own, whole, policies.full(), max_new_tokens=3, stop=own.eos_token_ids)
        np.testing.assert_array_equal(asked.tokens, third.generation.tokens)


def test_what_is_no_conversation_to_continue(model, tmp_path):
    talker = templated(model, TURNS, tmp_path)
    reply = kvjax.chat(talker, "w8", policies.full(), max_new_tokens=2)
    with pytest.raises(InputError, match="keeps the cache that it began with; leave out a policy, storage"):
        kvjax.chat(reply.context, "w8", policies.full(), storage=None)
    with pytest.raises(InputError, match="begins with a policy"):
        kvjax.chat(talker, "w8")
    odd = templated(model, "{{ messages | length }} {% for m in messages %}{{ m.content }} {% endfor %}", tmp_path)
    begun = kvjax.chat(odd, "w8", policies.full(), max_new_tokens=2).context
    with pytest.raises(InputError, match="does not write a conversation turn by turn"):
        kvjax.chat(begun, "w7")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "texts must be a string, a conversation or a sequence of these"),
        (3, "texts must be a string, a conversation"),
        (["w5", 3], "text 1 must be a string, or a conversation"),
        ([[{"role": "user"}]], "a conversation must be messages of the form"),
    ],
)
def test_what_is_no_text(model, texts, message):
    with pytest.raises(InputError, match=message):
        kvjax.generate_text(model, texts, H2O)


def test_a_model_that_cannot_take_texts(model):
    plain = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, adds_bos=False, files={}))
    with pytest.raises(InputError, match="text 1 is empty"):
        kvjax.generate_text(plain, ["w5", ""], H2O)
    with pytest.raises(InputError, match="no chat template, which conversations need"):
        kvjax.generate_text(plain, [{"role": "user", "content": "w5"}], H2O)
    with pytest.raises(InputError, match="the model has no tokenizer"):
        kvjax.generate_text(tiny(layers=1).model, "w5", H2O)


@pytest.mark.sampled(0)
def test_a_row_of_nan_is_an_error_whose_result_has_texts(model):
    bad = spoiled(model, model.tokenizer.encode("w40")[-1])
    expected = kvjax.generate_text(untied(model), ["w6 w11"], H2O, max_new_tokens=4, stop=())
    with pytest.raises(NonFiniteError) as raised:
        kvjax.generate_text(bad, ["w5 w40 w7", "w6 w11"], H2O, max_new_tokens=4, stop=())
    result = raised.value.result
    assert isinstance(result, kvjax.TextGeneration) and raised.value.rows == (0,)
    assert result.texts == ["", expected.texts[0]]
