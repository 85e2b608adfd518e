"""Calibrations: low rank's worked cases, files that are damaged or of another model, traces, and gradients."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import kvjax
import kvjax.planning
from kvjax import policies, storage
from kvjax.cache.replay import _run
from kvjax.errors import StorageError
from kvjax.generation.generate import decode
from kvjax.generation.prefill import prefill
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Integer, Samples, calibration_files
from kvjax.storage.calibration import kind_of
from kvjax.units import size
from tests.laws import replay
from tests.storage.test_sides import DIM, LENGTHS, examples, given, random  # noqa: F401
from tests.tiny import random_tokens, tiny

LOW = storage.low_rank(4, 5, residual=2)


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: programs are many, and small."""


def samples(seed: int = 0, heads: int = 2, dim: int = DIM) -> Samples:
    key, value = np.random.default_rng(seed).normal(size=(2, 60, heads, dim)).astype(np.float32)
    return Samples(own=key, query=None, key=key, value=value)


def calibration(held: storage.Storage = LOW, seed: int = 0, rope: Rope | None = None) -> Calibration:
    return Calibration.of(held, [samples(seed)], rope)


@pytest.mark.parametrize("case", [18, 19])
def test_low_rank(examples, case):  # noqa: F811
    about, prompt, decode, lengths = given(examples, case)
    key, value = (examples[f"{case}_{name}_calibration"][:, None] for name in ("key", "value"))
    held = storage.low_rank(about["key_rank"], about["value_rank"], about["residual"])
    made = Calibration.of(held, [Samples(own=key, query=None, key=key, value=value)])
    for name, rank in (("key", about["key_rank"]), ("value", about["value_rank"])):
        sides = made.layers[0][name]
        np.testing.assert_allclose(sides["mean"][0], examples[f"{case}_{name}_mean"], atol=1e-6)
        np.testing.assert_allclose(sides["basis"][0], examples[f"{case}_{name}_basis"][:, :rank], atol=1e-5)
    out, layer = replay(held, prompt, decode, lengths, calibration=made)
    np.testing.assert_allclose(out, examples[f"{case}_out"], atol=1e-4)
    assert layer.stores[0]["key"]["latent"].shape[2:] == (max(lengths) + 8 - about["residual"], about["key_rank"])
    for row, (name, store) in itertools.product(range(2), layer.stores[0].items()):
        expected = examples[f"{case}_{name}_latent_{row}_0"]
        at = np.asarray(layer.position)[row, 0, : store["latent"].shape[2]]
        assert (at >= 0).sum() == lengths[row] + 8 - about["residual"]
        np.testing.assert_allclose(store["latent"][row, 0][at >= 0], expected[at[at >= 0]], atol=1e-4)


def test_every_direction_is_lossless():
    held = storage.low_rank(DIM, DIM, residual=2)
    rope = Rope(dim=DIM)
    arguments = (*random(3), LENGTHS, policies.h2o(6), rope)
    plain, _ = replay(storage.dense(), *arguments)
    output, layer = replay(held, *arguments, calibration=calibration(held, rope=rope))
    np.testing.assert_allclose(output, plain, atol=1e-4)
    with pytest.raises(StorageError, match="needs its calibration to be read"):
        storage.read(held, layer)


def test_in_blocks_is_what_is_held_afterwards():
    """Codes do not depend on the blocks of the prompt; nor do later tokens, once all slots are alike."""
    arguments = (*random(4), LENGTHS)
    made = calibration()
    (_, whole), (_, blocks) = (
        replay(LOW, *arguments, prefill_block=block, calibration=made) for block in (None, 5)
    )  # fmt: skip
    for one, other in zip(
        storage.read(LOW, whole, made), storage.read(LOW, blocks, made), strict=True
    ):  # fmt: skip
        for row, head in np.ndindex(2, 2):
            orders = [np.argsort(layer.position[row, head], kind="stable") for layer in (whole, blocks)]
            live = int((np.asarray(whole.position[row, head]) >= 0).sum())
            np.testing.assert_allclose(
                np.asarray(one)[row, head][orders[0][-live:]],
                np.asarray(other)[row, head][orders[1][-live:]],
                atol=1e-5,
            )


