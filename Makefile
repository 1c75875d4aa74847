# make run    set up and start the demo: https://localhost:8443
# make test   everything that CI checks
# make lint   style, types, import layers, generated references
# make wheelhouse  what hosts install from, offline: build/wheelhouse (TAGS="cp311 cp313": Debian 12 and 13)
# make molecule    scenarios on booted hosts: SCENARIO=default, or --all (the default); see molecule/shared/README.md
# make bench  this proxy beside nginx, HAProxy and Caddy (minutes; not part of make test)
# make bench-overload  the drill played against the others too (as root)
# make soak   ten minutes of mixed load; memory and descriptors must stay flat (not part of make test)
# make lock   the locks anew from pyproject.toml (with Python 3.11, the oldest that is supported)
# make clean  what the others made
.DEFAULT_GOAL := run
.PHONY: run test lint bench bench-overload soak lock clean setup-runtime setup-dev setup-test

BIN := .venv/bin

run: setup-runtime
	@exec $(BIN)/reverse-proxy demo

setup-runtime setup-dev setup-test:
	@.ci/setup $(@:setup-%=%)

SCRIPTS := $(wildcard .ci/* molecule/shared/run $(addprefix molecule/shared/lab/,lab labhost labhost-init labhost-keeper image-recipe engine engine-init ssh-defaults))

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m proxy.config.reference --check
	$(BIN)/python -m tests.role_readme --check
	$(BIN)/yamllint --strict .
	PATH="$(CURDIR)/$(BIN):$$PATH" ansible-lint --offline -q --profile production
	! command -v shellcheck >/dev/null || shellcheck --external-sources $(SCRIPTS)

# PYTEST_ARGS narrows: make test PYTEST_ARGS="-k websocket"
test: setup-test lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

wheelhouse: setup-runtime
	@.ci/wheelhouse $(TAGS)

SCENARIO := --all
molecule: setup-test
	molecule/shared/run $(SCENARIO)

bench: setup-dev
	$(BIN)/python -m tests.bench

bench-overload: setup-dev
	$(BIN)/python -m tests.bench.overload

soak: setup-test
	$(BIN)/python -m tests.show.soak

COMPILE := CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --allow-unsafe --generate-hashes --strip-extras \
	--no-emit-index-url --no-emit-find-links --no-emit-options $(LOCK_ARGS)

# LOCK_ARGS=--upgrade takes the newest releases; without it only what pyproject.toml demands changes.
lock: setup-dev
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "make lock: needs a .venv of Python 3.11")'
	$(COMPILE) --only-build-deps --build-deps-for wheel --build-deps-for editable -o requirements/build.txt pyproject.toml
	$(COMPILE) -o requirements/runtime.txt pyproject.toml
	$(COMPILE) --extra dev -c requirements/build.txt -c requirements/runtime.txt -o requirements/dev.txt pyproject.toml

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
