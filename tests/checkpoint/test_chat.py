"""Chat templates: the texts that transformers makes of the same conversations."""

import json

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies

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
    with pytest.raises(InputError, match=r"a conversation must be messages of the form|must be JSON values"):
        loaded(folder).apply_chat_template(talk)


#: Templates and what is right to be before the last content, which they may strip.
CONTINUED = {
    "as it is": ("{{ m.content }}<|im_end|>\n", lambda text: text),
    "nothing after it": ("{{ m.content }}", lambda text: text),
    "stripped": ("{{ m.content | trim }}<|im_end|>\n", str.strip),
    "stripped between spaces": ("{{ ' ' + m.content.strip() + ' ' + eos_token }}", lambda text: " " + text.strip()),
    "stripped after a word": ("answer:{{ m.content.strip() }};", lambda text: "answer:" + text.strip()),
    "stripped at the end": ("{{ m.content.rstrip() }} \n\n", str.rstrip),
    "stripped at the start": ("{{ m.content.lstrip() }} ", str.lstrip),
    "twice": ("({{ m.content | trim }}) {{ m.content | trim }};", lambda text: f"({text.strip()}) {text.strip()}"),
    "once more at the end": ("{{ m.content }}<|im_end|>{% if loop.last %}end{% endif %}", lambda text: text),
}
PIECES = [
    "",
    "i",
    "m",
    "<",
    "|",
    "end",
    "im_end",
    "<|im_end|>",
    "\n",
    " ",
    "assistant",
    "12",
    "é",
    "日本",
    "</s>",
    "user",
]


def continued(own, name, last):
    """Returns kvjax's text of a conversation that ends with a message, and the expected one."""
    source, kept = CONTINUED[name]
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + source + "{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    talk = [{"role": "user", "content": "Say i or end."}, {"role": "assistant", "content": last}]
    whole = chat.render(own, source, talk, answer=True)
    text = chat.render(own, source, talk, answer=False)
    assert whole.startswith(text)
    head = chat.render(own, source, talk[:1], answer=True).removesuffix("end<|im_start|>assistant\n")
    return text, head.removesuffix("<|im_start|>assistant\n") + "<|im_start|>assistant\n" + kept(last)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONTINUED)
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(strategies.lists(strategies.sampled_from(PIECES), max_size=3).map("".join))
@hypothesis.example("")
@hypothesis.example(" \n ")
def test_any_last_message_is_continued(folder, name, last):
    got, right = continued(loaded(folder), name, last)
    assert got == right


@pytest.mark.parametrize("last", ["The answer is", "i", "end", "im_end", "m", "a <|im_end|> b", "12", "日本"])
@pytest.mark.parametrize("name", ["as it is", "stripped", "stripped between spaces", "once more at the end"])
def test_continued_texts_are_those_of_transformers(folder, name, last):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + CONTINUED[name][0] + "{% endfor %}"
    talk = [{"role": "user", "content": "Say i or end."}, {"role": "assistant", "content": last}]
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talk, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert chat.render(loaded(folder), source, talk, answer=False) == expected


def test_the_last_of_several_parts_is_continued(folder):
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text or p.type }}]{% endfor %};{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "]"}, {"type": "image"}]
    talk = [{"role": "assistant", "content": parts}]
    assert chat.render(loaded(folder), source, talk, answer=False) == "[a][]"
    with pytest.raises(InputError, match="no text that could be continued"):
        chat.render(loaded(folder), source, [{"role": "assistant", "content": parts[2:]}], answer=False)


@pytest.mark.parametrize("content", ["{{ m.content | upper }}", "{{ m.content[1:] }}", "{{ m.content | tojson }}", "x"])
def test_a_template_that_changes_the_last_message(folder, content):
    source = "{% for m in messages %}" + content + "{% endfor %}"
    with pytest.raises(InputError, match="changes the last message"):
        chat.render(loaded(folder), source, [{"role": "assistant", "content": 'a"b'}], answer=False)


def test_an_empty_last_message_that_the_template_would_leave_out(folder):
    source = "{% for m in messages %}{% if m.content %}[{{ m.role }}]{{ m.content }};{% endif %}{% endfor %}"
    talk = [{"role": "user", "content": ";"}, {"role": "assistant", "content": ""}]
    assert chat.render(loaded(folder), source, talk, answer=False) == "[user];;[assistant]"


