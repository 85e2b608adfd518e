"""Chat templates: the texts that transformers makes of the same conversations."""

import json

import pytest
import tokenizers

from kvjax.checkpoint import chat
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import InputError
from kvjax.models import families

pytest.importorskip("jinja2", reason="chat templates need jinja2: pip install 'kvjax[chat]'")

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role not in ["user", "assistant", "system"] %}
    {{- raise_exception("unknown role") }}
  {%- endif %}
<|{{ message.role }}|>
{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 1 + 1? "},
    {"role": "assistant", "content": "It is"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    write(folder, TEMPLATE)
    return folder


def write(folder, template):
    added = {"__type": "AddedToken", "content": "</s>", "special": True} | dict.fromkeys(
        ("lstrip", "rstrip", "normalized", "single_word"), False
    )
    settings = {
        "bos_token": "<s>", "eos_token": added, "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def loaded(folder):
    return load_tokenizer(folder, families.read({"model_type": "llama"}))


@pytest.mark.parametrize("answer", [True, False])
def test_texts_are_those_of_transformers(folder, answer):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    own = loaded(folder)
    talk = TALK[:2] if answer else TALK
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talk, tokenize=False, add_generation_prompt=answer, continue_final_message=not answer
    )
    assert own.apply_chat_template(talk, answer=answer) == expected
    assert expected.endswith("<|assistant|>\n" if answer else "It is")


def test_a_template_may_refuse_a_role(folder):
    own = loaded(folder)
    with pytest.raises(chat.ChatTemplateError, match="refuses the conversation: unknown role"):
        own.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hé!"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hé"}'),
        ("{{ messages[0] | tojson(ensure_ascii=true) }}", '{"role": "user", "content": "H\\u00e9"}'),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}{{ x }}", "15"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{% for %}", "refuses the conversation"),
    ],
)
def test_what_templates_can_do(folder, source, expected):
    own, talk = loaded(folder), [{"role": "user", "content": "Hé"}]
    if "{% for %}" not in source and "unsafe" not in expected and "concatenate" not in expected:
        assert chat.render(own, source, talk, answer=True, x=5) == expected
        return
    with pytest.raises(chat.ChatTemplateError, match=expected):
        chat.render(own, source, talk, answer=True)


@pytest.mark.parametrize("talk", [[], "Hello", ["Hello"], [{"role": "user"}], [{"role": "user", "content": {1}}]])
def test_what_is_no_conversation(folder, talk):
    with pytest.raises(InputError, match=r"a conversation must be messages of the form|must be what JSON can hold"):
        loaded(folder).apply_chat_template(talk)


def test_templates_by_name(folder):
    two = folder.parent / "two"
    two.mkdir()
    (two / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    write(two, [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}])
    assert [chat.template(loaded(two), name) for name in (None, "rag")] == ["D", "R"]
    with pytest.raises(InputError, match="there are default, rag"):
        chat.template(loaded(two), "tool")
    (two / "chat_template.jinja").write_text("J")
    assert chat.template(loaded(two), None) == "J"
    (two / "chat_template.jinja").unlink()
    write(two, None)
    with pytest.raises(InputError, match="no chat template"):
        chat.template(loaded(two))
