"""Time and bytes of the secure sum of 5 million float32 numbers.

    python benchmarks/secagg.py [--parameters 5000000] [--sites 5] [--dropped 1]

Times are those of one site's and of the server's own work on one thread, in an exchange
as an engine runs it, including the keys and shares of the next exchange. The total is
compared with the plain sum. Bytes are all bytes that a site sends in an exchange
(header, masked words and opened shares), relative to the float32 numbers, a weight and a
metric. Expected: at most 2.1 times the bytes, and at most 1 s per site.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fednotes.core.messages import to_json_values
from fednotes.core.tensors import nbytes
from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.fixed_point import compute_limits
from fednotes.privacy.secure_sum.messages import MaskedMessage
from fednotes.privacy.secure_sum.server import ServerChain
from fednotes.privacy.secure_sum.site import SiteChain

T = TypeVar("T")


class Clock:
    """Measures the seconds that a party computes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(
        self, function: Callable[..., T], *arguments: object, **options: object
    ) -> T:
        """Call a function, and add its seconds."""
        begin = time.perf_counter()
        result = function(*arguments, **options)
        self.seconds += time.perf_counter() - begin
        return result


def size(message: object) -> int:
    """Return the bytes of a message whose header is JSON."""
    words = message.words.nbytes if isinstance(message, MaskedMessage) else 0
    return len(json.dumps(to_json_values(message, "words"))) + words


def start(server: ServerChain, sites: dict[str, SiteChain]) -> None:
    """Exchange the keys and shares of the first exchange."""
    now, number = server.start(), server.number
    for site in sites.values():
        now.add_keys(site.make_keys(number))
    keys = now.collect_keys()
    for site in sites.values():
        now.add_shares(site.find_exchange(number).make_shares(keys))
    now.collect_boxes()


def exchange(
    server: ServerChain,
    sites: dict[str, SiteChain],
    updates: dict[str, Update],
    limits: dict[str, int],
) -> tuple[Total, dict[str, float], float, int]:
    """Run an exchange.

    Returns the total, the seconds of each site, the seconds of the server, and the bytes
    that one site sent.
    """
    clocks, server_clock = {name: Clock() for name in updates}, Clock()
    boxes, number = server_clock(server.current.collect_boxes), server.number
    sent = 0
    for name, update in updates.items():
        masked = clocks[name](
            sites[name].mask_update, number, boxes[name], update, limits=limits
        )
        sent = size(masked)
        server_clock(server.add_masked, masked)
        del masked
    requests, keys = server_clock(server.make_requests)
    for name, request in requests.items():
        answer = clocks[name](sites[name].unmask, number, request, keys)
        server_clock(server.add_unmask, answer)
    total = server_clock(server.open_total)
    return (
        total,
        {name: c.seconds for name, c in clocks.items()},
        server_clock.seconds,
        sent + size(answer),
    )


def check(total: Total, plain: Total, updates: Sequence[Update]) -> float:
    """Return the largest difference to the plain float64 sum, relative to the largest value."""
    if total.weight != plain.weight or dict(total.metrics) != dict(plain.metrics):
        raise SystemExit("error: the secure sum has a wrong weight or wrong counts")
    worst = 0.0
    for name, value in plain.tensors.items():
        scale = float(value.abs().max())
        worst = max(worst, float((total.tensors[name] - value).abs().max()) / scale)
    if worst > 1e-9:
        raise SystemExit(
            f"error: the secure sum is wrong by {worst:.1e} of the largest value"
        )
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--dropped", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    names = tuple(f"h{i}" for i in range(arguments.sites))
    updates = {
        name: Update(
            {
                "weight": torch.randn(arguments.parameters - 100, generator=draw)
                * 1e-2,
                "bias": torch.randn(100, generator=draw),
            },
            1000.0 + i,
            {"sentences": 1000.0 + i},
        )
        for i, name in enumerate(names)
    }
    begin = time.perf_counter()
    plain = Total.of(updates.values())
    seconds = time.perf_counter() - begin
    before = nbytes(updates[names[0]].tensors) + 8 * 2
    print(f"plain sum: {seconds:.2f} s at the server, {before / 1e6:.1f} MB up a site")
    parties = Parties(names, confirmed=False)
    sites = {name: SiteChain(name, parties, b"benchmark") for name in names}
    server = ServerChain(parties, b"benchmark")
    start(server, sites)
    limits = compute_limits(plain)
    for label, limits_given in [
        ("first", {}),
        ("fault-free", limits),
        ("fault-free", limits),
    ]:
        total, each, server_seconds, sent = exchange(
            server, sites, updates, limits_given
        )
        worst = check(total, plain, list(updates.values()))
        print(
            f"{label}: slowest site {max(each.values()):.2f} s, server {server_seconds:.2f} s, "
            f"{sent / 1e6:.1f} MB up a site, largest error {worst:.0e} of the largest sum"
        )
    present = {name: updates[name] for name in names[arguments.dropped :]}
    total, each, server_seconds, _ = exchange(server, sites, present, limits)
    check(total, Total.of(present.values()), list(present.values()))
    print(
        f"{arguments.dropped} dropped out: slowest site {max(each.values()):.2f} s, "
        f"server {server_seconds:.2f} s"
    )
    print(f"secagg ratio={sent / before:.3f} against plain")


if __name__ == "__main__":
    main()
