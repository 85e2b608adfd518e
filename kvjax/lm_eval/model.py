"""The class that lm-evaluation-harness runs. Its rules of what is scored are those of lm_eval's own `HFLM`."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from tqdm.auto import tqdm

from kvjax import products
from kvjax.attention import Implementation
from kvjax.checkpoint import chat
from kvjax.checkpoint.huggingface import load
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.errors import ConfigError, InputError
from kvjax.generation.detokenize import marked_text
from kvjax.generation.sampling import Greedy, Sample, Sampler
from kvjax.lm_eval import options
from kvjax.lm_eval.runner import Pair, Runner
from kvjax.models.calibrate import calibrated
from kvjax.models.model import Model
from kvjax.policies import Policy
from kvjax.policies.budget import BudgetLike
from kvjax.selection import Selection
from kvjax.storage import Storage
from kvjax.storage.calibration import load_calibration
from kvjax.typing import JsonObject
from kvjax.version import __version__

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"kvjax.lm_eval needs lm-evaluation-harness: pip install 'kvjax[lm-eval]' ({error}).") from None

Answer = tuple[float, bool]
NEW_TOKENS = 256  # of a generation task that says nothing, as in lm_eval
SAMPLING = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


@register_model("kvjax")
class KVJaxLM(TemplateLM):
    """A decoder under a limited KV cache, as a model of lm_eval.

    All choices of a question are scored from copies of one cache. A full cache gives the results of ``--model hf``.
    """

    def __init__(
        self,
        path: str | Path | Model | None = None,
        *,
        pretrained: str | Path | Model | None = None,
        policy: str | Policy = "full",
        budget: BudgetLike = None,
        storage: str | Storage = "dense",
        selection: str | Selection = "everything",
        least_slots: int = options.MIN_SLOTS,
        calibration: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        prefill_block: int | None = None,
        implementation: Implementation = "auto",
        rolling_prompt: float = 0.5,
        max_length: int | None = None,
        max_gen_toks: int = NEW_TOKENS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ):
        """Loads a model.

        Args:
          path: see `kvjax.load`; or a model.
          pretrained: another name of `path`.
          policy: which slots the cache keeps, as text (`kvjax.specs.parse`) or a policy.
          budget: of the policies in the text: slots, or a fraction of each context.
          storage: how slots are held.
          selection: which slots a query reads.
          least_slots: slots that are kept of short contexts if `budget` is a fraction.
          calibration: a file of `python -m experiments.calibrate`, if the storage needs one.
          dtype: see `kvjax.load`.
          weights: see `kvjax.load`.
          prefill_block: see `kvjax.CacheOptions`.
          implementation: see `kvjax.CacheOptions`.
          rolling_prompt: see `kvjax.lm_eval.runner.Runner`.
          max_length: the most tokens that are fed for one request; None for the model's trained context.
          max_gen_toks: new tokens of generation tasks that do not say how many.
          add_bos_token: whether texts begin with BOS; None as the tokenizer says.
          prefix_token_id: the context of texts that have none; None for BOS, or EOS in a model without BOS.
          think_end_token: text after which the answer of a generation begins.
          seed: of sampling.
          batch_size: rows of a batch, or ``auto`` for 16.
          max_batch_size: not used.
          device: not used; JAX_PLATFORMS in the environment chooses.
          unknown: refused.

        Raises:
          KvjaxError: a text that says nothing known, a combination that cannot work, or a model that cannot be loaded.
        """
        super().__init__()
        if unknown:
            raise ConfigError(
                f"--model kvjax does not take {sorted(unknown)[0]!r}; it takes {', '.join(sorted(self._arguments()))}."
            )
        name = pretrained if path is None else path
        if name is None:
            raise ConfigError("--model kvjax needs a model: --model_args path=FOLDER, or the name of one on the hub.")
        self.spec = options.spec(policy, budget, storage, selection, least_slots)
        # Standard errors are otherwise bootstrapped in forks of this process, which JAX's threads do not survive.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        products.await_native()
        model = name if isinstance(name, Model) else load(name, dtype=dtype, weights=weights)
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{name} has no tokenizer, which texts need.")
        if calibration is not None:
            model = calibrated(model, self.spec, load_calibration(calibration))
        self._texts: Tokenizer = tokenizer
        self._name = "model" if isinstance(name, Model) else str(name)
        self.runner = Runner(
            model, self.spec, rows=options.rows(batch_size), max_length=max_length or model.config.max_positions,
            rolling_prompt=rolling_prompt, prefill_block=prefill_block, implementation=implementation,
        )  # fmt: skip
        self.max_gen_toks, self.think_end_token = max_gen_toks, think_end_token
        self._add_bos, self._prefix, self._key = add_bos_token, prefix_token_id, jax.random.key(seed)
        self._least_slots = least_slots
        self._chat_name: str | None = None
        self._contexts: list[int] = []

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "KVJaxLM":
        """Parses ``key=value,key=value``; lm_eval's parser would split a policy at its commas."""
        return cls.create_from_arg_obj(options.parsed(arg_string), additional_config)

    @property
    def max_length(self) -> int:
        return self.runner.max_length

    @property
    def batch_size(self) -> int:
        return self.runner.rows

    @property
    def eot_token_id(self) -> int:
        found = self._texts.eos_id
        if found is None:
            raise ConfigError(f"{self._name} has no end-of-text token, which the task needs.")
        return found

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self._texts.bos_id is None else self._texts.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, with BOS as asked for, or else as the model's texts begin."""
        wanted = self._add_bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and (begin := self._texts.token(self.prefix_token_id)):
            wanted = False if string.startswith(begin) else wanted
        if wanted is None:
            return self._texts.encode(string)
        bos = self._texts.bos_id
        ids = self._texts.encode(string, bos=False)
        return [bos, *ids] if wanted and bos is not None else ids

    def tok_decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._texts.decode(tokens)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Answer]:
        self._contexts += [len(context) for _, context, _ in requests]
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:

            def done(index: int, answer: Answer) -> None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                bar.update()

            return self.runner.scores([Pair(context, choice) for _, context, choice in requests], done)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        own: list[tuple[int, Pair]] = []
        for number, text in enumerate(texts):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.runner.window_length, context_len=1
            )
            own += [(number, Pair(*make_disjoint_window(window))) for window in windows]
        with tqdm(total=len(own), disable=disable_tqdm, desc="Running loglikelihood_rolling requests") as bar:
            scores = self.runner.windows([pair for _, pair in own], lambda _: cast(None, bar.update()))
        found = [0.0] * len(texts)
        for (number, _), score in zip(own, scores, strict=True):
            found[number] += score
        for text, score in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        found = [""] * len(requests)
        # As transformers does, whose other defaults lm_eval replaces.
        penalty = {"repetition_penalty": self.runner.model.generation.sampler.repetition_penalty}
        # Those of the same settings are generated together.
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True, default=str)].append(index)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for indices in alike.values():
                settings = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
                eos = self._texts.eos_id
                until = handle_stop_sequences(settings.pop("until", None), None if eos is None else self._text_of(eos))
                new_tokens, stop_texts = int(settings.pop("max_gen_toks")), [each for each in until if each]
                stop = sorted({*self.runner.model.eos_token_ids, *([] if eos is None else [eos])})

                contexts = [self.tok_encode(requests[index].args[0]) for index in indices]

                def done(
                    number: int, ids: np.ndarray, indices: list[int] = indices, stop_texts: list[str] = stop_texts,
                    contexts: list[list[int]] = contexts,
                ) -> None:  # fmt: skip
                    index = indices[number]
                    text = self._answer(contexts[number], ids, stop_texts)
                    found[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update()

                self._contexts += map(len, contexts)
                self.runner.texts(
                    contexts, new_tokens=new_tokens, stop=stop, sampler=sampler(penalty | settings), key=self._key,
                    done=done,
                    # A stop text may be part of the thoughts before an answer.
                    ended=() if self.think_end_token else stop_texts,
                )  # fmt: skip
        return found

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Chooses the template that `apply_chat_template` uses, and returns it; None if there is to be none."""
        if chat_template is False or chat_template is None:
            return None
        self._chat_name = chat_template if isinstance(chat_template, str) else None
        return chat.template(self._texts, self._chat_name)

    def apply_chat_template(self, chat_history: list[chat.Message], add_generation_prompt: bool = True) -> str:
        """Makes one text of a conversation; without its system message if the template refuses that."""
        source = chat.template(self._texts, self._chat_name)
        try:
            return chat.render(self._texts, source, chat_history, answer=add_generation_prompt)
        except chat.ChatTemplateError:
            others = [each for each in chat_history if each["role"] != "system"]
            return chat.render(self._texts, source, others, answer=add_generation_prompt)

    def get_model_info(self) -> JsonObject:
        """Returns the settings that results depend on, for results.json."""
        spec, config = self.spec, self.runner.model.config
        budget = spec.policy.budget
        leaves = jax.tree.leaves(self.runner.model.params)
        info = {
            "kvjax_version": __version__,
            "policy": spec.policy.name,
            "budget": None if budget is None else budget.value,
            "least_slots": self._least_slots if isinstance(getattr(budget, "value", None), float) else None,
            "storage": spec.storage.name,
            "selection": spec.selection.name,
            "prefill_block": self.runner.prefill_block,
            "rolling_prompt": self.runner.rolling_prompt if self.runner.changes else None,
            "max_length": self.max_length,
            "rows": self.batch_size,
            "model_num_parameters": sum(leaf.size for leaf in leaves),
            "model_dtype": str(leaves[0].dtype),
            "jax_version": jax.__version__,
            "platform": self.runner.model.platform,
        }
        if budget is not None and not budget.of_text and self._contexts:
            lengths = np.minimum(self._contexts, self.max_length)
            slots = np.array([np.mean(budget.slots(int(n), config.num_layers)) for n in lengths])
            info["kept_of_contexts"] = float(np.minimum(slots, lengths).sum() / lengths.sum())
        return info

    def _answer(self, context: list[int], ids: np.ndarray, stop_texts: list[str]) -> str:
        """The text of new tokens after a context, as `postprocess_generated_text` of lm_eval makes it.

        Thoughts are removed first: a stop text may be part of them. Both may end in a special token, which has no text.
        """
        text = marked_text(self._texts, context, ids)
        if self.think_end_token:
            text = text.after_last(self.think_end_token).stripped()
        return text.before(stop_texts).visible

    def _text_of(self, token: int) -> str | None:
        return self._texts.token(token) or None

    @classmethod
    def _arguments(cls) -> tuple[str, ...]:
        code = cls.__init__.__code__
        return code.co_varnames[1 : 1 + code.co_argcount - 1 + code.co_kwonlyargcount]


def sampler(settings: JsonObject) -> Sampler:
    """Returns the sampling method that settings of a generation describe.

    Raises:
      InputError: a setting that kvjax does not have.
    """
    if other := sorted(settings.keys() - SAMPLING):
        raise InputError(
            f"generation_kwargs: {other[0]!r} is not known; known: until, max_gen_toks, {sorted(SAMPLING)}."
        )
    penalty = float(settings.get("repetition_penalty") or 1.0)
    if not settings.get("do_sample"):
        return Greedy(penalty)
    top_p, min_p = (None if (p := settings.get(name)) is None else float(p) for name in ("top_p", "min_p"))
    return Sample(
        temperature=float(settings.get("temperature") or 1.0), top_k=settings.get("top_k") or None, top_p=top_p,
        min_p=min_p, repetition_penalty=penalty,
    )  # fmt: skip
