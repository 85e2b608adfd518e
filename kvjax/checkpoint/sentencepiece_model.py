"""A SentencePiece model as a tokenizer of the package ``tokenizers``.

SentencePiece splits texts into pieces; ``tokenizers`` finds added tokens in texts, by their flags, and makes text of
ids, both as in folders of other kinds.
"""

import functools
from typing import TYPE_CHECKING

from kvjax.checkpoint.readers import Json
from kvjax.checkpoint.special_tokens import SpecialTokens

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"  # as pieces have it
CONTROL, USER_DEFINED = 3, 4  # types of pieces
#: Classes of transformers 5 that change no character, whatever the model says, and write a space before a text if it
#: begins with none.
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")


class Model:
    """A SentencePiece model.

    Attributes:
      backend: has the pieces, and finds added tokens; it does not split texts into pieces.
      named: the special tokens of the model: ``bos_token``, ``eos_token`` and ``unk_token`` -> text.
      extra: text and flags of the other pieces that are found in texts as they are.
    """

    def __init__(self, content: bytes, settings: Json, tokens: SpecialTokens):
        """Loads a model.

        Args:
          content: of tokenizer.model.
          settings: from `kvjax.checkpoint.special_tokens.read_settings`.
          tokens: the tokens that other files name.
        """
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2 as messages

        name = settings.get("tokenizer_class")
        self._llama = isinstance(name, str) and name.removesuffix("Fast") in _LLAMA
        self._whole = whole = sentencepiece.SentencePieceProcessor(model_proto=content)
        model = messages.ModelProto.FromString(content)  # type: ignore[attr-defined]  # made when it is imported
        rules = model.normalizer_spec
        rules.add_dummy_prefix = False
        if self._llama:
            rules.remove_extra_whitespaces, rules.precompiled_charsmap = False, b""
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        prefix = self._llama or whole.normalize("a").startswith(SPACE)
        self._prefix = prefix and settings.get("add_prefix_space") is not False
        # Whether a space is written before a text that follows an added token, too.
        legacy = settings.get("legacy")
        self._everywhere = bool(not self._llama if legacy is None else legacy)
        ids = {"bos_token": whole.bos_id(), "eos_token": whole.eos_id(), "unk_token": whole.unk_id()}
        self.named = {name: whole.id_to_piece(number) for name, number in ids.items() if number >= 0}
        # SentencePiece itself finds the pieces that its users defined, but writes a space before them.
        found = (CONTROL, USER_DEFINED) if self._llama else (CONTROL,)
        self.extra: list[Json] = [
            {"content": piece.piece, "special": piece.type == CONTROL, "normalized": False}
            for piece in model.pieces
            if piece.type in found
        ]
        self.backend = self._backend(tokens)

    def _backend(self, tokens: SpecialTokens) -> "tokenizers.Tokenizer":
        from tokenizers import Tokenizer, decoders, models

        whole = self._whole
        texts = [whole.id_to_piece(number) for number in range(whole.vocab_size())]
        for number, token in tokens.added.items():
            # An id of the model may have got another text, for example that of a piece without use.
            if not self._llama and 0 <= number < len(texts) and token["content"] not in texts:
                texts[number] = token["content"]
        vocab = {text: number for number, text in enumerate(texts)}
        made = Tokenizer(models.WordLevel(vocab, unk_token=texts[whole.unk_id()]))
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if self._prefix else steps)
        return made

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """Id -> text of the added tokens, once all were added."""
        return {number: token.content for number, token in self.backend.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        """Converts a text to ids: added tokens to themselves, and what is between them to pieces."""
        found: list[int] = []
        made = self.backend.encode(text, add_special_tokens=False)
        for number, (start, end) in zip(made.ids, made.offsets, strict=True):
            part = text[start:end]
            # The spaces next to an added token are part of it if its flags say so.
            if part.strip() == self._added.get(number, "\0").strip():
                found.append(number)
            elif part:
                found += self._split(part, begins=start == 0)
        return found

    def _split(self, part: str, *, begins: bool) -> list[int]:
        """Converts a text without added tokens to ids.

        Args:
          part: the text.
          begins: whether it begins the whole text.
        """
        if not self._prefix or not (begins or self._everywhere):
            return self._pieces.encode(part)
        if self._llama:
            return self._pieces.encode(part if part[0] in (" ", SPACE) else f" {part}")
        return self._whole.encode(part)
