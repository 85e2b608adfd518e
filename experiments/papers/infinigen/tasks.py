"""InfiniGen, Figure 11: accuracy against the share of the cache that takes part."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import choice, lm, plan, recall, speculation
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

SIZES = (0.03, 0.05, 0.1, 0.2)
BELOW = (0.03, 0.05)  # where eviction is said to fail
LATE = f"from_layer(h2o, first={speculation.FIRST})"  # as InfiniGen, with whole first layers
STORED = ("full + int4", "full + int2")
TASKS = ("copa",)
CHOSEN = 0.05


def _sizes(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some(SIZES, BELOW)


def _read(settings: Settings, size: float) -> Part:
    return speculation.read(settings, cap=size)


def _stored(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(STORED, ("full + int4",))


def _asked(settings: Settings, cache: str, size: float) -> Part:
    length = recall.short(settings)
    if cache == "infinigen":
        return speculation.with_skew(
            settings, recall.recall(settings, speculation.infinigen(cap=size), 1.0, length=length)
        )
    return recall.recall(settings, cache, size, length=length)


def _choice(settings: Settings, cache: str, task: str) -> Part:
    if cache == "infinigen":
        made = choice.choice(settings, speculation.infinigen(cap=CHOSEN), 1.0, task=task)
        return speculation.with_skew(settings, made)
    return choice.choice(settings, cache, CHOSEN, task=task)


def _tasks(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(TASKS, TASKS[:1])


def _parts(settings: Settings) -> Iterable[Part]:
    yield lm.lm(settings, "full", 1.0)
    yield _asked(settings, "full", 1.0)
    for size in _sizes(settings):
        yield from (lm.lm(settings, "h2o", size), _read(settings, size))
    for size in BELOW:
        yield from (_asked(settings, cache, size) for cache in ("h2o", "infinigen"))
    yield from (lm.lm(settings, LATE, size) for size in settings.scale.some(BELOW[1:], ()))
    for cache in ("full", *_stored(settings)):
        yield from (lm.lm(settings, cache, 1.0), plan.held(settings, cache, 1.0))
    for task in _tasks(settings):
        yield from (_choice(settings, cache, task) for cache in ("full", "h2o", "infinigen"))


def _judge(settings: Settings, found: Found) -> Judgement:
    full = found[lm.lm(settings, "full", 1.0)]
    rows: list[dict[str, str]] = []
    lines: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("infinigen", "h2o", "quantised")}
    better, answered = {}, {}
    rows.append({"cache": "full", "share read": "100 %", **lm.cells(full, full),
                 "passkey": recall.shown(found[_asked(settings, "full", 1.0)])})  # fmt: skip

    def add(cache: str, line: str, share: float, result: lm.Result, passkey: str = "-") -> None:
        rows.append(
            {"cache": cache, "share read": f"{100 * share:.1f} %", **lm.cells(result, full), "passkey": passkey}
        )
        if line:
            lines[line][0].append(100 * share)
            lines[line][1].append(lm.perplexity(result))

    for size in _sizes(settings):
        own, other = found[_read(settings, size)], found[lm.lm(settings, "h2o", size)]
        facts = {"h2o": "-", "infinigen": "-"}
        if size in BELOW:
            asked = {cache: found[_asked(settings, cache, size)] for cache in facts}
            facts = {cache: recall.shown(result) for cache, result in asked.items()}
            answered[size] = recall.compare(
                f"infinigen against h2o at {size:g}, passkey", asked["infinigen"], asked["h2o"]
            )
            better[size] = lm.compare(f"infinigen against h2o at {size:g}", own, other, settings)
        add(
            f"infinigen({speculation.ALPHA:g}, cap={size:g})",
            "infinigen",
            speculation.share(own),
            own,
            facts["infinigen"],
        )
        add(f"h2o({size:g})", "h2o", size, other, facts["h2o"])
    for size in settings.scale.some(BELOW[1:], ()):
        add(f"h2o({size:g}) from layer {speculation.FIRST} on", "", size, found[lm.lm(settings, LATE, size)])
    held = {c: float(found[plan.held(settings, c, 1.0)]["bytes"]) for c in ("full", *_stored(settings))}
    for cache in _stored(settings):
        # A full cache is in two bytes per number in the paper, in four here.
        add(cache, "quantised", 2 * held[cache] / held["full"], found[lm.lm(settings, cache, 1.0)])
    decided, more = [], []
    for task in _tasks(settings):
        results = {cache: found[_choice(settings, cache, task)] for cache in ("full", "h2o", "infinigen")}
        row = {"task": task, "chance": f"{choice.chance(results['full']):.0%}"}
        row |= {cache: f"{choice.accuracy(result):.1%}" for cache, result in results.items()}
        decided.append(
            row | {f"{c} as full": f"{choice.agreement(results[c], results['full']):.0%}" for c in ("h2o", "infinigen")}
        )
        what = f"infinigen against h2o at {CHOSEN:g}, {task}"
        more.append(choice.compare(what, results["infinigen"], results["h2o"], results["full"]))
    lines["full"] = ([min(lines["h2o"][0]), max(lines["quantised"][0])], [lm.perplexity(full)] * 2)
    shown = ", ".join(f"{size:g}: {made.result}" for size, made in better.items())
    recalled = ", ".join(f"{size:g}: {100 * made.difference:+.0f} points" for size, made in answered.items())
    return Judgement(
        tables=[
            Table("Perplexity of a book, and passkeys, by the share that takes part in attention", rows),
            Table(f"At {CHOSEN:g}: accuracy, and questions decided as under the full cache", decided),
        ],
        confirm=[
            Claim("below 0.1 infinigen's perplexity is better than h2o's", all(m.lower for m in better.values()),
                  shown),
            Claim("and so is its recall", all(m.higher for m in answered.values()), recalled),
        ],
        contradict=[
            Claim("h2o's perplexity is as good or better at two sizes below 0.1",
                  all(lm.as_good(made) for made in better.values()), shown),
            Claim("h2o's recall is as good or better at two sizes below 0.1",
                  all(made.difference <= 0 for made in answered.values()), recalled),
        ],
        comparisons=[*better.values(), *answered.values(), *more],
        notes=[
            "Shares of infinigen were measured, in the layers that choose; the first two layers read everything, "
            "which in a model of few layers is much. h2o from layer 2 on has these layers whole, too.",
            "Shares of quantised caches are of two bytes per number.",
        ],
        draw=lambda: figures.curves([
            figures.Panel("Perplexity of a book", "% of the cache that takes part", "perplexity", lines, log_x=True)
        ]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig11",
        question="How does accuracy depend on the relative size of the cache?",
        here="Perplexity, passkeys in prompts of half the usual length, and choices. The skew is found from another "
        "text; guesses are of 0.3 of the columns.",
        parts=_parts,
        judge=_judge,
    ),
)
