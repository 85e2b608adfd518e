"""RoCo, Tables 2, 7 and 8: whose text is closest to the full cache's, with grouped queries, and by the model's size."""

from collections.abc import Iterable, Sequence

from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import fullref
from experiments.papers.recipes.fullref import Comparison
from experiments.papers.roco.scopes import BLOCK, RATE
from experiments.papers.settings import MAIN, SECOND, Settings
from experiments.papers.verdict import Claim, Judgement, Table
from experiments.runs.resolve import decoder_config

#: kvjax's name -> RoCo's.
POLICIES = {
    "random": "Random", "window": "StreamLLM", "scissorhands": "ScissorHands", "h2o": "H2O", "tova": "TOVA",
    "roco": "RoCo",
}  # fmt: skip
BOOK, ARTICLES = "book", "xsum"


def near_table(settings: Settings, found: Found, parts: dict[str, fullref.Greedy], title: str) -> Table:
    """How close each cache's text is to that of ``full``, which is one of the parts; and the floor."""
    full = found[parts["full"]]
    table = [
        {"policy": f"{cache} ({POLICIES[cache]})" if cache in POLICIES else cache}
        | dict(fullref.cells(found[part], full))
        for cache, part in parts.items() if cache != "full"
    ]  # fmt: skip
    table.append({"policy": "(unrelated texts)"} | dict(fullref.cells(fullref.unrelated(full), full)))
    return Table(title, table)


def near(
    settings: Settings, found: Found, parts: dict[str, fullref.Greedy], where: str
) -> dict[tuple[str, str], Comparison]:
    """ROUGE-L of pairs of caches."""
    full = found[parts["full"]]
    every = (("roco", "h2o"), ("roco", "window"), ("h2o", "window"), ("h2o", "random"))
    pairs = [pair for pair in every if parts.keys() >= set(pair)]
    return {
        (one, other): fullref.compare(
            f"{one} against {other}, {where}", found[parts[one]], found[parts[other]], full, settings
        )
        for one, other in pairs
    }


def order_claims(made: dict[tuple[str, str], Comparison], where: str) -> tuple[list[Claim], list[Claim]]:
    """The claims of RoCo's order for one text: to confirm, and to contradict."""
    others = [other for one, other in made if one == "h2o"]
    confirm = [
        Claim(f"roco is better than h2o, {where}", made["roco", "h2o"].higher, made["roco", "h2o"].result),
        Claim(
            f"h2o is better than {' and '.join(others)}, {where}",
            all(made["h2o", other].higher for other in others),
            ", ".join(made["h2o", other].result for other in others),
        ),
    ]
    better = [other for other in ("h2o", "window") if made["roco", other].lower]
    contradict = [Claim(f"h2o or window is better than roco, {where}", bool(better), " and ".join(better) or "neither")]
    return confirm, contradict


def _greedy(settings: Settings, text: str, caches: Sequence[str], model: str = MAIN) -> dict[str, fullref.Greedy]:
    return {
        cache: fullref.greedy(settings, cache, RATE, text=text, block=BLOCK, rows=settings.scale.rows, model=model)
        for cache in caches
    }


# Table 2
def _table2_texts(settings: Settings) -> dict[str, dict[str, fullref.Greedy]]:
    texts = settings.scale.some((BOOK, ARTICLES), (BOOK,))
    return {text: _greedy(settings, text, ("full", *POLICIES)) for text in texts}


def _table2(settings: Settings, found: Found) -> Judgement:
    tables = []
    confirm: list[Claim] = []
    contradict: list[Claim] = []
    comparisons: list[Comparison] = []
    for text, parts in _table2_texts(settings).items():
        where = {BOOK: "the book", ARTICLES: "XSum articles"}[text]
        count = len(found[parts["full"]]["tokens"])
        tables.append(near_table(settings, found, parts, f"Continuations of {where} at {RATE:g}, {count} rows"))
        made = near(settings, found, parts, where)
        comparisons += made.values()
        one, other = order_claims(made, where)
        confirm, contradict = confirm + one, contradict + other
    return Judgement(tables=tables, confirm=confirm, contradict=contradict, comparisons=comparisons, notes=NOTES)


NOTES = (
    "kvjax's policies go on evicting while answering; RoCo's do not for these tasks. METEOR needs WordNet and is left "
    "out.",
)

# Table 7
GROUPED = ("h2o", "roco")


def _largest(cache: str) -> str:
    return f"{cache}(group_reduce='max')"


def _table7_caches(settings: Settings) -> dict[str, fullref.Greedy]:
    return _greedy(settings, BOOK, ("full", *POLICIES, *map(_largest, GROUPED)))


