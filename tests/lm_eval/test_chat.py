"""Chat templates: the texts that transformers makes of the same conversations."""

import json

import pytest

from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import InputError
from kvjax.models import families

jinja2 = pytest.importorskip("jinja2", reason="chat templates need jinja2, which lm_eval installs")
tokenizers = pytest.importorskip("tokenizers")

from kvjax.lm_eval import chat  # noqa: E402

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
    assert chat.render(own, chat.template(own), talk, answer=answer) == expected
    assert expected.endswith("<|assistant|>\n" if answer else "It is")


def test_a_template_may_refuse_a_role(folder):
    own = loaded(folder)
    with pytest.raises(jinja2.exceptions.TemplateError, match="unknown role"):
        chat.render(own, TEMPLATE, [{"role": "tool", "content": "x"}], answer=True)


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