def test_another_calibration_compiles_nothing():
    arguments = (*random(), LENGTHS)
    before = _run._cache_size()
    one, _ = storage.replay(LOW, *arguments, calibration=calibration(seed=1))
    two, _ = storage.replay(LOW, *arguments, calibration=calibration(seed=2))
    assert _run._cache_size() == before + 1 and np.abs(one - two).max() > 1e-2


def model() -> kvjax.Model:
    return tiny().model


def test_a_pass_over_a_text_is_what_its_vectors_are():
    """Moments of each layer's own rotated keys, padding left out, from the cache of a prompt."""
    own, tokens, lengths = model(), random_tokens(2, 40, seed=5), np.array([40, 23])
    made = kvjax.calibrate(own, tokens, LOW, lengths=lengths)
    state = kvjax.log_likelihood(own, tokens, policies.full(), prompt_length=lengths, lengths=lengths).state
    for layer, sides in zip(state.layers, made.layers, strict=True):
        for name, held in (("key", layer.key), ("value", layer.value)):
            live = np.asarray(layer.position)[..., None] >= 0
            x = np.where(live, np.asarray(held, np.float64), 0)
            mean = x.sum(axis=(0, 2)) / lengths.sum()
            np.testing.assert_allclose(sides[name]["mean"], mean, atol=1e-5)
            centred = np.where(live, x - mean[None, :, None], 0)
            moment = np.einsum("bknd,bkne->kde", centred, centred)
            basis = np.asarray(sides[name]["basis"], np.float64)
            # Columns span what holds most: the moment of the coordinates is that of the largest eigenvalues.
            spread = np.einsum("kdr,kde,kes->krs", basis, moment, basis)
            rank = basis.shape[2]
            largest = np.linalg.eigvalsh(moment)[:, ::-1][:, :rank]
            np.testing.assert_allclose(spread, np.stack([np.diag(each) for each in largest]), atol=1e-3 * largest.max())


def test_generation_and_scores_take_it():
    own, tokens = model(), random_tokens(2, 20, seed=6)
    dim = own.config.head_dim
    held = storage.low_rank(dim, dim)
    made = kvjax.calibrate(own, tokens, held)
    options = {"max_new_tokens": 6}
    plain = kvjax.generate(own, tokens, policies.full(), **options)
    low = kvjax.generate(own, tokens, policies.full(), storage=held, calibration=made, **options)
    np.testing.assert_array_equal(low.tokens, plain.tokens)
    np.testing.assert_allclose(low.logprobs, plain.logprobs, atol=1e-4)
    for each in (own, kvjax.calibrated(own, held, made)):
        first = prefill(each, tokens, policies.full(), storage=held, calibration=made, **options)
        apart = decode(each, first, calibration=made if each is own else None, **options)
        np.testing.assert_array_equal(apart.logprobs, low.logprobs)
    inside = kvjax.calibrated(own, held, made)
    again = kvjax.generate(inside, tokens, policies.full(), storage=held, **options)
    np.testing.assert_array_equal(again.logprobs, low.logprobs)
    for run in (
        lambda: kvjax.generate(own, tokens, policies.full(), storage=held, **options),
        lambda: kvjax.log_likelihood(own, tokens, policies.full(), prompt_length=9, storage=held),
        lambda: decode(
            own, prefill(own, tokens, policies.full(), storage=held, calibration=made, **options), **options
        ),
    ):
        with pytest.raises(StorageError, match="low_rank_k8v8 needs a calibration: make it with"):
            run()


