"""The layers of a model grouped by kind, and what each pipeline stage holds of them.

A model of 61 layers has two kinds: the estimate computes the sizes of a kind once and multiplies them. A difference of
running sums gives the number of a stage's layers of one kind. For one dense layer before two layers of experts:

    before of dense      0 1 1 1      layers 1 and 2: 1 - 1 = 0
    before of experts    0 0 1 2      layers 1 and 2: 2 - 0 = 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from moejob_api.job.parallelism import Parallelism
from moejob_api.layout.stages import pipeline_stages
from moejob_api.models.parameters import ParameterCounts, layer_kinds, layer_weights
from moejob_api.models.shape import Experts, Layer, ModelShape


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Each kind of layer with its parameters. before[k][i]: layers of kind k among the first i."""

    layers: tuple[Layer, ...]
    weights: tuple[ParameterCounts, ...]
    before: tuple[tuple[int, ...], ...]

    def count_layers(self, start: int, stop: int) -> tuple[int, ...]:
        """Layers of each kind in a range of layers."""
        return tuple([layers_before[stop] - layers_before[start] for layers_before in self.before])


def layers_by_kind(shape: ModelShape) -> LayerKinds:
    """The model's layers, grouped."""
    kinds = tuple(layer for layer, _ in layer_kinds(shape))
    return LayerKinds(
        layers=kinds,
        weights=tuple(layer_weights(shape, layer) for layer in kinds),
        before=tuple(
            tuple(accumulate((layer is kind or layer == kind for layer in shape.layers), initial=0)) for kind in kinds
        ),
    )


def router_parameters(hidden: int, layer: Layer) -> int:
    """Parameters of the router of a layer."""
    return layer.mlp.count * (hidden + layer.mlp.router_bias) if isinstance(layer.mlp, Experts) else 0


@dataclass(frozen=True, slots=True)
class StageContents:
    """The contents of a pipeline stage: ranges of layers, one a chunk, and perhaps the embedding or the output.

    Of stages with equal contents the first stands for all: it has the most microbatches in flight.
    """

    index: int
    chunks: tuple[range, ...]
    embedding: bool
    output: bool


def distinct_stages(parallelism: Parallelism, kinds: LayerKinds) -> tuple[StageContents, ...]:
    """Return one stage of each sort: the fullest and the slowest are among them."""
    return _distinct_stages(
        kinds.before,
        parallelism.pipeline,
        parallelism.virtual_pipeline,
        (parallelism.first_stage_layers, parallelism.last_stage_layers),
        (parallelism.embedding_counts_as_layer, parallelism.loss_counts_as_layer),
    )


@lru_cache(maxsize=1024)
def _distinct_stages(
    before: tuple[tuple[int, ...], ...],
    pipeline: int,
    virtual_pipeline: int | None,
    ends: tuple[int | None, int | None],
    counted: tuple[bool, bool],
) -> tuple[StageContents, ...]:
    # Built again of the few values that cut stages: layouts that differ in other sizes share a cached result.
    parallelism = Parallelism(
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        first_stage_layers=ends[0],
        last_stage_layers=ends[1],
        embedding_counts_as_layer=counted[0],
        loss_counts_as_layer=counted[1],
    )
    depth = len(before[0]) - 1
    cut = pipeline_stages(parallelism, depth)
    if cut is None:
        raise ValueError(f"{depth} layers do not divide over {pipeline} stages: moejob_api.rules refuses such a layout")
    sorts: dict[object, StageContents] = {}
    for index, stage in enumerate(cut):
        layers = tuple(
            tuple(layers_before[chunk.stop] - layers_before[chunk.start] for layers_before in before)
            for chunk in stage.chunks
        )
        contents = StageContents(index, stage.chunks, embedding=index == 0, output=index == pipeline - 1)
        sorts.setdefault((layers, contents.embedding, contents.output), contents)
    return tuple(sorts.values())
