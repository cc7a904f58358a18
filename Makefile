# demo, test, lab: each makes .venv, installs what it needs, then does its one thing.
PYTHON ?= python3
MODEL  ?= smollm2-135m
PROMPT ?= What is the capital of France?

VENV     := .venv
DECODEV2 := $(VENV)/bin/decodev2
FOLDER   := models/$(MODEL)
CHR      := $(FOLDER).chr

.PHONY: demo test lab models

demo: $(VENV)/installed
	$(DECODEV2) fetch $(MODEL) -o models
	test -e $(CHR) || $(DECODEV2) pack $(FOLDER) -o $(CHR)
	$(DECODEV2) generate --model $(FOLDER) --chr $(CHR) --prompt "$(PROMPT)" --max-new-tokens 64
	$(DECODEV2) run cpu_decode --param only=$(MODEL)

# Everything the tests check runs on the real models too.
models: $(VENV)/installed
	for model in smollm2-135m qwen2.5-coder-0.5b; do \
	  $(DECODEV2) fetch $$model -o models && \
	  { test -e models/$$model.chr || $(DECODEV2) pack models/$$model -o models/$$model.chr; } || exit 1; \
	done

test: $(VENV)/installed models
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest
	$(VENV)/bin/python -m pytest --nbval --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg notebooks
	$(DECODEV2) lint

lab: $(VENV)/installed
	$(VENV)/bin/jupyter lab $(firstword $(wildcard notebooks/00_*.ipynb))

$(VENV)/installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -e '.[test]'
	touch $@
