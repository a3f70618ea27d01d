# Everything is run from .venv, which these targets make and keep up to date by themselves.
#
#   make lab     JupyterLab on your copy of the first lab, in labs/; LAB=02_allreduce opens another
#   make demo    the same lab without a browser, printing what each rank said
#   make test    every check, the tests of the core, and those that your change can reach: 15 minutes;
#                LANES=0 one after the other; with PYTEST_ARGS="tests/unit -k guard" only those
#   make test-all   every check and every test: half an hour
#   make test-gpu   what needs a GPU; CUDA=cuda13 where the driver is for CUDA 13; SYSTEM_SITE=1
#                   PYTHON=python3 with the packages that this Python has, and no registry;
#                   PARTS=contract for those whose names begin so
#   make grade   all 55 submissions that the test of nbgrader has, of which "make test-all" grades a part
#   make docs    the documentation as a site, in build/site
#   make docs-branch NAME=0.2.0 ALIAS=latest  the same on the branch gh-pages, beside other versions
#   make dist    the sdist and the wheel, in dist/, and those of allranks-without-mpi
#   make release VERSION=0.2.0  all of a release but the publication: version, dist, checks, docs
#   make test-lowest   the core's tests with the lower bounds of pyproject.toml, exactly
#   make test-prereleases   the same with pre-releases of ipykernel, jupyterlab, numpy and mpi4py
#   make test-pythons  the unit tests and a notebook on every Python from 3.11 on that is found, or on PYTHONS=…
#   make pictures   docs/pictures, taken anew; PICTURES="ring strips" takes some of them
#   make gallery   each thing shown in JupyterLab and Notebook 7, in two themes and two widths
#   make soak    random hostile cells on real ranks, for MINUTES=60
#   make many-hosts   a start, a cell, an exception, an interrupt and a death on HOSTS=16 hosts of
#                RANKS=4, which are namespaces; every night in CI
#   make chaos   one fault after the other on 4 hosts of namespaces, for MINUTES=30
#   make simulate   the same on simulated hosts, thousands of faults, for MINUTES=10 or SEEDS=20000;
#                SCENARIO=part_of_a_name SEED=7 repeats one, with a trace
#   make bench   every measurement; its samples go to benchmarks/results
#   make lock    new versions in constraints.txt
#   make clean   removes what these targets have made
#
# PYTHON=/path/to/python3.12 chooses the interpreter, LAB_ARGS="--port 9000" goes to JupyterLab,
# CHROMIUM=/path/to/chromium to the browser tests.

.DEFAULT_GOAL := help
SHELL := /bin/sh

LAB ?= 01_ranks
NOTEBOOK = notebooks/$(basename $(notdir $(LAB))).ipynb
VENV := .venv
LABEXTENSIONS := share/jupyter/labextensions
MPICH := .venv-mpich
IMPI := .venv-impi
CUPY := .venv-cupy
TORCH := .venv-torch
NBGRADER := .nbgrader
LOWEST := .venv-lowest
PRERELEASES := .venv-prereleases
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The pip of Python 3.11 says nothing while it installs what it has fetched: a minute or more.
PIP_VERSION := 26.3
PYTHON ?=
LAB_ARGS ?=
PYTEST_ARGS ?=
# Two test files at once, and beside them one whose tests mostly wait: see tests/conftest.py.
LANES ?= 3
BENCH_ARGS ?=
CHAOS_ARGS ?=
PICTURES ?=
PYTHONS ?=
SUITES ?= tests/unit,tests/widgets,tests/notebook/test_px.py
# Code that depends on the Python: what is drawn does not, nor the pages of the docs.
NEWEST_SUITES = tests/unit/cluster,tests/unit/collectives,tests/unit/command,tests/unit/engine,tests/unit/ensemble,$\
    tests/unit/magics,tests/unit/records,tests/notebook/test_cluster.py
CUDA ?= cuda12

