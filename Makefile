PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# torch_xla has wheels for Linux on x86-64 alone; elsewhere all but XLA is set up, with the same torch
comma := ,
XLA := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),xla$(comma))
COSTS := $(if $(XLA),torch$(comma) torch_xla and CUDA's libraries: about 7 GB and 4 minutes,torch: about 1.5 GB and a few minutes)

# .venv is set up here; another environment that is there is used as it is, if it has the packages that a target needs
ifneq ($(VENV),.venv)
export PYTHONPATH := $(CURDIR)
endif
NEEDS = $(if $(filter-out .venv,$(VENV)),$(if $(wildcard $(BIN)/python),complete,$(VENV)/.installed),$(VENV)/.installed)

.PHONY: demo test lint docs browser bench soak mutants clean complete

demo: EXTRAS = demo
demo: $(NEEDS)
	$(BIN)/python examples/demo.py

test: lint browser
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

lint: EXTRAS = docs test
lint: $(NEEDS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: EXTRAS = docs
docs: $(NEEDS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html, or serve it, for the search to work: $(BIN)/python -m http.server --directory site"

# for the tests of the page that vbs compare makes
browser:
	@(command -v chromium && command -v chromedriver) > /dev/null \
		|| (apt-get -qq -o Acquire::Retries=3 update && DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 \
			install --yes --no-install-recommends chromium chromium-driver > /dev/null) \
		|| echo "chromium and chromedriver are missing: tests marked browser will fail"

bench: EXTRAS = test
bench: $(NEEDS) .peers
	$(BIN)/python bench/sampler.py
	$(BIN)/python bench/trace.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/command.py
	$(BIN)/python bench/optimizer.py
	$(BIN)/python bench/weights.py
	$(BIN)/python bench/reduction.py
	$(BIN)/python bench/exact.py
	$(BIN)/python bench/logs.py
	$(BIN)/python bench/saving.py
	$(BIN)/python bench/xla.py

soak: EXTRAS = test
soak: $(NEEDS)
	$(BIN)/python test/soak.py --directory .soak
	$(BIN)/python test/elastic.py --directory .soak

# plants faults and shows those that no test notices; for some files: make mutants ONLY="rules/noise.py rules/adam.py"
mutants: EXTRAS = test
mutants: $(NEEDS) .mutmut
	PYTHONPATH=$(CURDIR)/.mutmut $(BIN)/python test/mutants.py $(if $(ONLY),--only $(ONLY))

# everything else needs the environment; it is made once, and again when the requirements change
$(VENV)/.installed: setup.cfg pyproject.toml
	@echo "Setting up $(VENV), once, with $(COSTS)."
	@echo "To use an environment that you have: make $(MAKECMDGOALS) VENV=/path/to/venv"
	$(PYTHON) -m venv $(VENV)
	@if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; set -x; \
		$(BIN)/pip install $$quiet --disable-pip-version-check --no-compile --editable '.[$(XLA)docs,test]' 'torch==2.9.*'
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib  # on all cores, where pip would on one
	touch $@

complete:
	@$(BIN)/python .ci/missing.py $(EXTRAS)

# what benchmarks compare with, apart from the environment; without it they say so and go on
.peers: | $(NEEDS)
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ fairscale==0.4.13 adaptdl==0.2.11 \
		autograd portpicker psutil redis requests certifi charset_normalizer idna urllib3 semver 'setuptools<81'

# apart from the environment, too; pytest and what it needs are those of the environment
.mutmut: | $(NEEDS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ mutmut==3.8.0 click coverage libcst \
		linkify-it-py markdown-it-py mdit-py-plugins mdurl platformdirs pyyaml rich setproctitle textual

clean:
	rm -rf .venv .peers .soak .mutmut build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
