"""H2O, Figures 8 and 9 and Table 9: neurons of MLPs that are active on most tokens."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import neurons
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

TEXTS = ("book", "ptb", "wiki")
JOINTLY = 16  # neurons that a figure shows as one point
OFTEN, RARELY = 0.5, 0.01  # of the tokens
NOTE = (
    "SiLU is never 0: where the activation has no zeros, the largest tenth of a token's gates count as active, so that "
    "the mean over neurons is a tenth."
)


def _parts(settings: Settings) -> Iterable[Part]:
    return [neurons.neurons(settings, text) for text in TEXTS]


def _fig8(settings: Settings, found: Found) -> Judgement:
    # [L, neurons]
    active = found[neurons.neurons(settings, "book")]["active"].astype(np.float64)
    often, rarely = (active > OFTEN).mean(axis=1), (active < RARELY).mean(axis=1)
    rows = [
        {"layer": str(layer), "active on over 50 % of tokens": f"{100 * often[layer]:.2f} %",
         "on under 1 %": f"{100 * rarely[layer]:.2f} %", "the most active": f"{100 * active[layer].max():.0f} %",
         "median": f"{100 * np.median(active[layer]):.1f} %"}
        for layer in range(len(active))
    ]  # fmt: skip
    curves = {f"layer {layer}": -np.sort(-active[layer]) for layer in range(len(active))}
    rank = np.arange(1, active.shape[1] + 1)
    lines = {name: (rank.tolist(), (100 * each).tolist()) for name, each in curves.items()}
    return Judgement(
        tables=[Table("Neurons of each layer, of all of its neurons", rows)],
        confirm=[
            Claim("over 1 % of the neurons are active on over half of the tokens", often.mean() > 0.01,
                  f"{100 * often.mean():.2f} %"),
            Claim("over 30 % are active on under 1 %", rarely.mean() > 0.3, f"{100 * rarely.mean():.1f} %"),
        ],
        notes=[NOTE],
        draw=lambda: figures.curves(
            [figures.Panel("Active neurons, the most active first", "rank", "% of tokens", lines, log_x=True)]
        ),
    )  # fmt: skip


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of [n] values from 0, of equal ones the mean."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[group]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of the ranks of [n] values."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def _fig9(settings: Settings, found: Found) -> Judgement:
    active = {text: found[neurons.neurons(settings, text)]["active"] for text in TEXTS}
    pairs = [(TEXTS[i], TEXTS[j]) for i in range(len(TEXTS)) for j in range(i + 1, len(TEXTS))]
    layers = range(len(active["book"]))
    found_by = {pair: [spearman(active[pair[0]][i], active[pair[1]][i]) for i in layers] for pair in pairs}
    rows = [
        {"layer": str(layer)} | {f"{one}, {other}": f"{found_by[one, other][layer]:.3f}" for one, other in pairs}
        for layer in layers
    ]
    least = min(min(each) for each in found_by.values())
    order = np.argsort(-active["wiki"][0], kind="stable")
    parts = np.array_split(order, max(1, order.size // JOINTLY))
    ends = np.cumsum([part.size for part in parts]).tolist()
    lines = {text: (ends, [100 * float(active[text][0][part].mean()) for part in parts]) for text in TEXTS}
    return Judgement(
        tables=[Table("Spearman's correlation of how often neurons are active, between texts", rows)],
        confirm=[Claim("it is over 0.7 in every layer", least > 0.7, f"the least is {least:.3f}")],
        contradict=[Claim("it is under 0.3 in a layer", least < 0.3, f"the least is {least:.3f}")],
        notes=[NOTE],
        draw=lambda: figures.curves(
            [figures.Panel(f"Layer 0, means of {JOINTLY} neurons", "neuron, in wiki's order", "% of tokens", lines)]
        ),
    )


def _table9_parts(settings: Settings) -> Iterable[Part]:
    return [neurons.removal(settings)]


def _table9(settings: Settings, found: Found) -> Judgement:
    part = neurons.removal(settings)
    result = found[part]
    before, after, random = (float(result[name]) for name in ("before", "after", "random"))
    tuned = [float(each) for each in result["tuned"]]
    rows = [
        {"": "with all neurons", "perplexity": f"{before:.2f}"},
        {"": f"without those active on over {neurons.OFTEN:.0%} of tokens", "perplexity": f"{after:.2f}"},
        {"": "without as many random ones", "perplexity": f"{random:.2f}"},
    ]
    rows += [
        {"": f"without those, after {part.steps} steps on {100 * share:g} % of the text", "perplexity": f"{each:.2f}"}
        for share, each in zip(part.shares, tuned, strict=True)
    ]
    lost = after - before
    regained = [(after - each) / lost if lost > 0 else 0.0 for each in tuned]
    shown = ", ".join(f"{each:.0%}" for each in regained)
    return Judgement(
        tables=[Table(f"Perplexity of {part.text}; {float(result['removed']):.1%} of neurons are removed", rows)],
        confirm=[
            Claim("removal costs more than that of as many random neurons", after > random,
                  f"{after:.2f} and {random:.2f}"),
            Claim("a short tuning regains 80 % of it", max(regained) >= 0.8, shown),
        ],
        contradict=[Claim("removal costs no more than that of random neurons", after <= random)],
        notes=[NOTE, "Tuning is on another book, so that it moves the decoder away from the one that is scored."],
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_fig8",
        question="Do neurons of MLPs have heavy hitters too?",
        here="The same share on a book.",
        parts=lambda settings: [neurons.neurons(settings, "book")],
        judge=_fig8,
        needs="a model with ReLU, such as --config.model.path=facebook/opt-125m, for the paper's definition.",
    ),
    Entry(
        name="h2o_fig9",
        question="Are the same neurons heavy on other texts?",
        here="A book, Penn Treebank and WikiText-2.",
        parts=_parts,
        judge=_fig9,
        needs="a model with ReLU, such as --config.model.path=facebook/opt-125m, for the paper's definition.",
    ),
    Entry(
        name="h2o_table9",
        question="What does removing heavy neurons cost, and how much data restores it?",
        here="The same on a small model: neurons are counted and the decoder is tuned on one book, another is scored.",
        parts=_table9_parts,
        judge=_table9,
    ),
)
