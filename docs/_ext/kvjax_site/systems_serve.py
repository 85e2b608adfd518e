"""Published systems of reuse, sharing and serving."""

from kvjax_site.system import System

CLOSED_FORMS = "tests/planning/test_closed_forms.py"

REUSE = (
    System(
        "reuse", "CacheGen", "2310.07240", ("kvjax.transport.CacheGen", "kvjax.transport.plan_transfer"),
        test="tests/transport/test_cachegen.py", figure="messages",
    ),
    System(
        "reuse", "Prompt Cache", "2311.04934", ("kvjax.reuse.blend",), test="tests/reuse/test_chunks.py",
        figure="chunks", form="`check=None`: nothing is recomputed; chunks lie one after the other, without a schema",
    ),
    System(
        "reuse", "CacheBlend", "2405.16444",
        ("kvjax.reuse.blend", "kvjax.serve.Documents", "kvjax.planning.offload_shares.plan_blend"),
        test="tests/reuse/test_worked_examples.py", figure="chunks",
    ),
    System("reuse", "PIE", "2407.03157", ("kvjax.reuse.edit",), test="tests/reuse/test_edit.py", figure="edits"),
    System(
        "reuse", "KV prediction", "2410.08391", ("kvjax.reuse.predict", "kvjax.training.train_predictor"),
        test="tests/reuse/test_prediction.py",
        command="python -m experiments.train_reuse --config=train_prediction_tiny", figure="learned reuse",
    ),
    System(
        "reuse", "EPIC", "2410.15332", ("kvjax.reuse.blend",), test="tests/reuse/test_chunks.py", figure="chunks",
        form="`check=None, first=4`: the first tokens of each chunk are recomputed",
    ),
    System(
        "reuse", "SCBench", "2412.10319", figure="turns",
        test="tests/experiments/test_scbench.py", form="its tasks, modes and scores, from local files",
        command="python -m experiments.leaderboard --config=leaderboard_turns_tiny",
    ),
    System(
        "reuse", "Cache augmentation", "2412.17747", ("kvjax.reuse.augment", "kvjax.training.train_coprocessor"),
        test="tests/reuse/test_augmentation.py",
        command="python -m experiments.train_reuse --config=train_augmentation_tiny", figure="learned reuse",
    ),
    System(
        "reuse", "APE", "2502.05431", ("kvjax.reuse.parallel",), test="tests/reuse/test_parallel.py", figure="chunks",
    ),
    System(
        "reuse", "Cache-Craft", "2502.15734",
        ("kvjax.reuse.craft", "kvjax.reuse.compute_variants", "kvjax.reuse.calibrate_alpha"),
        test="tests/reuse/test_worked_examples.py", figure="chunks",
        form="without the early stop for chunks that a question ignores",
    ),
    System(
        "reuse", "KVTC", "2511.01815", ("kvjax.transport.KVTC", "kvjax.transport.fit_transform"),
        test="tests/transport/test_kvtc.py", figure="messages",
    ),
    System(
        "reuse", "ProphetKV", "2602.02579", ("kvjax.reuse.blend",), test="tests/reuse/test_chunks.py", figure="chunks",
        form="`by_question=1`: by the votes of KV heads for the question; with a smaller part, deviations choose "
        "the others",
    ),
)  # fmt: skip

