"""How tokens are drafted: values that a user gives, and checks of them before anything is traced."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.arguments import choice_argument, plain_signature
from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError, PolicyError, shown
from kvjax.generation.sampling import Greedy, Sampler, check_sampling, penalty_of
from kvjax.inputs import check_count
from kvjax.models.model import Model, check_model
from kvjax.policies import full
from kvjax.policies.base import Policy
from kvjax.policies.traits import refuses_ranking
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything

ACCEPT = ("shared", "ratio")
GAMMA = 4  # drafts of a round


@dataclasses.dataclass(frozen=True)
class Own:
    """Drafts with a cache of its own: that of plain decoding under a policy after the same tokens.

    Attributes:
      spec: the policy, or a `CacheSpec` with a storage and a selection too.
    """

    spec: Policy | CacheSpec


@dataclasses.dataclass(frozen=True)
class Seen:
    """Drafts from the slots of the target that a policy ranks highest, chosen anew in each round.

    The policy ranks all slots of the target by the statistics of the target's own attention, so that a slot which it
    passes over in one round may be read in a later one.

    Attributes:
      policy: an eviction policy with a budget, which ranks by positions or by statistics of attention.
    """

    policy: Policy


Drafter = Own | Seen | Selection | Policy | CacheSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """One level of drafts.

    Attributes:
      draft: how tokens are drafted: `own`, `seen`, a selection that reads the target's cache, or a policy or
        `CacheSpec` for `own`. None = ``own(full())``, for another model.
      gamma: the number of tokens that are drafted for the level before, or for the target; None = that of the call.
      accept: the rule by which the level before accepts them, ``shared`` or ``ratio``; None = that of the call.
      model: another model that drafts, with the vocabulary of the target; None = the target itself.
      sampler: how tokens are chosen from the logits of this level; None = as of the target.
    """

    draft: Drafter | None = None
    gamma: int | None = None
    accept: str | None = None
    model: Model | None = None
    sampler: Sampler | None = None


#: What `speculate` takes as ``draft``: one level, or several, the nearest to the target first.
Draft = Drafter | Level | Sequence[Drafter | Level]


@plain_signature
def own(policy: Policy | CacheSpec) -> Own:
    """Drafts with a small cache of its own.

    At the start of each round, it is the cache of plain decoding under the policy after the same tokens. It is
    prefilled like any cache, and what it held after each drafted token is kept until it is known which are accepted.

    Args:
      policy: which slots the cache keeps, or a `CacheSpec`.
    """
    return Own(policy)


@plain_signature
def seen(policy: Policy) -> Seen:
    """Drafts from the slots of the target's cache that a policy ranks highest, chosen anew in each round.

    Args:
      policy: an eviction policy with a budget, which ranks by positions or by statistics of attention, such as
        ``h2o(256)`` or ``window(256)``. Its statistics are of the target's attention, which sees every slot.
    """
    return Seen(policy)


@plain_signature
def level(
    draft: Drafter | None = None,
    *,
    gamma: int | None = None,
    accept: str | None = None,
    draft_model: Model | None = None,
    sampler: Sampler | None = None,
) -> Level:
    """Describes one level of drafts, where there are several.

    Args:
      draft: see `Level`.
      gamma: see `Level`.
      accept: see `Level`.
      draft_model: see `Level`.
      sampler: see `Level`.
    """
    return Level(draft, gamma, accept, draft_model, sampler)


def resolve_levels(model: Model, draft: Draft | None, base: Level, sampler: Sampler) -> tuple[Level, ...]:
    """Checks the levels of a call, and returns them with nothing left to default.

    Args:
      model: the target.
      draft: of the call.
      base: what levels have by default.
      sampler: of the target.

    Raises:
      InputError: a level that is not valid.
      PolicyError: a policy or selection that cannot draft.
    """
    check_sampling(sampler, None)
    given = list(draft) if isinstance(draft, list | tuple) else [draft]
    if not given:
        raise InputError("draft has no level; give one, such as kvjax.selection.retrieval(budget=512).")
    levels = tuple(_check_level(model, each, base, sampler) for each in given)
    for kind, what in ((Seen, "by a policy (seen)"), (Selection, "by a selection")):
        if sum(isinstance(each.draft, kind) for each in levels) > 1:
            raise InputError(f"only one level can read the target's cache {what}; leave out the others.")
    return levels


def _check_level(model: Model, given: Any, base: Level, sampler: Sampler) -> Level:
    """Returns one checked level."""
    each = given if isinstance(given, Level) else Level(given)
    gamma = base.gamma if each.gamma is None else each.gamma
    check_count("gamma", gamma)
    accept = base.accept if each.accept is None else each.accept
    choice_argument("accept", accept, ACCEPT, error=InputError)
    draft_model = base.model if each.model is None else each.model
    if draft_model is not None:
        check_model(draft_model, "draft_model")
    level_sampler = each.sampler or base.sampler or sampler
    check_sampling(level_sampler, None)
    if penalty_of(level_sampler) is not None or penalty_of(sampler) is not None:
        raise InputError(
            "a repetition penalty depends on the tokens that are accepted, and drafts are verified together; use a "
            "sampler without one."
        )
    if isinstance(sampler, Greedy) and isinstance(level_sampler, Greedy):
        accept = "shared"  # both rules are the same
    for one in (sampler, level_sampler):
        if accept == "ratio" and not (isinstance(one, Greedy) or hasattr(one, "filter")):
            raise InputError(
                f"accept='ratio' needs the probabilities of a sampler, from its `filter`; {one!r} has none."
            )
    drafts = _check_draft(each.draft, draft_model)
    if draft_model is not None and not isinstance(drafts, Own):
        raise InputError(
            f"draft={shown(drafts)} reads the target's cache, which another model cannot; leave out draft_model, or "
            "give the policy of its own cache."
        )
    if draft_model is not None and draft_model.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"the draft model has a vocabulary of {draft_model.config.vocab_size:,} tokens, and the target one of "
            f"{model.config.vocab_size:,}; they must be the same."
        )
    return Level(drafts, gamma, accept, draft_model, level_sampler)


def _check_draft(draft: Any, model: Model | None) -> Own | Seen | Selection:
    """Returns how a level drafts, checked; a policy means `own`."""
    if draft is None:
        if model is None:
            raise InputError(
                "draft is missing; give a selection such as kvjax.selection.retrieval(budget=512), "
                "kvjax.speculation.own(policy) or seen(policy), or a draft_model."
            )
        return Own(full())
    if isinstance(draft, Policy | CacheSpec):
        return Own(draft)
    if isinstance(draft, Own):
        if not isinstance(draft.spec, Policy | CacheSpec):
            raise PolicyError(f"own({shown(draft.spec)}): give a policy or a CacheSpec.")
        return draft
    if isinstance(draft, Seen):
        if not isinstance(draft.policy, Policy):
            raise PolicyError(f"seen({shown(draft.policy)}): give a policy.")
        if reason := refuses_ranking(draft.policy):
            raise PolicyError(
                f"seen({draft.policy.name}) cannot rank the target's slots: {reason}; use own({draft.policy.name}), or "
                "a policy such as h2o(256) or window(256)."
            )
        return draft
    if isinstance(draft, Selection):
        if draft.reads_all or draft == everything():
            raise PolicyError("a selection that reads everything drafts nothing sooner; give one such as retrieval.")
        draft = without_reuse(draft)
        if reason := refuses_selection(draft):
            raise PolicyError(f"the selection {draft.name} cannot draft: {reason}; use retrieval, quest or lserve.")
        return draft
    raise InputError(
        f"draft={shown(draft)} is not valid; give a selection, kvjax.speculation.own(policy), seen(policy), a policy, "
        "or a list of these."
    )


def without_reuse(selection: Selection) -> Selection:
    """Returns a selection without choices that stand for several steps: a choice stands for a round of drafts."""
    fields = {each.name for each in dataclasses.fields(selection)}  # type: ignore[arg-type]  # all are dataclasses
    standing = {name: value for name, value in {"every": 1, "reuse": None}.items() if name in fields}
    return dataclasses.replace(selection, **standing)  # type: ignore[type-var]


def refuses_selection(selection: Selection) -> str | None:
    """Returns why a selection cannot choose once for a round of drafts, or None if it can."""
    if selection.in_prompt or selection.prompt is not None or selection.whole_text:
        return "it hides slots of prompts, and the target reads them whole"
    if selection.budget is not None or selection.needs:
        return "it ranks slots by attention over what it has read itself"
    if selection.sees_values:
        return "it adds the mean of values to its output, which copies of slots do not have"
    if selection.watches or selection.ahead or selection.per_slot:
        return "it keeps numbers of each slot, which are not taken back where a draft is refused"
    return None
