"""The tokenizer of a GGUF file, as the files of a Hugging Face folder: token ids are those of llama.cpp.

A byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``) becomes tokenizer.json; its metadata name the rule by which texts
are split into words, and the rules are here. SentencePiece (``llama``) becomes tokenizer.model, with the same pieces,
scores and types.
"""

import json
import warnings
from collections.abc import Sequence
from typing import Any

from kvjax.checkpoint.gguf.container import Container
from kvjax.checkpoint.gguf.metadata_errors import checked
from kvjax.checkpoint.special_tokens import CONFIG_FILE
from kvjax.errors import CheckpointError, ConfigError, shown
from kvjax.models.values import Json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of tokens, in SentencePiece too
_PREFIX = "tokenizer.ggml."
_SPACE_RUN = r"\s+(?!\S)"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACE_RUN}"
_ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES = rf"\s*[\r\n]+|{_SPACE_RUN}|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: int) -> str:
    """Returns the expression of GPT-4 and LLaMA 3, with numbers of at most `digits` digits."""
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased(digits: int, endings: str) -> str:
    """Returns the expression of GPT-4o and tekken, where a word begins at a capital after a small letter."""
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


#: Expressions by which texts are split into words, one after the other, by name.
_RULES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_words(3),),
    "qwen2": (_words(1),),
    "gpt-4o": (_cased(3, "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),),
    "tekken": (_cased(1, ""),),
}
#: Other names of ``tokenizer.ggml.pre`` for the same rules.
_SAME: dict[str, tuple[str, ...]] = {
    "gpt-2": ("mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral"),
    "qwen2": ("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"),
    "gpt-4o": ("llama4",),
}
#: Name of a rule -> rule.
PRE_TOKENIZERS = _RULES | {name: _RULES[rule] for rule, others in _SAME.items() for name in others}
#: Rules of vocabularies of which a whole word is taken if it is a token, whatever its merges.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
#: Rules of vocabularies whose texts begin with BOS unless the metadata specify otherwise.
_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
#: Special tokens: name in tokenizer_config.json -> key of metadata.
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_TEMPLATE = "tokenizer.chat_template"
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that keep the spaces after them


@checked
def tokenizer_files(container: Container) -> dict[str, bytes]:
    """Returns the files of the tokenizer, {} if a file has none.

    Raises:
      CheckpointError: if the vocabulary is damaged, or a package is not installed.
      ConfigError: if its kind, or the rule by which it splits texts into words, is not supported.
    """
    metadata, where = container.metadata, container.path
    kind = metadata.get(f"{_PREFIX}model", "none")
    if kind in ("none", "no_vocab"):
        return {}
    tokens, kinds = metadata.get(f"{_PREFIX}tokens"), metadata.get(f"{_PREFIX}token_type")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{where} is damaged: {_PREFIX}tokens must be texts, but is {shown(tokens)}.")
    kinds = [NORMAL] * len(tokens) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"{where} is damaged: {_PREFIX}token_type must have a type for each token.")
    settings: Json = {}
    for name, key in _NAMED.items():
        number = metadata.get(f"{_PREFIX}{key}")
        if isinstance(number, int) and 0 <= number < len(tokens):
            settings[name] = tokens[number]
    if template := _chat_template(container):
        settings["chat_template"] = template
    if kind == "gpt2":
        settings["add_bos_token"] = _adds_bos(container)
        made = {"tokenizer.json": _byte_level(container, tokens, kinds, settings)}
    elif kind == "llama":
        settings["add_bos_token"] = bool(metadata.get(f"{_PREFIX}add_bos_token", True))
        settings |= _phi3_flags(container, tokens, kinds)
        made = {"tokenizer.model": _sentencepiece(container, tokens, kinds)}
    else:
        raise ConfigError(
            f"{where}: a vocabulary of the kind {shown(kind)} is not supported; supported: gpt2 (byte-level BPE) and "
            "llama (SentencePiece)."
        )
    return made | {CONFIG_FILE: json.dumps(settings, ensure_ascii=False, indent=2).encode()}