SHARE = (
    System(
        "share", "RadixAttention (SGLang)", "2312.07104", ("kvjax.PrefixStore",),
        test="tests/contexts/test_prefix_store.py", figure="prefixes",
        form="rows have copies; under eviction, a state is found where its blocks ended",
    ),
    System(
        "share", "RAGCache", "2404.12457", ("kvjax.PrefixStore",), test="tests/contexts/test_prefix_store.py",
        figure="prefixes",
        form="documents in one order; the least recently used goes first; prompts are read after retrieval",
    ),
    System(
        "share", "BatchLLM", "2412.03594", ("kvjax.serve.grouping.prefix_groups", "kvjax.contexts.with_prefix"),
        test="tests/serve/test_grouping.py", command="python -m experiments.batch", figure="shared",
        form="groups and their order; a batch's rows have copies of what they share, which `with_prefix` holds once",
    ),
    System(
        "share", "ChunkAttention", "2402.15220", ("kvjax.contexts.with_prefix",), test="tests/contexts/test_shared.py",
        figure="shared", form="one text that all rows follow; no tree of texts, and no kernel on GPUs",
    ),
    System(
        "share", "Hydragen", "2402.05099", ("kvjax.contexts.with_prefix",), test="tests/contexts/test_shared.py",
        figure="shared", form="attention in two parts, of which the shared one has the queries of all rows",
    ),
)  # fmt: skip

SERVE = (
    System(
        "serve", "Speculative decoding", "2211.17192", ("kvjax.speculate",), test="tests/speculation/test_speculate.py",
        figure="drafts", form="also with drafts that leave every sampled token as it is",
    ),
    System(
        "serve", "PagedAttention (vLLM)", "2309.06180", ("kvjax.planning.memory_layouts.row_bytes",), test=CLOSED_FORMS,
        command="python -m experiments.simulate layouts", form="a plan: fixed numbers of slots need no pages",
        figure="plans of layouts",
    ),
    System(
        "serve", "Infinite-LLM (DistAttention)", "2401.02669",
        ("kvjax.planning.memory_pool.simulate_pool", "kvjax.planning.attention_traffic.part_bytes"),
        test="tests/planning/test_memory_pool.py", command="python -m experiments.simulate pool",
        form="slots of a head lie on several devices of a mesh; its pool over instances as a plan",
        figure="plans of a pool",
    ),
    System(
        "serve", "I/O bounds of attention (Saha, Ye)", "2402.07443",
        ("kvjax.planning.attention_traffic.attention_traffic",), test=CLOSED_FORMS,
        command="python -m experiments.simulate traffic", form="the order of the bound beside counted traffic",
        figure="plans of traffic",
    ),
    System(
        "serve", "vAttention", "2405.04437", ("kvjax.planning.memory_layouts.simulate_layouts",), test=CLOSED_FORMS,
        command="python -m experiments.simulate layouts", form="a plan: slots lie in one piece as they are",
        figure="plans of layouts",
    ),
    System(
        "serve", "Fu (deploying long contexts)", "2405.08944", ("kvjax.planning.serving_costs.serving_costs",),
        test=CLOSED_FORMS, command="python -m experiments.simulate serving", figure="plans of serving",
    ),
    System(
        "serve", "FuseMax", "2406.10491", ("kvjax.planning.attention_traffic.passes_over_keys",), test=CLOSED_FORMS,
        command="python -m experiments.simulate traffic", form="its count of passes; not its accelerator",
        figure="plans of traffic",
    ),
    System(
        "serve", "MEMO", "2407.12117", ("kvjax.planning.offload_shares.host_share",), test=CLOSED_FORMS,
        command="python -m experiments.train --config.activations=offload",
        form="a share of the layers instead of the tokens; which share, as a plan", figure="plans of activations",
    ),
    System(
        "serve", "InstInfer", "2409.04992",
        ("kvjax.planning.storage_attention.storage_bytes", "kvjax.selection.sparf"),
        test="tests/planning/test_storage_attention.py", command="python -m experiments.simulate storage",
        form="its attention as a selection; the bytes and seconds of its drive as a plan", figure="plans of a drive",
    ),
    System(
        "serve", "FastSwitch", "2411.18424", ("kvjax.planning.preemption.simulate_preemption",), test=CLOSED_FORMS,
        command="python -m experiments.simulate preemption", figure="plans of preemption",
        form="a plan; `kvjax serve` gives rows to requests by priority",
    ),
)  # fmt: skip
