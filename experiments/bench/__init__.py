"""Measures speed and memory of kvjax and of its peers, in alternation in one process: medians and ratios.

  python -m experiments.bench accelerator --output=FOLDER
  python -m experiments.bench decode --against=transformers
  python -m experiments.bench decode --against=kvpress,llama.cpp --policies=h2o,knorm --batch=1 --context=512
  python -m experiments.bench decode --against=none --policies=h2o,roco,full
  python -m experiments.bench policies --slots=512
  python -m experiments.bench storages --slots=512
  python -m experiments.bench selections --context=2048,8192,32768
  python -m experiments.bench products
  python -m experiments.bench forms --policies=h2o,full
  python -m experiments.bench link
  python -m experiments.bench stream --slots=512 --tokens=100000 --text=FILE
  python -m experiments.bench prefill --context=2048
  python -m experiments.bench memory --context=512,2048,8192
  python -m experiments.bench decode --shape=opt-6.7b --dtype=bfloat16 --batch=64 --context=2048 --tokens=2048
  python -m experiments.bench device --dtype=bfloat16
  python -m experiments.bench transfers
  python -m experiments.bench swap --policies=h2o --context=512,2048 --against=none
  python -m experiments.bench first_use --rounds=3
  python -m experiments.bench gguf --against=llama.cpp,transformers --model=smollm2-135m-instruct
  python -m experiments.bench lm_eval --data=FOLDER --policies=full,h2o --batch=16 --shots=0,5
  python -m experiments.bench serve --policies=h2o --requests=2000 --batch=32 --tokens=1024 --rounds=1
  python -m experiments.bench prefixes --policies=full --shape=kvjax-tiny --requests=2000 --context=960 --tokens=8
  python -m experiments.bench shared --model=smollm2-135m-instruct --context=512,4096 --batch=8 --tokens=32
  python -m experiments.bench speculate --model=kvjax-tiny --context=512,960 --slots=128 --tokens=64 --drafts=retrieval
  python -m experiments.bench equality --drafts="seen(h2o(32))" --gammas=1,4
  python -m experiments.bench acceptance --context=768 --slots=512
  python -m experiments.bench answers --model=smollm2-135m-instruct --python=kvpress=PYTHON
  python -m experiments.bench kernels --grid=1024x2048x128 --dtype=bfloat16

All sides run the same random weights (--dtype) on all cores. Each peer runs in the fastest of its settings that are
listed in the output (torch.compile, which takes minutes, only with --compile). Log-probabilities are compared before
anything is timed. Every program is compiled before its timing, and each timing waits for its results. Sides take turns
in the order A B B A. A ratio is the median of the ratios of all rounds, so that a change of the machine's speed affects
both sides alike. "limit" is the time that a decoding step needs to read the bytes that it must move (weights, live
keys and values, positions, statistics) at the bandwidth of this machine, which is measured in the same rounds. With
--fill no prompt is run: caches are filled with random keys and values, and a setting that does not fit the device is
refused before anything is allocated. A warning names the sides whose rounds differ by more than 50 %: other load
disturbed them. KVJAX_PRODUCTS=fixed in the environment disables the choice of matrix products by timing. --output
writes the results and a description of the machine, --plot draws them.

accelerator: measurements that need a GPU or a TPU, within eight minutes (--minutes), the most important first: peak
rates of the device; a layer's decoding step and attention, relative to the bandwidth of a copy; a model with the shape
of OPT-6.7B; tests of kernels; prompts; storages; the host link; selections; caches in host memory. Each part is one of
the other tasks in its own process, so that a part that fails or exceeds its time does not stop the others. The rows of
a part are written to the folder --output when the part ends. A second run with the same folder, code, jax and device
measures the missing parts, then those that failed. report.md in that folder has the table of experiments/measured with
the results so far, and the reasons for those that are missing. --tiny checks on any machine that every part runs.
decode: milliseconds per decoding step, in which every row advances by one token. "no policy" attends to the same number
of slots without choosing them; the difference is the cost of the policy. The peers' full caches begin every round at
--context tokens.
policies: a decoding step of every policy that evicts while decoding, with the same number of slots, relative to h2o.
storages: a decoding step with each storage, under h2o, with a full cache, and with a full cache and selections,
relative to dense slots; with --fill, --context tokens of random numbers.
selections: a decoding step of a long context, filled with random keys and values, read as a whole and by selections,
in device memory and in host memory.
products: matrix products of 1, 8 and 32 rows (or --batch) with weights and with caches, in every form that kvjax has,
and by NumPy and torch: bytes and FLOPs per second, and their share of memory bandwidth and of XLA's largest product.
forms: a decoding step with products in a fixed form, and in the forms that are fastest on this machine.
link: bytes that a step moves from host memory and the time this takes, from shapes alone (InfiniGen's Figures 14 to
16).
stream: kvjax-tiny under streaming_llm: time per generated token in each tenth of the text, then for the first and the
last 1,000 tokens in alternation; bytes of the cache; perplexity of a text (a generated story, or --text).
prefill: a prompt in one block, with and without a policy's statistics: FLOPs per second relative to a large product
and, for a known device in bfloat16, to its published peak (only matrix products are counted). --model runs a trained
model, --caches="quest(budget=1024, in_prompt=True)" a full cache whose selection reads pages of the prompt. The FLOPs
of attention are those that XLA computes; "CPU ms" are of all cores of the process, which other load disturbs less.
device: bytes and FLOPs per second of reading, copying and a large product, and the published peaks of a known device.
transfers: bytes per second between a device and the pinned memory of its host.
swap: a row of a batch of --batch rows (8), filled with random keys and values, to host memory and back into another
row, under each policy and with a full cache: bytes, milliseconds, bytes per second.
memory: bytes beyond the weights by context length: of the compiled programs, and the peak of the process.
kernels: attention with one query per head, and a layer's whole decoding step under h2o, in every implementation: bytes
per second, relative to a copy; a shape that fits in the processor's cache can exceed 100 %. --kinds selects attention
without statistics, attention with statistics, and the step; --implementation compares a single one with XLA.
first_use: processes without compiled programs, and second processes that find all of them: imports, --help, a first
generate of kvjax-tiny under --policies and of random LLaMAs of 6 and 30 layers, eight budgets of h2o; CPU and wall
seconds of the call and of the whole process, compared with transformers and kvpress; about five minutes per round.
gguf: prompts and decoding steps of a GGUF file (--model): kvjax with the codes of the file, under a full cache, each
policy and each of --caches ("full + fp16"), llama.cpp with its defaults (8-bit activations, a float16 cache), and, if
--against names it, transformers with the decoded weights in float32. With --fill only steps, where llama.cpp reads one
prompt and copies its cache to all rows.
lm_eval: --model (default kvjax-tiny) in lm-evaluation-harness, on --questions of the multiple-choice tasks in --data,
and on pieces of --text: seconds of an evaluation and of the model's part of it, with a full cache and each policy,
compared with `--model hf` with the same weights, and whether the printed digits are equal.
serve: --requests of mixed lengths (prompts of up to --context tokens, answers of up to --tokens) in --batch rows that
are refilled, and in batches that run until their longest answer ends: useful tokens per second, useful row-steps, reads
by the host. With --shape=kvjax-tiny the model is the trained one, which another server with OpenAI's API can run too
(llama-server, vLLM, python -m kvjax.serve): --servers=NAME=http://HOST:PORT sends it the same requests.
prefixes: --requests of up to --context tokens and --tokens new ones in --batch rows: questions about documents, ten of
each, after one of five system prompts; a runner with a prefix store and one without. Useful tokens per second, the
tokens of prompts that were found, whether answers are equal, bytes of states, and the milliseconds of a hit relative to
those of the blocks that it saves. CPU seconds are of the whole process, which other load disturbs less.
shared: --batch prompts that begin with the same text of --context tokens and end with different questions, and --tokens
new tokens after each: with a copy of the text's slots in each row, and with one for all (kvjax.contexts.with_prefix).
answers: needles in --context tokens (at least --documents questions, asked after the context is compressed to --budget)
under compressors (--caches) of kvjax and under kvpress's presses of the same name, with the same weights: how many
answers are equal token by token, and how many are right. kvpress needs a separate environment
(--python=kvpress=PYTHON).
speculate: --tokens new tokens after prompts of --context tokens (of --text), plain and in rounds of --gammas drafts,
greedy or with --temperature: accepted drafts of each place, tokens per round, rows whose tokens differ from plain
decoding, times of a token, of a round and of its steps, the speed-up, and what the times of steps and the plan of this
machine predict of it. Of several lengths, the length from which rounds are faster as planned, by the times of steps,
and as measured. --drafts are selections, seen(POLICY) or own(POLICY) with --slots. With --memory=host the model's cache
is in host memory, and the plan takes the measured speed of the link. Prompts are not timed. On a CPU, times are CPU
seconds of the whole process.
equality: --tokens new tokens (128) after --batch prompts (64) of up to --context tokens, plain and in rounds of
--gammas (1 to 8) drafts, greedy and by samples: the rows whose tokens differ, and how many of them do at a near-tie,
where plain decoding's choice is at most 0.001 above the other token in logits (with the noise of samples). --drafts are
those of speculate; `A + B` are levels, and `int4: own(POLICY)` is the model with weights of 4 bits.
acceptance: the chance that a draft is accepted, by the budget of what drafts (64 slots, doubled up to --slots): the
overlap of its probabilities and of the full cache's on --tokens tokens that the model has sampled after --batch prompts
of --context tokens, and the share of tokens where both have the same most probable one. `seen` is counted in rounds of
one draft.
"""
