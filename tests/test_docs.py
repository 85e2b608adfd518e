"""docs/selections.md: its blocks run one after the other, and its selections choose what a few lines of NumPy do."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.cache import Block, Limits
from kvjax.generation.prefill import prefill
from kvjax.models.decoder import Decoder
from kvjax.specs import parse
from tests.conftest import ROOT
from tests.tiny import random_tokens, tiny

PAGE = ROOT / "docs" / "selections.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
LENGTHS, STEPS = np.array([45, 33]), 12
SLOTS, WIDE = 24, 64  # narrower than every prompt, wider than every text
PAGES, CODES = 8, 8  # slots of a page, entries of a codebook


@pytest.fixture(scope="module")
def page():
    """The names that the page defines. Of kvjax-tiny three layers run, which compile in half the time."""
    load = kvjax.load

    def shorter(name):
        model = load(name)
        config = dataclasses.replace(model.config, num_layers=3, windows=())
        return dataclasses.replace(model, config=config)

    names = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvjax, "load", shorter)
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    return names


def example(page, name, slots):
    """A selection of the page that reads `slots` slots."""
    return {
        "mean_pages": lambda: page["mean_pages"](page=PAGES, slots=slots, first_layer=0),
        "alisa": lambda: page["Alisa"](slots=slots),
        "a2ats": lambda: page["Codebook"](slots=slots - 1, codes=CODES, first_layer=0),
    }[name]()


EXAMPLES = ("mean_pages", "alisa", "a2ats")


@pytest.mark.sampled(0)
def test_blocks_run(page):
    assert all(example(page, name, SLOTS).width(100) == SLOTS for name in EXAMPLES)
    rows = re.findall(r"^\| ([a-z ,]+) \| [^|]* \|$", TEXT.split("| row of the table |")[1], re.MULTILINE)
    assert len(rows) == 6 and all(f"\n{row} " in page["planned"].table() for row in rows)


def test_links_and_names():
    assert "docs/selections.md" in (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
    hooks = re.findall(r"^\|[^|]*\| `(\w+)\(", TEXT, re.MULTILINE)
    assert len(hooks) == 18 and all(callable(getattr(kvjax.selection.Selection, hook)) for hook in hooks)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("memory", ["device", "host"])
def test_wide_enough_is_the_full_cache(page, name, memory):
    model, tokens = tiny().model, random_tokens(2, LENGTHS.max(), seed=1)
    options = {"lengths": LENGTHS, "max_new_tokens": 8}
    full = kvjax.generate(model, tokens, policies.full(), **options)
    made = kvjax.generate(
        model,
        tokens,
        policies.full(),
        selection=example(page, name, WIDE),
        storage=storage.dense(memory=memory),
        **options,
    )
    np.testing.assert_array_equal(made.tokens, full.tokens)
    np.testing.assert_allclose(made.logprobs, full.logprobs, atol=1e-5)


@pytest.mark.sampled(0)
def test_by_its_file(page, tmp_path):
    imports = "\n".join(line for block in BLOCKS for line in block.splitlines() if re.match(r"import |from ", line))
    (block,) = (block for block in BLOCKS if "def mean_pages(" in block)
    file = tmp_path / "mine.py"
    file.write_text(f"{imports}\n\n{block}")
    made = parse.build("selection", f"{file}:mean_pages(page=16, slots=256)")
    assert dataclasses.asdict(made) == dataclasses.asdict(page["mean_pages"](page=16, slots=256))


# What is chosen, against NumPy in float64.


@functools.partial(jax.jit, static_argnames=("config",))
def _prompt(params, tokens, lengths, *, config):
    position = np.arange(tokens.shape[1], dtype=np.int32)
    position = jax.numpy.where(position < lengths[:, None], position, -1)
    block = Block(position=position, prompt=lengths, total=lengths, budget=((None,),) * config.num_layers)
    return _seen(Decoder(config), params, tokens, None, block, None)[1]


@functools.partial(jax.jit, static_argnames=("config", "phase"))
def _steps(params, kv, tokens, *, config, phase):
    def body(kv, token):
        block = Block(position=kv.length[:, None], prompt=kv.prompt, total=kv.total, budget=kv.budget)
        return _seen(Decoder(config), params, token[:, None], kv, block, phase)

    return jax.lax.scan(body, kv, tokens.T)[1]


def _seen(decoder, params, tokens, kv, block, phase):
    """The cache after a block, and what attention saw of each layer."""
    given = ({"params": params}, tokens, kv, block, *(() if phase is None else (phase,)))
    (_, kv), sown = decoder.apply(*given, method="hidden", mutable="intermediates")
    return kv, [sown["intermediates"][f"attention_{i}"][0][0] for i in range(decoder.config.num_layers)]


@dataclasses.dataclass
class Head:
    """Returns the tokens that one KV head of a row saw.

    Attributes:
      prompt: queries [n, G, D] of the prompt.
      key: [T, D], of the whole text.
      query: [steps, G, D].
      read: positions that each step read.
      chosen: positions that each step chose.
    """

    prompt: np.ndarray
    key: np.ndarray
    query: np.ndarray
    read: list[np.ndarray]
    chosen: list[np.ndarray]

    @property
    def scale(self):
        return self.key.shape[1] ** -0.5


def heads(selection):
    """A `Head` of every row, layer and KV head of a tiny decoder that is fed random tokens."""
    model, tokens = tiny().model, random_tokens(2, LENGTHS.max(), seed=2)
    limits = Limits(prompt=int(LENGTHS.max()), new_tokens=STEPS + 1)
    made = prefill(
        model, tokens, policies.full(), max_new_tokens=STEPS + 1, lengths=LENGTHS, selection=selection, limits=limits
    )
    prompts = _prompt(model.params, tokens, LENGTHS.astype(np.int32), config=model.config)
    following = random_tokens(2, STEPS, seed=3)
    steps = _steps(model.params, made.state, following, config=model.config, phase=made.layout.decode)
    kv_heads = model.config.num_kv_heads

    def grouped(query, row, head):
        """[..., B, H, n, D] -> [n, G, D] or [steps, G, D]."""
        own = np.asarray(query, np.float64)[..., row, :, :, :]
        own = own.reshape(*own.shape[:-3], kv_heads, -1, *own.shape[-2:])[..., head, :, :, :]
        return own[:, :, 0] if own.ndim == 4 else own.swapaxes(0, 1)

    for prompt, step in zip(prompts, steps, strict=True):
        held, position, choice = (np.asarray(each) for each in (step.held, step.position, step.choice))
        for row, length in enumerate(LENGTHS):
            for head in range(kv_heads):
                at = held[-1, row, head]
                order = np.argsort(at)[np.sum(at < 0) :]
                yield Head(
                    grouped(prompt.query, row, head)[:length],
                    np.asarray(step.key[-1, row, head], np.float64)[order],
                    grouped(step.query, row, head),
                    [np.sort(each[each >= 0]) for each in position[:, row, head]],
                    [np.sort(held[i, row, head][choice[i, row, head]]) for i in range(STEPS)],
                )


def top(worth, count):
    """The positions of the `count` largest, of equal ones the newer."""
    return np.sort(np.lexsort((-np.arange(len(worth)), -worth))[:count])


def ranked(logits):
    """[G, U] -> [U]: the gap to each query head's best, and of these the largest."""
    return (logits - logits.max(axis=1, keepdims=True)).max(axis=0)


