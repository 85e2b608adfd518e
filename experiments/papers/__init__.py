"""Papers by name: every table and figure of H2O, RoCo and InfiniGen, measured on a small model.

    python -m experiments.paper h2o_table6 roco_fig5 [--fast] [--config.model.path=FOLDER]
    python -m experiments.paper all --fast

How to write an entry: add it to a module of `experiments.papers.h2o`, `.roco` or `.infinigen`, which are found by
themselves; the module's ``ENTRIES`` is a tuple of `Entry`. An entry has two functions and the paper's numbers:

- ``parts(settings)`` returns what is to be measured: `Part`s, made by the functions of `experiments.papers.recipes`
  (``lm(settings, "h2o", 0.2, text="book")``), which take their sizes from ``settings.scale``. Parts are frozen
  dataclasses: equal parts are measured once, whichever entries ask for them. Use the sizes of the scale and few
  different caches, for every (cache, shape) is a compiled program; budgets are data and cost none. `Scale.some` gives a
  trial (``--fast``) fewer values.
- ``judge(settings, found)`` makes tables, claims and comparisons of the results. It is a pure function:
  ``found[lm(settings, "h2o", 0.2)]`` is the result of that part, which the recipe's other functions read
  (``lm.perplexity``, ``recall.share``). Claims carry the thresholds, which are those of PAPERS.md; every bootstrap and
  every sign test goes into ``comparisons``.

A new recipe is a `Part` with ``measure(lab)`` that returns named arrays, and functions that read these. Arrays should
be small (numbers per row or per position), for every part is a file. `names.NAMES` lists all entries; a test fails
while one of them is missing.
"""
