"""The decision whether ranks of a group can write to each other's memory. Pure: opens and moves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """The place of a rank: its machine and its GPU.

    machine: differs also between two pods of one machine, which cannot open each other's memory. device: the UUID of
    the GPU, empty on the CPU. reached: the GPUs whose memory this GPU can read and write.
    """

    machine: str
    device: str = ""
    reached: tuple[str, ...] = ()


def find_obstacle(places: Sequence[PeerPlace]) -> str:
    """Return the reason that these ranks cannot write to each other's memory; empty when they can.

    Every rank of the group calls it with the same places, so all decide alike.
    """
    machines = len({place.machine for place in places})
    if machines > 1:
        return f"its {len(places)} ranks lie on {machines} nodes"
    devices = [place.device for place in places]
    if any(devices) and len(set(devices)) < len(devices):
        return f"its {len(devices)} ranks share {len(set(devices))} GPUs"
    unreachable_pair = next(_unreachable_pairs(places), None)
    if unreachable_pair is not None:
        return (
            f"rank {unreachable_pair[0]} of it cannot reach the memory of rank {unreachable_pair[1]}: neither NVLink "
            "nor P2P joins them"
        )
    return ""


def _unreachable_pairs(places: Sequence[PeerPlace]) -> Iterator[tuple[int, int]]:
    # Both directions: each rank reports only what its own GPU reaches.
    for rank, place in enumerate(places):
        for peer_rank, peer in enumerate(places):
            if peer.device != place.device and peer.device not in place.reached:
                yield rank, peer_rank
