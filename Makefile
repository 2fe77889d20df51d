PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# torch_xla has wheels for Linux on x86-64 alone; elsewhere all but XLA is set up, with the same torch
comma := ,
XLA := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),xla$(comma))

.PHONY: demo test lint browser bench soak clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint browser
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# for the tests of the page that vbs compare makes
browser:
	@(command -v chromium && command -v chromedriver) > /dev/null \
		|| (apt-get -qq -o Acquire::Retries=3 update && DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 \
			install --yes --no-install-recommends chromium chromium-driver > /dev/null) \
		|| echo "chromium and chromedriver are missing: tests marked browser will fail"

bench: $(VENV)/.installed .peers
	$(BIN)/python bench/sampler.py
	$(BIN)/python bench/trace.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/command.py
	$(BIN)/python bench/optimizer.py
	$(BIN)/python bench/reduction.py
	$(BIN)/python bench/logs.py
	$(BIN)/python bench/xla.py

soak: $(VENV)/.installed
	$(BIN)/python test/soak.py --directory .soak

# everything else needs the environment; it is made once, and again when the requirements change
$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(XLA)test]' 'torch==2.9.*'
	touch $@

# what benchmarks compare with, apart from the environment; without it they say so and go on
.peers: | $(VENV)/.installed
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ fairscale==0.4.13 adaptdl==0.2.11 \
		autograd portpicker psutil redis requests certifi charset_normalizer idna urllib3 semver 'setuptools<81'

clean:
	rm -rf $(VENV) .peers .soak build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
