"""H2O, Tables 5 and 8: storage in four bits, and a reader of the exact top k."""

from collections.abc import Iterable

from experiments.papers.entry import Entry, Found, published, with_published
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, plan, recall
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table, at_least

# Table 5
STORED = ("full", "h2o", "full + int4", "h2o + int4")


def _table5_parts(settings: Settings) -> Iterable[Part]:
    for cache in STORED:
        yield lm.lm(settings, cache, 0.2)
        yield recall.recall(settings, cache, 0.2)
        yield plan.held(settings, cache, 0.2)


def _table5(settings: Settings, found: Found) -> Judgement:
    results = {cache: found[lm.lm(settings, cache, 0.2)] for cache in STORED}
    held = {cache: float(found[plan.held(settings, cache, 0.2)]["bytes"]) for cache in STORED}
    losses = {cache: lm.loss(result, results["full"]) for cache, result in results.items()}
    rows = [
        {"cache": cache, **lm.cells(results[cache], results["full"]),
         "passkey": recall.shown(found[recall.recall(settings, cache, 0.2)]),
         "KV held, of full": f"{100 * held[cache] / held['full']:.1f} %"}
        for cache in STORED
    ]  # fmt: skip
    comparisons = [
        lm.compare("h2o + int4 against h2o", results["h2o + int4"], results["h2o"], settings),
        lm.compare("full + int4 against full", results["full + int4"], results["full"], settings),
    ]
    both = losses["h2o"] + losses["full + int4"]
    shown = f"{losses['h2o + int4']:+.2%} against {losses['h2o']:+.2%} and {losses['full + int4']:+.2%}"
    slots = 0.2 * settings.scale.prompt / (settings.scale.prompt + settings.scale.new - 1)
    # One slot per head for the newest token, and scales.
    most = held["full + int4"] * slots * (1 + 2 / (0.2 * settings.scale.prompt))
    matches = dict(zip(STORED, ("Full", "H2O", "Quant-4bit", "H2O w. Quant-4bit"), strict=True))
    return Judgement(
        tables=[Table("At a budget of 0.2", with_published(rows, published("h2o_table5"), matches, "cache"))],
        confirm=[
            Claim("the loss of both is at most 1.2 times the sum of theirs", losses[STORED[3]] <= 1.2 * both, shown),
            Claim(
                "both hold as much as h2o's share of the full cache in four bits with scales", held[STORED[3]] <= most,
                f"{held[STORED[3]] / 1e3:.1f} kB a row, at most {most / 1e3:.1f}",
            ),
        ],
        contradict=[Claim("the loss of both is over twice the sum", losses[STORED[3]] > 2 * both, shown)],
        comparisons=comparisons,
    )  # fmt: skip


# Table 8


def _readers(settings: Settings, budget: float) -> dict[str, str]:
    """Name -> cache; the new token is read in addition to what is chosen."""
    chosen = int(budget * settings.scale.prompt) - 1
    return {
        "TopK w.o.": f"full + optimal({chosen})", "TopK w.": f"full + own:topk_heavy(n={chosen})", "h2o": "h2o"
    }  # fmt: skip


def _shares(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some((0.05, 0.1, 0.2), (0.2,))


def _table8_parts(settings: Settings) -> Iterable[Part]:
    yield lm.lm(settings, "full", 1.0)
    for budget in _shares(settings):
        yield from (lm.lm(settings, cache, budget) for cache in _readers(settings, budget).values())


def _table8(settings: Settings, found: Found) -> Judgement:
    full, budgets = found[lm.lm(settings, "full", 1.0)], _shares(settings)
    rows = [{"cache": "full"} | {f"{b:g}": lm.shown(full) for b in budgets}]
    mixed, readers = [], []
    results = {(n, b): found[lm.lm(settings, c, b)] for b in budgets for n, c in _readers(settings, b).items()}
    for name in _readers(settings, 0.2):
        rows.append({"cache": name} | {f"{b:g}": lm.shown(results[name, b]) for b in budgets})
    for budget in budgets:
        what = f"half heavy against pure top-k at {budget:g}"
        mixed.append(lm.compare(what, results["TopK w.", budget], results["TopK w.o.", budget], settings))
        for name in ("TopK w.o.", "TopK w."):
            one, other = results[name, budget], results["h2o", budget]
            readers.append(lm.compare(f"{name} against h2o at {budget:g}", one, other, settings))
    comparisons = [*mixed, *readers]
    shown = ", ".join(f"{b:g}: {each.result}" for b, each in zip(budgets, mixed, strict=True))
    most = len(budgets) // 2 + 1
    matches = {"full": "Full", "TopK w.o.": "TopK w.o.", "TopK w.": "TopK w."}
    counts = {word: sum(each.result == word for each in readers) for word in ("lower", "higher")}
    compared = with_published(rows, published("h2o_table8"), matches, "cache")
    return Judgement(
        tables=[Table("Perplexity by share of the prompt that a step reads", compared)],
        confirm=[
            Claim(f"half heavy hitters is better than pure top-k at {most} of {len(budgets)} shares or more",
                  at_least([each.lower for each in mixed], most), shown)
        ],
        contradict=[
            Claim(f"pure top-k is better at {most} of {len(budgets)} shares or more",
                  at_least([each.higher for each in mixed], most), shown)
        ],
        comparisons=comparisons,
        notes=[
            f"Both readers should beat h2o, which forgets: their perplexity is lower in {counts['lower']} of "
            f"{len(readers)} comparisons, and higher in {counts['higher']}."
        ],
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_table5",
        question="Do eviction and storage in four bits add up their losses?",
        here="Perplexity of a book, passkeys, and bytes, of the four combinations.",
        parts=_table5_parts,
        judge=_table5,
    ),
    Entry(
        name="h2o_table8",
        question="Does the share for heavy hitters help a reader of the exact top k as well?",
        here="Perplexity of a book; every token is kept, and a step reads a share of the prompt.",
        parts=_table8_parts,
        judge=_table8,
    ),
)
