"""Contexts that share positions: worked cases, attention as it is at T = s = 1, and any order."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, reuse, transport
from kvjax.cache.layer_stack import arranged_state
from kvjax.errors import InputError
from kvjax.numerics.statistics import Statistic
from tests.conftest import ROOT, XLA_FLAGS
from tests.reuse.test_chunks import CHUNKS, PREFIX, QUESTION, assert_close
from tests.reuse.test_worked_examples import IDS, cases, divided, prefix_of, stories  # noqa: F401, a fixture
from tests.tiny import tiny


@pytest.fixture(scope="module")
def model():
    return tiny().model


@pytest.fixture(scope="module")
def caches(model):
    prefix = reuse.compute(model, PREFIX)
    return [reuse.compute(model, each, prefix) for each in CHUNKS]


def mass_of(tokens):
    """A policy that keeps everything and sums what the last tokens of a prompt attended to."""
    mass = Statistic("mass of the end", tail=tokens)
    importance = policies.Importance(needs={mass}, score=lambda stats, view: stats["mass of the end"])
    return policies.evict(importance=importance, budget=128, name="mass of the end")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(5))
def test_worked_cases(stories, shared_data, number):  # noqa: F811
    found = [*cases(shared_data, "parallel")]
    assert len(found) == 5
    arguments, expect, given, expected = found[number]
    prefix, question = prefix_of(stories, given), given["suffix"]
    own = [reuse.compute(stories, each, prefix) for each in divided(given["contexts"], arguments["lengths"])]
    options = {name: arguments[name] for name in ("temperature", "scale")}
    made = reuse.parallel(stories, own, question, mass_of(len(question)), **options)
    np.testing.assert_allclose(np.asarray(made.logits)[0, IDS], expected["logits"][-1], atol=1e-4)
    for place, layer in enumerate((0, 4)):
        group = arranged_state(made.state, ()).layers[layer][0]
        order = np.argsort(np.where(group.position < 0, 1 << 30, group.position), axis=2)
        mass = np.take_along_axis(np.asarray(group.stats["mass of the end"]), order, axis=2)[0]
        np.testing.assert_allclose(mass[:, : expected["mass"].shape[2]], expected["mass"][place], atol=2e-5)
    shift = int(np.asarray(arranged_state(made.state, ()).layers[0][0].marks["shift"])[0, 0])
    assert len(made.text[0]) - len(question) - shift == expect["first_position"]
    one = reuse.parallel(stories, own, question[:1], **options)
    for number, logits in enumerate(expected["logits"]):
        if number:
            one = contexts.extend(stories, one, question[number : number + 1])
        np.testing.assert_allclose(np.asarray(one.logits)[0, IDS], logits, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [policies.window(16), policies.full(), policies.snapkv(12, window=4)])
def test_one_context_is_a_prefill(model, caches, policy):
    """And goes on like it, under a cache that evicts too, past the room that there was."""
    made = reuse.parallel(model, caches[:1], QUESTION, policy, temperature=1.0, scale=1.0, room=20)
    text = np.concatenate([PREFIX, CHUNKS[0], QUESTION])
    plain = contexts.prefill(model, text, policy, room=20)
    assert_close(made, plain)
    turns = [contexts.extend(model, each, [[5, 9, 2]]) for each in (made, plain)]
    assert_close(*turns)
    answers = [contexts.decode(model, each, max_new_tokens=12) for each in turns]
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    assert_close(answers[0].context, answers[1].context)


def test_the_order_of_contexts_does_not_matter(model, caches):
    made = reuse.parallel(model, caches, QUESTION)
    other = reuse.parallel(model, caches[::-1], QUESTION)
    np.testing.assert_allclose(made.logits, other.logits, atol=1e-5)
    answers = [contexts.decode(model, each, max_new_tokens=8) for each in (made, other)]
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    # Keys and values of chunks are those of each after the prefix.
    distance = reuse.distances(model, made, chunks=caches)
    assert distance.value[0] < 1e-6 and (distance.value[1:] > 1e-3).all()
    alone = reuse.distances(model, reuse.parallel(model, caches[:1], QUESTION, scale=1.0), chunks=caches[:1])
    assert max(alone.key.max(), alone.value.max()) < 1e-5
    evicted = contexts.prefill(model, PREFIX, policies.window(4))
    for refused, match in (
        (lambda: reuse.distances(model, made), "give chunks="),
        (lambda: reuse.distances(model, 3), "distances takes"),
        (lambda: reuse.distances(model, made, chunks=caches[::-1]), "are not those of the context"),
        (lambda: reuse.distances(tiny(layers=4, seed=1).model, made, chunks=caches), "another model"),
        (lambda: reuse.distances(model, evicted), "got 1 of window, dense"),
        (lambda: reuse.distances(model, reuse.blend(model, caches, QUESTION), chunks=caches), "has its own"),
    ):
        with pytest.raises(InputError, match=match):
            refused()
    # It is not a prefill of all of them.
    far = reuse.blend(model, caches, QUESTION, ratio=1.0).context
    assert np.abs(np.asarray(made.logits) - np.asarray(far.logits)).max() > 1e-3


def test_forks_and_joined_rows(model, caches):
    one, two = (reuse.parallel(model, own, QUESTION, room=64) for own in (caches, caches[:2]))
    both = contexts.join(one, two)
    turned = contexts.extend(model, both, [[5, 9], [5, 9]])
    for number, each in enumerate((one, two)):
        own = contexts.extend(model, each, [[5, 9]])
        np.testing.assert_allclose(turned.logits[number], own.logits[0], atol=1e-4)


def test_what_is_refused(model, caches, tmp_path):
    for options, match in (
        ({"temperature": 0.0}, "temperature"),
        ({"scale": -1.0}, "scale"),
        ({"policy": policies.h2o(8)}, "cannot take over chunks"),
        ({"policy": policies.streaming_llm(8)}, "positions="),
        ({"question": []}, "token"),
        ({"room": 3}, "smaller than the text"),
    ):
        arguments = {"question": QUESTION} | options
        with pytest.raises(kvjax.KvjaxError, match=match):
            reuse.parallel(model, caches, arguments.pop("question"), **arguments)
    made = reuse.parallel(model, caches, QUESTION)
    plain = reuse.blend(model, caches, QUESTION).context
    colder = reuse.parallel(model, caches, QUESTION, temperature=0.5)
    for function, match in (
        (lambda: contexts.save(tmp_path / "made", made), "cannot be saved"),
        (lambda: transport.encode(made), "cannot be saved"),
        (lambda: contexts.rewind(model, made, 10), "share positions"),
        (lambda: reuse.edit(model, made, (2, 3, [4])), "share positions"),
        (lambda: contexts.join(made, plain), "share positions"),
        (lambda: contexts.join(made, colder), "share positions"),
        (lambda: kvjax.PrefixStore(1 << 20).add(made), "chunks"),
    ):
        with pytest.raises(InputError, match=match):
            function()


@pytest.mark.sampled(0)
def test_slots_over_devices_equal_one_device(tmp_path):
    """Simulated devices exist only if XLA is told before jax starts, so that a subprocess runs the cases."""
    names = ("full", "window")
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = os.environ | {
        "XLA_FLAGS": f"{XLA_FLAGS} --xla_force_host_platform_device_count=4 {dump}", "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.reuse.parallel_checks", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    for name, parts in zip(names, (4, 2), strict=True):
        each = found[name]
        assert each["kept"] and each["text"] and each["logits"] < 1e-4, each
        assert each["axes"] == ["context"] and each["own_slots"] == each["slots"] // parts
        assert (
            f"not a program of each of {parts} devices: XLA divides the slots, as contexts share positions"
            in each["says"]
        )
    # A step of decoding gathers no keys and values.
    programs = [each.read_text() for each in tmp_path.glob("*jit_decode_steps*after_optimizations.txt")]
    divided = [each for each in programs if "num_partitions=4" in each]
    assert divided and not any(re.search(r"f32\[1,\d+,\d+,8\]\S* all-gather", each) for each in divided)
