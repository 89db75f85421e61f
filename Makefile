# Two commands do everything on a fresh machine: `make chat` and `make test`. Both build .venv on first use: the first with
# what a chat needs, the second with what tests need besides (Triton, 0.7 GB; matplotlib).
# A machine without a GPU can spare itself the CUDA libraries (gigabytes) by having pip look here too:
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
MODEL ?=
ARGS ?=

PY := .venv/bin/python
CACHES = .pytest_cache .ruff_cache .hypothesis

# A process per core, of which each may take 2 GB; ARGS='-n 0' runs all tests in one process.
PYTEST = $(PY) -m pytest -m 'not gpu' -n auto --maxprocesses 4 --dist worksteal
# What can differ by instruction set: operators, weights, logits, a search of each family; not what Triton makes, how
# libraries are built and found, what has tiles, or how headers and fields are read.
GOLDEN = $(addprefix tests/test_golden.py::test_,logits scores a_search_of_each_family)
BUILDING = $(patsubst %,tests/kernels/test_%.py,cpp operators sass spills tiles races)
READING = $(patsubst %,tests/models/checkpoint/test_%.py,fields files headers quantized_configs)
NUMERIC = --full $(GOLDEN) -k 'not interpreted and not triton'
MODELS = tests/models $(addprefix --ignore=,$(READING))
# Without C++ kernels only these tests of operators compute something else: the others name what they run.
UNNAMED = $(patsubst %,tests/kernels/test_%.py,checks kv_write short_conv wide_trees)
AVX2_KERNELS = build/avx2
# Prints the targets of kernels that run here and need more than AVX2. Where there are none, test-all runs torch's same code
# and operators compiled from the same lines, which may round otherwise: the tests of operators and the golden logits are
# run with them as they are built for all processors with AVX2, the tests of what surrounds them in models are not.
BEYOND_AVX2 = $(PY) -c 'from kernels.processor import TARGETS as known; avx2 = known["x86-64-v3"].needs; \
	print(*(name for name, target in known.items() if target.needs > avx2 and not target.why_not()))'
# Where the choice of a dtype matters: all but tests that load no model, name its dtype or compare nothing that it computes.
CHOOSING = tests/engine $(filter-out $(addprefix tests/test_,$(addsuffix .py,$(LOADING_NONE) golden fuzz numpy_free)), \
	$(wildcard tests/test_*.py)) --ignore=tests/engine/text $(addprefix --ignore=tests/engine/,$(NAMING_IT))
LOADING_NONE = arrows glossary links package structure
NAMING_IT = $(addsuffix .py,$(addprefix load/test_,compiling distributed) app/test_trace_browser \
	$(addprefix serve/test_,attack connections embeddings fuzz openai responses shares tools) \
	$(addprefix step/test_,graphs driver gpu overlapped) $(addprefix cache/test_,kept_states prefixes tree) \
	$(addprefix contract/test_,embedding sampling trace))

.PHONY: help chat test test-all test-pretend test-avx2 test-portable check lint gpu gpu-test gpu-bench clean
.DEFAULT_GOAL := help

help:
	@echo "make chat [MODEL=PATH] [ARGS=...]  talk to the bundled toy, to a checkpoint folder, a GGUF file, or org/name of the hub"
	@echo "make test [ARGS=...]              run the tests except slow variants; ARGS go to pytest"
	@echo "make test-all [ARGS=...]          run all tests: every variant, build and random draw"
	@echo "make test-pretend [ARGS=...]      engine tests with auto dtypes chosen the other way"
	@echo "make test-avx2 [ARGS=...]         tests that depend on the instruction set, limited to AVX2"
	@echo "make test-portable [ARGS=...]     tests that depend on C++ kernels, without them, as without a compiler"
	@echo "make check                        lint, types, import arrows, room map, packaging"
	@echo "make lint                         ruff and pyright only"
	@echo "make gpu                          gpu-test, then gpu-bench; without a GPU, prints a message"
	@echo "make gpu-test [ARGS=...]          tests that need a GPU, nine minutes at most (GPU_SECONDS)"
	@echo "make gpu-bench [ARGS=...]         GPU benchmarks in stages, nine minutes at most; ARGS go to tools.bench gpu"
	@echo "make clean                        remove the environment, caches and build outputs"
	@echo "The first target makes .venv; PYTHON=python3.12 chooses the interpreter (3.11 or newer)."