# Where images ask for none, what has not been compiled would be compiled by each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help lab demo test test-all test-rest ready every rest beside newest test-lowest test-prereleases grade test-gpu lint types scripts contract packages docs docs-branch dist release test-pythons pictures gallery soak many-hosts chaos simulate bench lock clean

help:
	@sed -n '3,$$ { /^#/!q; s/^# \{0,1\}//; p; }' Makefile

lab: $(VENV)/.lab
	@$(BIN)/python notebooks/serve.py $(basename $(notdir $(LAB))) $(LAB_ARGS)

demo: $(VENV)/.lab
	$(BIN)/python notebooks/run.py $(NOTEBOOK)

IN_LANES = --numprocesses=$(LANES) --dist=loadscope --no-loadscope-reorder --durations=40
PYTESTS = ALLRANKS_TEST_PYTHONS=$(abspath $(MPICH)/bin/python) \
    ALLRANKS_TEST_CUPY=$(abspath $(CUPY)/bin/python) \
    ALLRANKS_TEST_TORCH=$(abspath $(TORCH)/bin/python) $(BIN)/python -m

test: ready
	$(PYTESTS) pytest $(IN_LANES) --junitxml=test-results/junit.xml $(or $(PYTEST_ARGS),--part=gate)

test-all: ready
	@$(MAKE) --jobs=2 every beside

# The second part of CI: what "make test" left out, until UNTIL, in seconds since 1970.
test-rest:
	@$(MAKE) --jobs=2 rest beside

# The environments, and the checks, which run while packages are fetched.
ready:
	@test -e $(VENV)/.test || df -Pk . | awk '$$4 + 0 && $$4 < 8e6 { printf "make test expected 8 GB of free space for its packages, found %.1f GB here.\n", $$4 / 1e6 }'
	@$(MAKE) --jobs=3 $(VENV)/.test lint contract types scripts $(MPICH)/.made $(CUPY)/.made $(TORCH)/.made $(NBGRADER)/.made packages

every:
	$(PYTESTS) pytest $(IN_LANES) --junitxml=test-results/junit.xml $(PYTEST_ARGS)

rest:
	$(PYTESTS) tests.rest --until $(UNTIL) $(IN_LANES)

# What computes without a pause gets the third of two cores that the lanes leave while they wait.
# Its output comes in one piece.
beside:
	@mkdir -p build; nice -n 5 $(MAKE) docs $(if $(CI),newest) >build/beside.txt 2>&1; \
	    status=$$?; echo; cat build/beside.txt; exit $$status

grade: $(NBGRADER)/.made
	ALLRANKS_TEST_SUBMISSIONS=all $(BIN)/python -m pytest -n0 tests/grading/test_nbgrader.py --durations=5

test-lowest: $(LOWEST)/.made
	$(LOWEST)/bin/python -m pytest $(IN_LANES) --part=core $(PYTEST_ARGS)

test-prereleases: $(PRERELEASES)/.made
	$(PRERELEASES)/bin/python -m pytest $(IN_LANES) --part=core $(PYTEST_ARGS)

newest:
	$(BIN)/python tests/pythons.py --newest --suites $(NEWEST_SUITES)

# Writes benchmarks/results/gpu_tests.json as each part ends; a part that cannot run says why. With
# SYSTEM_SITE=1 nothing is installed: PYTHON has what it has.
ifdef SYSTEM_SITE
test-gpu:
	$(or $(PYTHON),python3) tests/gpu/parts.py $(PARTS)
else
test-gpu: $(VENV)/.gpu-$(CUDA)
	$(BIN)/python tests/gpu/parts.py $(PARTS)
endif

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.test
	$(BIN)/python -m mypy

# The types and the rules of the JavaScript. Its tests are among the others: see tests/front.
scripts:
	@if ! command -v npm >/dev/null; then \
	    echo 'The types of the JavaScript are not checked: that needs npm, which was not found. On Debian and Ubuntu: apt-get install npm'; \
	elif ! $(MAKE) --no-print-directory node_modules/.made; then \
	    echo 'The types of the JavaScript are not checked: npm could not install what package-lock.json lists.'; \
	else npm run --silent types && npm run --silent lint; fi