def test_ranks_of_their_own_for_each_layer():
    """The directions of a smaller rank are the first of those of a larger one, of a layer and of a head."""
    own, tokens = model(), random_tokens(2, 20, seed=6)
    dim, ranks = own.config.head_dim, ((8, (3, 2)), (8, 5))
    held, whole = storage.low_rank(*ranks), storage.low_rank(dim, dim)
    made, most = (kvjax.calibrate(own, tokens, each) for each in (held, whole))
    result = kvjax.generate(own, tokens, policies.full(), max_new_tokens=6, storage=held, calibration=made)
    shapes = [
        [
            tuple(group.stores[0][name]["latent"].shape[i] for name in ("key", "value") for i in (1, 3))
            for group in layer
        ]
        for layer in result.state.layers
    ]
    assert shapes == [[(2, 8, 2, 8)], [(1, 3, 1, 5), (1, 2, 1, 5)]], "heads and ranks of keys and values"
    for index, name, rank in ((0, "key", 8), (0, "value", 8), (1, "key", 3), (1, "value", 5)):
        basis = most.layers[index][name]["basis"][..., :rank]
        np.testing.assert_array_equal(made.layers[index][name]["basis"], basis)
    for head, rank in enumerate((3, 2)):
        group = result.state.layers[1][head]
        key, _, position = storage.read(held, group, made, index=1, heads=(head,))
        live = np.asarray(position) >= 0
        # What is held of a head lies in as many directions, around the mean.
        inside = np.asarray(key - made.layers[1]["key"]["mean"][None, head, None])[0, 0][live[0, 0]]
        assert np.linalg.matrix_rank(inside, tol=1e-4) == rank
    for wrong, of in (
        (storage.low_rank((8, 3, 3), 8), "layers"), (storage.low_rank((8,), 8), "layers"),
        (storage.low_rank((8, (3, 2, 1)), (8, 5)), "KV heads"),
    ):  # fmt: skip
        with pytest.raises(StorageError, match=rf"{of}, but the model has \w+; give one for all {of}"):
            kvjax.generate(own, tokens, policies.full(), max_new_tokens=6, storage=wrong, calibration=made)
    with pytest.raises(StorageError, match="is for 3 KV heads, but the model has 2"):
        kvjax.calibrate(own, tokens, storage.low_rank(8, (8, (3, 2, 1))))
    for part in (held, held.of_layer(1)):
        with pytest.raises(StorageError, match=r"with Storage\.of_layer and Storage\.of_head"):
            part.bytes_per_slot(dim, "float32")


@pytest.mark.sampled(0)
def test_training_lowers_the_loss():
    """Gradients reach the directions through the scores of a text (MatryoshkaKV trains them so)."""
    own, tokens, held = model(), random_tokens(2, 16, seed=7), storage.low_rank(3, 3)
    made = kvjax.calibrate(own, tokens, held)
    optimizer = optax.adam(3e-2)

    @jax.jit
    def update(made, memory):
        def loss(made):
            scores = kvjax.log_likelihood(
                own, tokens, policies.full(), prompt_length=6, storage=held, calibration=made
            ).logprobs  # fmt: skip
            return -jnp.mean(scores[:, 6:])

        value, gradient = jax.value_and_grad(loss)(made)
        change, memory = optimizer.update(gradient, memory)
        return optax.apply_updates(made, change), memory, value, gradient

    memory, losses = optimizer.init(made), []
    with jax.numpy_dtype_promotion("standard"):  # for optax
        for _ in range(6):
            made, memory, value, gradient = update(made, memory)
            losses.append(float(value))
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(gradient))
    assert losses[-1] < losses[0] - 1e-3, losses


