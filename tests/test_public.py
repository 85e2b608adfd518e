"""The first encounter with the library: names, help, suggestions, warnings, and how results are shown."""

import dataclasses
import inspect
import pydoc
import warnings

import jax
import numpy as np
import pytest

import kvjax
from experiments import config as configs
from kvjax import arguments, contexts, errors, policies, presets, selection, storage
from kvjax.generation import prefill
from kvjax.generation.generate import decode
from kvjax.serve import Request, Runner
from tests.tiny import random_tokens, tiny

AXES = [policies, storage, selection, presets]


@pytest.fixture
def unwarned(monkeypatch):
    """A process that has not warned of anything."""
    monkeypatch.setattr(arguments, "_warned", set())


def test_all_that_is_public_is_named_and_described():
    assert kvjax.__version__
    for name in set(kvjax.__all__) - {"__version__"}:
        assert hasattr(kvjax, name)
        assert f"`{name}`" in kvjax.__doc__, f"the docstring of kvjax does not say what {name} is"


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.__name__)
def test_names(axis):
    """Names that `names` lists are known to `by_name`; a name that is nearly one of them is suggested."""
    assert len(axis.names()) == len(set(axis.names())) >= 1
    for name in axis.names():
        assert callable(getattr(axis, name)) and axis.accepts(name) is not None
        with pytest.raises(errors.KvjaxError, match=rf"did you mean '{name}'"):
            axis.by_name(f"{name}_")


def test_suggestions():
    for call in (
        lambda: configs.by_name("h2o_tinny"),
        lambda: kvjax.load("kvjax-tyni"),
        lambda: policies.h2o(0.5, recentt=3),
        lambda: storage.int8(resdual=3),
        lambda: presets.infinigen(alhpa=3),
    ):
        with pytest.raises(errors.KvjaxError, match=r"[Dd]id you mean '(h2o_tiny|kvjax-tiny|recent|residual|alpha)'"):
            call()


@pytest.mark.parametrize(("axis", "name", "meant"), [(policies, "H2O", "h2o"), (selection, " QUEST", "quest")])
def test_suggestions_in_capital_letters(axis, name, meant):
    with pytest.raises(errors.KvjaxError, match=f"did you mean '{meant}'"):
        axis.by_name(name)


@pytest.mark.parametrize(
    "call",
    [
        lambda text: policies.h2o(text),
        lambda text: policies.by_name(text),
        lambda text: storage.int8(**{text: 1}),
        lambda text: kvjax.Rules.parse(text),
        lambda text: kvjax.make_mesh(text),
        lambda text: kvjax.generate(tiny().model, [[1]], policies.full(), max_new_tokens=1, implementation=text),
    ],
)
def test_messages_are_short_whatever_is_given(call):
    with pytest.raises(errors.KvjaxError) as raised:
        call("x" * 1_000_000)
    assert 50 < len(str(raised.value)) < errors.LONGEST_MESSAGE + 10


def factories():
    own = [getattr(axis, name) for axis in AXES for name in axis.names()]
    public = [getattr(kvjax, name) for name in kvjax.__all__ if inspect.isfunction(getattr(kvjax, name))]
    continued = [getattr(contexts, name) for name in contexts.__all__]
    loops = [prefill.prefill, decode, *continued, policies.evict, policies.compress, Runner]
    return [*own, *policies.COMBINATORS.values(), *policies.HEAD_PLANS.values(), *public, *loops]


@pytest.mark.parametrize("function", factories(), ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_help_shows_the_arguments_in_a_line(function):
    shown = pydoc.plain(pydoc.render_doc(function))
    signature = str(inspect.signature(function))
    assert "Union[" not in shown and "ForwardRef" not in shown and ": " not in signature
    assert {"args", "kwargs"}.isdisjoint(inspect.signature(function).parameters)
    assert len(signature) < (200 if function.__module__.startswith(("kvjax.policies", "kvjax.storage")) else 320)


def warned_of(function, times=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            function()
    return [text for text in (str(each.message) for each in caught) if "mean little" in text or "one slot" in text]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: policies.h2o(1), "budget 1 is one slot"),
        (lambda: policies.window((1, 8), sinks=0), "budget 1 is one slot"),
        (lambda: presets.infinigen(pool_limit=1, pool="lru"), "budget 1 is one slot"),
        (lambda: selection.infinigen(cap=1), "cap 1 is one slot"),
    ],
)
@pytest.mark.usefixtures("unwarned")
def test_one_slot_is_warned_of_once(make, match):
    (text,) = warned_of(make, times=3)
    assert match in text and "1.0" in text


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (policies.h2o(0.5), "leaves 20 of 40 tokens"),
        (policies.adakv(policies.snapkv(0.3, window=4)), "leaves 12 of 40"),
        (policies.pyramidkv(0.4, window=4), "leaves 16 of 40"),
        (policies.window((64, 0.2)), "leaves 8 of 40"),
        (policies.from_layer(policies.h2o(0.5), first=1), "leaves 20 of 40"),
        (policies.h2o(1.0), None),
        (policies.h2o(0.9), None),
        (policies.h2o(policies.Fraction(0.5, min_slots=32)), None),
        (policies.h2o(policies.Fraction(0.5, min_slots=8)), None),
        (policies.h2o(8), None),
        (policies.h2o(policies.Slots(1), recent=0), None),
    ],
)
@pytest.mark.usefixtures("unwarned")
def test_fractions_that_leave_few_slots_are_warned_of_once(policy, says):
    """With what is kept as it is defined; a fraction that says its least number of slots is as its user wants it."""
    lengths = np.array([60, 40], np.int32)

    def prepare():
        spec, options = kvjax.CacheSpec(policy), kvjax.CacheOptions(implementation="xla")
        prefill.prepare(tiny().model, spec, lengths, lengths + 1, width=60, options=options)

    found = warned_of(prepare, times=2)
    assert len(found) == (0 if says is None else 1)
    assert says is None or (says in found[0] and "\n" not in found[0])


