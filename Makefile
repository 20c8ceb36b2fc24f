# Two commands: `make demo` shows what shardfold finds, `make test` checks everything.
# While you work, `make quick` checks most of it in a minute or two, and `make fuzz` draws examples
# that no run has drawn before. All build a virtual environment in .venv first; a fresh machine needs
# only Python 3.11+ and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A worker that is done takes tests over from the others: all are busy to the end. There are three for
# two cores, as tests of several processes wait for one another.
PYTEST := $(BIN)/pytest -n 3 --dist worksteal

.PHONY: demo test quick fuzz lint types imports unit docs clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# First what reads the code, on both cores; then what runs it, on both.
test: $(READY)
	$(MAKE) --jobs=2 --output-sync=target lint types imports docs
	$(MAKE) unit

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

unit: $(READY)
	$(PYTEST)

# A test is skipped where it would export a model or start a process; properties draw little.
quick: lint
	$(PYTEST) -m "not slow" --hypothesis-profile=quick

# Seconds to draw for; the seed to begin with is FUZZ_SEED, or a random one.
fuzz: export FUZZ_SECONDS ?= 300
fuzz: $(READY)
	$(BIN)/python tests/fuzz.py

# torch comes first and pinned: whatever depends on torch then finds it installed. Other stacks come
# without what they depend on, each group in a folder of its own; where that fails, their tests skip.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --group docs --editable '.[hf,lightning]'
	for group in stacks stacks-older; do \
		rm -rf $(VENV)/$$group; \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --group $$group --target $(VENV)/$$group || \
			{ rm -rf $(VENV)/$$group; echo "$$group: not installed, the tests of their parsers are skipped"; }; \
	done
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
