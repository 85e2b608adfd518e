"""Slots that are held and read, as `measure` counts them, against a record of each step."""

import numpy as np
import pytest

import kvjax
from experiments.runs.measure import measure
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import layers_of, live_slots
from tests import examples
from tests.tiny import random_tokens, tiny

PROMPT, NEW = 40, 12

SPECS = {
    # The budget is reached while decoding.
    "window": CacheSpec(examples.policy("window", 45)),
    "adakv": CacheSpec(examples.combined()["adakv"]),
    "razor_attention": CacheSpec(examples.planned()["razor_attention"]),
    "quest": CacheSpec(examples.policy("full"), selection=examples.chosen("quest")),
    "infinigen": CacheSpec(examples.policy("full"), selection=examples.chosen("infinigen")),
}


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore:budget 0.* leaves")
@pytest.mark.parametrize("name", SPECS)
def test_footprint_and_share_read_are_those_of_a_record(name):
    model, tokens = tiny().model, random_tokens(2, PROMPT)
    made = measure(model, tokens, SPECS[name], prompt_length=PROMPT, new_tokens=NEW, repeats=0)
    generation = kvjax.generate(model, tokens, SPECS[name], max_new_tokens=NEW, record=True)
    record = generation.record
    last = np.mean([np.asarray(live_slots(group)) for _, group in layers_of(generation.state)])
    # [steps + 1], the mean of all KV heads: a step's count has the new token.
    held = np.append(record.live.mean(axis=(1, 2, 3)) - 1, last)
    np.testing.assert_allclose(made.footprint, held.sum() / (PROMPT + np.arange(NEW)).sum())
    share = record.read.sum() / record.live.sum()
    # The share falls as slots are added; a page that is not full is read in part.
    assert share <= made.read + 1e-6 and made.read < 1.3 * share
    assert (made.read < 1) == (name in ("quest", "infinigen"))