def _heads(settings: Settings) -> str:
    """Returns the numbers of query heads and KV heads of the model, as far as they are known here."""
    config = decoder_config(settings.config(MAIN))
    return f"{config.num_heads} query heads on {config.num_kv_heads} KV heads" if config else "queries in groups"


def _table7(settings: Settings, found: Found) -> Judgement:
    parts = _table7_caches(settings)
    full = found[parts["full"]]
    made = near(settings, found, parts, "mean of the group")
    confirm, _ = order_claims(made, "mean of the group")
    largest = {
        cache: fullref.compare(
            f"{cache}: largest against mean of the group", found[parts[_largest(cache)]], found[parts[cache]], full,
            settings,
        )
        for cache in GROUPED
    }  # fmt: skip
    return Judgement(
        tables=[near_table(settings, found, parts, f"Continuations of the book at {RATE:g}, {_heads(settings)}")],
        confirm=confirm,
        contradict=[
            Claim(
                "the largest is better than the mean of the group for h2o and roco",
                all(each.higher for each in largest.values()),
                ", ".join(f"{cache}: {each.result}" for cache, each in largest.items()),
            )
        ],
        comparisons=[*made.values(), *largest.values()],
        notes=NOTES,
    )


# Table 8
SMALL_PROMPT, SMALL_NEW = 384, 64


def _table8_parts(settings: Settings, model: str) -> dict[str, fullref.Greedy]:
    prompt, new = (settings.scale.tokens(size) for size in (SMALL_PROMPT, SMALL_NEW))
    caches = ("full", "window", "h2o", "roco")
    return {
        cache: fullref.greedy(
            settings, cache, RATE, block=BLOCK, rows=settings.scale.rows, model=model, prompt=prompt, new=new
        )
        for cache in caches
    }


def _table8(settings: Settings, found: Found) -> Judgement:
    tables = []
    mean: dict[tuple[str, str], float] = {}
    comparisons: list[Comparison] = []
    names = {MAIN: "the model (the larger one)", SECOND: "stories260K"}
    for model, name in names.items():
        parts = _table8_parts(settings, model)
        tables.append(near_table(settings, found, parts, f"{name}: continuations of the book at {RATE:g}"))
        comparisons += near(settings, found, parts, name).values()
        full = found[parts["full"]]
        mean |= {
            (c, model): float(fullref.rouge_l(found[part], full).mean()) for c, part in parts.items() if c != "full"
        }
    caches = [cache for cache in _table8_parts(settings, MAIN) if cache != "full"]
    table = [{"policy": c, **{names[m]: f"{mean[c, m]:.1f}" for m in names}} for c in caches]
    shown = ", ".join(f"{c} {mean[c, MAIN]:.1f} and {mean[c, SECOND]:.1f}" for c in caches)
    return Judgement(
        tables=[Table("ROUGE-L against each model's own full cache", table), *tables],
        confirm=[
            Claim("every policy is closer in the larger model", all(mean[c, MAIN] > mean[c, SECOND] for c in caches),
                  shown)
        ],
        contradict=[
            Claim("roco or h2o is less close in the larger model",
                  any(mean[c, MAIN] < mean[c, SECOND] for c in ("roco", "h2o")), shown),
        ],
        comparisons=comparisons,
        notes=["Two models of different training and tokenizers: weak evidence either way.", *NOTES],
    )  # fmt: skip


def _all(parts: Iterable[dict[str, fullref.Greedy]]) -> list[Part]:
    return [part for each in parts for part in each.values()]


ENTRIES = (
    Entry(
        name="roco_table2",
        question="Which policy keeps a summary closest to the full cache's?",
        here="Prompts of a book and of XSum articles, continued greedily under each policy; prompts are evicted from "
        f"while they are read, in blocks of {BLOCK} tokens.",
        parts=lambda settings: _all(_table2_texts(settings).values()),
        judge=_table2,
    ),
    Entry(
        name="roco_table7",
        question="Does averaging over a group of query heads carry over to grouped queries?",
        here="The model groups queries: the book's part of roco_table2 is this one; and the largest of a group instead "
        "of its mean.",
        parts=lambda settings: _all([_table7_caches(settings)]),
        judge=_table7,
    ),
    Entry(
        name="roco_table8",
        question="Does the order hold for a larger model?",
        here="The model against stories260K, a book, shorter texts.",
        parts=lambda settings: _all(_table8_parts(settings, model) for model in (MAIN, SECOND)),
        judge=_table8,
    ),
)
