"""GGUF files, the format of llama.cpp: one file, or several parts, with settings, vocabulary and weights.

`container` reads the header, `architectures` converts it to a ``config.json`` and `vocabulary` to the files of a
tokenizer. `weights` gives the tensors the names of Hugging Face checkpoints, and `elements` dequantises them, or
`codes` keeps the codes. The rest of loading is the same for all formats.

The format is described in the repository ggml-org/ggml, docs/gguf.md.
"""

from kvjax.checkpoint.gguf.architectures import config_json
from kvjax.checkpoint.gguf.codes import KEPT
from kvjax.checkpoint.gguf.container import SUFFIX, Container, parts, read
from kvjax.checkpoint.gguf.vocabulary import tokenizer_files
from kvjax.checkpoint.gguf.weights import coded, stored, tensors

__all__ = [
    "KEPT",
    "SUFFIX",
    "Container",
    "coded",
    "config_json",
    "parts",
    "read",
    "stored",
    "tensors",
    "tokenizer_files",
]