contract: $(VENV)/.test
	$(BIN)/lint-imports

# Fails where a link or an anchor leads nowhere, or a docstring cannot be found.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The same on the local branch gh-pages, below the version's name, with a selector of versions.
docs-branch: $(VENV)/.test
	$(if $(NAME),,$(error Type for example: make docs-branch NAME=0.2.0 ALIAS=latest))
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(NAME) $(ALIAS)
	$(if $(ALIAS),NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default $(ALIAS))

dist: $(VENV)/.made
	@$(PIP) install --quiet --constraint constraints.txt hatchling
	rm -rf dist
	$(BIN)/python -m hatchling build -t sdist -t wheel -d dist
	$(BIN)/python -m tests.without_mpi dist/allranks-*.tar.gz dist

release: $(VENV)/.test
	@$(if $(VERSION),,echo 'Type for example: make release VERSION=0.2.0' >&2; exit 2;) \
	    $(BIN)/python -m tests.release $(VERSION)

pictures: $(VENV)/.test
	$(BIN)/python -m tests.browser.pictures $(PICTURES)

gallery: $(VENV)/.test
	$(BIN)/python -m tests.browser.gallery $(PICTURES)

test-pythons: $(VENV)/.made
	$(BIN)/python tests/pythons.py --suites $(SUITES) $(PYTHONS)

# Chromium, what hosts of namespaces are made of, and JupyterHub's proxy; one after the other, as apt-get has one lock. Never
# fails: what cannot be installed is named, and so are the tests that are skipped for want of it.
packages: $(VENV)/.test
	@PYTHON=$(BIN)/python sh tests/browser/install.sh
	@sh tests/hosts/install.sh
	@sh tests/hub/install.sh $(BIN)/python

soak: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),60)

many-hosts: $(VENV)/.test
	HOSTS=$(or $(HOSTS),16) RANKS=$(or $(RANKS),4) $(BIN)/python -m pytest -n0 -s tests/hosts/many_hosts.py

chaos: $(VENV)/.test
	$(BIN)/python -m tests.hosts.chaos --minutes $(or $(MINUTES),30) $(CHAOS_ARGS)

# A plan is JSON, as a failing run has printed it.
simulate: $(VENV)/.test
	$(BIN)/python -m tests.simulated $(SCENARIO) \
	    $(if $(SEED),--seed $(SEED) $${PLAN:+--plan "$$PLAN"},$(if $(SEEDS),--count $(SEEDS),--minutes $(or $(MINUTES),10)))

# A measurement compares with every MPI that is installed.
bench: $(VENV)/.test $(MPICH)/.made $(IMPI)/.made
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# CUDA 12 and CUDA 13 cannot be installed together, so each is resolved on its own and the two
# results are laid over each other. They agree on everything but cuda-toolkit, which has no content:
# it only pins the nvidia packages, and those are pinned here.
COMPILE = $(BIN)/uv pip compile pyproject.toml tests/mpi/requirements.txt tests/grading/requirements.txt benchmarks/requirements.txt --quiet --upgrade --universal --python-version 3.11 \
	--fork-strategy fewest --strip-extras --no-annotate --no-header --no-emit-index-url \
	--extra tensorflow --extra legacy-keras --extra lab --extra dask --extra ray --extra test --extra docs --extra dev

# Why a version is not the newest one, beside it.
CAPS = -e '/^numpy==/s/$$/  \# 2.5 needs Python 3.12/' \
	-e '/^h5py==/s/$$/  \# TensorFlow 2.21 needs less than 3.15/' \
	-e '/^jsonschema==/s/$$/  \# see pyproject.toml/'

