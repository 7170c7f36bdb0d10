# The only entry point. Needs python3 >= 3.11, git and make; everything else is fetched, pinned and hashed, on first use.
# Environments are built on demand into .venv/; what they are built from is kept in $MOEJOB_CACHE, outside the tree.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

export PYTHON ?= python3
export IMAGES PREFIX TAG ENGINE BASE RUNTIME
# Programs of tests start by the dozen. Without compiled files beside their sources, torch and Megatron take each of them
# 12 s of a core instead of 5.
unexport PYTHONDONTWRITEBYTECODE
# Passed on to pytest: make test-operator ARGS="-k layout -x"
ARGS ?=

operator := .venv/operator/bin
trainer := .venv/trainer/bin
trainer_gpu := .venv/trainer-gpu/bin
rollout := .venv/rollout/bin
bridge := .venv/bridge/bin

help: ## Say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  %-14s %s\n", $$1, $$2 }'

# What a tool says matters when it fails.
quietly = said=$$($(1) 2>&1) || { echo "$$said"; exit 1; }


# Environments. The name of a stamp carries a hash of all that the environment is built from: a file's date says nothing
# after a checkout.

built = .venv/$(1)/.built-$(shell cat requirements/$(1).txt requirements/tools.txt scripts/environment VERSION \
	$(patsubst %,%/pyproject.toml,$(2)) | sha256sum | cut -c 1-16)
operator_built := $(call built,operator,crds operator cli)
trainer_built := $(call built,trainer,crds trainer)
trainer_gpu_built := $(call built,trainer-gpu,crds trainer)
rollout_built := $(call built,rollout,crds rollout)
peft_built := $(call built,peft)
bridge_built := $(call built,bridge,crds trainer)
docs_built := $(call built,docs,crds operator cli)
trl_built := $(call built,trl)
mlflow_built := $(call built,mlflow)
real_built := $(call built,real)

$(operator_built):
	@scripts/environment operator $@ crds operator cli

$(trainer_built):
	@scripts/environment trainer $@ crds trainer

$(trainer_gpu_built):
	@scripts/environment trainer-gpu $@ crds trainer

$(rollout_built):
	@scripts/environment rollout $@ crds rollout

$(peft_built):
	@scripts/environment peft $@

$(bridge_built):
	@scripts/environment bridge $@ crds trainer

$(docs_built):
	@scripts/environment docs $@ crds operator cli

$(trl_built):
	@scripts/environment trl $@

$(mlflow_built):
	@scripts/environment mlflow $@

$(real_built):
	@scripts/environment real $@

# What tests compare with, peft and trl for example, has environments of its own, which the tests build.
setup: $(operator_built) $(trainer_built) $(rollout_built) ## Build the environments that planning, training and engines need
	@:

setup-gpu: $(operator_built) $(trainer_gpu_built) ## Build what plans and trains on the GPUs of this machine
	@:

setup-megatron: $(operator_built) $(bridge_built) ## Build what converts to and from Megatron's checkpoints
	@:


# Checks.

fmt: $(operator_built) ## Format and fix what can be fixed
	@$(operator)/ruff check --quiet --fix-only
	@$(operator)/ruff format --quiet

lint: $(operator_built) ## Check format, style, words and the import rules
	@$(operator)/ruff format --quiet --check --diff
	@$(operator)/ruff check --quiet
	@$(call quietly,PYTHONPATH=crds/src:operator/src:trainer/src:rollout/src:cli/src:scripts $(operator)/lint-imports --no-logo --no-cache)
	@$(operator)/python scripts/words.py

# What is said of one environment is not mixed with what is said of another.
two_at_a_time = $(MAKE) --jobs=2 --output-sync=target

types: $(operator_built) $(trainer_built) $(rollout_built) ## Check types, strictly, against what each package runs with
	@$(two_at_a_time) operator-types trainer-types rollout-types

