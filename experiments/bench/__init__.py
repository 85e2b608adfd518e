"""Speed and memory, kvjax and its peers side by side in one process: A B B A, medians and ratios.

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
  python -m experiments.bench first_use --rounds=3
  python -m experiments.bench gguf --against=llama.cpp --model=smollm2-135m-instruct
  python -m experiments.bench lm_eval --data=FOLDER --policies=full,h2o --batch=16 --shots=0,5
  python -m experiments.bench serve --policies=h2o --requests=2000 --batch=32 --tokens=1024 --rounds=1
  python -m experiments.bench kernels --grid=1024x2048x128 --dtype=bfloat16

Peers hold the same random weights (--dtype), on all cores, each in its best setting, which is looked for among those
that are shown (torch.compile, which takes minutes, with --compile); before anything is timed, log-probabilities are
compared. Everything is warmed up and waited for. Ratios are those of a round, then their median: a machine that slows
down does so for both. The limit of a decoding step is the bytes that it must move (weights, live keys and values,
positions, statistics) over the speed at which this machine reads, measured in turns with the rest. With --fill no
prompt is run: caches hold random keys and values, and what does not fit the device is refused before it is made. Sides
whose rounds differ by more than a half are named: they were disturbed, and their figures are noise.
KVJAX_PRODUCTS=fixed in the environment leaves out the forms of products that are chosen by machine. `--output` writes
the figures with what they were measured on, `--plot` draws them.

accelerator: what only a GPU or a TPU can say, in eight minutes (--minutes): what the device does at most, a layer's
decoding step and attention, of a copy's bandwidth, OPT-6.7B's shape, the kernels' tests, prompts, storages, the host
link, selections, caches in host memory; the most telling first. Each part is another of these commands in a process of
its own, which may fail or run out of time alone. Its rows are kept in --output, a folder, when it ends: a second call
with the same folder, code, jax and device does what is missing, then what failed. report.md there has the table of
experiments/measured with the figures that there are, and the reasons for those that are not. --tiny shows, on any
machine, that every part runs.
decode: milliseconds a step, all rows advancing one token. "no policy" attends to the same number of slots without
choosing any: what the policy itself costs. The peers' full caches begin every round at --context tokens.
policies: a decoding step of every policy that evicts while decoding, on the same slots, against h2o.
storages: a decoding step with storages, under h2o and of a full cache, and of a full cache with selections, against
dense slots; with --fill of --context tokens of random numbers.
selections: a decoding step of a long context, filled with random keys and values, read whole and by selections, in the
memory of the device and of the host.
products: products of 1, 8 and 32 rows (--batch for another number) with weights and with caches, by every form that
kvjax has and by NumPy and torch: bytes and FLOPs a second, of what memory and XLA's largest product allow.
forms: a decoding step with products in a fixed form and in those that are fastest on this machine.
link: bytes that a step moves from host memory, and what they take, from shapes alone (InfiniGen's Figures 14 to 16).
stream: kvjax-tiny under streaming_llm: time a generated token, a tenth at a time, then the first and the last 1,000
in turns; bytes held; perplexity of a text (a generated story, or --text).
prefill: a prompt in one shot, with a policy's statistics, and without: of the FLOPs a second that a large product
takes and, of a known device in bfloat16, of what is published (its matrix products alone are counted).
device: bytes and FLOPs a second of reading, copying and a large product, beside what is published of a known device.
transfers: bytes a second between a device and the pinned memory of its host.
memory: bytes held and needed beyond the weights, by length of the context: compiled programs, and the process's peak.
kernels: attention of one query a head alone, and a layer's whole decoding step under h2o, by every implementation:
bytes a second, against those of a copy; a shape that stays in a processor's cache can beat it. --kinds chooses among
attention without and with statistics and the step, --implementation compares one of them with XLA.
first_use: processes with nothing compiled, and second ones that find everything: imports, --help, a first generate of
kvjax-tiny under --policies and of random LLaMAs of 6 and 30 layers, eight budgets of h2o; CPU and wall seconds, of the
call and of the whole process, beside transformers; about five minutes a round.
gguf: prompts and decoding steps of a GGUF file (--model): kvjax with the file's codes kept, under a full cache and each
policy, and llama.cpp as it comes, with activations in 8 bits and a cache in float16.
lm_eval: --model, else kvjax-tiny, in lm-evaluation-harness, on --questions of the multiple-choice tasks in --data, and
on pieces of --text: seconds of an evaluation and of the model's part of it, with a full cache and each policy, beside
`--model hf` with the same weights, and whether the printed digits are the same.
serve: --requests of mixed lengths (prompts of up to --context tokens, answers of up to --tokens) through --batch rows
that are refilled and through batches that run to their longest answer: useful tokens a second, useful row-steps, reads
by the host. With --shape=kvjax-tiny the model is the trained one, which a server of OpenAI's API can run too
(llama-server, vLLM, python -m kvjax.serve): --servers=NAME=http://HOST:PORT sends it the same requests.
"""
