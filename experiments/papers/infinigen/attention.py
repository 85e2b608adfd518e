"""InfiniGen, Figures 4 and 5: rows of attention that eviction loses, and the keys that they need."""

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.recipes import look, versus
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

# Figure 4
TEXTS = ("book", "alice")
POLICIES = ("h2o", "window", "roco")
PROMPT, LENGTH, SHARE = 64, 512, 0.1
MORE, LESS = 0.05, 0.01


def _slots(settings: Settings) -> int:
    return int(SHARE * settings.scale.tokens(LENGTH))


def _caches(settings: Settings) -> dict[str, tuple[str, int | float]]:
    slots, policies = _slots(settings), settings.scale.some(POLICIES, ("h2o",))
    return {each: (each, slots) for each in policies} | {"optimal": (f"full + optimal({slots})", 1.0)}


def _rows(settings: Settings) -> int:
    return max(1, settings.scale.look_rows // 2)


def _fig4_part(settings: Settings, text: str) -> versus.Cosine:
    prompt = settings.scale.tokens(PROMPT)
    return versus.cosine(
        settings, tuple(_caches(settings).values()), text=text, rows=_rows(settings), prompt=prompt,
        new=settings.scale.tokens(LENGTH) - prompt,
    )  # fmt: skip


def _fig4_texts(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(TEXTS, ("book",))


def _fig4(settings: Settings, found: Found) -> Judgement:
    names, prompt = list(_caches(settings)), settings.scale.tokens(PROMPT)
    # [caches, L, queries], the mean over the texts
    similar = np.mean([found[_fig4_part(settings, t)]["cosine"] for t in _fig4_texts(settings)], axis=0)
    after = max(0, _slots(settings) - prompt)  # the first query that misses something
    tail = settings.scale.tokens(100)
    layers = range(similar.shape[1])
    rows = [
        {"cache": name} | {f"layer {i}": f"{own[i, after:].mean():.3f}, {own[i, -tail:].mean():.3f}" for i in layers}
        for name, own in zip(names, similar, strict=True)
    ]
    # [queries]: the mean of the layers from 1 on
    gap = (similar[names.index("optimal")] - similar[names.index("h2o")])[1:].mean(axis=0)
    quarter = (gap.size - after) // 4
    first, last = gap[after : after + quarter].mean(), gap[-quarter:].mean()
    zero = (similar[names.index("optimal")] - similar[names.index("h2o")])[0, after:].mean()
    shown = f"{gap[after:].mean():.3f}; in layer 0 {zero:.3f}"
    queries = list(range(prompt, prompt + similar.shape[2]))
    width = max(1, len(queries) // 60)

    def smooth(values: np.ndarray) -> list[float]:
        count = values.size // width
        return values[: count * width].reshape(count, width).mean(axis=1).tolist()

    panels = [
        figures.Panel(title, "query", "cosine similarity with the full cache's row", {
            name: (queries[: len(queries) // width * width : width], smooth(own)) for name, own in zip(names, values,
                                                                                                       strict=True)
        })
        for title, values in (("layer 0", similar[:, 0]), ("layers from 1 on", similar[:, 1:].mean(axis=1)))
    ]  # fmt: skip
    return Judgement(
        tables=[Table(f"Mean over queries {prompt + after} to {queries[-1]}, and of the last {tail}", rows)],
        confirm=[
            Claim(f"optimal is over {MORE:g} above h2o, mean of the layers from 1 on", gap[after:].mean() > MORE,
                  shown),
            Claim("the gap grows with position: last quarter of the queries against the first", last > first,
                  f"{last:.3f} and {first:.3f}"),
        ],
        contradict=[Claim(f"optimal is less than {LESS:g} above h2o", gap[after:].mean() < LESS, shown)],
        notes=[
            f"{_rows(settings)} rows of each of {', '.join(_fig4_texts(settings))}; {_slots(settings)} slots.",
        ],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


# Figure 5
QUERIES = (250, 500, 1000)


def _fig5(settings: Settings, found: Found) -> Judgement:
    # [L, B, H, T]
    keys = found[look.look(settings, "keys_for_mass")]["keys"].astype(np.float64)
    at = [settings.scale.tokens(query) for query in QUERIES]
    # [L] for each query
    median = {q: np.median(keys[..., q], axis=(1, 2)) for q in at}
    most = {q: np.quantile(keys[..., q], 0.9, axis=(1, 2)) for q in at}
    # [L, B, H, 5]: adjacent queries of one head
    near = keys[..., at[-1] - 2 : at[-1] + 3]
    spread = np.median((near.max(axis=3) - near.min(axis=3)) / near.mean(axis=3), axis=(1, 2))
    rows = [
        {"layer": str(i)}
        | {f"query {q}: median, 90 %": f"{median[q][i]:.0f}, {most[q][i]:.0f}" for q in at}
        | {f"five queries around {at[-1]}": f"{100 * spread[i]:.0f} % apart"}
        for i in range(len(keys))
    ]
    example = [{"query": str(q), "keys": f"{keys[-1, 0, 0, q]:.0f}"} for q in (*at, *range(at[-1] - 2, at[-1] + 3))]
    ratio = median[at[2]].max() / median[at[2]].min()
    growth = median[at[2]] / median[at[1]]
    shown = ", ".join(f"{each:.2f}x" for each in growth)
    return Judgement(
        tables=[
            Table("Keys that hold 0.9 of a query's attention, over rows and heads", rows),
            Table("One head of the last layer, as in the paper's table", example),
        ],
        confirm=[
            Claim("the medians of layers differ by 2 times or more at the last query", ratio >= 2, f"{ratio:.1f}x"),
            Claim(f"query {at[2]} needs under 2 times as many as query {at[1]}, in every layer", growth.max() < 2,
                  shown),
            Claim("neighbours vary by 10 % or more, mean over layers", spread.mean() >= 0.1,
                  f"{100 * spread.mean():.0f} %"),
        ],
        contradict=[
            Claim("the need is proportional to the length in every layer (1.8 times or more)", growth.min() >= 1.8,
                  shown),
        ],
        draw=lambda: figures.png(look.analysis.plots.plot_keys_for_mass(keys.astype(np.int32))),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig4",
        question="Do kept tokens reproduce the attention row of the full cache, chosen for good or anew each step?",
        here="Two texts after short prompts, a tenth of the length kept.",
        parts=lambda settings: [_fig4_part(settings, text) for text in _fig4_texts(settings)],
        judge=_fig4,
    ),
    Entry(
        name="infinigen_fig5",
        question="How many keys hold 0.9 of a query's attention?",
        here="The same on a book.",
        parts=lambda settings: [look.look(settings, "keys_for_mass")],
        judge=_fig5,
    ),
)
