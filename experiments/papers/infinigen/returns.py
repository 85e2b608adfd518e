"""InfiniGen, Figure 20: queries that attend to few keys, and keys that come back."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import facts, look
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

LATE = (256, 512, 1023)
SHARES = (0.01, 0.05, 0.1)
AROUND = 16  # queries up to each of these
LONG = 250
HALF = 0.5  # of the queries


def _fig20_parts(settings: Settings) -> Iterable[Part]:
    return [look.look(settings, "keys_for_mass"), facts.fact(settings)]


def _fig20(settings: Settings, found: Found) -> Judgement:
    keys = found[look.look(settings, "keys_for_mass")]["keys"].astype(np.float64)
    at = [settings.scale.tokens(query + 1) - 1 for query in LATE]
    # [L, B, H, T]: of the visible keys
    needed = keys / np.arange(1, keys.shape[3] + 1)
    few = {(s, q): float(np.mean(needed[..., q - AROUND + 1 : q + 1] < s)) for s in SHARES for q in at}
    table = [
        {"under": f"{100 * s:g} % of the keys"} | {f"queries to {q}": f"{100 * few[s, q]:.1f} %" for q in at}
        for s in SHARES
    ]
    part = facts.fact(settings)
    result = found[part]
    quiet, paid, silent = (np.median(result[name], axis=1) for name in ("quiet", "paid", "silent"))
    group = quiet.shape[1] // result["heads"].shape[1]
    retrieval = np.repeat(result["heads"], group, axis=1)
    rows = [
        {"layer": str(i), "head": str(h), "retrieval head": "yes" if retrieval[i, h] else "no",
         "quiet queries before": f"{100 * silent[i, h]:.0f} %",
         "longest quiet stretch": f"{quiet[i, h]:.0f} tokens", "then, to the fact": f"{paid[i, h]:.2f}"}
        for i, h in sorted(np.ndindex(quiet.shape), key=lambda each: -paid[each])[:12]
    ]  # fmt: skip
    long = settings.scale.tokens(LONG)
    back = (quiet >= long) & (paid > facts.LOUD)
    paying = paid > facts.LOUD
    throughout = not (silent[paying] >= HALF).any()
    rises = all(few[s, at[-1]] > few[s, at[0]] for s in SHARES[1:])
    named = ", ".join(f"{i}.{h}" for i, h in np.argwhere(back & retrieval))
    shown = ", ".join(f"{100 * s:g} %: {100 * few[s, at[0]]:.1f} to {100 * few[s, at[-1]]:.1f} %" for s in SHARES[1:])
    curve = result["curve"]
    after = np.flatnonzero(~np.isnan(curve))
    return Judgement(
        tables=[
            Table("(a) Queries whose attention (0.9 of it) is on few of the keys that they see", table),
            Table("(b) Medians over prompts: attention to a passkey, the twelve heads that pay it most when asked",
                  rows),
        ],
        confirm=[
            Claim("(a) the share of queries rises with the length, under 5 % and under 10 % of the keys", rises, shown),
            Claim(f"(b) a retrieval head is quiet for {long} tokens or more, then pays the fact over {facts.LOUD:g}",
                  bool((back & retrieval).any()), named or "none"),
        ],
        contradict=[
            Claim("(b) the heads that pay it are not quiet before: the fact is attended throughout", throughout,
                  ", ".join(f"{i}.{h}: {100 * silent[i, h]:.0f} % quiet" for i, h in np.argwhere(paying))),
        ],
        notes=[
            f"Quiet: the query pays a token of the passkey less than {facts.QUIET:g} divided by the number of tokens "
            f"that it sees. {part.prompts} prompts, the fact {part.nearest} to {part.farthest} tokens back.",
            "This is why a policy that evicts what is not attended to loses a fact before it is asked for.",
        ],
        draw=lambda: figures.curves([
            figures.Panel("(b) a passkey, one head", "position of the query", "attention to the passkey",
                          {"paid": (after.tolist(), curve[after].tolist())}),
        ]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig20",
        question="Do more queries attend to few keys as texts grow, and can an unimportant key come back?",
        here="(a) keys that hold 0.9 of the attention, of those that a query sees; (b) the attention that passkeys "
        "receive until they are asked for.",
        parts=_fig20_parts,
        judge=_fig20,
        needs="a model and memory for a million tokens; the lengths here end at the model's positions.",
    ),
)
