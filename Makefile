# Needs make and Python 3.10 or later, with venv and pip. The first target that is called makes .venv.

PYTHON ?= python3
PY := .venv/bin/python
TORCH := $(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
# One test worker a core, eight at most: each of them imports torch.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -le 8 ] || n=8; echo $$n)

.PHONY: run test lint format bench docs clean

# make run [MODEL=org/name] [PROMPT="..."]
# The shell reads both from its environment, so a quote in a prompt is safe.
export MODEL PROMPT
run: .venv/.installed
	$(PY) -m bench.main_job $${MODEL:+--model "$$MODEL"} $${PROMPT:+--prompt "$$PROMPT"}

# make test [ARGS="-k views -x"] [WORKERS=0]
test: .venv/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# make bench [ARGS="--quick --only cold,capped"]
bench: .venv/.installed
	$(PY) -m bench $(ARGS)

docs: .venv/.docs
	$(PY) -m mkdocs build --strict

# Removes all that make has made, .venv too.
clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find offload tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch first: what follows then finds it there and asks for no other.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install torch==$(TORCH) -c constraints.txt
	$(PY) -m pip install -c constraints.txt -e '.[test,dev,bench]'
	touch $@

.venv/.docs: .venv/.installed
	$(PY) -m pip install -c constraints.txt -e '.[docs]'
	touch $@
