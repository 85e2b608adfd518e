"""Names that other programs have for the entries of the registries.

Each is the nearest that the other program has, by its own documentation; definitions differ in details, which
docs/migrating.md and the docstrings of `experiments.peers` describe.
"""

from collections.abc import Mapping

KVPRESS = "[kvpress](https://github.com/NVIDIA/kvpress)"
TRANSFORMERS = "[transformers](https://huggingface.co/docs/transformers/kv_cache)"
LLAMA_CPP = "[llama.cpp](https://github.com/ggml-org/llama.cpp)"
EASYKV = "[EasyKV](https://github.com/DRSY/EasyKV)"
VLLM = "[vLLM](https://docs.vllm.ai)"
TENSORRT_LLM = "[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM)"

#: Entry -> (program, its name, what differs).
NAMES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "full": ((TRANSFORMERS, "DynamicCache", "grows with the text; `StaticCache` does not"),),
    "random": ((KVPRESS, "RandomPress", "of prompts"),),
    "window": ((KVPRESS, "StreamingLLMPress", "of prompts; keys keep their positions"),),
    "streaming_llm": (
        (KVPRESS, "KeyRerotationPress(StreamingLLMPress(...))", "of prompts, whose kept keys are rotated once"),
    ),
    "h2o": (
        (
            KVPRESS, "ObservedAttentionPress",
            "the mean attention that a prompt paid; while decoding, the newest query's alone; protects no slot",
        ),
    ),
    "h2o_decay": ((EASYKV, "h2o_head_decay", ""),),
    "tova": ((KVPRESS, "TOVAPress", "always keeps the newest token"),),
    "roco": ((EASYKV, "roco", ""),),
    "snapkv": ((KVPRESS, "SnapKVPress", ""),),
    "pyramidkv": ((KVPRESS, "PyramidKVPress", ""),),
    "knorm": ((KVPRESS, "KnormPress", "norms are not rounded"),),
    "keydiff": ((KVPRESS, "KeyDiffPress", ""),),
    "expected_attention": (
        (KVPRESS, "ExpectedAttentionPress", "while decoding, moments of the last hidden states alone"),
    ),
    "lagkv": ((KVPRESS, "LagKVPress", ""),),
    "leverage": ((KVPRESS, "LeverageScorePress", "keys are not rounded to a grid"),),
    "qfilters": ((KVPRESS, "QFilterPress", "filters have the opposite sign"),),
    "critical": ((KVPRESS, "CriticalKVPress", ""),),
    "cur": ((KVPRESS, "CURPress", ""),),
    "compactor": ((KVPRESS, "CompactorPress", "logits are not scaled; mean and deviation over the batch"),),
    "kvzip": ((KVPRESS, "KVzipPress", "slots are shared by all heads of all layers"),),
    "kvgrad": (
        (
            KVPRESS, "KVgradPress",
            "attention times the norms of an output and a gradient, the largest over the replay; slots are shared by "
            "all heads of all layers",
        ),
    ),
    "triattention": (
        (
            TENSORRT_LLM, "TriAttentionKvCacheCompressionConfig",
            "keeps the prompt in addition to its budget, as `phases(full(), triattention(...))`; reads the authors' "
            "calibration",
        ),
    ),
    "learned": (
        (KVPRESS, "DMSPress(KVzapPress(...))", "a gate of KVzap with a threshold; masks what it evicts"),
        (KVPRESS, "FastKVzipPress", "the gate `sink`; slots are shared by all heads of all layers"),
    ),
    "adakv": ((KVPRESS, "AdaKVPress", "masks what it evicts, so that no memory is freed"),),
    "chunkkv": ((KVPRESS, "ChunkKVPress", "keeps only whole chunks"),),
    "duo_attention": ((KVPRESS, "DuoAttentionPress", "masks what it evicts, so that no memory is freed"),),
    "think": ((KVPRESS, "ThinKPress", "sets channels to 0, so that no memory is freed"),),
    "fp16": ((LLAMA_CPP, "--cache-type-k f16 --cache-type-v f16", "its default"),),
    "int8": ((LLAMA_CPP, "--cache-type-k q8_0 --cache-type-v q8_0", "a scale for 32 channels, no zero"),),
    "int4": (
        (LLAMA_CPP, "--cache-type-k q4_1 --cache-type-v q4_1", "a scale and a zero for 32 channels"),
        (TRANSFORMERS, "QuantizedCache(nbits=4)", "the newest tokens are exact"),
    ),
    "int2": ((TRANSFORMERS, "QuantizedCache(nbits=2)", "the newest tokens are exact"),),
    "kivi": ((TRANSFORMERS, "QuantizedCache", "in the manner of KIVI"),),
    "fp8": ((VLLM, 'kv_cache_dtype="fp8"', "`fp8(scale=...)`: one scale of keys and one of values"),),
}  # fmt: skip


def lines(name: str) -> list[str]:
    """Returns the lines of an entry's page that say what others call it; none if nothing is known."""
    known = NAMES.get(name, ())
    if not known:
        return []
    listed = [f"- {program}: `{called}`{f' ({differs})' if differs else ''}" for program, called, differs in known]
    return [
        "## Elsewhere", "", "The nearest that other programs have; definitions differ in details, see "
        "[](../../migrating.md).", "", *listed, "",
    ]  # fmt: skip
