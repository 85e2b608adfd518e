"""Folders with quantised weights: GPTQ's and AWQ's against the formats' definition, kvjax's own, what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax.checkpoint import names, orbax
from kvjax.checkpoint.quantized import stored_format
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import values
from kvjax.models.decoder import Decoder
from kvjax.models.quantize import parameter_bytes
from kvjax.products.quantized import dequantize, is_quantized
from tests.checkpoint.folders import assert_same, folder_with, get, raw_config
from tests.models.test_odd_configs import ODD
from tests.reference.weights import awq_tensors, gptq_tensors, random_codes

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48, "head_dim": 8, "word_embed_proj_dim": 32}
UP = "model.layers.1.mlp.up_proj"


def quantised_folder(folder, family="llama", settings=GPTQ, *, write=None, sizes=None, beside=None, **codes):
    """A folder whose projections are random codes; the config, and the exact parameters in float64.

    `beside` names a file for the settings; codes: of `random_codes`.
    """
    raw = raw_config(family, **(sizes or {}))
    config, params, found = folder_with(folder, raw)
    raw |= {} if beside else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(raw))
    if beside:
        (folder / beside).write_text(json.dumps(settings))
    bits, size = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    exact = jax.tree.map(np.asarray, params)
    for seed, tensor in enumerate(names.tensors(config)):
        if not (tensor.paths[0][0].startswith("layer_") and tensor.paths[0][-1] == "kernel"):
            continue
        inputs, outputs = tensor.shapes[0][0], sum(shape[-1] for shape in tensor.shapes)
        group = inputs if size == -1 else min(size, inputs)
        coded = random_codes(inputs, outputs, bits, group, seed, **codes)
        stem = tensor.name.removesuffix(".weight")
        del found[tensor.name]
        found |= {f"{stem}.{name}": array for name, array in write(coded).items()}
        for path, part in zip(tensor.paths, tensor.split_outputs(coded.matrix()) if tensor.fused else [coded.matrix()],
                              strict=True):  # fmt: skip
            get(exact, path[:-1])["kernel"] = part
    save_file(found, folder / "model.safetensors")
    return config, exact, found


def gptq(version=1, index=True, bits=4):
    return lambda coded: gptq_tensors(coded, bits, version=version, index=index)


def assert_decoded(params, exact, *, quantised=True):
    """Every matrix of the layers is quantised and decodes to the exact one; all else is equal."""
    found = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]
    for path, leaf in found:
        keys = tuple(key.key for key in path)
        in_layer = keys[0].startswith("layer_") and keys[-1] == "kernel"
        assert is_quantized(leaf) == in_layer
        expected = get(exact, keys)
        np.testing.assert_allclose(dequantize(leaf) if in_layer else leaf, expected, rtol=2e-6, atol=1e-8)


def logits(model, params=None):
    tokens = np.arange(10, dtype=np.int32)[None]
    run = jax.jit(lambda params: Decoder(model.config).apply({"params": params}, tokens)[0])
    return np.asarray(run(model.params if params is None else params))


CASES = {
    "v1": ("llama", GPTQ, gptq(), {}),
    "v2": ("llama", {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(2), {"zeros": (0, 15)}),
    "v1 with zeros of 0": ("llama", GPTQ, gptq(), {"zeros": (0, 15)}),
    "8 bits": ("mistral", {**GPTQ, "bits": 8, "checkpoint_format": "gptq"}, gptq(bits=8), {}),
    "2 bits": ("qwen2", {**GPTQ, "bits": 2, "group_size": 16}, gptq(bits=2), {"sizes": WIDE}),
    "act order": ("opt", {**GPTQ, "desc_act": True}, gptq(), {"act_order": True}),
    "act order, fused": ("phi3", {**GPTQ, "desc_act": True}, gptq(), {"act_order": True}),
    "fused by head": ("gpt_neox", GPTQ, gptq(), {}),
    "one group": ("qwen2", {**GPTQ, "group_size": -1}, gptq(), {}),
    "group beyond the inputs": ("llama", {**GPTQ, "group_size": 128}, gptq(index=False), {}),
    "no index": ("opt", GPTQ, gptq(index=False), {}),
    "symmetric": ("llama", {**GPTQ, "sym": True}, gptq(), {"zeros": (8, 8)}),
    "symmetric, zeros as in v2": ("llama", {**GPTQ, "sym": True}, gptq(2), {"zeros": (8, 8)}),
    "settings beside": ("llama", GPTQ, gptq(), {"beside": "quantize_config.json"}),
    "awq": ("llama", AWQ, awq_tensors, {"zeros": (0, 15)}),
    "awq, opt": ("opt", AWQ, awq_tensors, {}),
    "awq, old settings": (
        "mistral", {"w_bit": 4, "q_group_size": 8, "version": "GEMM", "zero_point": True}, awq_tensors,
        {"beside": "quant_config.json"},
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_matrices_are_those_of_the_definition(name, tmp_path):
    family, settings, write, more = CASES[name]
    _, exact, _ = quantised_folder(tmp_path, family, settings, write=write, **more)
    model = kvjax.load(tmp_path, dtype=jnp.float32)
    assert_decoded(model.params, exact)
    orders = [leaf.order for leaf in jax.tree.leaves(model.params, is_leaf=is_quantized) if is_quantized(leaf)]
    assert all((order is not None) == more.get("act_order", False) for order in orders)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["v1", "act order", "awq"])
def test_logits_are_those_of_exact_weights(name, tmp_path):
    family, settings, write, more = CASES[name]
    _, exact, _ = quantised_folder(tmp_path, family, settings, write=write, **more)
    model = kvjax.load(tmp_path, dtype=jnp.float32)
    expected = logits(model, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), exact))
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits(model), expected, atol=2e-4)


def test_scales_keep_their_16_bits(tmp_path):
    _, exact, _ = quantised_folder(tmp_path, write=gptq())
    model = kvjax.load(tmp_path, dtype=jnp.bfloat16)
    kernel = model.params["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel.scale.dtype == jnp.float16
    np.testing.assert_allclose(dequantize(kernel), exact["layer_0"]["mlp"]["up"]["kernel"], rtol=2e-6)
    assert model.params["embed"]["tokens"].dtype == jnp.bfloat16


def test_file_of_old_releases(tmp_path):
    """Its own file name, and biases of 0 that the decoder does not have."""
    settings = {**GPTQ, "model_file_base_name": "gptq_model-4bit-8g"}
    del settings["quant_method"]
    _, exact, found = quantised_folder(tmp_path, settings=settings, write=gptq(), beside="quantize_config.json")
    (tmp_path / "model.safetensors").unlink()
    save_file(found | {f"{UP}.bias": np.zeros(24, np.float16)}, tmp_path / "gptq_model-4bit-8g.safetensors")
    assert_decoded(kvjax.load(tmp_path).params, exact)
    save_file(found | {f"{UP}.bias": np.ones(24, np.float16)}, tmp_path / "gptq_model-4bit-8g.safetensors")
    with pytest.raises(CheckpointError, match=f"1 extra: {UP}.bias"):
        kvjax.load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["'bitsandbytes'", "gptq and awq"]),
        ({"bits": 4}, ["quant_method", "gptq and awq"]),
        ({**GPTQ, "bits": 3}, ["bits", "3", "2, 4, 8"]),
        ({**AWQ, "bits": 8}, ["bits", "8", "reads 4 of awq"]),
        ({**GPTQ, "group_size": 0}, ["group_size", "0", "-1 for all"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "'marlin'", "gptq_v2"]),
        ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format", "GPU"]),
        ({**GPTQ, "pack_dtype": "int64"}, ["pack_dtype", "int32"]),
        ({**AWQ, "version": "gemv"}, ["version", "'gemv'", "gemm"]),
        ("gptq", ["must be an object", "'gptq'"]),
    ],
)
def test_other_formats_are_refused(settings, words, tmp_path):
    _, _, found = folder_with(tmp_path, raw_config("llama", quantization_config=settings))
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        kvjax.load(tmp_path)
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


def test_no_codes_of_codes(tmp_path):
    quantised_folder(tmp_path, write=gptq())
    with pytest.raises(ConfigError, match="holds 4-bit weights of gptq; leave out weights='int8'"):
        kvjax.load(tmp_path, weights="int8")
    with pytest.raises(ConfigError, match="already quantized"):
        kvjax.quantize_weights(kvjax.load(tmp_path))


DAMAGES = {
    "no zeros": (lambda f: f.pop(f"{UP}.qzeros"), ["1 missing", f"{UP}.qzeros"]),
    "wrong codes": (
        lambda f: f.update({f"{UP}.qweight": np.zeros((3, 24), np.int32)}), ["misshapen", "qweight", "[2, 24]"]
    ),
    "wrong zeros": (
        lambda f: f.update({f"{UP}.qzeros": np.zeros((2, 24), np.int32)}), ["misshapen", "qzeros", "[2, 3]"]
    ),
    "other integers": (
        lambda f: f.update({f"{UP}.qweight": np.zeros((2, 24), np.int64)}), ["qweight", "stored as I64", "I32"]
    ),
    "uneven groups": (
        lambda f: f.update({f"{UP}.g_idx": np.array([0] * 9 + [1] * 7, np.int32)}), ["g_idx", "each of 2 groups"]
    ),
    "group beyond": (
        lambda f: f.update({f"{UP}.g_idx": np.array([0] * 8 + [2] * 8, np.int32)}), ["g_idx", "groups 0 to 2"]
    ),
    "no number": (
        lambda f: f.update({f"{UP}.scales": np.full((2, 24), np.nan, np.float16)}), ["scales", "NaN or infinity"]
    ),
    "three groups": (
        lambda f: f.update({f"{UP}.scales": np.ones((3, 24), np.float16), f"{UP}.qzeros": np.ones((3, 3), np.int32)}),
        ["scales", "3 groups for 16 inputs"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(name, tmp_path):
    _, _, found = quantised_folder(tmp_path, write=gptq())
    damage, words = DAMAGES[name]
    damage(found)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        kvjax.load(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_groups_without_an_index_have_the_size_of_the_settings(tmp_path):
    _, _, found = quantised_folder(tmp_path, write=gptq(index=False))
    found[f"{UP}.scales"] = np.ones((4, 24), np.float16)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"scales is \[4, 24\] instead of \[2, 24\]"):
        kvjax.load(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "weights"), [("llama", "int4"), ("gpt2", "int8"), ("gpt_neox", "int4"), ("phi3", "int4")]
)
def test_quantised_while_loading_saved_and_loaded_again(family, weights, tmp_path):
    _, _, found = folder_with(tmp_path / "exact", raw_config(family, tie_word_embeddings=True))
    save_file(found, tmp_path / "exact/model.safetensors")
    exact = kvjax.load(tmp_path / "exact")
    model = kvjax.load(tmp_path / "exact", weights=weights)
    expected = kvjax.quantize_weights(exact, bits=int(weights[-1]))
    assert_same(model.params, expected.params, None)
    assert any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized)))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert held == parameter_bytes(model.config, jnp.float32, kvjax.WeightCodes(int(weights[-1])))
    kvjax.save(model, tmp_path / "saved")
    assert_same(kvjax.load(tmp_path / "saved").params, model.params, None)
    orbax.save_params(tmp_path / "orbax", model.params)
    assert_same(orbax.restore_params(tmp_path / "orbax", model.config), model.params, None)


def test_scattered_groups_are_saved_and_loaded_again(tmp_path):
    quantised_folder(tmp_path / "first", write=gptq(), settings={**GPTQ, "desc_act": True}, act_order=True)
    model = kvjax.load(tmp_path / "first")
    kvjax.save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["desc_act"] is True
    assert_same(kvjax.load(tmp_path / "saved").params, model.params, None)
    orbax.save_params(tmp_path / "orbax", model.params)
    half = orbax.restore_params(tmp_path / "orbax", model.config, dtype=jnp.bfloat16)
    kernel = half["layer_0"]["mlp"]["up"]["kernel"]
    assert (kernel.scale.dtype, kernel.codes.dtype, kernel.order.dtype) == (jnp.bfloat16, jnp.uint8, jnp.int32)
    np.testing.assert_array_equal(kernel.order, model.params["layer_0"]["mlp"]["up"]["kernel"].order)


def test_the_output_head(tmp_path):
    _, _, found = folder_with(tmp_path / "exact", raw_config("llama", tie_word_embeddings=False))
    save_file(found, tmp_path / "exact/model.safetensors")
    codes = kvjax.WeightCodes(8, group=4, head=True)
    model = kvjax.load(tmp_path / "exact", weights=codes)
    assert model.params["head"]["kernel"].group == 4
    kvjax.save(model, tmp_path / "saved")
    assert_same(kvjax.load(tmp_path / "saved").params, model.params, None)
    tied = folder_with(tmp_path / "tied", raw_config("llama", tie_word_embeddings=True))[2]
    save_file(tied, tmp_path / "tied/model.safetensors")
    with pytest.raises(ConfigError, match="is not quantized"):
        kvjax.load(tmp_path / "tied", weights=codes)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"bits": 3}, "bits must be one of 2, 4, 8; got 3"), ({"group": 0}, "group"), ({"head": "yes"}, "head must be"),
     ({"group": 1}, "no group of up to 1 of its 16 inputs fills whole bytes")],
)  # fmt: skip
def test_bad_arguments(arguments, match, tmp_path):
    _, _, found = folder_with(tmp_path, raw_config("llama"))
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=match):
        kvjax.quantize_weights(kvjax.load(tmp_path), **arguments)


def test_unknown_name():
    with pytest.raises(ConfigError, match="'int3' is unknown; valid: int8, int4, int2"):
        kvjax.load("kvjax-tiny", weights="int3")


@pytest.mark.parametrize(("settings", "write"), [(GPTQ, gptq()), (AWQ, awq_tensors)], ids=["gptq", "awq"])
def test_tied_models_that_store_only_their_head(settings, write, tmp_path):
    sizes = {"tie_word_embeddings": True}
    config, exact, found = quantised_folder(tmp_path, "llama", settings, write=write, sizes=sizes)
    found["lm_head.weight"] = found.pop("model.embed_tokens.weight")
    save_file(found, tmp_path / "model.safetensors")
    model = kvjax.load(tmp_path, dtype=jnp.float32)
    assert config.tie_embeddings and model.config == config
    assert_decoded(model.params, exact)
    kvjax.save(model, tmp_path / "saved")
    assert_decoded(kvjax.load(tmp_path / "saved", dtype=jnp.float32).params, exact)


@pytest.mark.parametrize("settings", [GPTQ | {"checkpoint_format": "gptq"}, AWQ], ids=["gptq", "awq"])
def test_odd_values_of_every_setting(settings, tmp_path):
    for key in (*settings, "is_marlin_format", "pack_dtype", "model_file_base_name"):
        for value in ODD:
            try:
                form = stored_format(tmp_path, {"quantization_config": settings | {key: value}})
            except ConfigError:
                continue
            assert form is not None and form.bits == 4 and isinstance(form.bits, int)
            assert form.group is None or (type(form.group) is int and 0 < form.group <= values.MAX_SIZE)
    for value in ODD:
        if value is not None:
            with pytest.raises(ConfigError):
                stored_format(tmp_path, {"quantization_config": value})
