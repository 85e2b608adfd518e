"""InfiniGen, Figures 13 and 17: whether skewing is needed, and how sensitive alpha and the partial ratio are."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, moved, recall, speculation
from experiments.papers.recipes.speculation import CAP, WITHOUT_THRESHOLD
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

# Figure 13
RATIOS, LOW = (0.1,), 0.1
SAME = 0.01  # of an overlap


def _kept(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(RATIOS, (LOW,))


def _fixed(ratio: float) -> str:
    return speculation.infinigen(WITHOUT_THRESHOLD, ratio=ratio, cap=CAP)


def _scored(settings: Settings, ratio: float, skew: bool) -> Part:
    return speculation.read(settings, alpha=WITHOUT_THRESHOLD, ratio=ratio, skew=skew)


def _recalled(settings: Settings, ratio: float, skew: bool) -> Part:
    of = recall.recall(settings, _fixed(ratio), 1.0)
    return speculation.with_skew(settings, of) if skew else of


def _fig13_parts(settings: Settings) -> Iterable[Part]:
    yield lm.lm(settings, "full", 1.0)
    for skew in (False, True):
        for ratio in _kept(settings):
            yield from (_scored(settings, ratio, skew), speculation.overlap(settings, _fixed(ratio), skew=skew))
        yield _recalled(settings, LOW, skew)


def _fig13(settings: Settings, found: Found) -> Judgement:
    full = found[lm.lm(settings, "full", 1.0)]
    rows, near = [], {}
    for ratio in _kept(settings):
        for skew in (False, True):
            overlap = found[speculation.overlap(settings, _fixed(ratio), skew=skew)]
            near[ratio, skew] = float(np.nanmean(overlap["overlap"]))
            rows.append(
                {"ratio": f"{ratio:g}", "skew": "with" if skew else "without",
                 "overlap with the best": f"{100 * near[ratio, skew]:.1f} %",
                 "attention covered": f"{100 * np.nanmean(overlap['mass']):.1f} %",
                 **lm.cells(found[_scored(settings, ratio, skew)], full),
                 "passkey": recall.shown(found[_recalled(settings, ratio, skew)]) if ratio == LOW else "-"}
            )  # fmt: skip
    comparisons = [
        lm.compare(f"with against without skew, ratio {ratio:g}", found[_scored(settings, ratio, True)],
                   found[_scored(settings, ratio, False)], settings)
        for ratio in _kept(settings)
    ]  # fmt: skip
    facts = recall.compare(
        f"with against without skew, ratio {LOW:g}, passkey",
        *(found[_recalled(settings, LOW, s)] for s in (True, False)),
    )
    gain = near[LOW, True] - near[LOW, False]
    shown = f"overlap {100 * gain:+.1f} points, passkey {100 * facts.difference:+.0f} points"
    return Judgement(
        tables=[Table(f"{CAP:.0%} of the slots read in the layers that choose, without a threshold", rows)],
        confirm=[
            Claim(f"overlap and recall are better with skew at a ratio of {LOW:g}", gain > SAME and facts.higher, shown)
        ],
        contradict=[Claim("neither differs", abs(gain) <= SAME and not facts.differs, shown)],
        comparisons=[*comparisons, facts],
        notes=["This model rotates queries and keys, as Llama-2 does, where the paper has a small drop without skew."],
    )


# Figure 17
ALPHAS, PLATEAU = (1.0, 2.0, 4.0, 5.0, 7.0), 5.0
COLUMNS, AT = (0.1, 0.3, 0.6, 1.0), 4.0  # ratios, and their alpha
ASKED = (5.0,)
NEAR, OFTEN = 0.01, 0.5


def _alphas(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(ALPHAS, (1.0, 4.0, 5.0))


def _columns(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(COLUMNS, (0.3, 0.6, 1.0))


def _of_alpha(settings: Settings, alpha: float) -> Part:
    return speculation.read(settings, alpha=alpha)


def _of_ratio(settings: Settings, ratio: float) -> Part:
    return speculation.read(settings, alpha=AT, ratio=ratio)


def _answers(settings: Settings, alpha: float) -> Part:
    return speculation.with_skew(settings, recall.recall(settings, speculation.infinigen(alpha), 1.0))


def _asked(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(ASKED, ())


def _fig17_parts(settings: Settings) -> Iterable[Part]:
    yield lm.lm(settings, "full", 1.0)
    yield from (_of_alpha(settings, alpha) for alpha in _alphas(settings))
    yield from (_of_ratio(settings, ratio) for ratio in _columns(settings))
    yield from (_answers(settings, alpha) for alpha in _asked(settings))
    yield from (moved.own(settings, ratio) for ratio in _columns(settings))


def _fig17(settings: Settings, found: Found) -> Judgement:
    full = found[lm.lm(settings, "full", 1.0)]
    alphas, ratios = _alphas(settings), _columns(settings)
    by_alpha = {alpha: found[_of_alpha(settings, alpha)] for alpha in alphas}
    by_ratio = {ratio: found[_of_ratio(settings, ratio)] for ratio in ratios}

    def cells(result: speculation.Result) -> dict[str, str]:
        return {
            **lm.cells(result, full), "slots fetched": f"{speculation.mean(result, 'number'):.1f}",
            "share read": f"{100 * speculation.share(result):.1f} %",
            "at the cap": f"{100 * speculation.mean(result, 'capped'):.0f} %",
        }  # fmt: skip

    first = [
        {"alpha": f"{alpha:g}", **cells(result),
         "passkey": recall.shown(found[_answers(settings, alpha)]) if alpha in _asked(settings) else "-"}
        for alpha, result in by_alpha.items()
    ]  # fmt: skip
    second = []
    for ratio, result in by_ratio.items():
        own = found[moved.own(settings, ratio)]
        held = float(own["partial"]) / float(own["bytes"][0])
        second.append({"ratio": f"{ratio:g}", **cells(result), "partial keys, of the cache": f"{100 * held:.1f} %"})
    loss = {alpha: lm.loss(result, full) for alpha, result in by_alpha.items()}
    shares = [speculation.share(result) for result in by_alpha.values()]
    differences = {ratio: lm.loss(result, by_ratio[1.0]) for ratio, result in by_ratio.items()}
    flat = [alpha for alpha in alphas if alpha >= PLATEAU]
    before = [a for a in alphas if abs(loss[a]) <= NEAR and speculation.mean(by_alpha[a], "capped") < OFTEN]
    shown = ", ".join(f"{alpha:g}: {value:+.2%}" for alpha, value in loss.items())
    columns = ", ".join(f"{ratio:g}: {value:+.2%}" for ratio, value in differences.items())
    comparisons = [
        lm.compare(f"alpha {alpha:g} against full", by_alpha[alpha], full, settings) for alpha in alphas
    ] + [
        lm.compare(f"ratio {ratio:g} against 1", by_ratio[ratio], by_ratio[1.0], settings)
        for ratio in ratios if ratio != 1.0
    ]  # fmt: skip
    panels = [
        figures.Panel("(a) perplexity", "alpha", "above the full cache's, %",
                      {"ratio 0.3": (list(alphas), [100 * value for value in loss.values()])}),
        figures.Panel("(a) slots", "alpha", "share read, %", {"ratio 0.3": (list(alphas), [100 * s for s in shares])}),
        figures.Panel("(b) perplexity", "ratio", "above the full cache's, %",
                      {f"alpha {AT:g}": (list(ratios), [100 * lm.loss(r, full) for r in by_ratio.values()])}),
    ]  # fmt: skip
    return Judgement(
        tables=[
            Table(f"(a) By alpha, ratio {speculation.RATIO:g}, cap {CAP:g}", first),
            Table(f"(b) By ratio, alpha {AT:g}", second),
        ],
        confirm=[
            Claim(f"the perplexity is within {NEAR:.0%} of the full cache's from alpha {PLATEAU:g} on",
                  all(abs(loss[alpha]) <= NEAR for alpha in flat), shown),
            Claim("the share that is read rises with alpha", shares == sorted(shares) and shares[-1] > shares[0],
                  f"{shares[0]:.1%} to {shares[-1]:.1%}"),
            Claim(f"a ratio of 0.3 is within {NEAR:.0%} of 1", abs(differences[0.3]) <= NEAR, columns),
        ],
        contradict=[
            Claim(f"the ratio must exceed 0.6 to be within {NEAR:.0%} of 1", abs(differences[0.6]) > NEAR, columns),
            Claim("no alpha reaches the plateau before the cap binds in half of the steps", not before,
                  ", ".join(f"{alpha:g}" for alpha in before) or "none"),
        ],
        comparisons=comparisons,
        notes=["Shares, slots and the cap are of the layers that choose, means over steps, rows and heads."],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig13",
        question="Is skewing needed?",
        here="Perplexity, passkeys, and how many of the chosen slots are among the best.",
        parts=_fig13_parts,
        judge=_fig13,
    ),
    Entry(
        name="infinigen_fig17",
        question="How sensitive are alpha and the partial weight ratio?",
        here="Perplexity, passkeys, slots that are fetched, and bytes of partial keys.",
        parts=_fig17_parts,
        judge=_fig17,
        needs="a GPU with a host link for latencies.",
    ),
)
