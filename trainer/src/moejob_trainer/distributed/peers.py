"""The decision whether ranks of a group write straight into each other's memory. Pure; moves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """The place of a rank: its machine, as its processes see it, and its GPU.

    machine: processes of one machine that cannot see each other, such as those of two pods, have two. device: the
    GPU's own name, empty on the CPU. reached: the GPUs whose memory this one reads and writes.
    """

    machine: str
    device: str = ""
    reached: tuple[str, ...] = ()


def obstacle(places: Sequence[PeerPlace]) -> str:
    """The reason that these ranks cannot write into each other's memory; empty when they can.

    Every rank of the group asks it with the same places, so all of them choose alike.
    """
    machines = len({place.machine for place in places})
    if machines > 1:
        return f"its {len(places)} ranks lie on {machines} nodes"
    devices = [place.device for place in places]
    if any(devices) and len(set(devices)) < len(devices):
        return f"its {len(devices)} ranks share {len(set(devices))} GPUs"
    apart = next(_apart(places), None)
    if apart is not None:
        return f"rank {apart[0]} of it cannot reach the memory of rank {apart[1]}: neither NVLink nor P2P joins them"
    return ""


def _apart(places: Sequence[PeerPlace]) -> Iterator[tuple[int, int]]:
    for rank, place in enumerate(places):
        for other, peer in enumerate(places):
            if peer.device != place.device and peer.device not in place.reached:
                yield rank, other
