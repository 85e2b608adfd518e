"""Answers many requests: a file of prompts in, a file of results out.

python -m experiments.batch --config=h2o_tiny --requests=FILE.jsonl --output=FILE.jsonl [--config.FIELD=VALUE ...]

Model, policy, storage, selection, mesh, rules, prefill_block, implementation and seed are those of the config, as in
`experiments.run`; what it compares and measures is not used. Each line of the requests is an object:

  {"prompt": "Once upon a time", "max_new_tokens": 64, "stop": ["\\n\\n"], "id": "a-1", "temperature": 0.7, "seed": 3}

prompt: a text, or a list of token ids. Everything else is optional: id (a text or a number; the line's number),
max_new_tokens (--new_tokens), stop (texts, which are no part of the result), stop_tokens (token ids, which are, beside
the model's own), temperature, top_k, top_p, min_p and repetition_penalty (the flags of these names, or else the model's
generation_config.json; temperature 0 takes the most probable token), seed (the config's, and the line's number).

Each line of the output is an object, in the order of the requests, written as soon as those before it are:

  {"id": "a-1", "text": "...", "tokens": [...], "reason": "stop" or "length", "prompt_tokens": 5, "new_tokens": 17}

A line that cannot be answered is said on stderr with its file and number, and has {"id": ..., "error": "..."} for a
result; then the exit status is 1. After a kill the same command goes on: results are written once and none is lost,
since OUTPUT.journal has those that came before their turn. What is sampled depends on the seed and the line's number.
"""