def softmax(logits):
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def mean_pages(head):
    for step, query in enumerate(head.query):
        old = (len(head.prompt) + step) // PAGES  # whole pages before the newest
        mean = head.key[: old * PAGES].reshape(old, PAGES, -1).mean(axis=1)
        pages = top(ranked(query @ mean.T), SLOTS // PAGES - 1)
        yield (pages[:, None] * PAGES + np.arange(PAGES)).ravel()


def alisa(head, queries=4):
    size, history = len(head.key), []
    for position in range(len(head.prompt) - queries, len(head.prompt)):
        paid = softmax(head.prompt[position] @ head.key[: position + 1].T * head.scale).mean(axis=0)
        history.append(np.pad(paid, (0, size - position - 1)))
    for step, query in enumerate(head.query):
        older = len(head.prompt) + step + 1 - SLOTS // 2  # positions before the newest half
        yield top(sum(history[-queries:])[:older], SLOTS // 2)
        paid = np.zeros(size)
        paid[head.read[step]] = softmax(query @ head.key[head.read[step]].T * head.scale).mean(axis=0)
        history.append(paid)


def a2ats(head, rounds=4):
    key, metric = head.key[: len(head.prompt)], np.einsum("ngd,nge->de", head.prompt, head.prompt)
    book = key[np.arange(CODES) * len(key) // CODES]

    def codes(key):
        gap = key[:, None] - book
        return np.einsum("nmd,de,nme->nm", gap, metric, gap).argmin(axis=1)

    for _ in range(rounds):
        code = codes(key)
        book = np.array([key[code == m].mean(axis=0) if (code == m).any() else book[m] for m in range(CODES)])
    for step, query in enumerate(head.query):
        stands_for = book[codes(head.key[: len(key) + step])]
        yield top(ranked(query @ stands_for.T), SLOTS - 1)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", EXAMPLES)
def test_chooses_what_numpy_does(page, name):
    reference, count = {"mean_pages": mean_pages, "alisa": alisa, "a2ats": a2ats}[name], 0
    for head in heads(example(page, name, SLOTS)):
        for step, expected in enumerate(reference(head)):
            np.testing.assert_array_equal(head.chosen[step], expected, f"step {step}")
            assert len(head.read[step]) <= SLOTS and set(expected) < set(head.read[step])
            count += 1
    assert count == 2 * 2 * 2 * STEPS  # layers, rows, KV heads