chat: .venv/.installed
	@exec $(PY) -m engine.chat $(if $(MODEL),--model '$(subst ','\'',$(MODEL))') $(ARGS)

test: .venv/.installed-test
	@$(PYTEST) $(ARGS)

test-all: .venv/.installed-test
	@$(PYTEST) --full $(ARGS)

test-pretend: .venv/.installed-test
	@COPPICE_PRETEND=other $(PYTEST) $(CHOOSING) $(ARGS)

test-avx2: $(AVX2_KERNELS)/x86-64-v3.so
	@more=$$($(BEYOND_AVX2)) || exit; models='$(MODELS)'; \
	if [ -z "$$more" ]; then models=; echo "this processor has no more than AVX2: tests/models is left out, which make test-all runs"; fi; \
	COPPICE_KERNELS="$$PWD/$(AVX2_KERNELS)" ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		$(PYTEST) $(NUMERIC) $$models tests/kernels $(addprefix --ignore=,$(BUILDING)) $(ARGS)

test-portable: .venv/.installed-test
	@COPPICE_KERNELS=off $(PYTEST) $(NUMERIC) $(MODELS) $(UNNAMED) $(ARGS)

$(AVX2_KERNELS)/x86-64-v3.so: kernels/cpp.py kernels/processor.py $(wildcard kernels/*.h kernels/*/*.h kernels/*/*.cpp) | .venv/.installed-test
	@$(PY) -m kernels.build --target x86-64-v3 --flags '-Wall -Wextra -Werror' --output $(AVX2_KERNELS)

check: lint
	@$(PY) -m pytest -q tests/test_arrows.py tests/test_structure.py tests/test_package.py

lint: .venv/.installed-dev
	@$(PY) -m ruff check .
	@$(PY) -m pyright --pythonpath $(PY)

# A machine with a GPU often has its own torch and no way to install another: .venv first, then PYTHON as it is.
define with_gpu
set -e; py=$(PY); \
if [ ! -e .venv/.installed-test ]; then \
	if $(PYTHON) -c 'import torch' 2>/dev/null; then py=$(PYTHON); \
	else $(MAKE) --no-print-directory .venv/.installed-test; fi; \
fi; \
name=$$($$py -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")'); \
if [ -z "$$name" ]; then echo "no GPU here: nothing to do"; exit 0; fi; \
echo "GPU: $$name";
endef

# Interrupted tests report their failures so far. Triton's compiler takes most of their time, hence several processes.
GPU_SECONDS ?= 520

gpu:
	@$(MAKE) --no-print-directory gpu-test || code=$$?; \
	$(MAKE) --no-print-directory gpu-bench ARGS= || exit; exit $${code:-0}

gpu-test:
	@$(with_gpu) timeout --foreground -s INT -k 15 $(GPU_SECONDS) \
		$$py -m pytest --full -m gpu $$(grep -rlE --include='test_*.py' 'mark\.gpu|tests\.marks' tests) -p no:benchmark --tb=short --durations=15 \
		--continue-on-collection-errors \
		$$($$py -c 'import xdist' 2>/dev/null && echo --numprocesses 8 --dist worksteal) $(ARGS)

gpu-bench:
	@$(with_gpu) $$py -m tools.bench gpu $(ARGS)

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed and '$(PYTHON)' is not one. Choose it: make ... PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@$(call install,,--no-compile)

# Tests start hundreds of processes, each of which would compile torch where Python may not write bytecode.
.venv/.installed-test: .venv/.installed
	@$(call install,test$(comma)viz)
	@$(PY) -m compileall -q -j 0 .venv/lib >>.venv/install.log 2>&1 || true

.venv/.installed-dev: .venv/.installed-test
	@$(call install,test$(comma)viz$(comma)dev)

comma := ,
# The pinned versions are made for Python 3.11 to 3.14; newer Pythons get the newest ones.
# Arguments: extras; options of pip. Without --no-compile it would write bytecode of modules that no chat imports (140 MB).
define install
echo "installing coppice$(1:%=[%]) into .venv (minutes the first time; log: .venv/install.log)" >&2; \
pins=$$($(PY) -c 'import sys; print("-c constraints.txt" * (sys.version_info < (3, 15)))'); \
$(PY) -m pip install --disable-pip-version-check $(2) $$pins -e '.$(1:%=[%])' >.venv/install.log 2>&1 \
	|| { cat .venv/install.log >&2; exit 1; }; \
touch $@
endef

clean:
	rm -rf .venv build dist *.egg-info $(CACHES)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
