"""Rates of quack-kernels' grouped products for experts of Mixtral and Qwen3, in its own tiles and in chosen ones.

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

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.kernels import experts
from moejob_trainer.layers.kernels.experts import Tiles

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
        for line in _measured(shape, everything=chosen.all):
            print(json.dumps({"tiles": name, **line, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)


def _measured(shape: ExpertShape, *, everything: bool) -> Iterator[dict[str, object]]:
    generation = torch.cuda.get_device_capability()[0]
    taken = experts.tiles(shape.rows / shape.experts, (shape.inner, shape.outer), generation)
    # Where the trainer takes the default, the wide tiles show that it is right to.
    wanted = dict.fromkeys([None, *(OTHERS if everything else OTHERS[:1])])
    products = _products(shape)
    for tiles in wanted:
        about = {"tile": None if tiles is None else asdict(tiles), "chosen": tiles == taken, "rows": shape.rows}
        for name, product in products.items():
            yield {**about, "product": name, **_rate(shape, product, tiles), "device": torch.cuda.get_device_name()}


def _products(shape: ExpertShape) -> dict[str, Callable[[Tiles | None], object]]:
    """Return the products of a step that take tiles, over random rows, of which experts get uneven shares."""
    torch.manual_seed(1)
    device, dtype = torch.device("cuda"), torch.bfloat16
    bounds = _bounds(shape, device)
    x = torch.randn(shape.rows, shape.inner, device=device, dtype=dtype)
    gradient = torch.randn(shape.rows, shape.outer, device=device, dtype=dtype)
    weight = torch.randn(shape.experts, shape.outer, shape.inner, device=device, dtype=dtype) * 0.02
    return {
        "forward": lambda tiles: experts.products_in_tiles(x, weight.transpose(1, 2), bounds, tiles),
        "rows": lambda tiles: experts.products_in_tiles(gradient, weight, bounds, tiles),
    }


def _bounds(shape: ExpertShape, device: torch.device) -> Tensor:
    shares = torch.rand(shape.experts) + 0.5
    sizes = (shares / shares.sum() * shape.rows).long()
    sizes[-1] += shape.rows - sizes.sum()
    return functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0)).to(device)


def _rate(shape: ExpertShape, product: Callable[[Tiles | None], object], tiles: Tiles | None) -> dict[str, object]:
    # A tile may ask for more memory than a block has, which only its compiler knows, by errors of many kinds.
    try:
        return {"teraflops": round(shape.flops / _seconds(lambda: product(tiles)) / 1e12, 1)}
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
