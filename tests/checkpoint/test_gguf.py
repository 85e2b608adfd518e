"""GGUF files: decoders of every family, types of tensors, several files, damage; and vocabularies."""

import ctypes
import dataclasses
import io
import re
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import gguf as files
from kvjax.checkpoint.gguf.architectures import ARCHITECTURES
from kvjax.checkpoint.gguf.elements import TYPES
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import families
from tests.checkpoint import folders
from tests.models.test_parity import log_probabilities

gguf = pytest.importorskip("gguf", reason="GGUF files need gguf")
writer = pytest.importorskip("tests.checkpoint.gguf_files")

GRANITE = {
    "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
#: Name -> family, and what its config.json has besides the sizes of tests/checkpoint/folders.py.
CASES = {
    "llama": ("llama", {"rope_theta": 500.0}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, yarn": (
        "llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}
    ),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": None}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "num_hidden_layers": 7,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 1000.0,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 6}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", GRANITE),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-4}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False}),
    "stablelm": ("stablelm", {}),
    "stablelm, norms": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
}  # fmt: skip


def small(name: str, **changes):
    """A config.json, its decoder and random parameters."""
    family, more = CASES[name]
    # Every GGUF file is untied if it has an output head; families differ in what they are without a setting.
    usual = {"tie_word_embeddings": False, "head_dim": 4, "rms_norm_eps": 1e-5, "rope_theta": 200.0}
    raw = folders.raw_config(family, **{**usual, **more, **changes})
    if family in ("phi3", "stablelm"):
        del raw["head_dim"]
    config = families.read(raw)
    return raw, config, folders.random_params(config)


def written(path: Path, name: str, **options):
    """Writes a random model of a case; returns its decoder, parameters and tensors."""
    raw, config, params = small(name)
    tensors = folders.tensors(config, params)
    writer.write(path, raw, tensors, **options)
    return config, params, tensors


def same_decoder(found, expected) -> bool:
    """Whether two decoders are the same but for the names of families that GGUF does not distinguish, and tokens."""
    ignored = {"family": found.family, "bos_token_id": None, "eos_token_ids": (), "pad_token_id": None}
    return dataclasses.replace(found, **ignored) == dataclasses.replace(expected, **ignored)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        else:
            np.testing.assert_array_equal(np.asarray(found[key]), value, err_msg=key)


@pytest.fixture(scope="module")
def llama_cpp():
    """llama-cpp-python, which prints nothing."""
    found = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    silent = found.llama_log_callback(lambda *_: None)
    found.llama_log_set(silent, ctypes.c_void_p(0))
    yield found
    found.llama_log_set(found.llama_log_callback(), ctypes.c_void_p(0))


def test_every_architecture_has_a_case():
    assert {writer.ARCHITECTURES[family] for family, _ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_decoder_and_parameters(name, tmp_path):
    path = tmp_path / "model.gguf"
    config, params, _ = written(path, name)
    model = kvjax.load(path, dtype=jnp.float32)
    assert same_decoder(model.config, config)
    if "gemma" in name:  # 1 is added to scales of norms and subtracted again
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-7), model.params, params)
    else:
        assert_equal(model.params, params)


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_reads_the_same_model(name, llama_cpp, tmp_path):
    """The files of these tests are right: llama.cpp computes the same from them."""
    if name == "starcoder2, no biases":
        pytest.skip("llama.cpp does not load a starcoder2 without biases")
    path = tmp_path / "model.gguf"
    vocabulary = {"ggml.model": "none"}
    written(path, name, vocabulary=vocabulary)
    model = kvjax.load(path, dtype=jnp.float32)
    # llama.cpp ignores Phi-3's window, within which both see the same tokens.
    tokens = np.arange(1, 7 if name == "phi3" else 13, dtype=np.int32)
    # llama.cpp looks GELU up in a table of half precision.
    np.testing.assert_allclose(
        of_llama_cpp(llama_cpp, path, tokens), log_probabilities(model, tokens[None])[0], atol=2e-2
    )


