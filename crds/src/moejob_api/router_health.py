"""The measures and words of routers that collapse: the trainer finds these, the operator shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Steps in a row after which a layer counts as collapsed, or as recovered: the load of single steps varies.
COLLAPSE_STEPS = 5
# A layer is collapsed when its tokens choose nearly the same experts: exp(entropy) of its load is their number, and k
# are the fewest that there can be. With 8 of 128 experts for a token, a layer collapses at 10.
COLLAPSED_CHOICES = 1.25
# Measures of a run's progress: the number of collapsed layers once it is known, and one measure for each of them.
# Measures, not a field: an operator of another version refuses a report with a field that it does not know.
_COUNT, _LAYER = "collapsedRouters", "collapsedRouter/"
# A model has fewer layers, and a report has room for other measures.
_MOST_LAYERS, _MOST_DIGITS = 128, 4


def health_measures(layers: Sequence[int] | None) -> dict[str, float]:
    """Return the measures that report collapsed layers; none before it is known whether there are any."""
    if layers is None:
        return {}
    return {_COUNT: float(len(layers))} | {f"{_LAYER}{layer}": 1.0 for layer in sorted(layers)[:_MOST_LAYERS]}


def reported_layers(measures: Mapping[str, float]) -> tuple[int, ...] | None:
    """Return the collapsed layers of a report; None when it says nothing of them."""
    if _COUNT not in measures:
        return None
    numbers = (name.removeprefix(_LAYER) for name in measures if name.startswith(_LAYER))
    # Anyone may write a report, also with numbers that no model has.
    return tuple(
        sorted({int(text) for text in numbers if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS})
    )


def collapse_text(layers: Sequence[int]) -> str:
    """Return the sentence about collapsed layers. It has no number that changes while its meaning stays."""
    return (
        f"the {'router' if len(layers) == 1 else 'routers'} of {layers_text(layers)} collapsed: for {COLLAPSE_STEPS} "
        "steps in a row nearly all tokens chose the same experts, or half of the experts got no token"
    )


def layers_text(layers: Sequence[int]) -> str:
    """Return the numbers of layers, such as `layers 3-5 and 12`."""
    parts = [
        str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first}, {last}"
        for first, last in _consecutive_ranges(layers)
    ]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    return f"{'layer' if len(layers) == 1 else 'layers'} {listed}"


def _consecutive_ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