def test_files(tmp_path):
    made, path = calibration(rope=Rope(dim=DIM, theta=500.0)), tmp_path / "own.safetensors"
    made.save(path)
    back = kvjax.load_calibration(path)
    assert back.method == made.method and back.rope == made.rope and back.hash == made.hash
    jax.tree.map(np.testing.assert_array_equal, back.layers, made.layers)
    assert back.nbytes == sum(x.nbytes for x in jax.tree.leaves(made)) == 2 * DIM * (4 + 5) * 4 + 2 * 2 * DIM * 4
    with safe_open(path, "numpy") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert json.loads(about["shapes"])["layer_0.key.basis"] == [2, DIM, 4]

    def of_nan() -> Calibration:
        wrong = made.layers[0]["key"] | {"basis": made.layers[0]["key"]["basis"].at[0, 0, 0].set(jnp.nan)}
        return dataclasses.replace(made, layers=({**made.layers[0], "key": wrong},))

    def altered(change: dict, **more) -> None:
        save_file({**tensors, **change}, path, metadata={**about, **more})

    for write, match in (
        (
            lambda: altered({"layer_0.key.basis": tensors["layer_0.key.basis"] + 1}),
            "is damaged or was changed: its arrays and its header have the hash",
        ),
        (lambda: altered({"layer_0.key.basis": tensors["layer_0.key.basis"][:1]}), "have shapes .*, its header"),
        (lambda: altered({}, rope="open('x')"), "is damaged or was changed"),
        (
            lambda: calibration_files.write(path, made.layers, {"method": "own", "rope": "open('x')"}),
            r"is not a file of kvjax.calibrate.*open\('x'\).* is not a rotary embedding",
        ),
        (lambda: altered({}, rope=repr(Rope(dim=DIM, theta=501.0))), "is damaged or was changed"),
        (lambda: altered({}, rope="None"), "is damaged or was changed"),
        (lambda: altered({}, method=f"{about['method']} "), "is damaged or was changed"),
        (lambda: altered({}, model="another"), "is damaged or was changed"),
        (lambda: altered({}, note="of another"), "is damaged or was changed"),
        (lambda: altered({}, format="kvjax calibration 1"), "its format is 'kvjax calibration 1', .* make it again"),
        (lambda: altered({"layer_0.key.basis": tensors["layer_0.key.basis"].astype(np.float16)}), "is damaged"),
        (lambda: save_file(dict(list(tensors.items())[1:]), path, metadata=about), "have shapes .*, its header"),
        (
            lambda: altered({"layer_2.key.basis": tensors["layer_0.key.basis"]}),
            r"not a file of .*: layer_\d is missing",
        ),
        (lambda: altered({"basis": tensors["layer_0.key.basis"]}), "array 'basis' is not named layer_N.key.PART"),
        (lambda: save_file(tensors, path), "its format is None"),
        (lambda: save_file(tensors, path, metadata={"format": about["format"]}), "is not a file of kvjax.calibrate"),
        (lambda: of_nan().save(path), "is not finite: layer_0.key.basis has numbers that are infinite or NaN"),
        (lambda: altered({}, format="other"), "its format is 'other'"),
        (lambda: path.write_bytes(path.read_bytes()[:-9]), "is not a file of kvjax.calibrate"),
        (lambda: path.write_bytes(b"text"), "is not a file of kvjax.calibrate"),
        (path.unlink, "does not exist; make it with"),
    ):
        write()
        with pytest.raises(StorageError, match=match):
            kvjax.load_calibration(path)
    with pytest.raises(StorageError, match="cannot be written"):
        made.save(tmp_path / "none" / "own.safetensors")


def test_a_file_says_from_which_tokens_it_was_made(tmp_path):
    """Their number and a hash, without padding; they are no part of the pytree, and the file's hash covers them."""
    own, tokens, path = model(), random_tokens(2, 16, seed=5), tmp_path / "own.safetensors"
    made = kvjax.calibrate(own, tokens, LOW, lengths=np.array([16, 9]))
    assert made.text.tokens == 25 and str(made.text) == f"25 tokens with the hash {made.text.hash}"
    made.save(path)
    assert kvjax.load_calibration(path).text == made.text
    padded = np.pad(np.where(np.arange(16) < [[16], [9]], tokens, 3), ((0, 0), (0, 4)))
    assert kvjax.calibrate(own, padded, LOW, lengths=np.array([16, 9])).text == made.text
    others = (tokens[:, :15], tokens[::-1], np.where(np.arange(16) == 8, tokens + 1, tokens))
    for other in others:  # another length, another order of the rows, another token
        assert kvjax.calibrate(own, other % own.config.vocab_size, LOW, lengths=np.array([15, 9])).text != made.text
    assert jax.tree.structure(kvjax.calibrate(own, others[0], LOW)) == jax.tree.structure(made)
    assert jax.tree.map(lambda x: x, made).text is None and calibration().text is None
    with safe_open(path, "numpy") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={**about, "tokens": "26"})
    with pytest.raises(StorageError, match="is damaged or was changed"):
        kvjax.load_calibration(path)
    # Without them, as files of earlier versions are.
    made.with_text(None).save(path)
    assert kvjax.load_calibration(path).text is None


