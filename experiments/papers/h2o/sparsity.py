"""H2O, Figure 2: sparse attention, its power law, and what heavy hitters are worth."""

import math
from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, look
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

TEXTS = ("book", "wiki")
HEAVY = 0.2  # of the tokens
WITHOUT = (0.95, 0.8)  # budgets of the policies that lose heavy hitters, or random tokens
GLOBAL = "h2o(variant='global')"


def _lengths(settings: Settings) -> tuple[int, ...]:
    length = settings.scale.length
    return settings.scale.some((length // 8, length // 4, length // 2, length), (length // 2, length))


def _global(settings: Settings) -> lm.LM:
    """The variant that looks at the whole text, with the slots of the other caches."""
    return lm.lm(settings, GLOBAL, int(0.2 * settings.scale.prompt), whole=True)


def _parts(settings: Settings) -> Iterable[Part]:
    yield from (look.look(settings, "sparsity", length=length) for length in _lengths(settings))
    yield look.look(settings, "sparsity", text="wiki")
    yield from (look.look(settings, "accumulated", text=text) for text in TEXTS)
    yield from (lm.lm(settings, f"own:{name}", share) for name in ("lightest", "chance") for share in WITHOUT)
    yield from (lm.lm(settings, cache, 0.2) for cache in ("full", "h2o", "local_only"))
    yield _global(settings)


def _judge(settings: Settings, found: Found) -> Judgement:
    sparse = {length: look.by_layer(found[look.look(settings, "sparsity", length=length)]["sparsity"])
              for length in _lengths(settings)}  # fmt: skip
    longest = sparse[_lengths(settings)[-1]]
    wiki = look.by_layer(found[look.look(settings, "sparsity", text="wiki")]["sparsity"])
    heavy = {text: found[look.look(settings, "accumulated", text=text)] for text in TEXTS}
    shares = {text: look.top_share(result, HEAVY) for text, result in heavy.items()}
    layers = range(len(longest))
    attention = [
        {"layer": str(i)} | {f"sparsity, {n} tokens": f"{100 * each[i]:.1f} %" for n, each in sparse.items()}
        | {"of wiki": f"{100 * wiki[i]:.1f} %"}
        | {f"top 20 % of {text}": f"{100 * shares[text][i]:.0f} %" for text in TEXTS}
        | {f"exponent, {text} (R²)": f"{look.by_layer(r['exponent'])[i]:.2f} ({look.by_layer(r['fit'])[i]:.2f})"
           for text, r in heavy.items()}
        for i in layers
    ]  # fmt: skip
    full = found[lm.lm(settings, "full", 1.0)]
    lost = {(n, s): found[lm.lm(settings, f"own:{n}", s)] for n in ("lightest", "chance") for s in WITHOUT}
    names = {"lightest": "the heaviest evicted", "chance": "random ones evicted"}
    masked = [
        {"policy": names[n]} | {f"{s:g} kept": ", ".join(lm.cells(lost[n, s], full).values()) for s in WITHOUT}
        for n in names
    ]
    scopes = {"h2o": found[lm.lm(settings, "h2o", 0.2)], "global": found[_global(settings)],
              "local_only": found[lm.lm(settings, "local_only", 0.2)]}  # fmt: skip
    statistics = [{"statistics": "full"} | dict(lm.cells(full, full))]
    statistics += [{"statistics": name} | dict(lm.cells(result, full)) for name, result in scopes.items()]
    cost = lm.compare("heaviest 5 % against random 20 % evicted", lost["lightest", 0.95], lost["chance", 0.8], settings)
    local = {name: lm.compare(f"{name} against local_only at 0.2", scopes[name], scopes["local_only"], settings)
             for name in ("h2o", "global")}  # fmt: skip
    gap = math.expm1(float(np.mean(lm.nats(scopes["h2o"]) - lm.nats(scopes["global"]))))
    sparse_layers, thin = int(np.sum(longest >= 0.95)), int(np.sum(longest < 0.9))
    least = min(float(each.min()) for each in shares.values())
    shown = ", ".join(f"{100 * each:.1f} %" for each in longest)
    uniform = look.uniform_mass(heavy["book"]["mass"].shape[1])
    flat = look.top_share({"mass": uniform[None]}, HEAVY)[0]
    return Judgement(
        tables=[
            Table("(a, b) Attention below 1 % of its row's maximum, and accumulated attention", attention),
            Table("(c) Perplexity without heavy hitters, the newest half protected", masked),
            Table("(d) Perplexity at 0.2 by what scores are summed over", statistics),
        ],
        confirm=[
            Claim("(a) sparsity is at least 95 % in all layers but one", sparse_layers >= len(longest) - 1, shown),
            Claim("(b) the top 20 % of tokens hold over 80 % of the mass in every layer", least > 0.8,
                  f"the least is {100 * least:.0f} %"),
            Claim("(c) losing the heaviest 5 % costs more than losing a random 20 %", cost.higher, cost.result),
            Claim("(d) h2o is within 1 % of the perplexity of global statistics", abs(gap) <= 0.01, f"{gap:+.2%}"),
            Claim("(d) both are better than local_only", all(each.lower for each in local.values()),
                  ", ".join(f"{name}: {each.result}" for name, each in local.items())),
        ],
        contradict=[
            Claim("(a) sparsity is under 90 % in half of the layers", thin >= len(longest) / 2, shown),
            Claim("(c) losing the heaviest 5 % is no worse than a random 20 %", cost.difference <= 0, cost.result),
            Claim("(d) global statistics are better by more than 2 %", gap > 0.02, f"{gap:+.2%}"),
            Claim("(d) local_only is as good as h2o", lm.as_good(local["h2o"]), local["h2o"].result),
        ],
        comparisons=[cost, *local.values()],
        notes=[
            f"Where each query attends to all tokens before it alike, the top 20 % hold {100 * flat:.0f} %, and the "
            f"exponent is {look.exponent_of(uniform):.2f}.",
            "Short rows are less sparse. How often words co-occur, which (b) sets beside accumulated attention, is not "
            "measured. Global statistics are those of the authors' masks, under which the queries of the prompt see no "
            "more than those after it; h2o's prompt is read whole.",
        ],
        draw=lambda: figures.curves([
            figures.Panel("Sparsity by layer", "layer", "% below 1 % of the row's maximum",
                          {f"{n} tokens": (list(layers), (100 * each).tolist()) for n, each in sparse.items()}),
            figures.Panel("Accumulated attention of the book", "rank of the token", "attention",
                          {f"layer {i}": (list(range(1, heavy["book"]["mass"].shape[1] + 1)),
                                          heavy["book"]["mass"][i].tolist()) for i in layers}, log_x=True, log_y=True),
        ]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_fig2",
        question="How sparse is attention, is accumulated attention a power law, and what do its heavy hitters carry?",
        here="Attention on a book and on WikiText-2; perplexity of the book for (c) and (d).",
        parts=_parts,
        judge=_judge,
    ),
)
