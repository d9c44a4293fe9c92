# Each target starts from a fresh clone and does everything: it needs python3 (3.10 or newer) with venv, a C++17
# compiler and make. A second call only does what has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
NATIVE := CMakeLists.txt $(shell find csrc -type f -not -path 'csrc/build*' 2>/dev/null)
CPP := $(shell find csrc tests -name '*.cc' -o -name '*.h' 2>/dev/null)
WORKERS ?= 2

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test lint format sanitize bench test-versions clean

help: ## show this list
	@grep -hE '^[a-z-]+: .*## ' Makefile | sed -E 's/^([a-z-]+): .*## /\1\t/' | expand -t 16

install: $(STAMPS)/project ## make .venv and install the project into it, editable

demo: $(STAMPS)/project ## train, kill twice, resume, compare with an undisturbed run (under two minutes)
	$(BIN)/ckpt-run demo $(DEMO)

test: $(STAMPS)/project $(STAMPS)/test ## run the test suite; TESTS=path picks a part of it
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --timeout 900 -m 'not campaign' $(TESTS)

lint: $(STAMPS)/lint ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p datastates.store -p datastates.engine
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))

format: $(STAMPS)/lint ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

sanitize: ## the engine's own tests under ThreadSanitizer and AddressSanitizer
	csrc/tests/run_sanitizers.sh

bench: $(STAMPS)/project $(STAMPS)/bench ## measure ckpt-run beside its peers; BENCH="--only save" picks, "--help" lists
	$(BIN)/python -m benchmarks $(BENCH)

test-versions: $(STAMPS)/project ## the training tests with transformers 4.57, and with the newest of everything
	$(MAKE) --no-print-directory test-with NAME=tf457 PACKAGES='transformers==4.57.* accelerate==1.13.0 deepspeed==0.18.9'
	$(MAKE) --no-print-directory test-with NAME=newest PACKAGES='transformers accelerate deepspeed'

clean: ## remove what was built and installed here
	rm -rf .venv .venv-* build dist demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .cmake .ninja_deps .ninja_log .skbuild-info.json CMakeCache.txt CMakeFiles CMakeInit.txt build.ninja cmake_install.cmake
	find runtime -name '*.so' -delete

# --- what the targets above stand on --------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ckpt-run needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)

# The build tools come from the tested set and are used as they are (no build isolation): nothing of the system's cmake.
$(STAMPS)/tools: constraints.txt | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt setuptools scikit-build-core pybind11 cmake ninja
	@touch $@

$(STAMPS)/project: $(STAMPS)/tools pyproject.toml $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) -c constraints.txt --no-build-isolation -e .
	@touch $@

# DeepSpeed comes as source; its kernels are built when they are first used, not here. Its setup asks for torch.
$(STAMPS)/test: $(STAMPS)/project
	DS_BUILD_OPS=0 $(PIP) -c constraints.txt --no-build-isolation deepspeed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

$(STAMPS)/lint: constraints.txt | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(PIP) -c constraints.txt ruff mypy clang-format
	@touch $@

# torchsnapshot asks for old versions of what it needs, which stand in the list instead.
$(STAMPS)/bench: benchmarks/requirements.txt $(STAMPS)/test
	$(PIP) -c constraints.txt -r benchmarks/requirements.txt
	$(PIP) --no-deps torchsnapshot
	@touch $@

# Other versions in a venv of their own: .venv-$(NAME). The module built for .venv serves it, the Python is the same.
.PHONY: test-with
test-with: OTHER = .venv-$(NAME)
test-with:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(transformers|accelerate|deepspeed|tokenizers|huggingface_hub|peft|datasets)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install -qq -c $(OTHER)/constraints.txt torch
	$(OTHER)/bin/python -m pip install -qq -c $(OTHER)/constraints.txt setuptools scikit-build-core pybind11 cmake ninja
	PATH="$(CURDIR)/$(OTHER)/bin:$$PATH" DS_BUILD_OPS=0 $(OTHER)/bin/python -m pip install -qq --upgrade \
	  -c $(OTHER)/constraints.txt --no-build-isolation -e '.[test]' $(foreach package,$(PACKAGES),'$(package)')
	$(OTHER)/bin/python -m pip list --disable-pip-version-check 2>/dev/null | grep -E '^(torch|transformers|accelerate|deepspeed) '
	$(OTHER)/bin/python -m pytest -n $(WORKERS) --dist loadfile --timeout 900 -m 'not campaign' $(or $(TESTS),tests/train)