operator-types:
	@$(call quietly,$(operator)/mypy --cache-dir .mypy_cache/operator $(wildcard crds/src operator/src cli/src scripts images \
		benchmarks/*.py benchmarks/contest \
		$(filter-out %/launcher_listeners.py %/engine_listeners.py,$(wildcard benchmarks/hostile/*.py)) tests/*.py $(patsubst %,tests/%,api operator cli chart cluster builds)))

trainer-types:
	@$(call quietly,$(trainer)/mypy --cache-dir .mypy_cache/trainer trainer/src tests/trainer tests/bridge tests/gpu benchmarks/trainer benchmarks/rollout benchmarks/grpo_learning \
		benchmarks/hostile/launcher_listeners.py examples/ask.py examples/recompute_step.py)

rollout-types:
	@$(call quietly,$(rollout)/mypy --cache-dir .mypy_cache/rollout rollout/src tests/rollout benchmarks/hostile/engine_listeners.py)

generate: $(operator_built) ## Write the CRD that the models describe, and the manifests that the operator makes
	@$(operator)/python -m moejob_api.crd
	@PYTHONPATH=tests $(operator)/python -m golden_manifests

verify: lint types ## All of that, and that nothing generated is stale
	@$(operator)/python -m moejob_api.crd --check


# Tests, in the environment of what they test.

# $(call tested,ENVIRONMENT,TESTS)
tested = scripts/tested $@ $(1)/pytest $(2) $(ARGS)
tested_targets := test-operator test-trainer test-nodes test-cluster test-bridge test-rollout

# Two cores have no room for trainers beside the nodes, where their tests took twice as long. Nodes wait for one another
# as long as they compute, so all others run beside them. What targets print that run at a time comes when each has ended.
# Each target runs whatever becomes of those before it: the table at the end says what all of them did.
test: $(operator_built) $(trainer_built) $(rollout_built) $(bridge_built) ## Run every test that needs no GPU
	@rm -rf $(patsubst %,.pytest_cache/%/table,$(tested_targets))
	@failed=0; \
	$(MAKE) --keep-going test-operator test-trainer || failed=1; \
	$(two_at_a_time) --keep-going test-nodes test-beside-nodes || failed=1; \
	$(PYTHON) scripts/test_table.py $(tested_targets) && exit $$failed

# The bridge computes in one process, and engines start in one each. Nodes take longer: while they compute,
# these get the smaller share of the cores.
test-beside-nodes: $(operator_built) $(trainer_built) $(rollout_built) $(bridge_built)
	@failed=0; \
	nice -n 10 $(MAKE) --jobs=1 test-cluster || failed=1; \
	nice -n 10 $(two_at_a_time) --keep-going test-bridge test-rollout || failed=1; \
	exit $$failed

# Three for two cores: tests of commands wait for processes.
test-operator: $(operator_built) ## Test api, operator, cli, chart and how images are built
	@$(call tested,$(operator),$(wildcard $(patsubst %,tests/%,api cli operator chart builds)) -n 3 --dist worksteal)

# moejob run, which starts the trainer, lives in the operator's environment; peers that it is compared with in their own.
test-trainer: $(trainer_built) $(operator_built) $(peft_built) $(trl_built) $(mlflow_built) $(real_built) ## Test the trainer
	@$(call tested,$(trainer),tests/trainer -m "not thorough" -n 3 --dist loadfile --no-loadscope-reorder)

# Thirteen minutes: other families and layouts of the tests that take longest, of which `make test` does some, a reward with
# its sign turned, demo-grpo, and whether every package of the closures with vLLM and Megatron-Bridge loads.
test-thorough: $(trainer_built) $(operator_built) $(rollout_built) $(bridge_built) ## Test the rows that `make test` leaves out
	@$(trainer)/pytest tests/trainer -m thorough -n 3 --dist loadfile $(ARGS)
	@$(rollout)/pytest tests/rollout -m thorough -n 2 --dist loadfile $(ARGS)
	@$(bridge)/pytest tests/bridge -m thorough $(ARGS)

# test-trainer does one seed.
test-learning: $(trainer_built) ## Test that GRPO learns from rewards, on three seeds
	@MOEJOB_LEARNING=full $(trainer)/pytest tests/trainer/objectives/grpo/test_learning.py $(ARGS)

# One process: importing Megatron-Bridge takes as long as all that is computed with it.
test-bridge: $(bridge_built) $(operator_built) ## Test the bridge to Megatron's checkpoints, and training beside Megatron's own model
	@$(call tested,$(bridge),tests/bridge -m "not thorough")

# Weights and moments that are resumed are compared to the bit; what is shown is what losses make of the layouts' sums.
matrix: $(trainer_built) ## Train and resume in every layout, and print how near each cell is
	@PYTHONPATH=tests $(trainer)/pytest -p trainer.parity.matrix tests/trainer/parity/test_parity.py \
		tests/trainer/parity/test_checkpoints.py -k "one_rank_trains or a_layout_trains or any_layout_saved" $(ARGS)

# Other jobs each time; what fails is printed with the values that make it fail again.
test-gate: $(trainer_built) ## Run hundreds of random jobs that plan accepts: each starts and makes a step
	@HYPOTHESIS_PROFILE=explore MOEJOB_ACCEPTED_JOBS=$${MOEJOB_ACCEPTED_JOBS:-300} \
		$(trainer)/pytest tests/trainer/test_accepted_jobs.py -n 0 $(ARGS)

# A minute or two the first time. Tests make them, too, when they first need one: tests/real_models.py.
real-models: $(trainer_built) $(real_built) ## Make real models, dense and MoE, in the cache: SmolLM2-135M-Instruct
	@PYTHONPATH=tests $(trainer)/python -m real_models

# Inputs that the usual tests have not seen; each listener and parser gets as many, a hundred thousand in a minute or so.
fuzz: $(operator_built) $(trainer_built) $(rollout_built) ## Send a million damaged inputs to each listener and each parser of foreign text
	@MOEJOB_FUZZ_INPUTS=$${MOEJOB_FUZZ_INPUTS:-1000000} $(operator)/pytest tests/operator/test_strange_bytes.py $(ARGS)
	@MOEJOB_FUZZ_INPUTS=$${MOEJOB_FUZZ_INPUTS:-1000000} $(trainer)/pytest tests/trainer/test_strange_bytes.py \
		tests/trainer/launcher/test_progress_server.py tests/trainer/rollouts/test_routed_experts.py \
		tests/trainer/interchange $(ARGS)
	@MOEJOB_FUZZ_INPUTS=$${MOEJOB_FUZZ_INPUTS:-1000000} $(rollout)/pytest tests/rollout/test_listener.py $(ARGS)

test-rollout: $(rollout_built) ## Test what runs beside vLLM
	@$(call tested,$(rollout),tests/rollout -m "not thorough" -n 2 --dist loadfile)

# Beside the trainer's environment, for this one has the kernels for GPUs; moejob run is the operator's. vLLM for GPUs is
# in images alone: MOEJOB_ROLLOUT_PYTHON names a Python with requirements/rollout-gpu.txt and pytest where there is one.
gpu-test: $(trainer_gpu_built) $(operator_built) ## Test kernels and training on the GPUs of this machine
	@MOEJOB_TRAINER_PYTHON=$(CURDIR)/$(trainer_gpu)/python $(trainer_gpu)/pytest tests/gpu -rs $(ARGS)
	@[ -z "$${MOEJOB_ROLLOUT_PYTHON:-}" ] || $$MOEJOB_ROLLOUT_PYTHON -m pytest tests/rollout/test_nccl.py -rs $(ARGS)

# Both build the cluster programs that they lack, and skip by name where they cannot; so they do not wait for control-plane.
test-cluster: $(operator_built) $(trainer_built) ## Test on a real control plane, and images
	@$(call tested,$(operator),tests/cluster --ignore tests/cluster/nodes -n 2 --dist loadfile -rs --no-fold-skipped)

# One process: a machine has one set of nodes.
test-nodes: $(operator_built) $(trainer_built) $(rollout_built) ## Test on two real nodes
	@$(call tested,$(operator),tests/cluster/nodes -n 1 -rs --no-fold-skipped)

# Needs what the nodes need, and half an hour; test-nodes does the three that happen most, and
# test-trainer kills ranks. Last comes `make kind-demo`.
test-faults: $(operator_built) $(trainer_built) $(rollout_built) ## Test every fault: of ranks, engines, pods, nodes, volumes, clocks, the cluster and the operator
	@MOEJOB_FAULTS=full $(operator)/pytest tests/cluster/control_plane/test_faults.py \
		tests/cluster/control_plane/test_any_job_on_a_real_api_server.py \
		tests/cluster/control_plane/test_scenarios_on_a_real_api_server.py tests/cluster/nodes/test_faults.py \
		tests/cluster/nodes/test_engines.py tests/cluster/nodes/test_policies.py tests/cluster/nodes/test_strangers.py tests/cluster/nodes/test_tenants.py tests/cluster/nodes/test_kind_demo.py -rs --no-fold-skipped $(ARGS)

# Two minutes of the first run build kube-router.
test-policies: $(operator_built) $(trainer_built) ## Test that kube-router, as clusters run it, keeps strangers off the pods of a job
	@MOEJOB_POLICY_ENGINE=kube-router $(operator)/pytest tests/cluster/nodes/test_kube_router.py -rs --no-fold-skipped $(ARGS)

# Ten gigabytes and five minutes for each image that is not there yet.
test-images: $(operator_built) ## Test engines in their images, serving what a trainer exported
	@MOEJOB_IMAGES=all $(operator)/pytest tests/cluster/images -rs --no-fold-skipped $(ARGS)

control-plane: $(operator_built) ## Build the Kubernetes programs that this machine lacks
	@PYTHONPATH=tests $(operator)/python -m cluster.binaries

# With docker, podman, or buildah where no registry of images can be reached: docs/images.md.
images: ## Build container images: IMAGES="operator trainer-cpu" PREFIX=registry.example.com/ml TAG=...
	@PYTHONPATH=scripts $(PYTHON) -m image_builds

# Asks the registries that the Dockerfiles name. ARGS=--check asks none, and fails where a base has no digest yet.
bases: ## Look up the digests of the images that ours stand on, into images/bases.txt; then build, test and commit it
	@PYTHONPATH=scripts $(PYTHON) -m image_builds.bases $(ARGS)

kind-demo: ## Train the tiny example on a cluster in Docker; needs docker, kind, kubectl and helm
	@scripts/kind-demo

bench: $(operator_built) ## Measure planning
	@$(operator)/python -m benchmarks.planning

# 25 minutes. ARGS="--all" measures a thousand jobs of eight pods as well; ARGS=--quick and ARGS="--only trace" record nothing.
bench-operator: $(operator_built) ## Measure the operator beside its peers, JobSet with JOBSET_SRC=CHECKOUT; needs Go
	@PYTHONPATH=tests $(operator)/python -m benchmarks.operator $(ARGS)

# As root, like the nodes. ARGS="--times 10" does every fault ten times, ARGS="--only 'rank killed'" one kind, unrecorded.
bench-recovery: $(operator_built) $(trainer_built) ## Measure how long a job over two nodes stands still after a fault
	@PYTHONPATH=tests:scripts $(operator)/python -m benchmarks.recovery $(ARGS)

# Some ten minutes. ARGS=--quick attacks for a second each and records nothing.
bench-hostile: $(operator_built) $(trainer_built) $(rollout_built) ## Measure hostile reviews, and each listener under attack
	@PYTHONPATH=tests $(operator)/python -W ignore -m benchmarks.hostile $(ARGS)

bench-trainer: $(trainer_built) ## Measure training on this CPU beside Transformers
	@$(trainer)/python -W ignore -m benchmarks.trainer.cpu_step

# An hour and more. ARGS="--only peers replicas" measures these alone, ARGS="--folder FOLDER" saves on another disk.
bench-gpu: $(trainer_gpu_built) ## Measure training on the GPUs of this machine, beside Transformers and the cost model
	@$(trainer_gpu)/python -W ignore -m benchmarks.trainer.on_gpus --log runs/bench-gpu.log $(ARGS)

bench-grpo: $(trainer_built) $(operator_built) $(rollout_built) ## Measure GRPO on this CPU with vLLM, beside vLLM alone
	@PYTHONPATH=tests $(trainer)/python -W ignore -m benchmarks.rollout.cpu

# Always from the start: a run folder that is used again goes on where it was.
demo: $(operator_built) $(trainer_built) ## Train a small model here, then ask it something
	@rm -rf runs/demo
	@$(operator)/moejob run examples/tiny-sft.yaml --run-dir runs/demo
	@echo
	@$(trainer)/python examples/ask.py runs/demo/export "count from 2 to 5"

# The first run's export is where the second starts.
demo-grpo: $(operator_built) $(trainer_built) $(rollout_built) ## Teach a small model sums by their reward here, with a vLLM engine
	@rm -rf runs/tiny-sft-sums runs/tiny-grpo
	@$(operator)/moejob run examples/tiny-sft-sums.yaml
	@$(operator)/moejob run examples/tiny-grpo.yaml
	@$(operator)/python examples/answers.py runs/tiny-grpo

# As root, with Go for the cluster's programs, buildah and mmdebstrap for the images.
cluster-demo: $(operator_built) $(trainer_built) ## Train on two Kubernetes nodes of this machine, without Docker
	@PYTHONPATH=tests:scripts $(operator)/python -m cluster.nodes.demo


docs: $(docs_built) ## Build the documentation as a site, into site/; a link that leads nowhere is an error
	@$(call quietly,NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict)

# With `make demo` in one of them; committed, for pages are read where nothing can be run.
pictures: $(operator_built) $(trainer_built) ## Draw the pictures of README and docs again
	@PYTHONPATH=scripts:. $(operator)/python -m pictures


# Closures. Order matters: what comes later is held to the versions chosen earlier, so that the tools install on top of
# any of them. A pin stays until it is named: make lock UPGRADE="kopf ruff", or UPGRADE=all.

UPGRADE ?=
upgrades := $(if $(filter all,$(UPGRADE)),--upgrade,$(addprefix --upgrade-package ,$(UPGRADE)))
compile = UV_CUSTOM_COMPILE_COMMAND="make lock" scripts/uv --quiet pip compile \
	--config-file requirements/uv.toml --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	--generate-hashes --no-emit-index-url --no-emit-find-links $(upgrades) $(patsubst %,--constraints requirements/%.txt,$(3)) \
	--output-file requirements/$(1).txt $(patsubst %,requirements/%.in,$(2))

lock: ## Pin and hash the closures of requirements/*.in
	@$(call compile,uv,uv)
	@$(call compile,operator,operator)
	@$(call compile,trainer,trainer trackers,operator)
	@$(call compile,tools,tools,operator trainer)
	@$(call compile,rollout,rollout,tools)
	@$(call compile,trainer-gpu,trainer trackers gpu,trainer tools)
	@$(call compile,peft,trainer peft,trainer tools)
	@$(call compile,bridge,trainer bridge,trainer tools)
	@$(call compile,trl,trainer trl,trainer tools)
	@$(call compile,mlflow,mlflow,trainer tools)
	@$(call compile,real,real,trainer tools)
	@$(call compile,rollout-gpu,rollout-gpu,tools)
	@$(call compile,sbom,sbom,tools)
	@$(call compile,docs,operator docs,operator tools)
	@$(call compile,audit,audit,tools)

# What could not be looked up counts as vulnerable, or an index without that service would pass everything.
audit: ## Look up every pin among known vulnerabilities; needs PyPI itself
	@for closure in requirements/*.txt; do \
		echo "$$closure"; scripts/uv --quiet tool run --with-requirements requirements/audit.txt pip-audit --strict --disable-pip \
			--require-hashes --progress-spinner off --requirement "$$closure" || failed=1; \
	done; exit $${failed:-0}

# Of images that are in docker, or in podman with ENGINE=podman; by the lists of parts in them. Needs grype.
audit-images: ## Look up what is in images, Debian's packages too: IMAGES="operator trainer" PREFIX=... TAG=...
	@scripts/audit-images $(or $(IMAGES),operator trainer rollout)

clean: ## Remove the environments and all build output; the cache stays
	@rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		$(foreach dist,crds operator trainer rollout cli,$(dist)/dist $(dist)/build)
	@find $(wildcard crds operator trainer rollout cli tests benchmarks scripts) -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help setup setup-gpu setup-megatron fmt lint types operator-types trainer-types rollout-types generate verify test test-operator test-trainer test-bridge test-learning matrix test-gate real-models test-rollout test-cluster test-nodes test-beside-nodes test-faults test-policies test-images gpu-test control-plane bench bench-operator bench-recovery bench-hostile bench-trainer bench-gpu bench-grpo demo demo-grpo cluster-demo docs pictures images bases kind-demo lock audit audit-images clean
