"""RoCo, Figure 4 and Table 1: what to protect beside mean attention, and the taxonomy as an ablation."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import fullref, lm
from experiments.papers.recipes.fullref import Comparison
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table, at_least

BLOCK = 8  # tokens that are read between evictions

# Figure 4
SIZES = (0.1, 0.2, 0.3, 0.5, 0.7)  # of the budget
SCOPES = ("window", "deviation")
RATE, LOW = 0.5, 0.2
OWN = {("window", 0.5): "mean_attention", ("deviation", 0.3): "roco"}  # the sizes that policies have by themselves
PLAIN = ("h2o", "mean_attention", "roco")


def _sizes(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(SIZES, (0.5,))


def _cache(settings: Settings, scope: str, size: float) -> str:
    slots = round(size * int(RATE * settings.scale.prompt))
    named = {"window": f"mean_attention(recent={slots})", "deviation": f"roco(protect={slots})"}
    return OWN.get((scope, size), named[scope])


def _text(settings: Settings, cache: str) -> fullref.Greedy:
    return fullref.greedy(settings, cache, RATE, block=BLOCK, rows=settings.scale.rows)


def _score(settings: Settings, cache: str) -> lm.LM:
    return lm.lm(settings, cache, LOW, block=BLOCK)


def _fig4_parts(settings: Settings) -> Iterable[Part]:
    yield from (_text(settings, cache) for cache in ("full", "h2o"))
    for scope in SCOPES:
        yield from (_text(settings, _cache(settings, scope, size)) for size in _sizes(settings))
    yield from (_score(settings, cache) for cache in ("full", *settings.scale.some(PLAIN, ())))


def _fig4(settings: Settings, found: Found) -> Judgement:
    full, sizes = found[_text(settings, "full")], _sizes(settings)

    def cells(cache: str) -> dict[str, str]:
        return dict(fullref.cells(found[_text(settings, cache)], full))

    def near(scope: str, size: float) -> float:
        return float(fullref.rouge_l(found[_text(settings, _cache(settings, scope, size))], full).mean())

    table = [{"protected": "window (h2o)", "size": "50 %", **cells("h2o")}]
    table += [
        {"protected": scope, "size": f"{100 * size:g} %", **cells(_cache(settings, scope, size))}
        for scope in SCOPES for size in sizes
    ]  # fmt: skip
    tables = [Table(f"At {RATE:g} of the prompt, by what is protected beside mean attention", table)]
    curve = {scope: [near(scope, size) for size in sizes] for scope in SCOPES}
    best = {scope: sizes[values.index(max(values))] for scope, values in curve.items()}

    def compare(what: str, one: str, other: str) -> Comparison:
        first, second = (found[_text(settings, cache)] for cache in (one, other))
        return fullref.compare(what, first, second, full, settings)

    top = compare("best deviation against best window", *(_cache(settings, s, best[s]) for s in SCOPES[::-1]))
    each = [
        compare(f"deviation against window of {100 * size:g} %", *(_cache(settings, s, size) for s in SCOPES[::-1]))
        for size in sizes
    ]  # fmt: skip
    comparisons = [top, *each, compare(f"mean_attention against h2o at {RATE:g}", "mean_attention", "h2o")]
    if low := settings.scale.some(PLAIN, ()):
        scored = {cache: found[_score(settings, cache)] for cache in ("full", *low)}
        shown = [{"policy": cache, **lm.cells(result, scored["full"])} for cache, result in scored.items()]
        tables.append(Table(f"Perplexity at {LOW:g} of the prompt", shown))
        comparisons += [
            lm.compare(f"{one} against {other} at {LOW:g}", scored[one], scored[other], settings)
            for one, other in (("mean_attention", "h2o"), ("roco", "mean_attention"), ("roco", "h2o"))
        ]
    spread = {scope: max(values) - min(values) for scope, values in curve.items()}
    worse = [made.lower for made in each]
    return Judgement(
        tables=tables,
        confirm=[
            Claim("the best deviation is better than the best window in ROUGE-L", top.higher, top.result),
            Claim(
                "its spread over sizes is smaller", spread["deviation"] < spread["window"],
                ", ".join(f"{scope} {value:.1f} points" for scope, value in spread.items()),
            ),
        ],
        contradict=[Claim("the window is better at three of five sizes", at_least(worse, 3), f"at {sum(worse)}")],
        comparisons=comparisons,
        notes=[
            "mean_attention against h2o, both with a window of half the budget, is where H2O's appendix B.2 (averaged "
            "attention is worse than accumulated) and RoCo's tables (it is better) disagree.",
        ],
        draw=lambda: figures.curves([
            figures.Panel(f"Continuations at {RATE:g}", "size of the scope, % of the budget",
                          "ROUGE-L against the full cache's text",
                          {scope: ([100 * size for size in sizes], values) for scope, values in curve.items()}),
        ]),
    )  # fmt: skip


# Table 1
IMPORTANCES = {"AAS": "mass", "AQAS": "above", "LTAS": "last", "MAS": "mean"}
PROTECTED = ("nothing", "window", "deviation")
#: The cells that are policies of kvjax.
NAMED = {
    ("AAS", "nothing"): "heavy_only", ("AAS", "window"): "h2o", ("AQAS", "nothing"): "scissorhands(recent=0)",
    ("AQAS", "window"): "scissorhands", ("LTAS", "nothing"): "tova(share_heads=False)",
    ("MAS", "nothing"): "mean_attention(recent=0)", ("MAS", "window"): "mean_attention", ("MAS", "deviation"): "roco",
}  # fmt: skip
OTHERS = ("random", "window")


def _cell(importance: str, scope: str) -> str:
    made = f"own:ranked(by={IMPORTANCES[importance]!r}, protect={scope!r})"
    return NAMED.get((importance, scope), made)


def _others(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(OTHERS, OTHERS[1:])


def _grid(settings: Settings) -> dict[tuple[str, str], lm.LM]:
    importances = settings.scale.some(tuple(IMPORTANCES), ("MAS",))
    return {
        (i, scope): lm.lm(settings, _cell(i, scope), LOW, block=BLOCK) for i in importances for scope in PROTECTED
    }  # fmt: skip


def _table1_parts(settings: Settings) -> Iterable[Part]:
    yield lm.lm(settings, "full", 1.0)
    yield from (lm.lm(settings, cache, LOW, block=BLOCK) for cache in _others(settings))
    yield from _grid(settings).values()


def _table1(settings: Settings, found: Found) -> Judgement:
    full, grid = found[lm.lm(settings, "full", 1.0)], _grid(settings)
    importances = list(dict.fromkeys(importance for importance, _ in grid))
    rows = [
        {"importance": importance} | {scope: ", ".join(lm.cells(found[grid[importance, scope]], full).values())
                                      for scope in PROTECTED}
        for importance in importances
    ]  # fmt: skip
    others = {cache: found[lm.lm(settings, cache, LOW, block=BLOCK)] for cache in _others(settings)}
    plain = [{"policy": "full", **lm.cells(full, full)}]
    plain += [{"policy": cache, **lm.cells(result, full)} for cache, result in others.items()]
    comparisons = [
        lm.compare(
            f"{importance}: {one} against {other}",
            found[grid[importance, one]],
            found[grid[importance, other]],
            settings,
        )
        for importance in importances
        for one, other in (("window", "nothing"), ("deviation", "nothing"), ("deviation", "window"))
    ]
    return Judgement(
        tables=[
            Table(f"Perplexity at {LOW:g}, and above the full cache's, by importance and what is protected", rows),
            Table("Without importance", plain),
        ],
        comparisons=comparisons,
        notes=[
            "The window is half of the budget, the deviation three tenths of it (the 10 newest tokens among these). "
            "LTAS ranks in each KV head by itself.",
        ],
        draw=lambda: figures.bars(
            "Perplexity above the full cache's", "%",
            {i: {scope: 100 * lm.loss(found[grid[i, scope]], full) for scope in PROTECTED} for i in importances},
            log=True,
        ),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="roco_fig4",
        question="Which scope should be protected beside mean attention, a window or the largest deviation, and how "
        "sensitive is its size?",
        here="Continuations of a book against the full cache's, and perplexity; prompts are evicted from while they "
        f"are read, in blocks of {BLOCK} tokens, and eviction goes on while answering.",
        parts=_fig4_parts,
        judge=_fig4,
    ),
    Entry(
        name="roco_table1",
        question="Which importance and which scope does each policy have?",
        here="The ablation that the paper does not print: every importance with every scope, perplexity of a book.",
        parts=_table1_parts,
        judge=_table1,
    ),
)
