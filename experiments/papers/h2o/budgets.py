"""H2O, Figure 4: quality against the budget."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import choice, fullref, lm, recall
from experiments.papers.settings import Settings
from experiments.papers.statistics import Comparison, sign_test
from experiments.papers.verdict import Claim, Judgement, Table, at_least

SHARES = (0.04, 0.1, 0.2, 0.6, 1.0)
POLICIES = ("h2o", "local_only", "window")
TEXTS = ("book", "alice", "ptb")
TASKS = ("copa", "openbookqa", "piqa", "winogrande", "rte", "mathqa")
CHOSEN = ("full", "local_only", "h2o")
ARTICLES, NEW = "xsum_h2o", 64


def _distance(share: float) -> str:
    """Where facts are, so that no window of this share has them all."""
    return "near" if share <= 0.2 else "far"


def _sizes(settings: Settings) -> tuple[tuple[float, ...], tuple[str, ...], tuple[str, ...]]:
    """Budgets, texts and tasks."""
    some = settings.scale.some
    return some(SHARES, (0.1, 0.2, 0.6)), some(TEXTS, ("book", "alice")), some(TASKS, ("copa", "winogrande"))


def _article(settings: Settings, cache: str) -> fullref.Greedy:
    return fullref.greedy(settings, cache, 0.2, text=ARTICLES, new=settings.scale.tokens(NEW))


def _parts(settings: Settings) -> Iterable[Part]:
    shares, texts, tasks = _sizes(settings)
    for cache in ("full", *POLICIES):
        for share in shares:
            yield from (lm.lm(settings, cache, share, text=text) for text in texts)
            yield recall.recall(settings, cache, share, distance=_distance(share))
        yield _article(settings, cache)
    for cache in CHOSEN:
        yield from (choice.choice(settings, cache, 0.2, task=task) for task in tasks)


def _perplexities(settings: Settings, found: Found) -> tuple[list[Table], list[figures.Panel]]:
    shares, texts, _ = _sizes(settings)
    tables, panels = [], []
    for text in texts:
        results = {(c, s): found[lm.lm(settings, c, s, text=text)] for c in ("full", *POLICIES) for s in shares}
        table, panel = lm.by_budget(text, results, budget="budget, % of the prompt", unit=100)
        tables.append(table)
        panels.append(panel)
    return tables, panels


def _facts(settings: Settings, found: Found) -> tuple[Table, tuple[float, float]]:
    """The table, and the shares that h2o and the full cache answer at the largest budget up to 0.6."""
    shares, _, _ = _sizes(settings)
    asked = {(c, s): recall.recall(settings, c, s, distance=_distance(s)) for c in ("full", *POLICIES) for s in shares}
    rows = [
        {"policy": c} | {f"{s:g}": recall.shown(found[asked[c, s]]) for s in shares} for c in ("full", *POLICIES)
    ]  # fmt: skip
    inside = {s: recall.inside(asked["h2o", s], int(s * settings.scale.recall) // 2) for s in shares}
    rows.append({"policy": "(facts inside h2o's recent half)"} | {f"{s:g}": f"{inside[s]:.0%}" for s in shares})
    wide = max(share for share in shares if share <= 0.6)
    h2o, full = (recall.share(found[asked[c, wide]]) for c in ("h2o", "full"))
    far = asked["full", wide]
    near = asked["full", shares[0]]
    back = [f"{part.nearest} to {part.farthest}" for part in (near, far)]
    title = f"Passkeys {back[0]} tokens back; above a budget of 0.2 {back[1]}"
    return Table(title, rows), (h2o, full)


def _decisions(settings: Settings, found: Found) -> tuple[Table, list[Comparison]]:
    """The table, and the comparisons of h2o with local_only, the one over all tasks last."""
    rows, comparisons = [], []
    same: dict[str, list[np.ndarray]] = {"h2o": [], "local_only": []}
    for task in _sizes(settings)[2]:
        results = {c: found[choice.choice(settings, c, 0.2, task=task)] for c in CHOSEN}
        full = results["full"]
        row = {"task": task, "chance": f"{choice.chance(full):.0%}"}
        row |= {c: f"{choice.accuracy(results[c]):.1%}" for c in CHOSEN}
        row |= {f"{c} as full": f"{choice.agreement(results[c], full):.0%}" for c in same}
        rows.append(row | {"shots": f"{full['shots'].mean():.1f}"})
        what = f"h2o against local_only, {task}"
        comparisons.append(choice.compare(what, results["h2o"], results["local_only"], full))
        for cache, marks in same.items():
            marks.append(choice.same(results[cache], full))
    what = "h2o against local_only, all tasks, decided as under full"
    comparisons.append(sign_test(what, *(np.concatenate(marks) for marks in same.values())))
    return Table("Accuracy at 0.2, and questions decided as under the full cache", rows), comparisons


def _articles(settings: Settings, found: Found) -> Table:
    full = found[_article(settings, "full")]
    rows = [{"policy": c} | dict(fullref.cells(found[_article(settings, c)], full)) for c in POLICIES]
    rows.append({"policy": "(unrelated texts)"} | dict(fullref.cells(fullref.unrelated(full), full)))
    return Table("XSUM articles continued at 0.2, against the full cache's text", rows)


def _judge(settings: Settings, found: Found) -> Judgement:
    texts = _sizes(settings)[1]
    tables, panels = _perplexities(settings, found)
    better, losses = {}, {}
    for text in texts:
        for share in (0.1, 0.2):
            one, other = (found[lm.lm(settings, c, share, text=text)] for c in ("h2o", "local_only"))
            better[text, share] = lm.compare(f"h2o against local_only on {text} at {share:g}", one, other, settings)
        losses[text] = lm.loss(one, found[lm.lm(settings, "full", 1.0, text=text)])
    facts, (h2o, full) = _facts(settings, found)
    decisions, decided = _decisions(settings, found)
    wins = [all(better[text, share].lower for share in (0.1, 0.2)) for text in texts]
    ties = [all(lm.as_good(better[text, share]) for share in (0.1, 0.2)) for text in texts]
    near = [loss < 0.02 for loss in losses.values()]
    return Judgement(
        tables=[*tables, facts, decisions, _articles(settings, found)],
        confirm=[
            Claim("h2o is better than local_only at 0.1 and 0.2 on two texts", at_least(wins, 2), f"on {sum(wins)}"),
            Claim(
                "h2o's perplexity at 0.2 is under 2 % above the full cache's on two texts", at_least(near, 2),
                ", ".join(f"{text} {loss:+.2%}" for text, loss in losses.items()),
            ),
            Claim(
                "h2o agrees with the full cache's choices more often than local_only", decided[-1].higher,
                f"{100 * decided[-1].difference:+.1f} points over all tasks",
            ),
        ],
        contradict=[
            Claim("local_only is as good or better at 0.1 and 0.2 on two texts", at_least(ties, 2), f"on {sum(ties)}"),
            Claim(
                "no passkey under h2o at 0.6 where the full cache answers 90 % or more", h2o == 0 and full >= 0.9,
                f"{h2o:.0%} and {full:.0%}",
            ),
        ],
        comparisons=[*better.values(), *decided],
        notes=["A fact that was read once gets little attention before it is asked for."],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_fig4",
        question="At which budget does each policy lose quality?",
        here="Perplexity of three texts, passkeys, six multiple-choice tasks after up to five solved questions, and "
        "articles continued.",
        parts=_parts,
        judge=_judge,
    ),
)
