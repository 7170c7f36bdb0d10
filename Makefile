# The only entry point; needs python3 >= 3.11, git and make. CONTRIBUTING.md explains the targets.
# The trainer's environments take a Python 3.12 or 3.13 that scripts/find_python finds.
# Environments are built on first use into .venv/, from $MOEJOB_CACHE outside the tree.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

export PYTHON ?= python3
export IMAGES PREFIX TAG ENGINE BASE RUNTIME
# Without compiled files, each program of a test takes 12 s of a core for its imports instead of 5.
unexport PYTHONDONTWRITEBYTECODE
# Passed on to pytest: make test-operator ARGS="-k layout -x"
ARGS ?=

operator := .venv/operator/bin
trainer := .venv/trainer/bin
trainer_gpu := .venv/trainer-gpu/bin
rollout := .venv/rollout/bin

# `##` marks a daily target, `#:` a rare one.
targets = sed -n 's/^\([a-z-]*\):.*$(1) \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | \
	awk -F '\t' '{ printf "  %-14s %s\n", $$1, $$2 }'

help: ## Print the targets
	@echo "Daily"
	@$(call targets,\#\#)
	@echo "Rare"
	@$(call targets,\#:)

# Print a tool's output only if it fails.
quietly = said=$$($(1) 2>&1) || { echo "$$said"; exit 1; }


# Environments. A stamp's name has the hash of the environment's sources: dates mean nothing after a checkout.

built = .venv/$(1)/.built-$(shell cat requirements/$(1).txt requirements/tools.txt scripts/environment scripts/find_python VERSION \
	$(patsubst %,%/pyproject.toml,$(2)) | sha256sum | cut -c 1-16)
operator_built := $(call built,operator,crds operator client cli)
trainer_built := $(call built,trainer,crds trainer)
trainer_gpu_built := $(call built,trainer-gpu,crds trainer)
rollout_built := $(call built,rollout,crds rollout)
peft_built := $(call built,peft)
docs_built := $(call built,docs,crds operator client cli)
trl_built := $(call built,trl)
mlflow_built := $(call built,mlflow)
real_built := $(call built,real)
lm_eval_built := $(call built,lm-eval)

$(operator_built):
	@scripts/environment operator $@ crds operator client cli

$(trainer_built):
	@scripts/environment trainer $@ crds trainer

$(trainer_gpu_built):
	@scripts/environment trainer-gpu $@ crds trainer

$(rollout_built):
	@scripts/environment rollout $@ crds rollout

$(peft_built):
	@scripts/environment peft $@

$(docs_built):
	@scripts/environment docs $@ crds operator client cli

$(trl_built):
	@scripts/environment trl $@

$(mlflow_built):
	@scripts/environment mlflow $@

$(real_built):
	@scripts/environment real $@

$(lm_eval_built):
	@scripts/environment lm-eval $@

# Tests build the environments of their references, peft and trl among them.
setup: $(operator_built) $(trainer_built) $(rollout_built) ## Build the environments that planning, training and engines need
	@:

setup-gpu: $(operator_built) $(trainer_gpu_built) #: Build the environment that trains on this machine's GPUs
	@:


# Checks.

fmt: $(operator_built) ## Format, and fix what ruff can fix
	@$(operator)/ruff check --quiet --fix-only
	@$(operator)/ruff format --quiet

lint: $(operator_built) ## Check format, style, words, pages and import rules
	@$(operator)/ruff format --quiet --check --diff
	@$(operator)/ruff check --quiet
	@$(call quietly,PYTHONPATH=crds/src:operator/src:trainer/src:rollout/src:client/src:cli/src:scripts $(operator)/lint-imports --no-logo --no-cache)
	@$(operator)/python scripts/words.py
	@$(operator)/python scripts/page_width.py

# Keep the output of one environment apart from the output of another.
two_at_a_time = $(MAKE) --jobs=2 --output-sync=target

types: $(operator_built) $(trainer_built) $(rollout_built) ## Check types, strictly, in the environment of each package
	@$(two_at_a_time) operator-types trainer-types rollout-types

operator-types:
	@$(call quietly,$(operator)/mypy --cache-dir .mypy_cache/operator $(wildcard crds/src operator/src client/src cli/src scripts images \
		benchmarks/*.py benchmarks/contest \
		$(filter-out %/launcher_listeners.py %/engine_listeners.py,$(wildcard benchmarks/hostile/*.py)) tests/*.py $(patsubst %,tests/%,api operator client cli chart cluster builds)))

trainer-types:
	@$(call quietly,$(trainer)/mypy --cache-dir .mypy_cache/trainer trainer/src tests/trainer tests/bridge tests/gpu benchmarks/trainer benchmarks/rollout benchmarks/grpo_learning \
		benchmarks/hostile/launcher_listeners.py examples/ask.py examples/recompute_step.py)

rollout-types:
	@$(call quietly,$(rollout)/mypy --cache-dir .mypy_cache/rollout rollout/src tests/rollout benchmarks/hostile/engine_listeners.py)

generate: $(operator_built) ## Write the CRD from the models, README's families, and the golden manifests
	@$(operator)/python -m moejob_api.crd
	@$(operator)/python scripts/model_table.py
	@PYTHONPATH=tests $(operator)/python -m golden_manifests

verify: lint types ## Run lint and types, and refuse generated files that are stale
	@$(operator)/python -m moejob_api.crd --check
	@$(operator)/python scripts/model_table.py --check


# Tests, in the environment of what they test.

# $(call tested,ENVIRONMENT,TESTS)
tested = scripts/tested $@ $(1)/pytest $(2) $(ARGS)
tested_targets := test-operator test-trainer test-nodes test-cluster test-bridge test-rollout

# Every target runs, also after a failure. CONTRIBUTING.md, "How `make test` shares two cores", has the order's reasons.
test: $(operator_built) $(trainer_built) $(rollout_built) ## Run every test that needs no GPU, and print a table
	@rm -rf $(patsubst %,.pytest_cache/%/table,$(tested_targets))
	@failed=0; \
	$(MAKE) --keep-going test-operator test-trainer || failed=1; \
	$(two_at_a_time) --keep-going test-nodes test-beside-nodes || failed=1; \
	$(PYTHON) scripts/test_table.py $(tested_targets) && exit $$failed

# Nodes take longest, so the targets beside them get the smaller share of the cores.
test-beside-nodes: $(operator_built) $(trainer_built) $(rollout_built)
	@failed=0; \
	nice -n 10 $(MAKE) --jobs=1 test-cluster || failed=1; \
	nice -n 10 $(two_at_a_time) --keep-going test-bridge test-rollout || failed=1; \
	exit $$failed

# Three processes on two cores, for tests of commands wait for other processes.
test-operator: $(operator_built) ## Test api, operator, cli, chart and the building of images
	@$(call tested,$(operator),$(wildcard $(patsubst %,tests/%,api client cli operator chart builds)) -n 3 --dist worksteal)

# moejob run is in the operator's environment; references have environments of their own.
test-trainer: $(trainer_built) $(operator_built) $(peft_built) $(trl_built) $(mlflow_built) $(real_built) ## Test the trainer
	@$(call tested,$(trainer),tests/trainer -m "not thorough" -n 3 --dist loadfile --no-loadscope-reorder)

# An hour on two cores.
test-thorough: $(trainer_built) $(operator_built) $(rollout_built) $(peft_built) $(mlflow_built) $(real_built) $(lm_eval_built) #: Test the families and layouts that make test leaves out
	@$(trainer)/pytest tests/trainer -m thorough -n 3 --dist loadfile $(ARGS)
	@$(rollout)/pytest tests/rollout -m thorough -n 2 --dist loadfile $(ARGS)

# test-trainer runs one seed.
test-learning: $(trainer_built) #: Test on three seeds that GRPO learns, also from older answers
	@MOEJOB_LEARNING=full $(trainer)/pytest tests/trainer/objectives/grpo/test_learning.py $(ARGS)

# Twenty-two runs of forty steps, and an engine for each placement.
test-learning-vllm: $(trainer_built) $(rollout_built) #: Test the same with vLLM; print the steps to the goal
	@MOEJOB_LEARNING=full PYTHONPATH=tests $(trainer)/pytest -p trainer.parity.matrix -n 2 --dist loadgroup \
		tests/trainer/rollouts/test_real_learning.py $(ARGS)

# One process: the import of Megatron-Bridge takes as long as its tests.
test-bridge: $(trainer_built) $(operator_built) ## Test conversion to and from Megatron's checkpoints
	@$(call tested,$(trainer),tests/bridge)

# Resumed weights and moments are compared to the bit; the printed errors are those of losses.
matrix: $(trainer_built) #: Train and resume in every layout; print each error
	@PYTHONPATH=tests $(trainer)/pytest -p trainer.parity.matrix tests/trainer/parity/test_parity.py \
		tests/trainer/parity/test_checkpoints.py -k "one_rank_trains or a_layout_trains or any_layout_saved" $(ARGS)

# The jobs differ each time; a failure is printed with the values that repeat it.
test-gate: $(trainer_built) #: Run 300 random jobs that plan accepts; each makes a step
	@HYPOTHESIS_PROFILE=explore MOEJOB_ACCEPTED_JOBS=$${MOEJOB_ACCEPTED_JOBS:-300} \
		$(trainer)/pytest tests/trainer/test_accepted_jobs.py -n 0 $(ARGS)

# A minute or two the first time. Tests that need a model make it too: tests/real_models.py.
real-models: $(trainer_built) $(real_built) #: Make real models, dense and MoE, in the cache
	@PYTHONPATH=tests $(trainer)/python -m real_models

# The inputs differ each time; 100,000 take about a minute.
fuzz: $(operator_built) $(trainer_built) $(rollout_built) #: Send a million damaged inputs to each listener and parser
	@MOEJOB_FUZZ_INPUTS=$${MOEJOB_FUZZ_INPUTS:-1000000} $(operator)/pytest tests/operator/test_strange_bytes.py $(ARGS)
	@MOEJOB_FUZZ_INPUTS=$${MOEJOB_FUZZ_INPUTS:-1000000} $(trainer)/pytest tests/trainer/test_strange_bytes.py \
		tests/trainer/launcher/test_progress_server.py tests/trainer/rollouts/test_routed_experts.py \
		tests/trainer/interchange $(ARGS)
	@MOEJOB_FUZZ_INPUTS=$${MOEJOB_FUZZ_INPUTS:-1000000} $(rollout)/pytest tests/rollout/test_listener.py $(ARGS)

test-rollout: $(rollout_built) ## Test the code beside vLLM
	@$(call tested,$(rollout),tests/rollout -m "not thorough" -n 2 --dist loadfile)

# MOEJOB_ROLLOUT_PYTHON: a Python with requirements/rollout-gpu.txt and pytest, for vLLM on GPUs.
gpu-test: $(trainer_gpu_built) $(operator_built) #: Test kernels and training on this machine's GPUs
	@MOEJOB_TRAINER_PYTHON=$(CURDIR)/$(trainer_gpu)/python $(trainer_gpu)/pytest tests/gpu -rs $(ARGS)
	@[ -z "$${MOEJOB_ROLLOUT_PYTHON:-}" ] || $$MOEJOB_ROLLOUT_PYTHON -m pytest tests/rollout/test_nccl.py -rs $(ARGS)

# Both build the cluster programs that they lack, or skip by name, so neither needs control-plane.
test-cluster: $(operator_built) $(trainer_built) ## Test on a real control plane, and images
	@$(call tested,$(operator),tests/cluster --ignore tests/cluster/nodes -n 2 --dist loadfile -rs --no-fold-skipped)

# One process: a machine has one set of nodes.
test-nodes: $(operator_built) $(trainer_built) $(rollout_built) ## Test on two real nodes
	@$(call tested,$(operator),tests/cluster/nodes -n 1 -rs --no-fold-skipped)

# An hour; needs root, like test-nodes.
test-faults: $(operator_built) $(trainer_built) $(rollout_built) #: Test every fault of ranks, engines, pods, nodes and operator
	@MOEJOB_FAULTS=full $(operator)/pytest tests/operator/test_scenarios.py tests/cluster/control_plane/test_faults.py \
		tests/cluster/control_plane/test_any_job_on_a_real_api_server.py \
		tests/cluster/control_plane/test_scenarios_on_a_real_api_server.py tests/cluster/nodes/test_faults.py \
		tests/cluster/nodes/test_engines.py tests/cluster/nodes/test_megatron.py tests/cluster/nodes/test_policies.py tests/cluster/nodes/test_strangers.py tests/cluster/nodes/test_tenants.py tests/cluster/nodes/test_kind_demo.py -rs --no-fold-skipped $(ARGS)

# The first run builds kube-router for two minutes.
test-policies: $(operator_built) $(trainer_built) #: Test a job's NetworkPolicy under kube-router
	@MOEJOB_POLICY_ENGINE=kube-router $(operator)/pytest tests/cluster/nodes/test_kube_router.py -rs --no-fold-skipped $(ARGS)

# An image that is not built yet takes 10 GB and five minutes.
test-images: $(operator_built) #: Test engines in their images
	@MOEJOB_IMAGES=all $(operator)/pytest tests/cluster/images -rs --no-fold-skipped $(ARGS)

control-plane: $(operator_built) #: Build the Kubernetes programs that this machine lacks
	@PYTHONPATH=tests $(operator)/python -m cluster.binaries

# With docker, podman, or buildah where no registry of images can be reached: docs/images.md.
images: #: Build container images: IMAGES="operator trainer-cpu" PREFIX=... TAG=...
	@PYTHONPATH=scripts $(PYTHON) -m image_builds

# ARGS=--check asks no registry, and fails if a base has no digest yet.
bases: #: Look up the digests of base images, into images/bases.txt
	@PYTHONPATH=scripts $(PYTHON) -m image_builds.bases $(ARGS)

# With the builder that requirements/tools.txt pins.
wheels: #: Build the Python packages into dist/; OUT=FOLDER
	@for folder in crds client cli operator trainer rollout; do \
	    scripts/uv --quiet build --wheel --python $(PYTHON) --require-hashes --build-constraints requirements/tools.txt \
	        --out-dir $(or $(OUT),dist) $$folder || exit 1; \
	done

kind-demo: #: Train the tiny example on a cluster in Docker
	@scripts/kind-demo

bench: $(operator_built) #: Measure planning
	@$(operator)/python -m benchmarks.planning

# 25 minutes; needs Go, and JOBSET_SRC=CHECKOUT for JobSet. ARGS=--all, --quick or "--only trace".
bench-operator: $(operator_built) #: Measure the operator beside its peers
	@PYTHONPATH=tests $(operator)/python -m benchmarks.operator $(ARGS)

# Needs root. ARGS="--times 10" repeats every fault, ARGS="--only 'rank killed'" measures one, unrecorded.
bench-recovery: $(operator_built) $(trainer_built) #: Measure how long a job stands still after a fault
	@PYTHONPATH=tests:scripts $(operator)/python -m benchmarks.recovery $(ARGS)

# Some ten minutes. ARGS=--quick attacks for a second each and records nothing.
bench-hostile: $(operator_built) $(trainer_built) $(rollout_built) #: Measure hostile reviews, and each listener under attack
	@PYTHONPATH=tests $(operator)/python -W ignore -m benchmarks.hostile $(ARGS)

# Needs root. ARGS="--only watch" takes a control plane alone and, like --dry, records nothing.
bench-steering: $(operator_built) $(trainer_built) #: Measure verbs on a cluster, and a submit until the first loss
	@PYTHONPATH=tests:scripts $(operator)/python -m benchmarks.steering $(ARGS)

bench-trainer: $(trainer_built) #: Measure training on this CPU beside Transformers
	@$(trainer)/python -W ignore -m benchmarks.trainer.cpu_step

# An hour and more. ARGS="--only peers replicas" measures these alone, ARGS="--folder FOLDER" saves on another disk.
bench-gpu: $(trainer_gpu_built) #: Measure training on this machine's GPUs
	@$(trainer_gpu)/python -W ignore -m benchmarks.trainer.on_gpus --log runs/bench-gpu.log $(ARGS)

bench-grpo: $(trainer_built) $(operator_built) $(rollout_built) #: Measure GRPO on this CPU with vLLM
	@PYTHONPATH=tests $(trainer)/python -W ignore -m benchmarks.rollout.cpu

demo: $(operator_built) $(trainer_built) ## Train a small model here, then ask it something
	@$(operator)/moejob demo

# The second run starts from the export of the first.
demo-grpo: $(operator_built) $(trainer_built) $(rollout_built) #: Teach a small model sums by their reward, with a vLLM engine
	@rm -rf runs/tiny-sft-sums runs/tiny-grpo
	@$(operator)/moejob run examples/tiny-sft-sums.yaml
	@$(operator)/moejob run examples/tiny-grpo.yaml
	@$(operator)/python examples/answers.py runs/tiny-grpo

# As root, with Go for the cluster's programs, buildah and mmdebstrap for the images.
cluster-demo: $(operator_built) $(trainer_built) #: Train on two Kubernetes nodes of this machine, without Docker
	@PYTHONPATH=tests:scripts $(operator)/python -m cluster.nodes.demo


docs: $(docs_built) ## Build the documentation into site/; a dead link is an error
	@$(call quietly,NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict)

# Runs `make demo` and `make demo-grpo` for two of them.
pictures: $(operator_built) $(trainer_built) #: Draw the pictures of README and docs again
	@PYTHONPATH=scripts:. $(operator)/python -m pictures


# Closures. Each is held to the versions of the closures before it: CONTRIBUTING.md, "Changing a pin".

UPGRADE ?=
upgrades := $(if $(filter all,$(UPGRADE)),--upgrade,$(addprefix --upgrade-package ,$(UPGRADE)))
# $(call compiled,PYTHON,.IN FILES,CLOSURES BEFORE)
compiled = scripts/uv --quiet pip compile --config-file requirements/uv.toml \
	--python-version $(1) --python-platform x86_64-manylinux_2_31 --no-emit-index-url --no-emit-find-links \
	$(patsubst %,--constraints requirements/%.txt,$(3)) $(patsubst %,requirements/%.in,$(2))
names_of_pins = sed --quiet 's/^\([a-z0-9-]*==[^ ]*\).*/\1/p'
# $(call lock,CLOSURE,PYTHONS,.IN FILES,CLOSURES BEFORE): pinned for the oldest Python; a newer one may need no further pin.
define lock
@UV_CUSTOM_COMPILE_COMMAND="make lock" $(call compiled,$(firstword $(2)),$(3),$(4)) --generate-hashes $(upgrades) \
	--output-file requirements/$(1).txt
@for python in $(wordlist 2,9,$(2)); do \
	further=$$($(call compiled,$$python,$(3),$(1)) --no-header --no-annotate | $(names_of_pins) | \
		grep --invert-match --line-regexp --fixed-strings --file <($(names_of_pins) requirements/$(1).txt) || true); \
	[[ -z $$further ]] || { echo "requirements/$(1).txt lacks what Python $$python needs:" $$further; exit 1; }; \
done
endef
# The Pythons of the operator and of what develops it; those of the trainer and of engines.
pythons := 3.11 3.12 3.13
trainer_pythons := 3.12 3.13

lock: #: Pin and hash the closures of requirements/*.in
	$(call lock,uv,$(pythons),uv)
	$(call lock,operator,$(pythons),operator)
	$(call lock,trainer,$(trainer_pythons),trainer trackers,operator)
	$(call lock,tools,$(pythons),tools,operator trainer)
	$(call lock,rollout,$(trainer_pythons),rollout,tools)
	$(call lock,trainer-gpu,$(trainer_pythons),trainer trackers gpu,trainer tools)
	$(call lock,peft,$(trainer_pythons),trainer peft,trainer tools)
	$(call lock,trl,$(trainer_pythons),trainer trl,trainer tools)
	$(call lock,mlflow,$(trainer_pythons),mlflow,trainer tools)
	$(call lock,real,$(trainer_pythons),real,trainer tools)
	$(call lock,lm-eval,$(trainer_pythons),lm-eval,trainer tools)
	$(call lock,rollout-gpu,$(trainer_pythons),rollout-gpu,tools)
	$(call lock,sbom,$(pythons),sbom,tools)
	$(call lock,docs,$(pythons),operator docs,operator tools)
	$(call lock,audit,$(pythons),audit,tools)

# HOLD="torch datasets" leaves these as they are pinned: the next torch is 3 GB. vLLM follows by hand.
try-next: #: Train with the newest versions of what the trainer pins, in .venv/next
	@scripts/try_next $(HOLD)

# Needs PyPI itself. A failed look-up counts as vulnerable: an index without the service must not pass.
audit: #: Look up every pin among known vulnerabilities
	@for closure in requirements/*.txt; do \
		echo "$$closure"; scripts/uv --quiet tool run --with-requirements requirements/audit.txt pip-audit --strict --disable-pip \
			--require-hashes --progress-spinner off --requirement "$$closure" || failed=1; \
	done; exit $${failed:-0}

# Reads the lists of parts of images in docker, or in podman with ENGINE=podman. Needs grype.
audit-images: #: Look up the contents of images among known vulnerabilities
	@scripts/audit-images $(or $(IMAGES),operator trainer rollout)

clean: #: Remove the environments and build output; the cache stays
	@rm -rf dist .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		$(foreach dist,crds operator trainer rollout client cli,$(dist)/dist $(dist)/build)
	@find $(wildcard crds operator trainer rollout client cli tests benchmarks scripts) -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help setup setup-gpu fmt lint types operator-types trainer-types rollout-types generate \
	verify test test-operator test-trainer test-bridge test-learning test-learning-vllm matrix test-gate real-models test-rollout \
	test-cluster test-nodes test-beside-nodes test-faults test-policies test-images gpu-test control-plane bench \
	bench-operator bench-recovery bench-hostile bench-steering bench-trainer bench-gpu bench-grpo demo demo-grpo cluster-demo docs \
	pictures images bases wheels kind-demo lock try-next audit audit-images clean
