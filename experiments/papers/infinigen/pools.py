"""InfiniGen, Table 2: a limited pool, by victim policy."""

from collections.abc import Iterable

from experiments.papers.entry import Entry, Found
from experiments.papers.infinigen.along import PROMPT
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, speculation, streams
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

LIMIT, LENGTH = 0.8, 512
POOLS = ("fifo", "lru", "counter")
TEXTS = ("wiki", "ptb")
NEAR = 0.01


def _part(settings: Settings, pool: str, limit: float, text: str) -> Part:
    scale = settings.scale
    prompt = scale.tokens(PROMPT)
    kept = "full" if pool == "none" else f"from_layer({pool}, first={speculation.FIRST})"
    length = scale.tokens(LENGTH)
    slots = int(limit * length)
    of = lm.lm(
        settings, speculation.infinigen(kept=kept), slots, text=text, prompt=prompt, new=length - prompt
    )  # fmt: skip
    return speculation.with_skew(settings, of)


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


ENTRIES = (
    Entry(
        name="infinigen_table2",
        question="Does a pool limit of 80 % of the cache hurt, by victim policy?",
        here=f"The same texts after short prompts, {LENGTH} tokens, InfiniGen's guesses with each pool.",
        parts=_parts,
        judge=_judge,
    ),
)