lock: $(BIN)/uv
	@set -e; trap 'rm -f .constraints.*' EXIT; \
	$(COMPILE) tests/fakes/requirements.txt --extra cuda12 --output-file .constraints.12; \
	$(COMPILE) --extra cuda13 --output-file .constraints.13; \
	{ \
	    echo '# Every version that the labs and the tests run with, for all extras together: Linux on'; \
	    echo '# x86_64 and aarch64, macOS, Python 3.11 to 3.13. Written by "make lock".'; \
	    cat .constraints.12 .constraints.13 | grep -v '^cuda-toolkit==' | LC_ALL=C sort -u | sed $(CAPS); \
	} > .constraints.new; \
	mv .constraints.new constraints.txt
	@cut -d= -f1 constraints.txt | uniq -d | { ! grep .; } \
	    || { echo 'The names above are pinned twice: pip would refuse.' >&2; exit 1; }

clean:
	rm -rf $(VENV) $(MPICH) $(IMPI) $(CUPY) $(TORCH) $(NBGRADER) $(LOWEST) $(PRERELEASES) .venv-pythons build dist node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache test-results

# In a terminal pip shows a bar while it fetches and while it installs; elsewhere it writes errors only.
SHOWN = $(shell test -t 2 && echo --progress-bar=on || echo --quiet)

# One stamp for each set of packages: a changed pyproject.toml or constraints.txt installs again. Modules
# are compiled as they are first imported: most never are. This notebook imports what a start and a cell
# need: outside of make, images that set PYTHONDONTWRITEBYTECODE would compile it in each process.
define FIRST_NOTEBOOK
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
cells = "%load_ext allranks", "%%distributed -n 2\nallreduce(rank, op=Sum)"
NotebookClient(new_notebook(cells=[*map(new_code_cell, cells)]), timeout=100, kernel_name="python3").execute()
endef
export FIRST_NOTEBOOK

$(VENV)/.test: EXTRAS = lab,tensorflow,legacy-keras,early,dask,ray,test,docs,dev
$(VENV)/.lab: EXTRAS = lab,tensorflow
$(VENV)/.gpu-$(CUDA): EXTRAS = test,$(CUDA)

# Other clones on this machine have the same packages: see tests/environments.py. Not those of a reader,
# who has one clone.
KEPT := false
$(VENV)/.test $(MPICH)/.made $(IMPI)/.made $(CUPY)/.made: KEPT = $(BIN)/python tests/environments.py
INSTALLED = $(VENV) $(EXTRAS) pyproject.toml constraints.txt hatch_build.py allranks/__init__.py
INSTALLED_BESIDE = $(@D) constraints.txt $(REQUIREMENTS)

