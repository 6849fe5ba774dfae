# Every target sets up what it needs: a virtual environment in .venv, made once.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export NO_MKDOCS_2_WARNING = 1
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: each would compile the sources
QUIET := OMP_WAIT_POLICY=PASSIVE  # threads that wait do not spin
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)  # one more than cores: some tests wait

.PHONY: help demo test fuzz validate bench zoo scripts docs guides figures picture lint format clean matrix test-all browser packages lock
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.venv/installed: pyproject.toml lab/pyproject.toml constraints.txt $(wildcard .ci/locked-*.txt) .ci/install
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	.ci/install
	@touch $@

LOOPS := $(shell find src/foretell/graph src/foretell/simulate src/foretell/cost src/foretell/search src/foretell/compiled lab/src/foretell_lab/loops -name '*.py' -o -name '*.hpp')
.venv/loops: .venv/installed $(LOOPS)  # built anew where their sources are newer
	$(BIN)/python -m foretell.compiled.build src/foretell/compiled/built
	@touch $@

demo: .venv/loops  ## the loop on embedded data: replay, what if, oracle, plan, run, report
	$(BIN)/foretell demo

test: browser  ## every test that ends in minutes
	$(QUIET) $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

fuzz: .venv/loops  ## hostile files through every command: make fuzz CASES=1000 [ARGS=--readers]
	$(BIN)/python -m tests.fuzz.fuzz --cases $(or $(CASES),500) $(ARGS)

matrix: .venv/loops  ## models x plans on gloo ranks, each compared with one process
	$(BIN)/python -m tests.pytorch.deploy.matrix $(ARGS)

test-all: browser  ## every test, the slow ones too
	EXAMPLES=100 $(QUIET) $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

browser: .venv/loops  ## get the browser that tests of pages need, where that can be
	@.ci/browser

validate: .venv/loops  ## every accuracy figure, from measured data
	$(BIN)/foretell validate

bench: .venv/loops  ## every speed figure, as ratios in one run
	$(BIN)/python benchmarks/run.py

zoo: .venv/zoo .venv/loops  ## capture every model of the zoo, beside a real step (minutes)
	$(BIN)/python -m tests.pytorch.zoo

scripts: .venv/zoo .venv/loops  ## profile and capture training scripts of every kind, unchanged (minutes)
	$(BIN)/python -m tests.pytorch.intake

.venv/zoo: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt transformers pillow accelerate lightning timm torchvision
	@touch $@

docs: .venv/documented .venv/loops  ## the site, into site/: opens from disk, loads nothing
	$(BIN)/mkdocs build --quiet
	@echo "site/index.html"

.venv/documented: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

guides: .venv/loops  ## run the guides and write what they print
	$(BIN)/python docs/guide.py

figures: .venv/loops  ## run all figures of the docs (minutes) and write their pages
	$(BIN)/python docs/figures.py

picture: .venv/loops  ## photograph report and studio for README and gallery (needs Chromium)
	$(BIN)/python docs/picture.py

lint: .venv/installed  ## ruff and mypy
	$(BIN)/ruff check src lab tests benchmarks docs
	$(BIN)/ruff format --check src lab tests benchmarks docs
	$(BIN)/mypy

format: .venv/installed  ## let ruff arrange the code
	$(BIN)/ruff check --fix src lab tests benchmarks docs
	$(BIN)/ruff format src lab tests benchmarks docs

packages:  ## wheel and sdist, tried in clean environments without extras
	.ci/packages

lock: .venv/installed  ## the hashed set of packages that CI installs, and its bill of materials
	$(BIN)/python .ci/supply.py lock
	@mkdir -p dist
	$(BIN)/python .ci/supply.py sbom >dist/foretell.cdx.json

clean:  ## remove what was built
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
