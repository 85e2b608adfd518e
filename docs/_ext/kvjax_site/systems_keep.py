"""Published policies: which tokens stay."""

from kvjax_site.system import System

SLOTS = "tests/laws/test_slots.py"
MERGES = "tests/policies/test_merge.py"
GATES = "tests/training/test_objectives.py"

KEEP = (
    System(
        "keep", "Sparse Transformers", "1904.10509", ("kvjax.policies.strided", "kvjax.policies.fixed"), test=SLOTS,
        form="its patterns, within a budget", figure="figure 1 of H2O",
    ),
    System(
        "keep", "Scissorhands", "2305.17118", ("kvjax.policies.scissorhands",), test=SLOTS, figure="policies",
        form="counts queries above the uniform share; one budget for all layers unless several are given",
    ),
    System(
        "keep", "H2O", "2306.14048",
        (
            "kvjax.policies.h2o", "kvjax.policies.heavy_only", "kvjax.policies.h2o_decay", "kvjax.policies.local_only",
            "kvjax.policies.window", "kvjax.policies.with_heavy_hitters",
        ),
        test=SLOTS, figure="papers", form="per KV head; other forms of its code by `variant=`",
    ),
    System(
        "keep", "StreamingLLM", "2309.17453", ("kvjax.policies.streaming_llm",), test=SLOTS, figure="policies",
    ),
    System("keep", "TOVA", "2401.06104", ("kvjax.policies.tova",), test=SLOTS, figure="policies"),
    System(
        "keep", "RoCo (EasyKV)", "2402.06262", ("kvjax.policies.roco", "kvjax.policies.mean_attention"), test=SLOTS,
        figure="papers", form="one rule for prompts, blocks and decoding",
    ),
    System(
        "keep", "CORM", "2404.15949", ("kvjax.policies.scissorhands",), test="tests/laws/test_reference.py",
        spec=(("policy", "scissorhands(history=64)"),),
        form="by the number of recent queries above the uniform share, of which the paper asks for one",
    ),
    System(
        "keep", "SnapKV", "2404.14469", ("kvjax.policies.snapkv",), test=SLOTS, figure="policies",
        form="one choice per KV head",
    ),
    System("keep", "PyramidKV", "2406.02069", ("kvjax.policies.pyramidkv",), test=SLOTS, figure="policies"),
    System(
        "keep", "LoCoCo", "2406.05317", ("kvjax.policies.lococo", "kvjax.training.train_merge"), test=MERGES,
        command="python -m experiments.train_merge",
        spec=(("policy", "h2o(every=32, merge=lococo(16))"),), figure="trained merge",
    ),
    System("keep", "L2 norm of keys", "2406.11430", ("kvjax.policies.knorm",), test=SLOTS, figure="policies"),
    System(
        "keep", "VATP", "2406.12335", ("kvjax.policies.value_norm",), test=SLOTS, figure="policies",
        spec=(("policy", "value_norm(h2o)"),), form="the Euclidean norm",
    ),
    System(
        "keep", "D2O", "2406.13035", ("kvjax.policies.d2o", "kvjax.analysis.density_weights"), test=MERGES,
        spec=(("policy", "h2o(merge=d2o())"),), form="budgets of layers by `kvjax.analysis.budgets`, before a run",
    ),
    System(
        "keep", "KVMerger", "2407.08454", ("kvjax.policies.kvmerger",), test=MERGES,
        spec=(("policy", "h2o(merge=kvmerger())"),), form="merges into the neighbour alone, without sets of tokens",
    ),
    System(
        "keep", "CaM", "", ("kvjax.policies.cam",), test=MERGES, spec=(("policy", "h2o(merge=cam())"),),
        form="adds the expected value instead of a draw",
    ),
    System(
        "keep", "AdaKV", "2407.11550", ("kvjax.policies.adakv",), test=SLOTS, figure="policies",
        spec=(("policy", "adakv(snapkv(window=16))"),), form="heads have arrays of one size",
    ),
    System(
        "keep", "RazorAttention", "2407.15891", ("kvjax.policies.razor_attention", "kvjax.analysis.retrieval_heads"),
        test="tests/policies/test_heads.py", figure="heads", form="slots or a fraction instead of max(S₀, n/C)",
    ),
    System(
        "keep", "Elastic Cache", "2407.18121", ("kvjax.policies.anchors",), test=MERGES,
        spec=(("policy", "h2o(merge=anchors())"),),
        form="its merge, with any policy; `phases(snapkv(0.2), window(64))` evicts at a fixed distance from the newest "
        "token, as its second stage does; no images",
    ),
    System(
        "keep", "FINCH", "2408.00167", ("kvjax.policies.snapkv",), test=SLOTS,
        spec=(("policy", "snapkv(window=16, kernel=1)"),),
        form="the window is the question; sums are not normalized, and a prompt is compressed once, not chunk by chunk",
    ),
    System(
        "keep", "LongGen", "2410.01485", ("kvjax.policies.longgen",), test="tests/policies/test_layers.py",
        form="on any model, without its training",
    ),
    System(
        "keep", "Locret", "2410.01805", ("kvjax.policies.learned", "kvjax.training.AnswerAttention"), test=GATES,
        spec=(("policy", "learned(gate=qkv(width=64), recent=16)"),),
    ),
    System(
        "keep", "DuoAttention", "2410.10819", ("kvjax.policies.duo_attention", "kvjax.analysis.head_gates"),
        test="tests/analysis/test_gates.py", form="any table of heads",
    ),
    System(
        "keep", "Attention-Gate", "2410.12876", ("kvjax.policies.learned", "kvjax.training.PromptEviction"), test=GATES,
        spec=(("policy", "learned(gate=attention(), every=None, threshold=0.5)"),), form="the model stays constant",
    ),
    System(
        "keep", "EMS", "2412.08521", ("kvjax.policies.ems",), test=SLOTS, figure="policies",
        form="from the paper's text; one budget for all heads",
    ),
    System(
        "keep", "ZigZagKV", "2412.09036", ("kvjax.analysis.entropy_weights", "kvjax.analysis.budgets"),
        test="tests/analysis/test_budgets.py", form="budgets of layers, measured before a run, for any policy",
    ),
    System(
        "keep", "SCOPE", "2412.13649", ("kvjax.policies.phases",), test=SLOTS,
        spec=(("policy", "phases(snapkv(window=16), h2o(every=16))"),), form="any two policies",
    ),
    System(
        "keep", "ChunkKV", "2502.00299", ("kvjax.policies.chunkkv",), test=SLOTS, figure="policies",
        spec=(("policy", "chunkkv(snapkv(window=16))"),), form="fills its budget; layers do not share a choice",
    ),
    System(
        "keep", "CriticalKV", "2502.03805", ("kvjax.policies.critical",), test=SLOTS, figure="policies",
        spec=(("policy", "critical(h2o)"),),
    ),
    System("keep", "MorphKV", "2503.00979", ("kvjax.policies.morphkv",), test=SLOTS, figure="policies"),
    System("keep", "Q-Filters", "2503.02812", ("kvjax.policies.qfilters",), test=SLOTS, figure="policies"),
    System("keep", "LagKV", "2504.04704", ("kvjax.policies.lagkv",), test=SLOTS, figure="policies"),
    System(
        "keep", "CAOTE", "2504.14051", ("kvjax.policies.caote",), test=SLOTS, figure="policies",
        spec=(("policy", "caote(h2o)"),),
    ),
    System("keep", "KeyDiff", "2504.15364", ("kvjax.policies.keydiff",), test=SLOTS, figure="policies"),
    System(
        "keep", "KVzip", "2505.23416", ("kvjax.policies.kvzip", "kvjax.policies.kvgrad"),
        test="tests/generation/test_prompt_replay.py", figure="unseen questions",
        spec=(("policy", "adakv(kvzip, safeguard=0, layers=True)"),), form="without `adakv`, one budget for each head",
    ),
    System("keep", "R-KV", "2505.24133", ("kvjax.policies.rkv",), test=SLOTS, figure="chance"),
    System(
        "keep", "DMS", "2506.05345", ("kvjax.policies.learned", "kvjax.training.DelayedEviction"), test=GATES,
        spec=(("policy", "learned(gate=channel(output='sigmoid'), recent=16, threshold=0.5)"),),
        form="the model stays constant",
    ),
    System(
        "keep", "Cartridges", "2506.06266", ("kvjax.cartridge", "kvjax.policies.matched"),
        test="tests/generation/test_cartridge.py", form="starts from `matched`, and trains on the text's continuation",
    ),
    System("keep", "LazyEviction", "2506.15969", ("kvjax.policies.lazy",), test=SLOTS, figure="policies"),
    System(
        "keep", "Compactor", "2507.08143", ("kvjax.policies.compactor", "kvjax.policies.leverage"), test=SLOTS,
        figure="policies",
    ),
    System(
        "keep", "LaCache", "2507.14204", ("kvjax.policies.ladder",), test=SLOTS, figure="policies",
        form="units of one length in every pass",
    ),
    System("keep", "CurDKV", "2509.15038", ("kvjax.policies.cur",), test=SLOTS, figure="policies"),
    System(
        "keep", "Expected Attention", "2510.00636", ("kvjax.policies.expected_attention",), test=SLOTS,
        figure="policies", form="weighs by ‖v‖, as its code",
    ),
    System("keep", "G-KV", "2512.00504", ("kvjax.policies.gkv",), test=SLOTS, figure="policies"),
    System(
        "keep", "TRIM-KV", "2512.03324", ("kvjax.policies.learned", "kvjax.training.Distillation"), test=GATES,
        spec=(("policy", "learned(gate=mlp(width=512, output='log_sigmoid'), age=True, every=128)"),),
    ),
    System(
        "keep", "WG-KV", "2512.17452", ("kvjax.policies.learned", "kvjax.training.Admission"), test=GATES,
        spec=(("policy", "learned(gate=linear(output='sigmoid'), recent=16, threshold=0.1)"),),
        form="what is not admitted stays while it is recent",
    ),
    System(
        "keep", "KVzap", "2601.07891", ("kvjax.policies.learned", "kvjax.training.ReplayedScore"), test=GATES,
        spec=(("policy", "learned(gate=mlp(width=512), recent=16, threshold=-4.0)"),), figure="trained gate",
    ),
    System(
        "keep", "Fast KVzip", "2601.17668", ("kvjax.policies.learned", "kvjax.training.ReplayedScore"), test=GATES,
        spec=(("policy", "learned(gate=sink(), recent=16)"),),
    ),
    System(
        "keep", "TriAttention", "2604.04921", ("kvjax.policies.triattention",), test=SLOTS, figure="policies",
        form="heads do not share a budget; the prompt stays under `phases(full(), triattention)`",
    ),
    System(
        "keep", "VaSE", "2606.03928",
        ("kvjax.policies.vase", "kvjax.policies.vase_dkv", "kvjax.policies.value_aware"), test=SLOTS,
        figure="policies",
    ),
    System(
        "keep", "Random eviction, prompt kept", "2609.03430",
        ("kvjax.policies.random_control", "kvjax.policies.random"),
        test="tests/policies/test_layers.py", figure="chance",
    ),
)  # fmt: skip
