"""Answers the requests in a file and writes their results to another file.

python -m experiments.batch --config=h2o_tiny --requests=FILE.jsonl --output=FILE.jsonl [--config.FIELD=VALUE ...]

Model, policy, storage, selection, mesh, rules, prefill_block, implementation and seed are read from the config, as in
`experiments.run`; its other fields are ignored. Each line of the file of requests is a JSON object:

  {"prompt": "Once upon a time", "max_new_tokens": 64, "stop": ["\\n\\n"], "id": "a-1", "temperature": 0.7, "seed": 3}

prompt: a string, or a list of token ids. All other fields are optional: id (a string or an integer; default: the line
number), max_new_tokens (default: --new_tokens), stop (strings, which the result does not contain), stop_tokens (token
ids, which the result contains; in addition to those of the model), temperature, top_k, top_p, min_p and
repetition_penalty (default: the flags of the same names, then the model's generation_config.json; temperature 0 takes
the most probable token), seed (default: the config's seed, combined with the line number).

With --contexts=FOLDER, the context after the last token of a request with "keep_context": true is kept there, and one
of a later run, with "context": ID, continues the text of the request with that id; its prompt is what follows. The
first run decides the sizes for all: --most_new_tokens must cover all tokens that follow a prompt, given and generated.
--codec=cachegen:2, or a file that kvjax.transport.Tables.save or Transform.save has written, saves contexts in fewer
bytes; later answers depend on it.

Results are written in the order of the requests, each as soon as all before it are written, one JSON object per line:

  {"id": "a-1", "text": "...", "tokens": [...], "reason": "stop" or "length", "prompt_tokens": 5, "new_tokens": 17}

Prompts that begin alike are run one after the other, and what they share is computed once; the program prints how many
tokens this saves. Answers do not depend on it. Where the state after a beginning depends on what follows, as under many
policies and storages, only equal prompts share theirs. --prefix_cache=BYTES bounds these states, by default 1GB; with
0, none are kept.

With --shared_slots, the slots of the common prefix of a group of prompts are held once, and all rows of the group read
them together; for --config.policy.name=full with exact storage. Answers are the same except for rounding.

If a line cannot be answered, an error with the file name and the line number is printed to stderr, the result is
{"id": ..., "error": "..."}, and the exit status is 1. If the process is killed, run the same command again to continue:
each result is written exactly once, and OUTPUT.journal stores those that were finished before their turn. Sampled
tokens depend on the seed and the line number only.
"""