def of_llama_cpp(llama_cpp, path: Path, tokens: np.ndarray) -> np.ndarray:
    """[T, V] log-probabilities."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, "llama.cpp does not load the file"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.flash_attn_type = 256, 0
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(256, 0, 1)
    batch.n_tokens = len(tokens)
    for place, token in enumerate(tokens):
        batch.token[place], batch.pos[place] = int(token), place
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, True
    assert llama_cpp.llama_decode(context, batch) == 0
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab,)) for i in range(len(tokens))]
    logits = np.stack(rows).astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path):
    raw, config, params = small("llama", rope_scaling=LLAMA3)
    # The factors of each pair of features by the definition of LLaMA 3.1.
    wavelengths = 2 * np.pi * raw["rope_theta"] ** (np.arange(0, 4, 2) / 4)
    smooth = np.clip((16 / wavelengths - 1) / (4 - 1), 0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    path = tmp_path / "model.gguf"
    plain = {key: value for key, value in raw.items() if key != "rope_scaling"}
    vectors = {"rope_freqs.weight": factors}
    writer.write(path, plain, folders.tensors(config, params), vectors=vectors)
    found = log_probabilities(kvjax.load(path, dtype=jnp.float32), np.arange(30)[None])
    expected = log_probabilities(kvjax.Model(config, jax.tree.map(jnp.asarray, params)), np.arange(30)[None])
    # Factors are float32 in the file.
    np.testing.assert_allclose(found, expected, atol=1e-3)
    # Factors of 1 are no scaling.
    writer.write(path, plain, folders.tensors(config, params), vectors={"rope_freqs.weight": np.ones(2)})
    assert kvjax.load(path).config.rope.scaling == "default"


def test_factors_of_longrope(tmp_path):
    short, long = [1.0, 1.5], [2.0, 6.0]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    raw, config, params = small("phi3", rope_scaling=scaling, original_max_position_embeddings=16)
    path = tmp_path / "model.gguf"
    vectors = {"rope_factors_short.weight": np.array(short), "rope_factors_long.weight": np.array(long)}
    writer.write(path, raw, folders.tensors(config, params), vectors=vectors)
    assert same_decoder(kvjax.load(path).config, config)


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_tensors(kind, tmp_path):
    """A matrix is what gguf itself decodes it to, also where a part of it alone is read."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    try:
        data = gguf.quants.quantize(rng.standard_normal((6, 512), np.float32), number)
    except NotImplementedError:  # gguf decodes K-quants and does not encode them
        data = rng.integers(0, 256, (6, 512 // elements, size), np.uint8)
        # Scales are float16 at the places that the definitions of ggml give them; any code is valid.
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
        for place in places:
            data[..., place : place + 2] = np.float16(0.01 + 0.01 * place).view(np.uint16).reshape(1).view(np.uint8)
        data = data.reshape(6, -1)
    expected = gguf.quants.dequantize(data, number)
    assert np.isfinite(expected).all() and expected.std() > 0
    path = tmp_path / "model.gguf"
    made = gguf.GGUFWriter(path, "llama")
    made.add_tensor("x", data, raw_dtype=number)
    for step in (made.write_header_to_file, made.write_kv_data_to_file, made.write_tensors_to_file, made.close):
        step()
    (stored,) = files.stored(files.read(path), small("llama")[1])
    np.testing.assert_array_equal(stored.read(np.dtype(np.float32)), expected)
    rows = stored.read_block([[(1, 2), (4, 6)], [(100, 300)]], np.dtype(np.float32))
    np.testing.assert_array_equal(rows, expected[[1, 4, 5], 100:300])


def test_unknown_types_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    made = gguf.GGUFWriter(path, "llama")
    made.add_tensor("x", np.zeros((1, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    for step in (made.write_header_to_file, made.write_kv_data_to_file, made.write_tensors_to_file, made.close):
        step()
    with pytest.raises(CheckpointError, match="IQ2_XXS"):
        files.stored(files.read(path), small("llama")[1])


def test_several_files(tmp_path):
    _, params, _ = written(tmp_path / "model.gguf", "qwen2", files=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in names:
        assert_equal(kvjax.load(tmp_path / name, dtype=jnp.float32).params, params)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003.*interrupted"):
        kvjax.load(tmp_path / names[0])


def test_saves_as_a_hugging_face_folder(tmp_path):
    vocabulary = byte_level("gpt-2")
    raw, config, params = small("llama", vocab_size=len(vocabulary["ggml.tokens"]))
    writer.write(tmp_path / "model.gguf", raw, folders.tensors(config, params), vocabulary=vocabulary)
    model = kvjax.load(tmp_path / "model.gguf", dtype=jnp.float32)
    kvjax.save(model, tmp_path / "saved")
    saved = kvjax.load(tmp_path / "saved", dtype=jnp.float32)
    assert saved.config == model.config
    assert_equal(saved.params, params)
    assert saved.tokenizer.encode("ab ab") == model.tokenizer.encode("ab ab")


def test_every_truncation_is_said(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "llama", vocabulary=byte_level("gpt-2"))
    content = path.read_bytes()
    for size in [*range(64), *range(64, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF"):
            kvjax.load(path)


@pytest.mark.filterwarnings("ignore:.*default rule of llama.cpp")
def test_no_damage_is_an_error_of_another_kind(tmp_path):
    """Bytes of the header are replaced: a file is a decoder, or refused."""
    path = tmp_path / "model.gguf"
    written(path, "llama", vocabulary=byte_level("gpt-2"))
    content, rng = path.read_bytes(), np.random.default_rng(0)
    end = content.index(b"output_norm.weight") + 60
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for place in rng.integers(4, end, rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            container = files.read(path)
            families.read(files.config_json(container))
            files.tokenizer_files(container)
        except (CheckpointError, ConfigError):
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported; supported: llama"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"llama.rope.scaling.type": "ntk"}, "rope.scaling.type is 'ntk'"),
        ({"llama.attention.value_length": 6}, "values have 6 features"),
        ({"llama.feed_forward_length": [24, 32]}, "differs between layers"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "kind 'bert'"),
    ],
)
def test_refusals(change, reason, tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "llama")
    container = files.read(path)
    changed = dataclasses.replace(container, metadata={**container.metadata, **change})

    def read():
        families.read(files.config_json(changed))
        files.tokenizer_files(changed)

    with pytest.raises(ConfigError, match=re.escape(reason)):
        read()


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.pre": ["a"]},
        {"tokenizer.ggml.merges": [1, 2]},
        {"tokenizer.ggml.tokens": 3},
        {"tokenizer.ggml.eos_token_id": [2]},
        {"tokenizer.chat_template": "\udcff"},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": ["x"] * 103},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 103, "tokenizer.ggml.bos_token_id": 5000},
        {"llama.block_count": 2**32},
        {"llama.attention.head_count": "two"},
        {"llama.embedding_length": 0},
    ],
    ids=str,
)
def test_metadata_of_wrong_types(change, tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "llama", vocabulary=byte_level("gpt-2"))
    container = files.read(path)
    assert len(container.metadata["tokenizer.ggml.tokens"]) == 103
    changed = dataclasses.replace(container, metadata={**container.metadata, **change})

    def read():
        families.read(files.config_json(changed))
        files.tokenizer_files(changed)

    with pytest.raises((CheckpointError, ConfigError)):
        read()


def test_settings_that_are_absent_are_those_of_llama_cpp(tmp_path):
    path = tmp_path / "model.gguf"
    for name, layers in (("mixtral", 2), ("smollm3", 5), ("qwen2", 2), ("starcoder2", 2)):
        written(path, name)
        container = files.read(path)
        family = container.metadata["general.architecture"]
        absent = ("rope.freq_base", "attention.head_count_kv", "attention.key_length", "attention.value_length")
        metadata = {k: v for k, v in container.metadata.items() if k not in {f"{family}.{key}" for key in absent}}
        config = families.read(files.config_json(dataclasses.replace(container, metadata=metadata)))
        assert (config.num_layers, config.num_kv_heads, config.head_dim) == (layers, 4, 4)
        assert config.rope.theta == 10_000


def test_factors_without_a_type_are_linear(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "llama")
    container = files.read(path)
    for change in ({"llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0}):
        raw = files.config_json(dataclasses.replace(container, metadata={**container.metadata, **change}))
        assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 0.5}
    raw = files.config_json(dataclasses.replace(container, metadata={**container.metadata, **yarn}))
    assert raw["rope_scaling"]["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_names_that_only_look_like_parts(tmp_path):
    for name in ("x-00001-of-00000.gguf", "y-00005-of-00001.gguf"):
        _, params, _ = written(tmp_path / "model.gguf", "llama")
        (tmp_path / "model.gguf").rename(tmp_path / name)
        assert_equal(kvjax.load(tmp_path / name, dtype=jnp.float32).params, params)


def test_other_versions_and_byte_orders(tmp_path):
    path = tmp_path / "model.gguf"
    for version, reason in ((1, "version 1"), (struct.unpack("<I", struct.pack(">I", 3))[0], "byte order")):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(CheckpointError, match=reason):
            kvjax.load(path)


def byte_level(pre: str, **more):
    """Metadata of a byte-level BPE of the letters and a few merges."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    merges = ["a b", "Ġ ab", "1 2", "12 3"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<user>"]
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    count = len(tokens)
    return {
        "ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.merges": merges,
        "ggml.bos_token_id": count - 3, "ggml.eos_token_id": count - 2, **more,
    }  # fmt: skip


def tokenizer(tmp_path, vocabulary, **changes):
    path = tmp_path / "model.gguf"
    raw, config, params = small("llama", vocab_size=len(vocabulary["ggml.tokens"]), **changes)
    writer.write(path, raw, folders.tensors(config, params), vocabulary=vocabulary)
    return kvjax.load(path, dtype=jnp.float32).tokenizer


def test_byte_level_vocabulary(tmp_path):
    found = tokenizer(tmp_path, byte_level("smollm", **{"ggml.add_bos_token": True, "chat_template": "{{ 1 }}"}))
    names = [found.token(i) for i in found.encode("ab ab 123\n<user></s>")]
    # Digits are words of their own by this rule, so that 12 and 123 are never made.
    assert names == ["<s>", "ab", "Ġab", "Ġ", "1", "2", "3", "Ċ", "<user>", "</s>"]
    assert found.decode(found.encode("ab ab 123<user></s>")) == "ab ab 123<user>"
    assert found.apply_chat_template([{"role": "user", "content": "x"}]) == "1"
    names = [found.token(i) for i in tokenizer(tmp_path, byte_level("llama-bpe")).encode("123")]
    assert names == ["<s>", "123"]


def test_rules_of_words(tmp_path):
    with pytest.raises(ConfigError, match="rule 'bloom'"):
        tokenizer(tmp_path, byte_level("bloom"))
    without = {key: value for key, value in byte_level("gpt-2").items() if key != "ggml.pre"}
    with pytest.warns(UserWarning, match="default rule of llama.cpp"):
        tokenizer(tmp_path, without)


def sentencepiece_model(**options):
    """A SentencePiece model that was trained here, and its GGUF metadata."""
    spm = pytest.importorskip("sentencepiece")
    text, model = [f"the cat number {i} sat on the mat, and the dog {i * 7} ran" for i in range(60)], io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=340, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, **options,
    )  # fmt: skip
    processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(len(processor))
    ]
    return processor, {
        "ggml.model": "llama", "ggml.tokens": [processor.id_to_piece(i) for i in range(len(processor))],
        "ggml.scores": [processor.get_score(i) for i in range(len(processor))], "ggml.token_type": kinds,
        "ggml.bos_token_id": 1, "ggml.eos_token_id": 2,
    }  # fmt: skip


def test_sentencepiece_vocabulary(tmp_path):
    processor, vocabulary = sentencepiece_model()
    found = tokenizer(tmp_path, vocabulary)
    for text in ("the cat sat", "  two  spaces", "café 🎉", "", "the dog 49 ran\n"):
        assert found.encode(text) == [1, *processor.encode(text)]
        assert found.decode(found.encode(text)) == text
    assert found.encode("the</s>") == [1, *processor.encode("the"), 2]
    plain = tokenizer(tmp_path, vocabulary | {"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    assert plain.encode("cat") == processor.encode("cat")[1:] or plain.decode(plain.encode("cat")) == "cat"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_token_ids_are_those_of_llama_cpp(kind, llama_cpp, tmp_path):
    vocabulary = byte_level("llama-bpe") if kind == "gpt2" else sentencepiece_model()[1]
    found = tokenizer(tmp_path, vocabulary)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in ("ab 123 ab", "the cat sat  on</s>the mat", " x", "<s>ab", "1234567"):
        assert found.encode(text) == theirs.tokenize(text.encode(), add_bos=True, special=True), text