$(VENV)/.lab $(VENV)/.test $(VENV)/.gpu-$(CUDA): $(VENV)/.made pyproject.toml constraints.txt
	@# First: an installation would write through the links, into this folder.
	@rm -rf $(VENV)/$(LABEXTENSIONS)/allranks
	@$(KEPT) restore $(INSTALLED) || { \
	    echo 'Installing allranks[$(EXTRAS)] into $(VENV): more than 100 packages, one to five minutes the first time.'; \
	    $(PIP) install $(SHOWN) --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'; }
	@# Links instead of the copy, so that a change is seen when the page is loaded again.
	@rm -rf $(VENV)/$(LABEXTENSIONS)/allranks
	@mkdir $(VENV)/$(LABEXTENSIONS)/allranks
	@ln -s $(CURDIR)/allranks/features/toolbar/labextension/* $(CURDIR)/docs $(VENV)/$(LABEXTENSIONS)/allranks
	@# Jupyter's server follows links to folders only.
	@cp README.md $(VENV)/$(LABEXTENSIONS)/allranks
	@# Without ranks, the lab and the tests say why.
	@mkdir -p build/ipython
	@IPYTHONDIR=$(CURDIR)/build/ipython ALLRANKS_LOG_DIR=$(CURDIR)/build/logs \
	    $(BIN)/python -c "$$FIRST_NOTEBOOK" >/dev/null 2>&1 || :
	@$(KEPT) keep $(INSTALLED) || :
	@touch $@

# The collectives run on both MPI wheels, and one environment cannot hold both. Nor is the real cupy
# to be had where tests say what is missing without it.
$(MPICH)/.made: REQUIREMENTS = tests/mpi/requirements.txt
$(IMPI)/.made: REQUIREMENTS = benchmarks/requirements.txt
$(CUPY)/.made: REQUIREMENTS = tests/fakes/requirements.txt

$(MPICH)/.made: tests/mpi/requirements.txt
$(IMPI)/.made: benchmarks/requirements.txt
$(CUPY)/.made: tests/fakes/requirements.txt

$(MPICH)/.made $(IMPI)/.made $(CUPY)/.made: $(VENV)/.made constraints.txt
	@$(BIN)/python -m venv --clear $(@D)
	@$(KEPT) restore $(INSTALLED_BESIDE) || { \
	    echo 'Installing what $(REQUIREMENTS) lists into $(@D).'; \
	    $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	        --constraint constraints.txt --requirement $(REQUIREMENTS); }
	@$(KEPT) keep $(INSTALLED_BESIDE) || :
	@touch $@

# Its stamp is written only where torch was found, so that the next run looks again.
$(TORCH)/.made: $(VENV)/.made tests/torch/requirements.txt tests/torch/constraints.txt tests/torch/install.sh pyproject.toml constraints.txt
	@sh tests/torch/install.sh $(TORCH) $(BIN)/python

$(BIN)/uv: $(VENV)/.made
	@$(PIP) install --quiet uv
	@touch $@

$(LOWEST)/.made: $(BIN)/uv pyproject.toml
	@echo 'Installing the lower bounds of pyproject.toml into $(@D).'
	@$(BIN)/python -m venv --clear $(@D)
	@$(BIN)/uv pip compile pyproject.toml --quiet --resolution lowest-direct --extra lab --extra test \
	    --python $(@D)/bin/python --output-file $(@D)/requirements.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	    --requirement $(@D)/requirements.txt --editable .
	@touch $@

$(PRERELEASES)/.made: $(VENV)/.made pyproject.toml
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --editable '.[lab,test]'
	@$(@D)/bin/python -m pip --disable-pip-version-check install --no-compile --pre --upgrade \
	    ipykernel jupyterlab numpy mpi4py
	@touch $@

node_modules/.made: package.json package-lock.json
	@npm ci --silent --no-audit --no-fund
	@touch $@

# In a folder of its own: where it is installed, it adds its extensions to each JupyterLab. What it needs
# besides, other tests need too.
$(NBGRADER)/.made: $(VENV)/.test tests/grading/requirements.txt constraints.txt
	@$(PIP) install --quiet --no-deps --upgrade --target $(NBGRADER) --constraint constraints.txt \
	    --requirement tests/grading/requirements.txt
	@touch $@

# CI takes the oldest Python, and runs a part of the tests on the newest one too.
CANDIDATES = $(if $(CI),python3.11 python3.12 python3.13,python3.13 python3.12 python3.11)

# A .venv that was cut short, or whose interpreter has been removed, is made anew.
$(VENV)/.made:
	@set -e; \
	if $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    touch $@; exit 0; \
	fi; \
	seen=; python=; package=python3-venv; \
	for candidate in $(if $(PYTHON),'$(PYTHON)',$(CANDIDATES) python3); do \
	    version=$$("$$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) \
	        || continue; \
	    case $$version in 2.*|3.[0-9]|3.10) seen="$$seen $$candidate ($$version)"; continue;; esac; \
	    if "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$$candidate; break; fi; \
	    seen="$$seen $$candidate ($$version, without venv)"; package=python$$version-venv; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "allranks needs Python 3.11 or newer with its venv module; found:$${seen:- none}." >&2; \
	    echo "On Debian and Ubuntu: apt-get install $$package" >&2; \
	    echo 'With another Python:  make PYTHON=/path/to/python3.12 …' >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version) ($$(command -v "$$python"))."; \
	"$$python" -m venv --clear $(VENV); \
	$(PIP) install --quiet 'pip==$(PIP_VERSION)'; \
	touch $@