@pytest.mark.usefixtures("unwarned")
def test_warnings_are_shown_where_a_user_called():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kvjax.generate(tiny().model, random_tokens(1, 40), policies.h2o(0.5), max_new_tokens=1)
    assert [each.filename for each in caught] == [__file__]


def results():
    model, ids = tiny(layers=1).model, random_tokens(2, 40)
    policy = policies.h2o(8)
    made = kvjax.generate(model, ids, policy, max_new_tokens=3)
    runner = Runner(model, policy, rows=1, limits=kvjax.Limits(prompt=40, new_tokens=3))
    request = Request(tokens=ids[0], max_new_tokens=3)
    runner.submit(request)
    quest = kvjax.CacheSpec(policies.full(), selection=selection.quest(page=4, budget=8, first_layer=0))
    recorded = kvjax.log_likelihood(model, ids, quest, prompt_length=20, record=True)
    coded = kvjax.generate(model, ids, policy, max_new_tokens=3, storage=storage.int8())
    low_rank = storage.low_rank(4, 4)
    choices = kvjax.score_choices(model, ids, [[[1], [2]]] * 2, policy)
    return [
        made, made.state, made.state.layers, made.state.layers[0], made.state.layers[0][0], made.layout,
        coded.state.layers[0], recorded, recorded.record, choices[0][0],
        prefill.prefill(model, ids, policy, max_new_tokens=3), *runner, request,
        kvjax.calibrate(model, ids, low_rank), kvjax.quantize_weights(model, bits=8).params["layer_0"]["mlp"],
    ]  # fmt: skip


@pytest.mark.sampled(0)
def test_results_layers_and_caches_are_shown_in_a_line():
    for result in results():
        text = repr(result)
        assert "\n" not in text and "array(" not in text and "Array(" not in text and len(text) < 2_000, text


def test_shapes_and_dtypes_are_shown():
    made = kvjax.generate(tiny().model, random_tokens(2, 40), policies.h2o(8), max_new_tokens=3)
    shown, layer = repr(made), repr(made.state.layers[0])
    assert shown.startswith("Generation(tokens=int32[2, 3], lengths=int32[2], logprobs=float32[2, 3], state=KVState(2 ")
    assert layer.startswith(
        "Layer(LayerKV(position=int32[2, 2, 9], stores=({key: {exact: float32[2, 2, 9, 8]}, value: "
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "policy",
    [
        policies.h2o(8),
        policies.full(),
        policies.split_heads([[1, 0], [0, 1]], policies.full(), policies.window(6, sinks=1)),
        policies.adakv(policies.snapkv(8, window=4)),
    ],
    ids=lambda policy: policy.name,
)
def test_kept_lists_the_positions_of_every_head(policy):
    """In the order of the model's heads, also where these are in several groups."""
    model, ids = tiny().model, random_tokens(2, 20)
    made = kvjax.generate(model, ids, policy, max_new_tokens=5)
    scored = kvjax.log_likelihood(model, np.concatenate([ids, made.tokens[:, :-1]], axis=1), policy, prompt_length=20)
    for layer in range(model.config.num_layers):
        kept = made.kept(layer)
        assert [len(row) for row in kept] == [model.config.num_kv_heads] * 2
        for row, other in zip(kept, scored.kept(layer), strict=True):
            for positions, same in zip(row, other, strict=True):
                assert positions.dtype == np.int32 and np.all(np.diff(positions) > 0) and positions[0] >= 0
                np.testing.assert_array_equal(positions, same)
    if policy.name.startswith("split"):
        # One head of each layer keeps everything, and it is another one in each.
        assert [[len(head) for head in made.kept(layer)[0]] for layer in (0, 1)] == [[24, 6], [6, 24]]
    np.testing.assert_array_equal(made.kept(-1)[1][0], made.kept(model.config.num_layers - 1)[1][0])
    for wrong in (model.config.num_layers, -9, 1.0, True):
        with pytest.raises(errors.InputError, match="layer must be"):
            made.kept(wrong)
    with pytest.raises(errors.InputError, match="layout"):
        made._replace(layout=None).kept(0)


def test_a_layout_is_no_leaf_of_a_result():
    made = prefill.prefill(tiny().model, random_tokens(1, 20), policies.h2o(8), max_new_tokens=2)
    assert all(isinstance(leaf, jax.Array | np.ndarray | int) for leaf in jax.tree.leaves(made))
    assert dataclasses.replace(made.layout) == made.layout
