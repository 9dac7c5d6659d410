# Every target works as the first command in a fresh clone: it makes .venv as uv.lock says, then runs. Needs python3.
UV_RANGE := uv>=0.9,<1
UV := $(shell uv --version 2>/dev/null | grep -qE '^uv (0\.(9|[1-9][0-9])|1)\.' && echo uv || echo .tools/uv/bin/uv)
PYTHONS := >=3.12,<3.15
EVERYTHING := --extra train --extra hf --extra plan-cuda --extra dev
BENCH := --noconftest -o python_functions='bench_*' --benchmark-columns=min,median,rounds --benchmark-sort=name --benchmark-disable-gc
ARGS ?=

# Of the caller's settings for uv and pip only how to reach packages counts: others could point at another environment.
REACH := UV_CACHE_DIR UV_CONCURRENT% UV_DEFAULT_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_HTTP% UV_INDEX% UV_INSECURE_HOST \
  UV_LINK_MODE UV_NATIVE_TLS UV_NO_CACHE UV_OFFLINE UV_PYTHON_DOWNLOADS% UV_PYTHON_INSTALL% UV_REQUEST_TIMEOUT UV_SYSTEM_CERTS
unexport $(filter-out $(REACH),$(filter UV_%,$(.VARIABLES)))
unexport CONDA_PREFIX PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_TARGET PIP_USER PYTHONHOME PYTHONPATH VIRTUAL_ENV
# Containers often set it; then each process of the tests compiles 1,500 modules before it begins.
unexport PYTHONDONTWRITEBYTECODE
without = env $(patsubst %,-u %,$(filter $1,$(.VARIABLES)))

# Like pip, uv is to trust the certificates that the system trusts, if it has any: a company's proxy may need them.
ifneq (,$(wildcard /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt))
export UV_SYSTEM_CERTS ?= true
endif

# The first python3 that runs. Asked from /, since pyenv's refuses to where .python-version names one that it lacks.
PYTHON = $(shell cd / && for python in python3 /usr/bin/python3 python; do \
  $$python -c 'import sys; assert sys.version_info >= (3, 8); print(sys.executable)' 2>/dev/null && break; done)

# Make's own search for a Python, which uv cannot do: beside the python3 at hand stand pyenv's and asdf's others.
# It prefers 3.12, as .python-version says, takes what else the lock serves, and lets uv download one only then.
define SYNC
@PATH="$$PATH$$(printf ':%s' "$$(dirname "$$('$(PYTHON)' -c 'import sys; print(sys.base_prefix)' 2>/dev/null)")"/3.1[2-4]*/bin)"; \
find() { $(UV) python find --no-python-downloads "$$1" 2>/dev/null; }; \
python=$$(find 3.12 || find '$(PYTHONS)' || echo 3.12); \
$(UV) sync --frozen --inexact --python "$$python"
endef

.PHONY: help train test test-tpu bench lint format lock-check clean
.DEFAULT_GOAL := help

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s%s\n", $$1, $$2 }' Makefile

train: $(filter .%,$(UV)) ## train a small DeepSeek on the CPU or what JAX finds; ARGS="train.steps=50 placement=host"
	$(SYNC) --extra train
	.venv/bin/zoo-train experiment=debug_deepseek $(or $(ARGS),run.dir=runs/debug_deepseek)

test: $(filter .%,$(UV)) ## run the tests; ARGS="tests/layers -k mla"
	$(SYNC) $(EVERYTHING)
	@$(call without,JAX_% XLA_%) .venv/bin/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-tpu: $(filter .%,$(UV)) ## run the tests that compile for TPUs; installs libtpu (680 MB)
	$(SYNC) $(EVERYTHING) --extra plan-tpu
	@$(call without,JAX_% XLA_%) TPU_SKIP_MDS_QUERY=1 .venv/bin/pytest tests/tpu/compile_*.py $(ARGS)

# Without tests/conftest.py: the devices and the machine code that users have, and no checks of shapes.
bench: $(filter .%,$(UV)) ## print figures: steps, compiling, experts, attention; ARGS="-k attention" JAX_PLATFORMS=cuda
	$(SYNC) $(EVERYTHING)
	@$(call without,JAX_% XLA_%) JAX_PLATFORMS=$(or $(JAX_PLATFORMS),cpu) .venv/bin/pytest tests/bench/bench_*.py $(BENCH) $(ARGS)

lint: $(filter .%,$(UV)) ## ruff and pyright
	$(SYNC) $(EVERYTHING)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

format: $(filter .%,$(UV)) ## let ruff fix and format the code
	$(SYNC) --extra dev
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

lock-check: $(filter .%,$(UV)) ## does uv.lock still answer pyproject.toml?
	@$(call without,UV_DEFAULT_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX%) $(UV) lock --check --no-config

clean: ## remove caches and builds; .venv, .tools and runs stay
	rm -rf dist *.egg-info .hypothesis .pytest_cache .ruff_cache
	find conf layers recipes tests zoo -name __pycache__ -type d -prune -exec rm -rf {} +

.tools/uv/bin/uv:
	@echo "no uv on PATH: installing one into .tools/uv"
	@test -n '$(PYTHON)' || { echo "no python3 on PATH that runs" >&2; exit 1; }
	@rm -rf .tools/uv && mkdir -p .tools
	@{ '$(PYTHON)' -m venv .tools/uv && .tools/uv/bin/python -m pip install --quiet '$(UV_RANGE)'; } >.tools/venv.log 2>&1 \
	|| { rm -rf .tools/uv && '$(PYTHON)' -m pip install --quiet --target .tools/uv '$(UV_RANGE)'; }
