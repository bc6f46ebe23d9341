# Every target sets up what it needs. PYTHON chooses the interpreter that makes the environment.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
FUZZ_SECONDS ?= 600
SOAK_KILLS ?= 100
DOCS   := $(or $(PACKTRAIN_HOSTS),$(HOME)/.cache/packtrain-hosts)/docs
S3     := $(or $(PACKTRAIN_HOSTS),$(HOME)/.cache/packtrain-hosts)/s3
STAMP  := $(VENV)/.packtrain-ready
# Workers and later processes read modules that an earlier one compiled.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo docs test test-s3 test-hosts test-versions test-install fuzz soak lint bench clean

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup.sh
	touch $(STAMP)

demo: $(STAMP)  ## measure, plan, train and report on data the project makes itself
	$(BIN)/packtrain run examples/demo.yaml

test: $(STAMP)  ## the whole test suite: a worker more than cores, since tests also wait
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-s3: $(STAMP)  ## remote files from a bucket of moto's server, through s3fs in an environment of its own
	$(PYTHON) -m venv $(S3)
	$(S3)/bin/pip install -q -c constraints.txt s3fs 'moto[server]'
	PYTHONPATH=$$($(S3)/bin/python -c 'import site; print(site.getsitepackages()[0])') $(BIN)/python -m pytest tests/packs/test_remote_s3.py

test-hosts: $(STAMP)  ## tests in virtual environments of other packages, made once in PACKTRAIN_HOSTS
	$(BIN)/python -m pytest tests/hosts -m hosts

test-versions: $(STAMP)  ## the training laws on the lowest, a middle and the newest versions; writes docs/attention.md
	$(BIN)/python -m pytest tests/hosts/test_versions.py -m versions

test-install: $(STAMP)  ## the built wheel with each extra, in clean environments kept in PACKTRAIN_HOSTS
	$(BIN)/python -m pytest tests/install -m install

fuzz: $(STAMP)  ## every reader of foreign bytes and every marker, 10 minutes each, on damaged input
	PACKTRAIN_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/fuzz -n logical --maxprocesses 8

soak: $(STAMP)  ## 100 kills at random moments: ranks and workers of a training run, the reader of a node, producers and readers, exports
	PACKTRAIN_SOAK_KILLS=$(SOAK_KILLS) $(BIN)/python -m pytest tests/train/test_soak.py tests/packs/test_node_soak.py -s
	PYTHONPATH=src:tests $(BIN)/python tests/export/kills.py $$(mktemp -d) $(SOAK_KILLS)
	PYTHONPATH=src:tests $(BIN)/python tests/export/kill_exports.py $$(mktemp -d) $(SOAK_KILLS)

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

docs:  ## the documentation as a site, in build/site; its tools live apart
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -q 'mkdocs-material>=9.5'
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

bench: $(STAMP)  ## ratios against peers and floors in the same run; slow
	$(BIN)/python -m bench.planner
	$(BIN)/python -m bench.planner --limits
	$(BIN)/python -m bench.planner --laws 3000
	$(BIN)/python bench/growing.py

clean:
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .hypothesis
