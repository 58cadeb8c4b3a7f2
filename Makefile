# Each target makes its own environment: a fresh machine needs Python 3.11 to 3.13, git and make.
FITS := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c "$(FITS)" 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The packages of tests/zoo lie in an environment of their own, which sees the other packages: of ray and
# tensorboard, which some need, every Trainer would make its logger. timm and lightly need torchvision,
# whose wheel needs CUDA's libraries: Lightning would import it wherever it finds it, and fail, so it has
# a folder of its own. The other slow tests want playwright, which looks at reports in the Chromium of
# apt-get, and a kernel for the notebook.
ZOO := $(VENV)/zoo
# Ray and what it needs (of which tensorboardX would be every Trainer's logger) lie in an environment of
# their own, which sees the other packages.
RAY := $(VENV)/ray
# torch of constraints.txt has no CUDA: where there is a GPU, a torch that has it gets an environment.
GPU := $(VENV)/gpu
GPU_TORCH ?= torch==2.11.0
HAS_GPU := $(wildcard /dev/nvidia0 /dev/dxg)
GPU_BIN := $(if $(HAS_GPU),$(GPU)/bin,$(BIN))
GPU_STAMP := $(if $(HAS_GPU),$(GPU)/.installed,$(STAMP))
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Several ranks share the cores: an idle OpenMP thread must sleep, not spin.
export OMP_WAIT_POLICY ?= PASSIVE
# Ranks that are processes import what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

# A file's tests stay together, in their order. Half of their time is waiting for ranks that are
# processes, so three share two cores.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile

.PHONY: demo test test-all test-cluster test-ray test-wheel test-gpu fuzz lint types docs bench bench-gpu clean

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py --config configs/gpt_demo.yaml
	$(BIN)/lightning-shard report build/demo

# What trains as a single device does so for 5 steps here, and for 10 in test-all.
test: $(STAMP)
	PARITY_STEPS=5 $(PYTEST) -m "not slow and not gpu and not benchmark and not hosts and not ray"

test-all: $(STAMP) $(ZOO)/.installed
	$(PYTEST) -m "not gpu and not hosts and not ray and not zoo and not wheel"
	$(ZOO)/bin/python -m pytest --numprocesses 3 --dist loadfile -m "zoo and not gpu"

# The pages, from the built wheel alone, on each Python that is allowed; fails where one lacks. For some
# the index may have torch with CUDA alone, 5 GB on the disk while the test runs.
test-wheel: $(STAMP)
	$(BIN)/python -m pytest tests/docs/test_from_the_wheel.py

# Root makes network namespaces that stand for hosts, and a SLURM of them; without it these tests
# fail, and say why. What launchers did over two hosts is written into docs/launchers.md.
test-cluster: $(STAMP) test-ray
	$(BIN)/python -m pytest -m hosts
	$(BIN)/python -m tests.hosts

test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/ray -m ray

# On a machine with 1 to 8 GPUs, with a torch that has CUDA; without a GPU both say so, and fail.
test-gpu: $(GPU_STAMP)
	$(GPU_BIN)/python -m tests.gpu

bench-gpu: $(GPU_STAMP)
	$(GPU_BIN)/python -m tests.benchmarks --device cuda --model wide

# Random programs, each on one device and under four schemes: SEED is that of the first one.
COUNT ?= 100
SEED ?= 0
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --count $(COUNT) --seed $(SEED) --jobs 2

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

SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(ZOO)/.installed: $(STAMP)
	$(PIP) --editable ".[dev,mpi,browser,notebook]"
	$(BIN)/python -m venv $(ZOO)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > \
		$$($(ZOO)/bin/python -c '$(SITE)')/beside.pth
	$(ZOO)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable ".[zoo]"
	$(ZOO)/bin/pip uninstall --quiet --yes torchvision
	$(ZOO)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-deps --upgrade --target $(ZOO)/zoo torchvision litgpt pytorch-tabular
	touch $(ZOO)/.installed

$(RAY)/.installed: $(STAMP)
	$(BIN)/python -m venv $(RAY)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > \
		$$($(RAY)/bin/python -c '$(SITE)')/beside.pth
	$(RAY)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable ".[ray]"
	touch $(RAY)/.installed

$(GPU)/.installed: $(STAMP)
	$(BIN)/python -m venv $(GPU)
	grep -v '^torch==' constraints.txt > $(GPU)/constraints.txt
	$(GPU)/bin/pip install --quiet --disable-pip-version-check \
		--constraint $(GPU)/constraints.txt '$(GPU_TORCH)' --editable ".[dev]"
	touch $(GPU)/.installed

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