def test_fields_that_are_none_are_absent(folder):
    talk = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert chat.render(loaded(folder), "{{ messages[0] | tojson }}", talk, answer=True) == '{"role": "assistant"}'


def test_messages_that_json_cannot_hold(folder):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for content in (deep, 10**5000):
        with pytest.raises(InputError, match="must be JSON values"):
            loaded(folder).apply_chat_template([{"role": "user", "content": content}])
    with pytest.raises(InputError, match=r"nested too deeply|must be messages of the form") as caught:
        loaded(folder).apply_chat_template([deep])
    assert len(str(caught.value)) < 500


def test_what_a_user_says_can_make_a_template_fail(folder):
    for source, content in (
        ("{{ messages[0].content.format() }}", "{a}"), ("{{ 1 // (messages[0].content | int) }}", "0"),
        ("{{ '%d' % messages[0].content }}", "x"), ("{{ messages[0].content.encode('ascii') }}", "é"),
        ("{{ messages[0].content.index('a') }}", "b"), ("{{ 'x' * messages[0].content | int }}", "9" * 12),
        ("{{ 10.0 ** messages[0].content | int }}", "9999"), ("{{ messages[0].content * 10**9 }}", "x"),
        ("{{ strftime_now(messages[0].content) }}", "\ud800"),
    ):  # fmt: skip
        with pytest.raises(chat.ChatTemplateError, match="refuses the conversation"):
            chat.render(loaded(folder), source, [{"role": "user", "content": content}], answer=True)


def named_folder(folder, tmp_path, template, *, default=None, **others):
    """A copy of a folder with templates in tokenizer_config.json and in files."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write(tmp_path, template)
    if default is not None:
        (tmp_path / "chat_template.jinja").write_text(default)
    for name, source in others.items():
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        (tmp_path / f"additional_chat_templates/{name}.jinja").write_text(source)
    return tmp_path


LISTED = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("template", "files"),
    [
        ("S", {}), (LISTED, {}), (LISTED[1:2], {}), ({"default": "D", "x": "X"}, {}), ("S", {"default": "F"}),
        (LISTED, {"default": "F"}), (LISTED, {"rag": "F"}), (None, {"default": "F", "tool_use": "U", "a.b": "AB"}),
        ("S", {"tool_use": "U"}),
    ],
)  # fmt: skip
def test_templates_are_those_that_transformers_finds(template, files, folder, tmp_path):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    peer = transformers.AutoTokenizer.from_pretrained(named_folder(folder, tmp_path, template, **files))
    own, talk = loaded(tmp_path), [{"role": "user", "content": "x"}]
    found = peer.chat_template if isinstance(peer.chat_template, dict) else {"default": peer.chat_template}
    assert chat.templates(own) == found
    for name in found:
        expected = peer.apply_chat_template(talk, chat_template=found[name], tokenize=False)
        assert own.apply_chat_template(talk, template=name) == expected
    for tools in (None, [{"type": "function"}]):
        if "default" in found or (tools and "tool_use" in found):
            expected = peer.apply_chat_template(talk, tools=tools, tokenize=False)
            assert own.apply_chat_template(talk, tools=tools) == expected
        else:
            with pytest.raises(InputError, match=f"no default chat template; there are {', '.join(sorted(found))}"):
                own.apply_chat_template(talk, tools=tools)
    with pytest.raises(InputError, match=f"no chat template 'other'; there are {', '.join(sorted(found))}"):
        own.apply_chat_template(talk, template="other")
    (tmp_path / "to").mkdir()
    own.save(tmp_path / "to")
    assert chat.templates(loaded(tmp_path / "to")) == found


@pytest.mark.parametrize("template", [5, ["a"], [{"name": "x"}], {"a": 1}, [{"name": "x", "template": 5}]])
def test_what_is_no_template(template, folder, tmp_path):
    own = loaded(named_folder(folder, tmp_path, template))
    with pytest.raises(InputError, match=r"chat_template in tokenizer_config\.json must be a template"):
        own.apply_chat_template(TALK)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja is not valid UTF-8"):
        loaded(tmp_path).apply_chat_template(TALK)


@pytest.mark.sampled(0)
def test_a_template_that_spins_is_not_rendered_when_it_is_loaded(folder, tmp_path):
    spin = "{{ 9**(9**9) }}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    own = loaded(named_folder(folder, tmp_path, spin, default=spin, rag=spin))
    with pytest.raises(chat.ChatTemplateError, match="processor time"):
        own.apply_chat_template(TALK)


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
