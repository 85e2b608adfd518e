"""How well drafts of several budgets would be accepted: probabilities of a draft beside those of the full cache.

The texts are samples of the model itself after prompts, so that they are what is drafted for. Drafts whose cache, or
whose choice for each token, does not depend on rounds are compared token by token on these texts
(`kvjax.analysis.acceptance`). Drafts of ``seen`` choose slots at the start of a round: they are counted in rounds of
one draft, accepted by the ``ratio`` rule, whose chance is the same sum.
"""

import jax
import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import lengths
from experiments.bench.speculate import drafter, model_of, prompts
from kvjax import analysis, policies
from kvjax.errors import ConfigError
from kvjax.generation.sampling import Sample
from kvjax.models.model import Model
from kvjax.speculation.drafts import Drafter, Seen
from kvjax.typing import JsonObject

CONTEXT, ROWS, LEAST = 768, 4, 64
SAMPLER = Sample(1.0)
DRAFTS = (
    "retrieval", "quest(first_layer=0)", "own(window)", "own(streaming_llm)", "own(h2o)", "own(snapkv)", "seen(window)",
    "seen(h2o)",
)  # fmt: skip


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each draft and budget: 64 slots, twice as many, and so on up to --slots.

    Raises:
      ConfigError: several lengths.
    """
    sizes = lengths(values) or [CONTEXT]
    if len(sizes) > 1:
        raise ConfigError(f"bench acceptance takes one --context; got {','.join(map(str, sizes))}.")
    (context,) = sizes
    model = model_of(values, context + values.tokens + 2)
    prompt = prompts(values, model, context, ROWS)
    new = kvjax.generate(
        model, prompt, policies.full(), max_new_tokens=values.tokens, sampler=SAMPLER, key=jax.random.key(0)
    ).tokens
    # [B, n + N]
    text = np.concatenate([prompt, new], axis=1)
    rows = []
    for name in values.drafts or DRAFTS:
        slots = LEAST
        while slots <= values.slots:
            row = {"context": context, "batch": len(prompt), "new tokens": values.tokens, "draft": name, "slots": slots}
            rows.append(row | measured(model, text, context, drafter(name, slots)))
            slots *= 2
    return rows


def measured(model: Model, text: np.ndarray, context: int, draft: Drafter) -> JsonObject:
    """Returns the acceptance of a draft, as a part of a row.

    Args:
      model: the target.
      text: [B, n + N] int32, prompts and what the model has sampled after them.
      context: n.
      draft: what drafts.
    """
    if isinstance(draft, Seen):
        made = kvjax.speculate(
            model, text[:, :context], max_new_tokens=text.shape[1] - context, draft=draft, gamma=1, accept="ratio",
            sampler=SAMPLER, key=jax.random.key(0),
        )  # fmt: skip
        assert made.drafts is not None
        return {"by": "rounds", "chance": made.drafts.acceptance, "agreement": None, "KL, nats": None}
    found = analysis.acceptance(model, text, draft, prompt_length=context)
    divergence = float(found.kl.sum() / found.counts.sum())
    return {"by": "tokens", "chance": found.chance, "agreement": found.agreement, "KL, nats": divergence}