def _chat_template(container: Container) -> str | list[Json] | None:
    """Returns the chat template, or all of them by name, as tokenizer_config.json has them."""
    metadata = container.metadata
    usual: str | None = metadata.get(_TEMPLATE)
    named = [
        {"name": key.removeprefix(f"{_TEMPLATE}."), "template": value}
        for key, value in metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    ]
    if not named:
        return usual
    return [{"name": "default", "template": usual}, *named] if usual else named


def _adds_bos(container: Container) -> bool:
    usual = container.metadata.get(f"{_PREFIX}pre") in _BOS
    return bool(container.metadata.get(f"{_PREFIX}add_bos_token", usual))


def _byte_level(container: Container, tokens: Sequence[str], kinds: Sequence[int], settings: Json) -> bytes:
    """Returns tokenizer.json of a byte-level BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    name, merges = container.metadata.get(f"{_PREFIX}pre"), container.metadata.get(f"{_PREFIX}merges")
    if name is None:
        warnings.warn(
            f"{container.path} does not name the rule by which texts are split into words ({_PREFIX}pre); the default "
            "rule of llama.cpp is used, and token ids may differ from those of training.",
            stacklevel=5,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{container.path}: texts are split into words by the rule {shown(name)}, which kvjax does not support; it "
            f"supports {', '.join(PRE_TOKENIZERS)}."
        )
    pairs = [tuple(merge.split(" ")) for merge in merges] if isinstance(merges, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):  # a pair
        raise CheckpointError(f"{container.path} is damaged: {_PREFIX}merges must be pairs of tokens.")
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=name in _WHOLE_WORDS))
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(f"{container.path} is damaged: its vocabulary and merges disagree ({error}).") from None
    split = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in PRE_TOKENIZERS[name]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_of])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    if settings["add_bos_token"] and (bos := settings.get("bos_token")) is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    return backend.to_str().encode()


def _sentencepiece(container: Container, tokens: Sequence[str], kinds: Sequence[int]) -> bytes:
    """Returns tokenizer.model."""
    from sentencepiece import sentencepiece_model_pb2 as messages

    metadata = container.metadata
    scores = metadata.get(f"{_PREFIX}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{container.path} is damaged: {_PREFIX}scores must have a number for each token.")
    model: Any = messages.ModelProto()  # type: ignore[attr-defined]  # made when it is imported
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    trained, rules = model.trainer_spec, model.normalizer_spec
    trained.model_type = trained.BPE
    trained.vocab_size = len(tokens)
    trained.byte_fallback = BYTE in kinds
    trained.unk_id = kinds.index(UNKNOWN) if UNKNOWN in kinds else -1
    trained.bos_id, trained.eos_id = (int(metadata.get(f"{_PREFIX}{key}_token_id", -1)) for key in ("bos", "eos"))
    for name, number in (("unk", trained.unk_id), ("bos", trained.bos_id), ("eos", trained.eos_id)):
        if number >= 0:
            setattr(trained, f"{name}_piece", tokens[number])
    rules.name, rules.escape_whitespaces, rules.remove_extra_whitespaces = "identity", True, False
    rules.add_dummy_prefix = bool(metadata.get(f"{_PREFIX}add_space_prefix", True))
    content: bytes = model.SerializeToString()
    return content


def _phi3_flags(container: Container, tokens: Sequence[str], kinds: Sequence[int]) -> Json:
    """Returns the flags of the special tokens of Phi-3, most of which swallow the spaces after them.

    GGUF has no such flags, and llama.cpp knows the model by its name.
    """
    name = str(container.metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return {}
    special = {
        number: token
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED) or token == "</s>"
    }
    return {
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "special": True,
                "normalized": False,
                "rstrip": token not in _KEEP_SPACES,
            }
            for number, token in special.items()
        }
    }
