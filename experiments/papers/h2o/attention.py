"""H2O, Figures 3 and 7: Algorithm 1 by hand, and heavy hitters in every layer."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import look, worked
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

TEXTS = ("book", "ptb")
HEAVY = 0.05  # of the tokens
MANY, FEW = 0.3, 0.1  # of the mass


def _fig7_parts(settings: Settings) -> Iterable[Part]:
    return [look.look(settings, "accumulated", text=text) for text in TEXTS]


def _fig7(settings: Settings, found: Found) -> Judgement:
    results = {text: found[look.look(settings, "accumulated", text=text)] for text in TEXTS}
    shares = {text: look.top_share(result, HEAVY) for text, result in results.items()}
    exponents = {text: look.by_layer(result["exponent"]) for text, result in results.items()}
    fits = {text: look.by_layer(result["fit"]) for text, result in results.items()}
    rows = [
        {"layer": str(layer)}
        | {f"top 5 % of {text}": f"{100 * shares[text][layer]:.0f} %" for text in TEXTS}
        | {f"exponent, {text} (R²)": f"{exponents[text][layer]:.2f} ({fits[text][layer]:.2f})" for text in TEXTS}
        for layer in range(len(shares["book"]))
    ]
    least = min(float(each.min()) for each in shares.values())
    shown = f"the least is {100 * least:.0f} %"
    uniform = look.uniform_mass(results["book"]["mass"].shape[1])
    flat = look.top_share({"mass": uniform[None]}, HEAVY)[0]
    return Judgement(
        tables=[Table("Accumulated attention on the heaviest tokens, and the exponent of its power law", rows)],
        confirm=[Claim("the top 5 % of the tokens hold over 30 % of the mass in every layer", least > MANY, shown)],
        contradict=[Claim("a layer where they hold under 10 %", least < FEW, shown)],
        notes=[
            "Early tokens have more queries: where each query attends to all tokens before it alike, the top 5 % hold "
            f"{100 * flat:.0f} %, and the exponent is {look.exponent_of(uniform):.2f}."
        ],
        draw=lambda: figures.png(look.accumulated(results["book"])),
    )


def _fig3(settings: Settings, found: Found) -> Judgement:
    part = worked.algorithm()
    result = found[part]
    rows = []
    for step in range(part.budget + 5):
        pairs = [(int(t), float(s)) for t, s in zip(result["live"][step], result["score"][step], strict=True) if t >= 0]
        victim = int(result["evicted"][step])
        scores = ", ".join(f"{token}: {score:.2f}" for token, score in pairs)
        evicted = "-" if victim < 0 else str(victim)
        rows.append({"step": str(step + 1), "accumulated (token: score)": scores, "evicted for good": evicted})
    same, count = int(np.sum(result["kvjax"] == result["numpy"])), result["kvjax"].size
    shown = f"{same} of {count} tokens"
    return Judgement(
        tables=[Table("The first layer's first head, tokens counted from 0", rows)],
        confirm=[Claim("kvjax evicts what Algorithm 1 does in every row and head", same == count, shown)],
        contradict=[Claim("a token is evicted at another step", same < count, shown)],
        notes=["Worked cases of all policies: tests/laws/test_worked_examples.py."],
    )


ENTRIES = (
    Entry(
        name="h2o_fig3",
        question="What does Algorithm 1 evict, step by step?",
        here="A text, token by token, in the first layer with a budget of 3 of which the newest token is protected; "
        "kvjax beside a loop in NumPy in float64.",
        parts=lambda settings: [worked.algorithm()],
        judge=_fig3,
        exact=True,
    ),
    Entry(
        name="h2o_fig7",
        question="Are heavy hitters there in every layer?",
        here="Accumulated attention by rank, mean over rows and heads, on a book and on Penn Treebank.",
        parts=_fig7_parts,
        judge=_fig7,
    ),
)
