"""RoCo, Figures 1 to 3: what is kept, whose top tokens are those of the full cache, and how attention varies."""

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.recipes import deviation, versus
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table, at_least

# Figure 1
KEPT, LAYER = 0.2, 2


def _kept(settings: Settings) -> deviation.Kept:
    return deviation.kept(settings, "roco", KEPT)


def _fig1(settings: Settings, found: Found) -> Judgement:
    part = _kept(settings)
    # [L, K, T]
    seen = found[part]["last_seen"]
    last = part.prompt + part.new - 1
    old = np.arange(seen.shape[2]) < part.prompt
    rows = [
        {"layer": str(layer), "KV head": str(head),
         "of the prompt, after it": f"{100 * np.mean(own[old] >= part.prompt):.0f} %",
         "at the end": f"{100 * np.mean(own[old] >= last):.0f} %",
         "as head 0 has it": f"{100 * np.mean((own[old] >= last) == (seen[layer, 0, old] >= last)):.0f} %"}
        for layer, heads in enumerate(seen) for head, own in enumerate(heads)
    ]  # fmt: skip
    layer = min(LAYER, len(seen) - 1)
    return Judgement(
        tables=[Table(f"Tokens of a prompt of {part.prompt} that roco still holds, {part.new} tokens later", rows)],
        draw=lambda: figures.png(deviation.drawn(part, found[part], layer=layer, head=0)),
    )


# Figure 2
RATES = (0.1, 0.2, 0.3, 0.4)
#: RoCo's name of a score -> the policy that ranks by it and protects nothing.
SCORES = {
    "MAS": "mean_attention(recent=0)", "LTAS": "tova(share_heads=False)", "AAS": "heavy_only",
    "AQAS": "scissorhands(recent=0)",
}  # fmt: skip


def _rates(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(RATES, (0.3,))


def _fig2_part(settings: Settings, rate: float) -> versus.Jaccard:
    half = settings.scale.length // 2
    return versus.jaccard(settings, SCORES, rate, prompt=half, new=half // 4)


def _fig2(settings: Settings, found: Found) -> Judgement:
    rates = _rates(settings)
    # [scores, rates]: the mean over layers and queries
    means = np.stack([found[_fig2_part(settings, rate)]["jaccard"].mean(axis=(1, 2)) for rate in rates], axis=1)
    similar = dict(zip(SCORES, means, strict=True))
    rows = [
        {"score": kind, "policy": SCORES[kind]}
        | {f"{rate:g}": f"{value:.3f}" for rate, value in zip(rates, similar[kind], strict=True)}
        for kind in SCORES
    ]
    low = [i for i, rate in enumerate(rates) if rate < 0.5]
    ordered = [similar["MAS"][i] > similar["AAS"][i] > similar["AQAS"][i] for i in low]
    reversed_ = [similar["AAS"][i] >= similar["MAS"][i] for i in low]
    part = _fig2_part(settings, rates[0])
    return Judgement(
        tables=[Table("Jaccard similarity of the top tokens with the full cache's, mean over layers, heads, queries",
                      rows)],
        confirm=[
            Claim("MAS > AAS > AQAS at three of four rates below 0.5", at_least(ordered, min(3, len(low))),
                  f"at {sum(ordered)} of {len(low)}"),
        ],
        contradict=[
            Claim("AAS is at least MAS at two of these rates", at_least(reversed_, 2), f"at {sum(reversed_)}"),
        ],
        notes=[
            "Each policy is judged by its own score: the top tokens are those that it ranks highest among what it "
            "holds, and those that the same score ranks highest under the full cache; as many as the budget. A score "
            "that moves little from query to query is favoured, and so is one of few distinct values.",
            f"{part.rows} rows, prompts of {part.prompt} tokens and {part.new} queries after them.",
        ],
        draw=lambda: figures.curves([
            figures.Panel("Top tokens shared with the full cache", "budget rate", "Jaccard similarity",
                          {kind: (list(rates), values.tolist()) for kind, values in similar.items()}),
        ]),
    )  # fmt: skip


# Figure 3
SOON, MOST, STILL = 32, 0.8, 0.5


def _fig3(settings: Settings, found: Found) -> Judgement:
    part = deviation.deviation(settings)
    result = found[part]
    median = np.median(result["peak"], axis=1)
    halved, rising = result["halved"], result["rising"]
    rows = [
        {"layer": str(i), "median query of the maximum": f"{median[i]:.0f}",
         f"under half of it at query {part.late}": f"{100 * halved[i]:.0f} %",
         f"still rising at query {part.still}": f"{100 * rising[i]:.0f} %"}
        for i in range(len(median))
    ]  # fmt: skip
    ages = list(range(part.late + 1))
    return Judgement(
        tables=[Table("Deviation of the attention that a token receives, by queries since its own", rows)],
        confirm=[
            Claim(f"the median maximum is within the first {SOON} queries in every layer", median.max() <= SOON,
                  f"at most {median.max():.0f}"),
            Claim(f"over {MOST:.0%} of the tokens are under half of their maximum in every layer", halved.min() > MOST,
                  f"at least {halved.min():.0%}"),
        ],
        contradict=[
            Claim(f"a layer in which half of the tokens still rise at query {part.still}", rising.max() >= STILL,
                  f"at most {rising.max():.0%}"),
        ],
        notes=[
            f"{part.followed} tokens of each of {part.rows} rows, every head by itself. A token rises if its deviation "
            f"is larger {part.around} queries after that query than {part.around} before it.",
        ],
        draw=lambda: figures.curves([
            figures.Panel("Mean over tokens and heads", "queries since the token's own",
                          "standard deviation of attention",
                          {f"layer {i}": (ages, curve.tolist()) for i, curve in enumerate(result["curve"])}),
        ]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="roco_fig1",
        question="What does eviction from the cache look like?",
        here=f"The tokens that roco keeps at {KEPT:g} of a prompt, in one row of a book.",
        parts=lambda settings: [_kept(settings)],
        judge=_fig1,
    ),
    Entry(
        name="roco_fig2",
        question="How well do the top tokens by a policy's own scores match those of the full cache?",
        here="Similarity at every query after prompts of a book.",
        parts=lambda settings: [_fig2_part(settings, rate) for rate in _rates(settings)],
        judge=_fig2,
    ),
    Entry(
        name="roco_fig3",
        question="How does the deviation of the attention that a token receives develop as queries come?",
        here="The same on a book, under the full cache.",
        parts=lambda settings: [deviation.deviation(settings)],
        judge=_fig3,
    ),
)
