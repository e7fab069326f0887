# make demo   the six steps on the embedded model and tasks: no GPU, no hub (RECIPE=recipes/X.yaml for another one)
# make test   set-up, fast tests, and the six steps on a tiny model
# make test-all   the same, then the tests marked slow or model
# make lint   ruff
# make bench  the benchmarks

SHELL := /usr/bin/env bash
PY := .venv/bin/python
RECIPE ?= recipes/demo.yaml
START := $(shell date +%s)

# $(call heading,text): a line that says what comes and how long it has been
heading = @s=$$(( $$(date +%s) - $(START) )); printf '\n=== %s   [%d:%02d since start]\n' '$(1)' $$((s / 60)) $$((s % 60))

.PHONY: help env demo test test-all lint bench
.NOTPARALLEL:

help:
	@sed -n '/^# make/s/^# //p' Makefile

env:
	./step1_env.sh

demo:
	$(call heading,1 of 6: environment (minutes the first time; seconds after that))
	@./step1_env.sh --config $(RECIPE)
	$(call heading,2 of 6: data)
	@$(PY) step2_prepare_data.py --config $(RECIPE)
	$(call heading,3 of 6: supervised fine-tuning on trajectories)
	@$(PY) step3_sft.py --config $(RECIPE)
	$(call heading,4 of 6: GRPO in the environments)
	@$(PY) step4_grpo.py --config $(RECIPE)
	$(call heading,5 of 6: evaluation of base | SFT | GRPO)
	@$(PY) step5_eval.py --config $(RECIPE)
	$(call heading,6 of 6: export)
	@$(PY) step6_export.py --config $(RECIPE)
	$(call heading,done: the whole comparison again)
	@cat checkpoints/$$(sed -n 's/^run: *//p' $(RECIPE))/eval/report.md

test:
	@./step1_env.sh
	$(PY) -m pytest -q -n auto -m "not slow and not model and not gpu" --ignore tests/test_smoke.py
	$(PY) -m pytest -q -m "not gpu" tests/test_smoke.py

test-all: test
	$(PY) -m pytest -q -m "(slow or model) and not gpu" --ignore tests/test_smoke.py

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

bench:
	@failed=0; for b in $$(grep -l __main__ bench/*.py); do echo "== $$b"; $(PY) "$$b" || failed=1; done; exit $$failed