def test_of_another_model_or_storage():
    """Each error says what the calibration has and what is needed."""
    prompt, decode = random()
    good = calibration()
    one = good.layers[0]
    for held, made, match in (
        (storage.low_rank(3, 5), good, r"1 layers of key.basis \[2, 8, 4\] .* need 1 layers of key.basis \[2, 8, 3\]"),
        (LOW, Calibration((one, one)), r"has 2 layers .* need 1 layers"),
        (LOW, Calibration(()), r"has 0 layers of nothing; .* need 1 layers of key.basis"),
        (LOW, Calibration.of(LOW, [samples(heads=1)]), r"key.basis \[1, 8, 4\] .* need .* \[2, 8, 4\]"),
        (LOW, Calibration.of(LOW, [samples()], dtype=jnp.bfloat16), "bfloat16, .* need .* float32"),
        (LOW, dataclasses.replace(good, rope=Rope(dim=8)), r"was made for Rope\(.* has a model without a rotary"),
        (storage.int4(), good, "storage int4 needs no calibration"),
        (LOW, None, "low_rank_k4v5 needs a calibration of one layer"),
    ):
        with pytest.raises(StorageError, match=match):
            storage.replay(held, prompt, decode, LENGTHS, calibration=made)
    short = samples()
    flat = short._replace(key=short.key[:, 0], value=short.value[:, 0])
    none = short._replace(key=short.key[:0], value=short.value[:0])
    for own, match in (([], "at least one layer"), ([flat], r"must be \[n, K, D\]"), ([none], "at least one token")):
        with pytest.raises(StorageError, match=match):
            Calibration.of(LOW, own)
    _, layer = storage.replay(LOW, prompt, decode, LENGTHS, calibration=good)
    with pytest.raises(StorageError, match=r"index must be a whole number from 0 to 0; got 3"):
        storage.read(LOW, layer, good, index=3)
    with pytest.raises(StorageError, match="calibration must be what"):
        storage.replay(LOW, prompt, decode, LENGTHS, calibration="a file")
    with pytest.raises(StorageError, match="storage int4 needs no calibration"):
        kvjax.calibrate(model(), random_tokens(1, 9), storage.int4())
    wrong = samples()
    wrong.value[3, 1, 2] = np.inf
    with pytest.raises(StorageError, match="values of layer 0 of the calibration have numbers that are infinite"):
        Calibration.of(LOW, [wrong])
    made = kvjax.calibrate(model(), random_tokens(1, 9), LOW)
    other = tiny(seed=1).model
    with pytest.raises(StorageError, match=r"made for a model with the fingerprint \w+, and this model has \w+"):
        kvjax.calibrated(other, LOW, made)
    with pytest.raises(StorageError, match="calibration=int is not valid"):
        kvjax.calibrated(model(), LOW, 3)


def test_of_another_kind_with_the_same_shapes(tmp_path):
    """Saved or not; also after training, which changes what the method is called. Numbers of directions are shapes."""
    own, tokens = model(), random_tokens(1, 9)
    made = kvjax.calibrate(own, tokens, storage.low_rank(4, 4, center=False))
    made.replace(method="trained").save(tmp_path / "made")
    for each in (made, kvjax.load_calibration(tmp_path / "made")):
        kvjax.calibrated(own, storage.low_rank(4, 4, center=False), each)
        with pytest.raises(StorageError, match=r"is of keys: .*basis='keys'.* needs one of .*basis='weights'"):
            kvjax.calibrated(own, storage.low_rank(4, 4, center=False, basis="weights"), each)
        with pytest.raises(StorageError, match="storage low_rank_k3v4 and this model need"):
            kvjax.calibrated(own, storage.low_rank(3, 4, center=False), each)
    side = storage.Side(lambda samples: {}, lambda dim, dtype: {}, when="calibration")
    functions = storage.Storage(key=storage.scaled(Integer(4), side), value=Integer(4), name="functions")
    assert "lambda" in kind_of(functions) and "0x" not in kind_of(functions), "addresses differ between processes"
    outliers = kvjax.calibrate(own, tokens, storage.kvquant(3, 0.3))
    with pytest.raises(StorageError, match=r"Quantiles\(outliers=0.3.* needs one of .*Quantiles\(outliers=0.2"):
        kvjax.calibrated(own, storage.kvquant(3, 0.2), outliers)
    with pytest.raises(StorageError, match=r"has 1 layers of key.basis .* need 2 layers of key.basis"):
        kvjax.calibrated(own, storage.low_rank(4, 4, center=False), made.replace(layers=made.layers[:1]))
    with pytest.raises(StorageError, match="is a folder"):
        kvjax.load_calibration(tmp_path)
    for wide in (storage.low_rank(DIM + 1, 4), storage.cskv(3 * DIM)):
        with pytest.raises(StorageError, match=r"must keep 1 to \d|exceeds the \d+ features"):
            kvjax.calibrate(own, tokens, wide)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.low_rank(0, 4), "rank must be a whole number of at least 1; got 0"),
        (lambda: storage.low_rank(4, ((3, (2, 1)),)), r"rank must be a whole number of at least 1; got \(2, 1\)"),
        (lambda: storage.low_rank((), 4), r"rank must be a whole number of at least 1; got \(\)"),
        (lambda: storage.low_rank(4, 4, basis="values"), "use 'keys' or 'weights'"),
        (lambda: storage.low_rank(4, 4, basis="weights"), "use center=False"),
        (lambda: storage.low_rank(4, 4, key_codec=3), "codec=3 must be a codec of one vector"),
        (lambda: storage.low_rank(9, 4).bytes_per_slot(DIM, "float32"), "would keep 9 of 8 features; it must"),
        (
            lambda: storage.replay(
                LOW,
                *random(),
                LENGTHS,
                policies.streaming_llm(6),
                Rope(dim=DIM),
                calibration=calibration(rope=Rope(dim=DIM)),
            ),
            "use positions='original'",
        ),
    ],
)
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(StorageError, match=match):
        build()


