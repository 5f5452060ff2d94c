# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-clients bench bench-paper lint

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

bench: setup
	$(PY) -m depthbatch bench throughput --workload alpaca --requests 200 --w 32 --policy no-refill --policy refill --policy auto

# Every figure of the paper that concerns scheduling, against ours: benchmarks/results/paper/README.md; 8.5 minutes of CPU.
bench-paper: setup
	$(PY) -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.8'
	$(PY) -m depthbatch bench paper --fresh
