# Each target makes its own environment: a fresh machine needs Python 3.11 or 3.12, git and make.
FITS := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do \
	$$p -c "$(FITS)" 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The packages of tests/zoo, playwright, which looks at reports in the Chromium of apt-get, and a
# kernel for the notebook.
# timm and lightly need torchvision, whose wheel needs CUDA's libraries: Lightning would import it
# wherever it finds it, and fail, so it lies in a folder of its own.
ZOO := $(VENV)/zoo
# Ray and what it needs (of which tensorboardX would be every Trainer's logger) lie in an environment of
# their own, which sees the other packages.
RAY := $(VENV)/ray
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Several ranks share the cores: an idle OpenMP thread must sleep, not spin.
export OMP_WAIT_POLICY ?= PASSIVE

# A file's tests stay together, in their order. Half of their time is waiting for ranks that are
# processes, so three share two cores.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile

.PHONY: demo test test-all test-cluster test-ray lint types docs bench clean

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py --config configs/gpt_demo.yaml
	$(BIN)/lightning-shard report build/demo

# What trains as a single device does so for 5 steps here, and for 10 in test-all.
test: $(STAMP)
	PARITY_STEPS=5 $(PYTEST) -m "not slow and not gpu and not benchmark and not hosts and not ray"

test-all: $(STAMP) $(ZOO)/.installed
	$(PYTEST) -m "not gpu and not hosts and not ray"

# Root makes network namespaces that stand for hosts, and a SLURM of them; without it these tests
# fail, and say why. What launchers did over two hosts is written into docs/launchers.md.
test-cluster: $(STAMP) test-ray
	$(BIN)/python -m pytest -m hosts
	$(BIN)/python -m tests.hosts

test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/ray -m ray

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# A warning is an error; the variable silences an advertisement.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev,mpi]"
	touch $(STAMP)

$(ZOO)/.installed: $(STAMP)
	$(PIP) --editable ".[dev,mpi,zoo,browser,notebook]"
	$(BIN)/pip uninstall --quiet --yes torchvision
	$(PIP) --no-deps --upgrade --target $(ZOO) torchvision
	touch $(ZOO)/.installed

SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(RAY)/.installed: $(STAMP)
	$(BIN)/python -m venv $(RAY)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > \
		$$($(RAY)/bin/python -c '$(SITE)')/beside.pth
	$(RAY)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable ".[ray]"
	touch $(RAY)/.installed

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