def test_weights_give_the_directions_of_projections():
    """W diag(s)² Wᵀ of each head, s² the mean magnitude of its inputs."""
    own, tokens = model(), random_tokens(1, 30, seed=8)
    held = storage.low_rank(3, 3, center=False, basis="weights")
    made = kvjax.calibrate(own, tokens, held)
    inputs = own.params["embed"]["tokens"][np.asarray(tokens)[0]]
    norm = own.params["layer_0"]["attention_norm"]["scale"]
    x = np.asarray(inputs, np.float64)
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + own.config.norm_eps) * np.asarray(norm, np.float64)
    kernel = np.asarray(own.params["layer_0"]["attention"]["key"]["kernel"], np.float64)
    heads = kernel.reshape(len(kernel), own.config.num_kv_heads, -1)
    scaled = heads * np.sqrt(np.abs(x).mean(axis=0) + 1e-6)[:, None, None]
    for head in range(own.config.num_kv_heads):
        left = np.linalg.svd(scaled[:, head].T)[0][:, :3]
        left *= np.where(left[np.abs(left).argmax(axis=0), np.arange(3)] < 0, -1, 1)
        np.testing.assert_allclose(made.layers[0]["key"]["basis"][head], left, atol=1e-4)
    assert set(made.layers[0]["key"]) == {"basis"}


def test_coordinates_in_codes():
    held = storage.low_rank(6, 6, key_codec=Integer(8, 6), value_codec=Integer(8, 6))
    exact = storage.low_rank(6, 6)
    arguments = (*random(9), LENGTHS)
    output, _ = replay(held, *arguments, calibration=calibration(held))
    plain, _ = replay(exact, *arguments, calibration=calibration(exact))
    np.testing.assert_allclose(output, plain, atol=2e-2)
    assert held.bytes_per_slot(DIM, "float32") == 2 * (6 + 2 * 4) and exact.bytes_per_slot(DIM, "float32") == 2 * 6 * 4


@pytest.mark.sampled(0)
def test_plans_count_it():
    """The compiled program takes the calibration as an argument, and rows have it in common."""
    config = model().config
    made = {
        batch: kvjax.planning.plan(config, policies.full(), batch=batch, prompt_length=8, new_tokens=4, storage=LOW)
        for batch in (1, 2)
    }
    shared = config.num_layers * config.num_kv_heads * DIM * (4 + 5 + 2) * 4
    plain = kvjax.planning.plan(config, policies.full(), batch=1, prompt_length=8, new_tokens=4)
    assert made[1].weights == made[2].weights == plain.weights + shared
    assert made[2].cache == 2 * made[1].cache
    assert f"calibration: {size(shared)} that rows have in common" in made[1].explain
    assert all(each.compiled is not None for each in made.values())
