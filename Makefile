PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# torch_xla has wheels for Linux x86-64 only; other platforms install everything else, with the same torch
comma := ,
XLA := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),xla$(comma))

# .venv is created here; any other existing environment is used unchanged if it has the packages that a target needs,
# unless it was created here: the file .demo in it names the clone
ifneq ($(VENV),.venv)
export PYTHONPATH := $(CURDIR)
endif
IS_OWN = $(filter $(CURDIR),$(shell cat $(VENV)/.demo 2> /dev/null))
SETS_UP := $(or $(filter .venv,$(VENV)),$(if $(wildcard $(BIN)/python),$(IS_OWN),$(VENV)))
FOR_DEMO := $(if $(SETS_UP),$(VENV)/.demo,complete)
FOR_ALL := $(if $(SETS_UP),$(VENV)/.test,complete)

# all processes of the tests read bytecode that the first one has written, instead of compiling the sources again
test test-core check soak: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test test-core style lint docs browser bench tpu torchtpu soak mutants clean complete

# the number of cores of the demo, as in make demo CORES=2; an environment variable is ignored
CORES =
demo: EXTRAS = demo
demo: $(FOR_DEMO)
	$(BIN)/python examples/demo.py $(CORES)

# more workers than cores: some wait for other processes; types are checked by a test, as mypy alone uses one core
PYTEST = $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
test: style browser
	$(PYTEST)

# the library alone, XLA included, without the lab and what is experimental
test-core: style
	$(PYTEST) -m 'not browser' $(addprefix test/,traces rules schedules policies cores data optim runs integrations promises) \
		test/test_layers.py test/test_mistakes.py test/test_frozen.py test/test_plugins.py test/test_typing.py

# quick check, in two minutes: tests that need no other process
CHECKED = $(addprefix test/,traces rules schedules policies lab/planning test_layers.py test_frozen.py)
check: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not xla and not browser' $(CHECKED)

lint: style
	$(BIN)/mypy

style: EXTRAS = docs test
style: $(FOR_ALL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

docs: EXTRAS = docs
docs: $(FOR_ALL)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html, or serve it, for the search to work: $(BIN)/python -m http.server --directory site"

# for the tests of the report of vbs compare
browser:
	@(command -v chromium && command -v chromedriver) > /dev/null \
		|| (apt-get -qq -o Acquire::Retries=3 update && DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 \
			install --yes --no-install-recommends chromium chromium-driver > /dev/null) \
		|| echo "chromium and chromedriver are missing: tests marked browser will fail"

bench: EXTRAS = test
bench: $(FOR_ALL) .peers
	$(BIN)/python bench/sampler.py
	$(BIN)/python bench/tokens.py
	$(BIN)/python bench/trace.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/command.py
	$(BIN)/python bench/optimizer.py
	$(BIN)/python bench/weights.py
	$(BIN)/python bench/reduction.py
	$(BIN)/python bench/shares.py
	$(BIN)/python bench/open_steps.py
	$(BIN)/python bench/exact.py
	$(BIN)/python bench/logs.py
	$(BIN)/python bench/saving.py
	$(BIN)/python bench/xla.py

# two environments without a TPU, for Linux on x86-64: the TPU compiler (libtpu, with jax), and TorchTPU, which needs a
# different torch than torch_xla and runs on XLA's CPU plugin instead of libtpu
NO_WHEEL = @echo "$(1) has no wheel for $(shell uname -s) on $(shell uname -m): its tests did not run"
tpu: EXTRAS = test
tpu: $(if $(XLA),$(FOR_ALL) .venv-tpu/.done)
	$(if $(XLA),$(BIN)/python -m pytest -m tpu_compiler test/experimental/tpu,$(call NO_WHEEL,libtpu))

torchtpu: $(if $(XLA),.venv-torchtpu/.done)
	$(if $(XLA),TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-torchtpu/bin/python -m pytest -m torch_tpu test/torchtpu,$(call NO_WHEEL,torch_tpu))

COMPILER = variable_batch_size/experimental/tpu/tpu_compiler.py
.venv-tpu/.done: $(COMPILER)
	@echo "Setting up .venv-tpu, once, with jax and libtpu: about 1.2 GB."
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/pip install --quiet --disable-pip-version-check $$($(PYTHON) $(COMPILER) packages)
	touch $@

.venv-torchtpu/.done: setup.cfg
	@echo "Setting up .venv-torchtpu, once, with torch and torch_tpu: about 2.5 GB, and CUDA's libraries if PyPI's torch has them."
	$(PYTHON) -m venv .venv-torchtpu
	.venv-torchtpu/bin/pip install --quiet --disable-pip-version-check --editable . torch==2.13.0 torch_tpu==0.2.0 \
		xla_cpu_pjrt==0.0.1 hypothesis pytest
	touch $@

soak: EXTRAS = test
soak: export PYTHONPATH := $(CURDIR):$(CURDIR)/test/support
soak: $(FOR_ALL)
	$(BIN)/python tools/soak.py --directory .soak
	$(BIN)/python tools/elastic.py --directory .soak
	$(BIN)/python tools/open_steps.py
	$(BIN)/python tools/cluster_soak.py --kills 50
	$(BIN)/python tools/live_soak.py
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m long
	$(MAKE) tpu torchtpu

# mutation testing: prints the mutants that no test kills; for some files: make mutants ONLY="rules/noise.py rules/adam.py"
mutants: EXTRAS = test
mutants: $(FOR_ALL) .mutmut
	PYTHONPATH=$(CURDIR)/.mutmut $(BIN)/python tools/mutants.py $(if $(ONLY),--only $(ONLY))

# the demo needs few packages, all other targets need all; each set is installed once, and again when setup.cfg changes
$(VENV)/.demo: PACKAGES = $(XLA)demo
$(VENV)/.demo: COSTS = $(if $(XLA),torch$(comma) torch_xla and CUDA's libraries: about 7.1 GB and 4 minutes,torch: about 0.8 GB)
$(VENV)/.test: PACKAGES = $(XLA)demo,docs,test
$(VENV)/.test: COSTS = $(if $(XLA),all packages: about 8.7 GB and 8 minutes,all packages: about 2.5 GB and 4 minutes)
# compile bytecode on all cores; pip would use one; the demo imports so little that this is not needed
$(VENV)/.test: COMPILE = -$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
$(VENV)/.demo $(VENV)/.test: setup.cfg pyproject.toml
	@echo "Setting up $(VENV), once, with $(COSTS)."
	@echo "To use an environment that you have: make $(MAKECMDGOALS) VENV=/path/to/venv"
	$(PYTHON) -m venv $(VENV)
	@if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; set -x; \
		$(BIN)/pip install $$quiet --disable-pip-version-check --no-compile --editable '.[$(PACKAGES)]' 'torch==2.9.*'
	$(COMPILE)
	echo '$(CURDIR)' | tee $(VENV)/.demo > $@

complete:
	@$(BIN)/python .ci/missing.py $(EXTRAS)

# packages that benchmarks compare with, outside of the environment; benchmarks skip them if they are missing
.peers: | $(FOR_ALL)
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ fairscale==0.4.13 adaptdl==0.2.11 \
		autograd portpicker psutil redis requests certifi charset_normalizer idna urllib3 semver 'setuptools<81'

# also outside of the environment; pytest and its dependencies are those of the environment
.mutmut: | $(FOR_ALL)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ mutmut==3.8.0 click coverage libcst \
		linkify-it-py markdown-it-py mdit-py-plugins mdurl platformdirs pyyaml rich setproctitle textual

clean:
	rm -rf .venv .venv-tpu .venv-torchtpu .peers .soak .mutmut build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
