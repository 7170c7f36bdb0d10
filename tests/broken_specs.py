"""Specs that break exactly one rule of those one object can decide; planner and API server must both refuse them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moejob_api.problems import Rule


@dataclass(frozen=True)
class BrokenSpec:
    """Sections for builders.spec, the rule they break and a piece of what is said about it."""

    id: str
    rule: Rule
    says: str
    sections: dict[str, Any] = field(default_factory=dict)


BROKEN_SPECS: tuple[BrokenSpec, ...] = (
    BrokenSpec("grpo without its section", Rule.METHOD, "no grpo section", {"method": "GRPO", "grpo": None}),
    BrokenSpec(
        "sft with a grpo section", Rule.METHOD, "no meaning for method SFT", {"grpo": {"rewards": [{"name": "math"}]}}
    ),
    BrokenSpec(
        "sft without a global batch", Rule.METHOD, "needs globalBatchSize", {"training": {"globalBatchSize": None}}
    ),
    BrokenSpec(
        "sft on prompts",
        Rule.METHOD,
        "SFT needs answers",
        {"data": {"train": [{"source": "/a.jsonl", "format": "Prompts"}]}},
    ),
    BrokenSpec(
        "grpo on chats",
        Rule.METHOD,
        "GRPO generates the answers",
        {"method": "GRPO", "data": {"train": [{"source": "/a.jsonl", "format": "Chat"}]}},
    ),
    BrokenSpec(
        "a shape that is no text",
        Rule.CONFLICT,
        "shape Alpaca of /a.jsonl cannot become format Text; use Chat or PromptCompletion or Prompts",
        {"data": {"train": [{"source": "/a.jsonl", "format": "Text", "shape": "Alpaca"}]}},
    ),
    BrokenSpec(
        "conversations as prompts and completions",
        Rule.CONFLICT,
        "use Chat",
        {"data": {"eval": [{"source": "/a.jsonl", "format": "PromptCompletion", "shape": "ShareGPT"}]}},
    ),
    BrokenSpec(
        "sft with offloaded parameters", Rule.OFFLOAD, "offloadOptimizer: 1", {"memory": {"offloadParameters": True}}
    ),
    BrokenSpec(
        "sft with offloaded gradients", Rule.OFFLOAD, "between the phases", {"memory": {"offloadGradients": True}}
    ),
    BrokenSpec(
        "separate engines with offloaded gradients",
        Rule.OFFLOAD,
        "only cost time",
        {
            "method": "GRPO",
            "memory": {"offloadGradients": True},
            "grpo": {"rewards": [{"name": "math"}], "rollout": {"placement": "Separate"}},
        },
    ),
    BrokenSpec("no length", Rule.EXACTLY_ONE, "neither is given", {"training": {"maxSteps": None}}),
    BrokenSpec("two lengths", Rule.EXACTLY_ONE, "both is given", {"training": {"epochs": 2}}),
    BrokenSpec(
        "a minimum above the peak",
        Rule.CONFLICT,
        "would rise",
        {"training": {"optimizer": {"learningRate": 1e-5}, "scheduler": {"minimumLearningRate": 1e-4}}},
    ),
    BrokenSpec(
        "two microbatch sizes",
        Rule.CONFLICT,
        "remove microBatchSize",
        {"training": {"microBatchSize": 2, "dynamicBatchTokens": 8192}},
    ),
    BrokenSpec(
        "dynamic batch below one sequence", Rule.CONFLICT, "4096 or more", {"training": {"dynamicBatchTokens": 4095}}
    ),
    BrokenSpec("wsd without decay", Rule.CONFLICT, "needs decaySteps", {"training": {"scheduler": {"kind": "WSD"}}}),
    BrokenSpec(
        "warm-up beyond the run",
        Rule.CONFLICT,
        "longer than the run",
        {"training": {"scheduler": {"warmupSteps": 101}}},
    ),
    BrokenSpec("the best of no evaluations", Rule.CONFLICT, "add data.eval", {"checkpoint": {"keepBest": 1}}),
    BrokenSpec(
        "a stop without evaluations", Rule.CONFLICT, "set evalEvery", {"training": {"earlyStop": {"patience": 2}}}
    ),
    BrokenSpec("evaluation of nothing", Rule.CONFLICT, "nothing to evaluate", {"training": {"evalEvery": 10}}),
    BrokenSpec(
        "deterministic answers",
        Rule.CONFLICT,
        "remove deterministic",
        {"method": "GRPO", "training": {"deterministic": True}},
    ),
    BrokenSpec(
        "a profile behind the last step",
        Rule.CONFLICT,
        "set firstStep to 97",
        {"training": {"profile": {"firstStep": 100, "steps": 4}}},
    ),
    BrokenSpec(
        "a profile of a rank that is not there",
        Rule.CONFLICT,
        "remove it",
        {"training": {"profile": {"ranks": [0, 100_000]}}},
    ),
    BrokenSpec(
        "modules under full recompute",
        Rule.RECOMPUTE,
        "only for granularity Selective",
        {"training": {"recompute": {"granularity": "Full", "modules": ["Norms"]}}},
    ),
    BrokenSpec(
        "method under selective recompute",
        Rule.RECOMPUTE,
        "only for granularity Full",
        {"training": {"recompute": {"granularity": "Selective", "method": "Uniform"}}},
    ),
    BrokenSpec(
        "bfloat16 gradients of float32 weights",
        Rule.CONFLICT,
        "lose what weights",
        {"model": {"dtype": "float32"}, "training": {"precision": {"gradients": "bfloat16"}}},
    ),
    BrokenSpec(
        "FP8 beside engines that have none",
        Rule.CONFLICT,
        "remove compute",
        {"method": "GRPO", "training": {"precision": {"compute": "FP8"}}},
    ),
    BrokenSpec(
        "FP8 of float32 weights",
        Rule.CONFLICT,
        "set it to bfloat16",
        {"model": {"dtype": "float32"}, "training": {"precision": {"compute": "FP8"}}},
    ),
    BrokenSpec(
        "FP8 that is to give the same bits",
        Rule.CONFLICT,
        "remove compute or deterministic",
        {"training": {"precision": {"compute": "FP8"}, "deterministic": True}},
    ),
    BrokenSpec(
        "FP8 on GPUs that have none",
        Rule.CONFLICT,
        "an A100 multiplies no FP8 numbers",
        {"training": {"precision": {"compute": "FP8"}}, "resources": {"gpuType": "A100"}},
    ),
    BrokenSpec(
        "a reward with two sources",
        Rule.EXACTLY_ONE,
        "reward 1 has name and url",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}, {"name": "math", "url": "http://c"}]}},
    ),
    BrokenSpec(
        "a reward without source",
        Rule.EXACTLY_ONE,
        "no source",
        {"method": "GRPO", "grpo": {"rewards": [{"weight": 2}]}},
    ),
    BrokenSpec(
        "no room for the prompt",
        Rule.SEQUENCE_LENGTH,
        "for the prompt",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "maxNewTokens": 4096}},
    ),
    BrokenSpec(
        "no room for a prompt of an evaluation",
        Rule.SEQUENCE_LENGTH,
        "evalAnswers.maxNewTokens 64 leaves no token of data.maxLength 64",
        {"data": {"maxLength": 64, "eval": [{"source": "/a.jsonl", "format": "Prompts"}]}},
    ),
    BrokenSpec(
        "replicas of colocated engines",
        Rule.ROLLOUT,
        "placement Separate",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "rollout": {"replicas": 2}}},
    ),
    BrokenSpec(
        "ipc to separate pods",
        Rule.ROLLOUT,
        "cannot reach separate pods",
        {
            "method": "GRPO",
            "grpo": {"rewards": [{"name": "math"}], "rollout": {"placement": "Separate", "sync": "IPC"}},
        },
    ),
    BrokenSpec(
        "nccl to colocated engines",
        Rule.ROLLOUT,
        "colocated engines use IPC",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "rollout": {"sync": "NCCL"}}},
    ),
    BrokenSpec(
        "ipc on cpu",
        Rule.ROLLOUT,
        "needs GPUs",
        {
            "method": "GRPO",
            "resources": {"accelerator": "CPU"},
            "grpo": {"rewards": [{"name": "math"}], "rollout": {"sync": "IPC"}},
        },
    ),
    BrokenSpec(
        "choices replayed and dropped",
        Rule.ROUTING,
        "remove one of the two",
        {
            "method": "GRPO",
            "moe": {"capacityFactor": 1.5},
            "grpo": {"rewards": [{"name": "math"}], "routingReplay": True},
        },
    ),
    BrokenSpec(
        "gathering dynamic batches",
        Rule.ROUTING,
        "one length",
        {"moe": {"dispatcher": "AllGather"}, "training": {"dynamicBatchTokens": 8192}},
    ),
    BrokenSpec(
        "fsdp with a pipeline",
        Rule.SHARDING,
        "does not combine with pipeline 2",
        {"memory": {"sharding": "FSDP"}, "parallelism": {"pipeline": 2}},
    ),
    BrokenSpec(
        "zero 2 with a pipeline",
        Rule.SHARDING,
        "ZeRO2 gathers every layer",
        {"memory": {"sharding": "ZeRO2"}, "parallelism": {"pipeline": 2}},
    ),
    BrokenSpec(
        "dropout in front of adapters that answers are generated with",
        Rule.LORA,
        "set lora.dropout: 0",
        {"method": "GRPO", "training": {"lora": {"dropout": 0.1}}, "grpo": {"rewards": [{"name": "math"}]}},
    ),
    BrokenSpec(
        "fsdp with an offloaded optimizer",
        Rule.SHARDING,
        "offloadOptimizer 0.5",
        {"memory": {"sharding": "FSDP", "offloadOptimizer": 0.5}},
    ),
    BrokenSpec(
        "offload on cpu",
        Rule.OFFLOAD,
        "host memory already",
        {"memory": {"offloadOptimizer": 1.0}, "resources": {"accelerator": "CPU"}},
    ),
    BrokenSpec(
        "offload under full recompute",
        Rule.OFFLOAD,
        "choose one of the two",
        {"memory": {"offloadActivations": True}, "training": {"recompute": {"granularity": "Full"}}},
    ),
    BrokenSpec(
        "two checkpoint rhythms", Rule.EXACTLY_ONE, "keep one", {"checkpoint": {"everySteps": 10, "everyMinutes": 10}}
    ),
    BrokenSpec("a run to go on with that nobody names", Rule.CONFLICT, "names none", {"checkpoint": {"resume": "Run"}}),
    BrokenSpec("no volume", Rule.EXACTLY_ONE, "neither is given", {"storage": {"size": None}}),
    BrokenSpec("two volumes", Rule.EXACTLY_ONE, "both is given", {"storage": {"claimName": "mine"}}),
    BrokenSpec(
        "two gpu memories", Rule.EXACTLY_ONE, "keep one", {"resources": {"gpuType": "H100", "gpuMemoryGiB": 80}}
    ),
    BrokenSpec("gpus beside arm", Rule.CONFLICT, "no images", {"resources": {"gpuType": "GB200"}}),
    BrokenSpec(
        "gpu type on cpu", Rule.CONFLICT, "has no GPUs", {"resources": {"accelerator": "CPU", "gpuType": "H100"}}
    ),
    BrokenSpec("a variable without value", Rule.ENVIRONMENT, "0 are given", {"resources": {"env": [{"name": "A"}]}}),
    BrokenSpec(
        "a variable with two values",
        Rule.ENVIRONMENT,
        "2 are given",
        {"resources": {"env": [{"name": "A", "value": "1", "secret": {"name": "s", "key": "k"}}]}},
    ),
    BrokenSpec(
        "a variable of moejob's own",
        Rule.ENVIRONMENT,
        "set by moejob itself",
        {"resources": {"env": [{"name": "MOEJOB_UID", "value": "1"}]}},
    ),
    BrokenSpec(
        "a variable of torchrun's",
        Rule.ENVIRONMENT,
        "sets it from the layout",
        {"resources": {"env": [{"name": "MASTER_ADDR", "value": "elsewhere"}]}},
    ),
    BrokenSpec(
        "a template with a field that a pod has and a template not",
        Rule.POD_TEMPLATE,
        "trainer.spec.hostPID is no field of a template; processes of other pods",
        {"podTemplate": {"trainer": {"spec": {"hostPID": True}}}},
    ),
    BrokenSpec(
        "a template with a field of a container that no limit sees",
        Rule.POD_TEMPLATE,
        "volumeDevices is no field of a template; use volumeMounts",
        {"podTemplate": {"trainer": {"spec": {"containers": [{"name": "a", "volumeDevices": []}]}}}},
    ),
    BrokenSpec(
        "a template with a volume that no limit sees",
        Rule.POD_TEMPLATE,
        "nfs is no field of a template",
        {"podTemplate": {"trainer": {"spec": {"volumes": [{"name": "a", "nfs": {"server": "b", "path": "/"}}]}}}},
    ),
    BrokenSpec(
        "a template of engines that have no pods",
        Rule.POD_TEMPLATE,
        "no pods of engines",
        {"podTemplate": {"rollout": {"spec": {"hostAliases": []}}}},
    ),
    BrokenSpec("an import without source", Rule.ENVIRONMENT, "entry 0", {"resources": {"envFrom": [{}]}}),
    BrokenSpec(
        "a toleration with exists and value",
        Rule.CONFLICT,
        "remove one",
        {"resources": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
    ),
    BrokenSpec("a toleration without key", Rule.CONFLICT, "no key", {"resources": {"tolerations": [{"value": "b"}]}}),
    BrokenSpec("kueue without queue", Rule.CONFLICT, "LocalQueue", {"lifecycle": {"gang": "Kueue"}}),
    BrokenSpec(
        "a queue without queues", Rule.CONFLICT, "has no queues", {"lifecycle": {"gang": "Native", "queue": "a"}}
    ),
    BrokenSpec("a spare beside a single pod", Rule.CONFLICT, "has a single pod", {"resources": {"spares": 1}}),
    BrokenSpec(
        "a spare with engines of its pods",
        Rule.CONFLICT,
        "use Separate",
        {"method": "GRPO", "parallelism": {"data": 2}, "resources": {"spares": 1, "gpusPerNode": 1}},
    ),
    BrokenSpec(
        "a spare under Kueue",
        Rule.CONFLICT,
        "use gang Volcano",
        {
            "parallelism": {"data": 2},
            "resources": {"spares": 1, "gpusPerNode": 1},
            "lifecycle": {"gang": "Kueue", "queue": "a"},
        },
    ),
    BrokenSpec(
        "a spare in a queue of any kind",
        Rule.CONFLICT,
        "or no queue",
        {
            "parallelism": {"data": 2},
            "resources": {"spares": 1, "gpusPerNode": 1},
            "lifecycle": {"queue": "a"},
        },
    ),
    BrokenSpec(
        "a spare in another domain",
        Rule.CONFLICT,
        "topologyKey",
        {"parallelism": {"data": 2}, "resources": {"spares": 1, "gpusPerNode": 1, "topologyKey": "rack"}},
    ),
    BrokenSpec(
        "more GPUs than exist",
        Rule.GPU_COUNT,
        "1048576",
        {"parallelism": {"data": 65536, "pipeline": 65536, "context": 65536, "expert": 65536}},
    ),
    BrokenSpec(
        "GPUs that do not fill nodes",
        Rule.NODE_SIZE,
        "12 GPUs (tensor 4 x expert 3), which gpusPerNode 8 does not divide",
        {"parallelism": {"tensor": 4, "expert": 3}},
    ),
    BrokenSpec(
        "a tensor group across nodes",
        Rule.TENSOR_IN_NODE,
        "straddle nodes of 8 GPUs; change tensor to 8",
        {"parallelism": {"tensor": 16}},
    ),
    BrokenSpec(
        "expert tensor under product",
        Rule.EXPERT_TENSOR,
        "not over expertTensor 1",
        {"parallelism": {"tensor": 2, "expertTensor": 1}},
    ),
    BrokenSpec(
        "folded experts that do not divide a stage",
        Rule.EXPERT_GRID,
        "expertTensor 1 x expert 32 = 32 must divide tensor 1 x context 1 x data 4 = 4",
        {"parallelism": {"pipeline": 16, "expert": 32, "data": 4, "expertLayout": "Folded"}},
    ),
    BrokenSpec("chunks of one stage", Rule.VIRTUAL_PIPELINE, "pipeline is 1", {"parallelism": {"virtualPipeline": 2}}),
    BrokenSpec(
        "two ways to cut the layers",
        Rule.CONFLICT,
        "remove them",
        {"parallelism": {"pipeline": 2, "firstStageLayers": 20, "lossCountsAsLayer": True}},
    ),
    BrokenSpec(
        "a format without its pattern",
        Rule.CONFLICT,
        "has no pattern",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "format"}]}},
    ),
    BrokenSpec(
        "a pattern that is not read",
        Rule.CONFLICT,
        "only the reward format reads",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math", "pattern": "a"}]}},
    ),
    BrokenSpec(
        "a header from nowhere",
        Rule.CONFLICT,
        "the variable TOKEN, which resources.env does not have",
        {
            "method": "GRPO",
            "resources": {"env": [{"name": "OTHER", "value": "1"}]},
            "grpo": {"rewards": [{"url": "http://a", "headersFrom": [{"header": "A", "variable": "TOKEN"}]}]},
        },
    ),
    BrokenSpec(
        "a penalty for every answer",
        Rule.CONFLICT,
        "penaltyTokens 65 is above maxNewTokens 64",
        {
            "method": "GRPO",
            "grpo": {
                "rewards": [{"name": "math"}],
                "maxNewTokens": 64,
                "overlong": {"penalty": 1.0, "penaltyTokens": 65},
            },
        },
    ),
    BrokenSpec(
        "updates that cut groups",
        Rule.CONFLICT,
        "would cut some of promptsPerStep 6 in two; change it to a divisor of 6",
        {
            "method": "GRPO",
            "grpo": {
                "rewards": [{"name": "math"}],
                "lossAggregation": "Group",
                "groupSize": 8,
                "promptsPerStep": 6,
                "updatesPerStep": 4,
            },
        },
    ),
    BrokenSpec(
        "batches that cut groups",
        Rule.CONFLICT,
        "would cut groups of 8 in two; change it to a multiple of 8",
        {
            "method": "GRPO",
            "training": {"globalBatchSize": 12},
            "grpo": {"rewards": [{"name": "math"}], "lossAggregation": "Group", "promptsPerStep": 6},
        },
    ),
    BrokenSpec(
        "a nucleus while training",
        Rule.CONFLICT,
        "evaluation.topP",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "topP": 0.9}},
    ),
    BrokenSpec(
        "a minimum that truncation does not know",
        Rule.CONFLICT,
        "is for mode Mask",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "mismatch": {"minimum": 0.5}}},
    ),
    BrokenSpec(
        "a mask that leaves nothing",
        Rule.CONFLICT,
        "every weight would be masked",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "mismatch": {"mode": "Mask", "minimum": 2.0}}},
    ),
    BrokenSpec(
        "answers from much older weights",
        Rule.ROLLOUT,
        "more than 64 is refused: lower it",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "rollout": {"staleness": 65}}},
    ),
    BrokenSpec(
        "keys and values of older weights of engines that stop",
        Rule.ROLLOUT,
        "set placement Separate (it is Colocated)",
        {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "rollout": {"cacheAcrossVersions": "Keep"}}},
    ),
    BrokenSpec(
        "keys and values of older weights without answers that need them",
        Rule.ROLLOUT,
        "staleness to 1 or more (it is 0)",
        {
            "method": "GRPO",
            "grpo": {
                "rewards": [{"name": "math"}],
                "rollout": {"placement": "Separate", "cacheAcrossVersions": "Keep"},
            },
        },
    ),
    BrokenSpec(
        "a reference that is a checkpoint",
        Rule.CONFLICT,
        "model.source",
        {
            "method": "GRPO",
            "grpo": {"rewards": [{"name": "math"}], "kl": {"coefficient": 0.1}},
            "checkpoint": {"resumeFrom": "/other"},
        },
    ),
)
