# make train   set up and train the main example on this machine's GPUs or CPU
# make test    set up, check style and types, run all tests, two files at a time: most of them wait
#
# Both make .venv on first use. To use an interpreter that has torch already: make train PYTHON=python3

ifdef PYTHON
READY :=
DEV_READY :=
else
PYTHON := .venv/bin/python
READY := .venv/ready
DEV_READY := .venv/dev-ready
endif

JOB ?= examples/quickstart.toml
OVERRIDES ?=

.PHONY: train test lint clean

train: $(READY)
	$(PYTHON) -m shoal train $(JOB) $(OVERRIDES)

test: lint
	$(PYTHON) -m pytest --numprocesses 2 --dist loadfile

lint: $(DEV_READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyrefly check

.venv/ready: pyproject.toml requirements.lock
	@echo "installing into .venv, torch too: some minutes the first time"
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable .
	touch $@

.venv/dev-ready: .venv/ready
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis
