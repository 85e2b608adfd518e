"""InfiniGen, Table 2: a limited pool, by victim policy."""

from collections.abc import Iterable

from experiments.papers.entry import Entry, Found, Published, numbers
from experiments.papers.infinigen.along import PROMPT
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, reading, streams
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

LIMIT, LENGTH = 0.8, 512
POOLS = ("fifo", "lru", "counter")
TEXTS = ("wiki", "ptb")
NEAR = 0.01


def _part(settings: Settings, pool: str, limit: float, text: str) -> Part:
    scale = settings.scale
    prompt = scale.tokens(PROMPT)
    kept = "full" if pool == "none" else f"from_layer({pool}, first={reading.FIRST})"
    length = scale.tokens(LENGTH)
    slots = int(limit * length)
    of = lm.lm(
        settings, reading.infinigen(kept=kept), slots, text=text, prompt=prompt, new=length - prompt
    )  # fmt: skip
    return reading.with_skew(settings, of)


def _pools(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(POOLS, ("fifo", "counter"))


def _runs(settings: Settings) -> dict[tuple[str, float], tuple[str, ...]]:
    """(text, limit) -> pools."""
    texts = settings.scale.some(TEXTS, TEXTS[:1])
    return {(text, LIMIT): ("none", *_pools(settings)) for text in texts}


def _parts(settings: Settings) -> Iterable[Part]:
    for (text, limit), pools in _runs(settings).items():
        yield from (_part(settings, pool, limit, text) for pool in pools)
        yield streams.important(settings, text=text)


def _judge(settings: Settings, found: Found) -> Judgement:
    rows, confirm, contradict, comparisons = [], [], [], []
    limited = _pools(settings)
    for (text, limit), pools in _runs(settings).items():
        results = {pool: found[_part(settings, pool, limit, text)] for pool in pools}
        loss = {pool: lm.loss(results[pool], results["none"]) for pool in limited}
        first = found[streams.important(settings, text=text)]["first"]
        length = settings.scale.tokens(LENGTH)
        rows.append(
            {"text": text, "pool": f"{limit:.0%}", "none": lm.shown(results["none"])}
            | {pool: f"{lm.shown(results[pool])} ({loss[pool]:+.2%})" for pool in limited}
            | {"evicted by head": str(length - int(limit * length)),
               "attention on the first token": ", ".join(f"{100 * each:.0f}" for each in first) + " %"}
        )  # fmt: skip
        made = {
            pool: lm.compare(f"{pool} against none, {text}, {limit:.0%}", results[pool], results["none"], settings)
            for pool in limited
        }
        worst = {
            pool: lm.compare(f"fifo against {pool}, {text}, {limit:.0%}", results["fifo"], results[pool], settings)
            for pool in limited[1:]
        }
        comparisons += [*made.values(), *worst.values()]
        shown = ", ".join(f"{pool} {value:+.2%}" for pool, value in loss.items())
        confirm += [
            Claim(f"{text}: fifo is the worst", all(each.higher for each in worst.values()), shown),
            Claim(
                f"{text}: lru and counter are within {NEAR:.0%} of none",
                all(abs(loss[p]) <= NEAR for p in limited[1:]),
                shown,
            ),
        ]
        contradict.append(Claim(f"{text}: fifo is within {NEAR:.0%}, too", abs(loss["fifo"]) <= NEAR, shown))
    return Judgement(
        tables=[Table("Perplexity by victim policy, and above that without a limit", rows)],
        confirm=confirm,
        contradict=contradict,
        comparisons=comparisons,
        notes=[
            "fifo loses the first tokens, which hurts a model whose attention rests on them. The limit is of layers "
            "that choose; an evicted slot is gone for good, so that every victim is another token. In the released "
            "simulation lru and counter keep choosing the same victim, which may be why the paper has them equal to no "
            "limit at all.",
        ],
    )


TABLE2 = Published(
    caption="Table 2: perplexity with a pool limited to 80 % of the cache, 2048 tokens; W = WikiText-2, P = PTB; OPT, "
    "and L2 = Llama-2.",
    rows=numbers("""
        pool | 6.7B W | 6.7B P | 13B W | 13B P | 30B W | 30B P | L2-7B W | L2-7B P | L2-13B W | L2-13B P
        100% | 11.68 | 13.86 | 10.55 | 12.78 | 10.14 | 12.31 | 5.69 | 22.53 | 5.25 | 31.94
        80-FIFO% | 19.64 | 16.82 | 30.99 | 33.84 | 30.66 | 35.45 | 22.26 | 61.88 | 21.41 | 32.34
        80-LRU% | 11.68 | 13.85 | 10.55 | 12.78 | 10.14 | 12.31 | 5.69 | 22.53 | 5.25 | 31.94
        80-Counter% | 11.68 | 13.86 | 10.55 | 12.78 | 10.14 | 12.31 | 5.69 | 22.53 | 5.25 | 31.94
    """),
)

ENTRIES = (
    Entry(
        name="infinigen_table2",
        question="Does a pool limit of 80 % of the cache hurt, by victim policy?",
        published=TABLE2,
        here=f"The same texts after short prompts, {LENGTH} tokens, InfiniGen's guesses with each pool.",
        parts=_parts,
        judge=_judge,
    ),
)
