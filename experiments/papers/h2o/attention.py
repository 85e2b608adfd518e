"""H2O, figures of attention: heavy hitters in every layer."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found, Published
from experiments.papers.parts import Part
from experiments.papers.recipes import look
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
    return Judgement(
        tables=[Table("Accumulated attention on the heaviest tokens, and the exponent of its power law", rows)],
        confirm=[Claim("the top 5 % of the tokens hold over 30 % of the mass in every layer", least > MANY, shown)],
        contradict=[Claim("a layer where they hold under 10 % (5 % would be uniform)", least < FEW, shown)],
        draw=lambda: figures.png(look.accumulated(results["book"])),
    )


ENTRIES = (
    Entry(
        name="h2o_fig7",
        question="Are heavy hitters there in every layer?",
        published=Published(
            caption="Figure 7: accumulated attention by word in each layer of OPT-1.3B.",
            shape="Shape only: a few tall points in each layer, none of them without.",
        ),
        here="Accumulated attention by rank, mean over rows and heads, on a book and on Penn Treebank.",
        parts=_fig7_parts,
        judge=_fig7,
    ),
)
