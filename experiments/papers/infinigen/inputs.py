"""InfiniGen, Figure 7 and Table 1: few columns of queries, and inputs of layers that resemble each other."""

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.recipes import streams
from experiments.papers.recipes.speculation import RATIO
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

BEFORE, AFTER, ADDED = 0.5, 0.7, 0.05  # shares of Σ|q|
HIGH, TWICE = 0.8, 2.0  # of cosines


def _fig7(settings: Settings, found: Found) -> Judgement:
    result = found[streams.columns(settings)]
    count = int(np.ceil(RATIO * result["plain"].shape[1] - 1e-9))
    # [L]
    top = {name: result[name][:, :count].sum(axis=1) for name in ("plain", "skewed")}
    rows = [
        {"layer": str(i), "before": f"{100 * top['plain'][i]:.0f} %", "skewed": f"{100 * top['skewed'][i]:.0f} %",
         "largest channel of the input": f"{result['outlier'][i]:.1f}x the median"}
        for i in range(len(result["plain"]))
    ]  # fmt: skip
    mean = {name: float(values.mean()) for name, values in top.items()}
    shown = f"{100 * mean['plain']:.0f} % and {100 * mean['skewed']:.0f} %"
    dim = result["plain"].shape[1]
    ranks = list(range(1, dim + 1))
    panels = [
        figures.Panel(title, "columns, the largest first", "% of Σ|q|",
                      {f"layer {i}": (ranks, (100 * np.cumsum(own)).tolist()) for i, own in enumerate(result[name])})
        for name, title in (("plain", "queries"), ("skewed", "skewed queries"))
    ]  # fmt: skip
    return Judgement(
        tables=[Table(f"Σ|q| in the largest {count} of {dim} columns of a KV head (uniform: {count / dim:.0%})", rows)],
        confirm=[
            Claim(f"the top 30 % hold over {BEFORE:.0%} before skewing, mean over layers", mean["plain"] > BEFORE,
                  shown),
            Claim(f"and over {AFTER:.0%} after it", mean["skewed"] > AFTER, shown),
        ],
        contradict=[
            Claim("skewing adds under 5 points", mean["skewed"] - mean["plain"] < ADDED,
                  f"{100 * (mean['skewed'] - mean['plain']):+.1f} points"),
        ],
        notes=["The skew is found from another text. Small models may have no outlier channels: see the last column."],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


NAMES = {"block input": "block_input", "attention output": "attention_output", "FFN output": "mlp_output"}


def _table1(settings: Settings, found: Found) -> Judgement:
    result = found[streams.inputs(settings)]
    layers = range(1, len(result["block_input"]))
    mean = {name: float(np.mean(result[field][1:])) for name, field in NAMES.items()}
    rows = [
        {"tensor of layer i - 1": name, "mean": f"{mean[name]:.2f}"}
        | {f"i = {i}": f"{result[field][i]:.2f}" for i in layers}
        for name, field in NAMES.items()
    ]
    rows.append(
        {"tensor of layer i - 1": "(attention inputs)", "mean": f"{np.mean(result['attention_input'][1:]):.2f}"}
        | {f"i = {i}": f"{result['attention_input'][i]:.2f}" for i in layers}
    )
    outputs = [mean["attention output"], mean["FFN output"]]
    shown = ", ".join(f"{name} {value:.2f}" for name, value in mean.items())
    return Judgement(
        tables=[Table("Cosine similarity to the input of layer i (last line: of what the projections multiply)", rows)],
        confirm=[
            Claim(f"the block input is over {HIGH:g} on average", mean["block input"] > HIGH, shown),
            Claim("it is at least twice either output's", mean["block input"] >= TWICE * max(outputs), shown),
        ],
        contradict=[Claim("an output is nearer than the input", max(outputs) > mean["block input"], shown)],
        notes=["Of few layers, each adds more. The guess is made of attention inputs, which are normalised."],
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig7",
        question="Are queries large in few columns?",
        here="Sums of |q| by column on a book, before and after skewing.",
        parts=lambda settings: [streams.columns(settings)],
        judge=_fig7,
    ),
    Entry(
        name="infinigen_table1",
        question="Does a block's input depend on the last block's input, or on what attention and FFN add?",
        here="The same on a book, by layer.",
        parts=lambda settings: [streams.inputs(settings)],
        judge=_table1,
    ),
)
