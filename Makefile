# `make demo` and `make test` need nothing but make, a Python >= 3.12 and the package index.
# A Python of your choice: make test PYTHON=/path/to/python3

VENV := .venv
JAX := 0.11.2
# What `make test-all` installs beside the base, extras of pyproject.toml, and runs: all tests.
EXTRAS := test
TESTS :=
# Lines of constraints.txt that start so do not bind; as it stands, its comments.
UNPINNED := \#
PY := $(VENV)/bin/python

# Images of containers often set it. Every program that a test starts would compile the sources of JAX
# and transformers anew, two to three seconds each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve notebooks report docs test test-all test-sweeps test-newest-jax test-parity test-cluster test-lm-eval test-aot compile-kernels compile-kernels-once cuda check-page load-aiperf lint format typecheck constraints clean
.DELETE_ON_ERROR:
.SECONDARY:

help:
	@echo 'make demo             serve the bundled model; report and plots in results/demo/'
	@echo 'make serve            serve the bundled model over HTTP, as OpenAI does, until Ctrl-C'
	@echo 'make notebooks        run the notebooks; with their outputs in results/notebooks/'
	@echo 'make report           the page of results beside the papers, in results/report/; README'"'"'s tables'
	@echo 'make docs             the site of docs/, in results/docs/'
	@echo 'make test             run the tests but for the slow ones'
	@echo 'make test-all         run all tests but for the sweeps, as CI does'
	@echo 'make test-sweeps      run the sweeps: every kernel and shape where test-all has some'
	@echo 'make test-newest-jax  run the tests on the newest JAX 0.12, in .venv-newest'
	@echo 'make test-parity      compare with the models of transformers and of PEFT on torch (gigabytes), in .venv-parity'
	@echo 'make test-cluster     run the tests of the cluster over Ray actors, in .venv-cluster'
	@echo 'make test-lm-eval     evaluate over HTTP with lm-evaluation-harness, in .venv-lm-eval'
	@echo 'make test-aot         compile kernels and whole steps for GPUs that need not be here, in .venv-aot'
	@echo 'make compile-kernels  the same of every kernel and spec, on both JAX versions'
	@echo 'make cuda             install for an NVIDIA GPU, in .venv-cuda'
	@echo 'make check-page       look at the live page under load with Chromium, which must be here'
	@echo 'make load-aiperf      load a running server with AIPerf, in .venv-aiperf'
	@echo 'make lint             ruff'
	@echo 'make format           let ruff rewrite the code'
	@echo 'make typecheck        mypy'
	@echo 'make constraints      choose the newest pins for constraints.txt, with JAX $(JAX)'
	@echo 'make clean            remove the environments and caches; results/ stays'

demo: $(VENV)/.installed-base
	$(PY) -m experiments.serve --flagfile=configs/demo.flags --output_dir=results/demo --overwrite

serve: $(VENV)/.installed-serve
	$(PY) -m experiments.serve_http

notebooks: $(VENV)/.installed-notebooks
	$(PY) -m experiments.notebooks --overwrite

report: $(VENV)/.installed-docs
	$(PY) -m experiments.report --tables

docs: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu $(PY) -m sphinx -W --keep-going -q -b html docs results/docs
	@echo 'the site begins at results/docs/index.html'

test: CHOSEN := -m 'not slow and not sweep'
test-all: CHOSEN := -m 'not sweep'
test-sweeps: CHOSEN := -m sweep
test test-all test-sweeps: $(VENV)/.installed-$(EXTRAS)
	$(PY) -m pytest -n logical --maxprocesses=8 --dist=worksteal $(CHOSEN) $(TESTS)

# Of the lengths of alpaca's requests (vLLM §6.1). It needs a server: make serve.
load-aiperf: .venv-aiperf/.created
	.venv-aiperf/bin/python -m pip install aiperf==0.13.0
	.venv-aiperf/bin/aiperf profile --model bundled --url http://127.0.0.1:8000 \
	    --endpoint-type completions --streaming --tokenizer models/bundled \
	    --request-rate 20 --arrival-pattern poisson --request-count 400 --random-seed 0 \
	    --isl 19 --isl-stddev 10 --osl 58 --osl-stddev 30 --extra-inputs ignore_eos:true \
	    --use-server-token-count --ui none --artifact-dir results/aiperf

check-page: $(VENV)/.installed-test
	$(PY) -m experiments.check_page --adapters=models/bundled/adapters --adapter_slots=4 --kv_cache_tokens=8192 --overwrite

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.installed-test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(VENV)/.installed-test
	$(PY) -m mypy

test-newest-jax:
	$(MAKE) test-all VENV=.venv-newest UNPINNED=jax
	.venv-newest/bin/python -c 'import jax; print("passed on JAX", jax.__version__)'

# torch and JAX's CUDA plugin bring CUDA libraries: each has an environment of its own.
test-parity:
	$(MAKE) test-all VENV=.venv-parity EXTRAS=test,parity \
	    TESTS='tests/models/test_live_parity.py tests/experiments/bench/test_vs_transformers.py tests/experiments/papers/punica/test_lora_cpu.py'

test-cluster:
	$(MAKE) test-all VENV=.venv-cluster EXTRAS=test,cluster TESTS=tests/paged/cluster

test-lm-eval:
	$(MAKE) test-all VENV=.venv-lm-eval EXTRAS=test,lm-eval TESTS=tests/paged/server/test_lm_eval.py

test-aot:
	$(MAKE) test-all VENV=.venv-aot EXTRAS=test,aot \
	    TESTS='tests/pallas_kernels/tools/test_compile.py tests/experiments/gpu/test_compile_step.py'

compile-kernels:
	$(MAKE) compile-kernels-once VENV=.venv-aot
	$(MAKE) compile-kernels-once VENV=.venv-newest-aot UNPINNED=jax

compile-kernels-once: $(VENV)/.installed-test,aot
	$(PY) -m pallas_kernels.tools.compile --target=h200,h100,a100

cuda:
	$(MAKE) VENV=.venv-cuda .venv-cuda/.installed-cuda

# An environment whose Python has been uninstalled is none: forget its stamps.
$(shell [ -x $(PY) ] || rm -f $(VENV)/.created $(VENV)/.installed-*)

%/.created:
	python="$$(sh .ci/find_python)" && "$$python" -m venv --clear $*
	touch $@

# .installed-base, or .installed-NAMES for extras of pyproject.toml.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	grep -v '^$(UNPINNED)' constraints.txt > $(VENV)/constraints.txt
	$(PY) -m pip install --no-compile -c $(VENV)/constraints.txt -e '.$(patsubst %,[%],$(filter-out base,$*))'
	touch $@

constraints: $(VENV)/.created
	$(PY) -m pip install --dry-run --ignore-installed --quiet --report $(VENV)/resolved.json \
	    -e '.[test,aot,parity,cuda,cluster,notebooks,lm-eval,docs]' jax==$(JAX) jaxlib==$(JAX) jax-cuda13-plugin==$(JAX)
	$(PY) .ci/write_constraints.py $(VENV)/resolved.json > $(VENV)/pins.txt
	mv $(VENV)/pins.txt constraints.txt

clean:
	rm -rf .venv .venv-newest .venv-parity .venv-cluster .venv-lm-eval .venv-aot .venv-newest-aot .venv-cuda .venv-aiperf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
