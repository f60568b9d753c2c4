# One command each for what CONTRIBUTING promises. Every target sets up what it needs; nothing outside the folder is touched.
SHELL := /bin/bash
PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3.12) python3)
VENV := .venv
ENGINE_VENV := .venv-engine
RUN := $(VENV)/bin/python
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: setup lock engine demo test test-engine test-engine-all lint format bench results-page chaos clean

$(VENV)/.ready: requirements-lock.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --require-hashes -r requirements-lock.txt
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

setup: $(VENV)/.ready  ## the environment of everything but a real server, with the command `specsweep`
	@echo "Ready. Next: source $(VENV)/bin/activate"

LOCKED := requirements-light.txt requirements-analysis.txt tests/requirements.txt

lock:  ## pin every package with its hashes (needs uv: pip install uv)
	set -o pipefail; for version in 3.11 3.12; do \
	  uv pip compile --quiet --no-config --generate-hashes --no-annotate --no-header --python-version $$version \
	    --python-platform x86_64-manylinux_2_28 --index-url https://pypi.org/simple $(LOCKED) -o .lock-$$version || exit 1; \
	done
	cmp .lock-3.11 .lock-3.12
	{ sed -n '/^#/p' requirements-lock.txt; cat .lock-3.11; } > .lock-new
	mv .lock-new requirements-lock.txt
	rm .lock-3.11 .lock-3.12

# A server's environment: $(call engine_environment,FOLDER); the models lie beside it, in FOLDER/models.
define engine_environment
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install --quiet -r tests/sglang_cpu/requirements.txt
	$(1)/bin/python -m pip install --quiet --no-deps -r tests/sglang_cpu/requirements-no-deps.txt
endef

$(ENGINE_VENV)/.ready: tests/sglang_cpu/requirements.txt tests/sglang_cpu/requirements-no-deps.txt tests/sglang_cpu/make_models.py
	$(call engine_environment,$(ENGINE_VENV))
	$(ENGINE_VENV)/bin/python tests/sglang_cpu/make_models.py $(ENGINE_VENV)/models
	touch $@

$(ENGINE_VENV)-0.5.16/.ready $(ENGINE_VENV)-0.5.23/.ready: $(ENGINE_VENV)-%/.ready: $(ENGINE_VENV)/.ready
	$(call engine_environment,$(ENGINE_VENV)-$*)
	$(ENGINE_VENV)-$*/bin/python -m pip install --quiet --no-deps sglang==$* $(if $(filter 0.5.23,$*),transformers==5.19.0 tokenizers==0.23.2)
	touch $@

engine: $(ENGINE_VENV)/.ready  ## the real SGLang for this machine's CPU, with tiny random models

demo: $(VENV)/.ready  ## the founding case's sweep on the simulated engine, to a report
	$(RUN) -m ray_jobs.run_sweep sweeps/specs/founding_case.yaml --results results/founding-case
	$(RUN) -m analysis report results/founding-case
	@echo "Next: source $(VENV)/bin/activate, then specsweep --help"

test: $(VENV)/.ready lint  ## format, lint, types, then the fast suite
	$(RUN) -m pytest -m "not engine and not engine_all"

lint: $(VENV)/.ready
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(VENV)/.ready
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

test-engine: $(VENV)/.ready $(ENGINE_VENV)/.ready  ## the real SGLang server on the CPU, tiny random models
	$(RUN) -m pytest -m engine

test-engine-all: $(VENV)/.ready $(ENGINE_VENV)-0.5.16/.ready $(ENGINE_VENV)-0.5.23/.ready  ## over the oldest and newest supported SGLang
	SPECSWEEP_ENGINE_PYTHON=$(ENGINE_VENV)-0.5.16/bin/python $(RUN) -m pytest tests/engine -m engine_all
	SPECSWEEP_ENGINE_PYTHON=$(ENGINE_VENV)-0.5.23/bin/python $(RUN) -m pytest tests/engine -m engine_all

# The Gaussian process among the search policies needs torch: that of the server's environment, where it was built.
TORCH_SITE ?= $(firstword $(wildcard $(ENGINE_VENV)/lib/python3*/site-packages))

bench: $(VENV)/.ready  ## every benchmark that needs no GPU, then the page of results
	$(RUN) -m benchmarks.overhead
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.search_cost $(if $(TORCH_SITE),--torch-site $(TORCH_SITE))
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(RUN) -m benchmarks.verdicts --record
	$(RUN) -m benchmarks.what_if
	$(RUN) -m benchmarks.results_page

results-page: $(VENV)/.ready
	$(RUN) -m benchmarks.results_page

chaos: $(VENV)/.ready  ## 200 trials with a random fault each, the driver killed three times
	$(RUN) -m benchmarks.chaos

clean:
	rm -rf $(VENV) *.egg-info build $(ENGINE_VENV) $(ENGINE_VENV)-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
