"""Rates of quack-kernels' grouped products for experts, in its own tiles and in chosen ones, and of FP8 numbers.

    python -m benchmarks.trainer.tiles
    python -m benchmarks.trainer.tiles --only "Mixtral down" --all

Prints a JSON line for each shape, tile and product as soon as it is measured; one that fails says why, and the rest
is measured all the same. `chosen` marks what the trainer takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.float8 import quantize_columns, quantize_rows
from moejob_trainer.layers.kernels import experts, float8
from moejob_trainer.layers.kernels.quack import Tiles

WARM, TIMED = 3, 12
# The others that came near when thirteen were tried.
OTHERS = (
    experts.WIDE_TILES,
    Tiles(256, 192, pingpong=False, cluster_rows=1, cluster_columns=2),
    Tiles(256, 192, pingpong=False, cluster_rows=2, cluster_columns=1),
    Tiles(192, 128, pingpong=True, cluster_rows=2, cluster_columns=1),
    Tiles(128, 256, pingpong=False, cluster_rows=2, cluster_columns=1),
    Tiles(128, 192, pingpong=True, cluster_rows=1, cluster_columns=2),
)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts of one projection, and the rows of four sequences of 4,096 tokens that come to all of them."""

    experts: int
    inner: int
    outer: int
    rows: int

    @property
    def flops(self) -> float:
        """The arithmetic of one product."""
        return 2.0 * self.rows * self.inner * self.outer


SHAPES = {
    "Mixtral down": ExpertShape(8, 14336, 4096, 32768),
    "Mixtral up": ExpertShape(8, 4096, 28672, 32768),
    "Qwen3-30B-A3B up": ExpertShape(128, 2048, 1536, 131072),
    "Qwen3-30B-A3B down": ExpertShape(128, 768, 2048, 131072),
    # Of experts on eight GPUs.
    "DeepSeek-V3 up": ExpertShape(32, 7168, 4096, 65536),
    "DeepSeek-V3 down": ExpertShape(32, 2048, 7168, 65536),
}


def main() -> None:
    """Measure the shapes, and print each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--all", action="store_true", help="other tiles too, not only the default and the chosen ones")
    parser.add_argument("--rows", type=int, help="rows of all experts together, instead of those of four sequences")
    chosen = parser.parse_args()
    begun = time.perf_counter()
    for name in chosen.only:
        shape = SHAPES[name]
        if chosen.rows:
            shape = ExpertShape(shape.experts, shape.inner, shape.outer, chosen.rows)
        for line in _measure_tiles(shape, everything=chosen.all):
            print(json.dumps({"tiles": name, **line, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)


def _measure_tiles(shape: ExpertShape, *, everything: bool) -> Iterator[dict[str, object]]:
    generation = torch.cuda.get_device_capability()[0]
    taken = experts.choose_tiles(shape.rows / shape.experts, (shape.inner, shape.outer), generation)
    # Where the trainer takes the default, the wide tiles show that it is right to.
    wanted = dict.fromkeys([None, *(OTHERS if everything else OTHERS[:1])])
    products = _products(shape)
    for tiles in wanted:
        about = {"tile": None if tiles is None else asdict(tiles), "chosen": tiles == taken, "rows": shape.rows}
        for name, product in products.items():
            rate = _rate(shape, partial(product, tiles))
            yield {**about, "product": name, **rate, "device": torch.cuda.get_device_name()}
    yield from _measured_in_float8(shape)


def _measured_in_float8(shape: ExpertShape) -> Iterator[dict[str, object]]:
    """Yield the rates of FP8 products, and what it takes to round what they multiply."""
    x, gradient, weight, bounds = _draw_tensors(shape)
    about = {"rows": shape.rows, "device": torch.cuda.get_device_name()}
    for way, rows, rounded in (("forward", x, quantize_rows), ("rows", gradient, quantize_columns)):
        left, right = quantize_rows(rows), rounded(weight)
        product = partial(float8.grouped_products, left.values, left.scales, right.values, right.scales, bounds)
        yield {**about, "product": f"{way}, FP8", **_rate(shape, product)}
        yield {**about, "product": f"{way}, rounding rows", **_rate(shape, partial(quantize_rows, rows))}
        yield {**about, "product": f"{way}, rounding weights", **_rate(shape, partial(rounded, weight))}


def _products(shape: ExpertShape) -> dict[str, Callable[[Tiles | None], object]]:
    """Return the products of a step that take tiles, over random rows, of which experts get uneven shares."""
    x, gradient, weight, bounds = _draw_tensors(shape)
    return {
        "forward": lambda tiles: experts.grouped_products_in_tiles(x, weight.transpose(1, 2), bounds, tiles),
        "rows": lambda tiles: experts.grouped_products_in_tiles(gradient, weight, bounds, tiles),
    }


def _draw_tensors(shape: ExpertShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that come in and gradients of those that come out, weights, and the bounds of each expert's rows."""
    torch.manual_seed(1)
    device, dtype = torch.device("cuda"), torch.bfloat16
    return (
        torch.randn(shape.rows, shape.inner, device=device, dtype=dtype),
        torch.randn(shape.rows, shape.outer, device=device, dtype=dtype),
        torch.randn(shape.experts, shape.outer, shape.inner, device=device, dtype=dtype) * 0.02,
        _bounds(shape, device),
    )


def _bounds(shape: ExpertShape, device: torch.device) -> Tensor:
    shares = torch.rand(shape.experts) + 0.5
    sizes = (shares / shares.sum() * shape.rows).long()
    sizes[-1] += shape.rows - sizes.sum()
    return functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0)).to(device)


def _rate(shape: ExpertShape, work: Callable[[], object]) -> dict[str, object]:
    """Milliseconds, and the rate of a product that takes as long."""
    # A tile may ask for more memory than a block has, which only its compiler knows, by errors of many kinds.
    try:
        seconds = _seconds(work)
        return {"milliseconds": round(seconds * 1e3, 3), "teraflops": round(shape.flops / seconds / 1e12, 1)}
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def _seconds(step: Callable[[], object]) -> float:
    for _ in range(WARM):
        step()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(TIMED):
        step()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / TIMED / 1e3


if __name__ == "__main__":
    main()
