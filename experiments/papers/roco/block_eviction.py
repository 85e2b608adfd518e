"""RoCo, Tables 6 and 9: what evicting a block at a time costs, and saves, while the prompt is read."""

from collections.abc import Callable, Iterable

from experiments.papers.entry import Entry, Found, Published, published, with_published
from experiments.papers.parts import Part
from experiments.papers.recipes import block_prefill, fullref, lm
from experiments.papers.roco.scopes import RATE
from experiments.papers.settings import MAIN, SECOND, Settings
from experiments.papers.verdict import Claim, Judgement, Table

BLOCKS = (1, 4, 16, 64, None)  # None = one shot
TEXTS = (1, 16)  # whose text is compared with the full cache's
TIMED = (1, 16, None)
SIZES = {MAIN: (768, 128), SECOND: (384, 64)}  # prompt and new tokens
NEAR, FAR, FAST = 0.01, 0.03, 5.0


def _sizes(settings: Settings, model: str) -> tuple[int, int]:
    """Tokens of prompts, and new ones."""
    prompt, new = SIZES[model]
    return settings.scale.tokens(prompt), settings.scale.tokens(new)


def _blocks(settings: Settings) -> tuple[int | None, ...]:
    return settings.scale.some(BLOCKS, (1, 16, None))


def _texts(settings: Settings, model: str) -> tuple[int | None, ...]:
    return settings.scale.some(TEXTS, ()) if model == MAIN else ()


def _timed(settings: Settings) -> tuple[int | None, ...]:
    return settings.scale.some(TIMED, (1, 16))


def _lm(settings: Settings, model: str, block: int | None, cache: str = "roco") -> lm.LM:
    prompt, new = _sizes(settings, model)
    return lm.lm(settings, cache, RATE, block=block, model=model, prompt=prompt, new=new)


def _greedy(settings: Settings, model: str, block: int | None, cache: str = "roco") -> fullref.Greedy:
    prompt, new = _sizes(settings, model)
    return fullref.greedy(
        settings, cache, RATE, block=block, model=model, rows=settings.scale.rows, prompt=prompt, new=new
    )


def _speed(settings: Settings, model: str, block: int | None) -> block_prefill.Prefill:
    return block_prefill.prefill(
        settings, "roco", RATE, block=block, prompt=_sizes(settings, model)[0], model=model
    )  # fmt: skip


def _parts(model: str) -> Callable[[Settings], Iterable[Part]]:
    def parts(settings: Settings) -> Iterable[Part]:
        yield _lm(settings, model, None, "full")
        yield from (_lm(settings, model, block) for block in _blocks(settings))
        yield from (_speed(settings, model, block) for block in _timed(settings))
        if _texts(settings, model):
            yield _greedy(settings, model, None, "full")
        yield from (_greedy(settings, model, block) for block in _texts(settings, model))

    return parts


def _name(block: int | None) -> str:
    return "one shot" if block is None else str(block)


def _judge(model: str, published: Published) -> Callable[[Settings, Found], Judgement]:
    def judge(settings: Settings, found: Found) -> Judgement:
        results = {block: found[_lm(settings, model, block)] for block in _blocks(settings)}
        speed = {block: float(found[_speed(settings, model, block)]["speed"]) for block in _timed(settings)}
        full, texts = found[_lm(settings, model, None, "full")], _texts(settings, model)
        rows = []
        for block, result in results.items():
            row = {"block": _name(block), **lm.cells(result, full)}
            shown = {"BLEU-4": "-", "R-2": "-", "R-L": "-"}
            if block in texts:
                made = fullref.cells(
                    *(found[_greedy(settings, model, b, c)] for b, c in ((block, "roco"), (None, "full")))
                )
                shown = {name: made[name] for name in shown}
            rows.append(
                row
                | shown
                | {
                    "prompt tokens/s": f"{speed[block]:,.0f}" if block in speed else "-",
                    "speed-up": f"{speed[block] / speed[1]:.1f}x" if block in speed else "-",
                }
            )
        cost, one_shot = lm.loss(results[16], results[1]), lm.loss(results[None], results[1])
        comparisons = [
            lm.compare(f"block {_name(block)} against block 1", result, results[1], settings)
            for block, result in results.items() if block != 1
        ]  # fmt: skip
        worse = comparisons[-1]
        gain = speed[16] / speed[1]
        matches = {_name(block): _name(block) for block in results}
        return Judgement(
            tables=[Table(f"roco at {RATE:g}", with_published(rows, published, matches, "block"))],
            confirm=[
                Claim(f"the perplexity at blocks of 16 is within {NEAR:.0%} of that at 1", abs(cost) <= NEAR,
                      f"{cost:+.2%}"),
                Claim(f"the prompt is read at least {FAST:g} times as fast", gain >= FAST, f"{gain:.1f}x"),
            ],
            contradict=[
                Claim(f"the perplexity at 16 is over {FAR:.0%} worse", cost > FAR, f"{cost:+.2%}"),
                Claim("one shot is worse than blocks of 1", worse.higher, f"{one_shot:+.2%}, {worse.result}"),
            ],
            comparisons=comparisons,
            notes=[
                "The paper's speed-ups equal the size of the block to the digit: they count steps. Here they are "
                f"measured, {_speed(settings, model, 1).rows} rows at a time; a seed does not repeat times.",
            ],
        )  # fmt: skip

    return judge


HERE = "Perplexity and continuations of a book{}; the prompt's speed is measured, and not counted in steps."

ENTRIES = (
    Entry(
        name="roco_table6",
        question="What does evicting a block at a time cost, and save, while the prompt is read?",
        here=HERE.format(""),
        parts=_parts(MAIN),
        judge=_judge(MAIN, published("roco_table6")),
    ),
    Entry(
        name="roco_table9",
        question="Does the same hold for another model?",
        here=HERE.format(", by stories260K"),
        parts=_parts(SECOND),
        judge=_judge(SECOND, published("roco_table9")),
    ),
)
