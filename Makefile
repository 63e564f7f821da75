# One command for each thing one does with this tree; `make help` lists them.
#
# Everything is installed into .venv, and stamp files in it remember for which pyproject.toml. Each
# target may be run again at any time and is quick where there is nothing to do.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
ARGS ?=
JOBS ?= 3
BENCH ?= all

# Where it is set, each command that a test starts compiles all of SliceFS and takes three times as
# long.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMPS := .venv/stamps

# A path in a .pth file: the finder that is the default costs each Python of .venv 30 ms.
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --config-settings editable_mode=compat

# PACKAGE:PROOF; see tools/apt.sh.
MOUNT_PACKAGES := fuse3:fusermount3 redis-server:redis-server
RUN_PACKAGES := fuse3:fusermount3 gcc:gcc libc6-dev:/usr/include/stdio.h git:git xz-utils:xz
PACKAGES := $(RUN_PACKAGES) redis-server:redis-server make:make attr:setfattr acl:setfacl \
	libfuse3-dev:/usr/include/fuse3/fuse_lowlevel.h pkg-config:pkg-config \
	ceph-mon:ceph-mon ceph-osd:ceph-osd ceph-common:monmaptool radosgw:radosgw \
	python3-rados:/usr/lib/python3/dist-packages/rados.*.so

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(STAMPS)/dev ## Create .venv with SliceFS and what develops it

$(STAMPS)/python:
	@python=$$(tools/python.sh $(PYTHON)) && "$$python" -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/python
	$(INSTALL) -e '.[dev]'
	@touch $@

$(STAMPS)/bench: $(STAMPS)/dev
	$(INSTALL) -e '.[bench]' py-spy
	@touch $@

.PHONY: mount-packages
mount-packages: ## Install the Debian packages that the quick start needs, if missing
	@tools/apt.sh $(MOUNT_PACKAGES)

.PHONY: packages
packages: ## Install all Debian packages that the tests need (Ceph, too), if missing
	@tools/apt.sh $(PACKAGES)

.PHONY: pyfuse3
pyfuse3: venv ## Build the extra pyfuse3 (half a minute), which mounts without the native session need
	@tools/pyfuse3.sh $(BIN)/python

.PHONY: run
run: venv ## Mount an embedded volume, do real work on it and show the result
	@tools/apt.sh $(RUN_PACKAGES)
	$(BIN)/python -m tools.demo $(ARGS)

.PHONY: test
test: packages venv pyfuse3 ## Run the tests; ARGS='-k rename -x' are pytest's, JOBS=0 runs one at a time
	PYTHONHASHSEED=0 $(BIN)/pytest --tb=short -ra --instafail -n $(JOBS) --max-worker-restart 1 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: test-torch
test-torch: venv ## Run the tests that need torch; installs it once, 4.9 GB; TORCH=no leaves them out
ifneq ($(TORCH),no)
	@python=$$(tools/torch_env.sh $(BIN)/python) && \
		"$$python" -m pytest --tb=short -ra -p no:cacheprovider tests/slicefs/torch $(ARGS)
endif

.PHONY: test-data
test-data: venv ## Run the tests with pandas, zarr and datasets; installs them once, 0.6 GB
	@python=$$(tools/data_env.sh $(BIN)/python) && \
		"$$python" -m pytest --tb=short -ra -p no:cacheprovider tests/libraries $(ARGS)

.PHONY: check format-check lint types house
check: format-check lint types house ## Formatting, lint, types and the house rules

format-check: venv
	$(BIN)/ruff format --check
lint: venv
	$(BIN)/ruff check --extend-select ERA
types: venv
	$(BIN)/mypy
house: venv
	$(BIN)/python -m tools.house

.PHONY: man
man: venv ## Write the manual pages into build/man; MANPATH=build/man man slicefs-mount
	@$(BIN)/python -m tools.man

.PHONY: docs
docs: venv ## Write the site of docs/ and the reference into build/site
	@$(BIN)/python -m tools.site

.PHONY: wheel
wheel: man ## Build the wheel, with manual pages and docs, into build/dist
	@rm -rf build/lib build/bdist.* build/dist
	@$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w build/dist .
	@ls build/dist/*.whl

.PHONY: bench
bench: packages $(STAMPS)/bench ## Measure against JuiceFS; BENCH=meta ARGS='--threads 1'
	$(BIN)/python -m tools.bench $(BENCH) $(ARGS)

.PHONY: clean
clean: ## Remove .venv and everything generated
	rm -rf .venv build ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
