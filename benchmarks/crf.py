"""Speed of the CRF, pytorch-crf and plain C on one thread, in float32.

    python benchmarks/crf.py [--runs 7] [--repeats 60]

The benchmark measures the loss with its gradient, and decoding, for batches of 32
sentences of 40 and 128 tokens, with 11 tags. All programs get the same parameters, and
losses, gradients and best sequences are compared before anything is timed. They are
timed in turns, by the thread's CPU time, which other programs hardly affect. The time of
a run is the median of its repeats; a ratio is the median over the runs.

The C program is a plain forward-backward algorithm in double precision
(helpers/forward_backward.c), compiled by `cc -O3 -march=native` and called without
autograd. Without `cc`, it is skipped, which a line says.

Goals of the loss with gradient (goals.toml):

    tokens   pytorch-crf / ours   C / ours
        40                 12.0        0.5
       128                 20.0        0.5
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchcrf
from torch import Tensor

from fednotes.taggers.crf import CRF

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch

BATCH, TAGS = 32, 11
TOKENS = (40, 128)
C_SOURCE = Path(__file__).parent / "helpers" / "forward_backward.c"


class Problem:
    """A batch of sentences, with our CRF and that of pytorch-crf with equal parameters."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.ours, self.theirs = CRF(TAGS), torchcrf.CRF(TAGS, batch_first=True)
        with torch.no_grad():
            self.theirs.start_transitions.copy_(self.ours.start)
            self.theirs.transitions.copy_(self.ours.transitions)
            self.theirs.end_transitions.copy_(self.ours.end)
        self.x = torch.randn(BATCH, tokens, TAGS, requires_grad=True)
        self.gold = torch.randint(0, TAGS, (BATCH, tokens))
        self.lengths = torch.full((BATCH,), tokens)
        self.mask = torch.ones(BATCH, tokens, dtype=torch.bool)

    def our_loss(self) -> Tensor:
        loss = self.ours.loss(self.x, self.gold, self.lengths).mean()
        loss.backward()
        return loss.detach()

    def their_loss(self) -> Tensor:
        loss = -self.theirs(self.x, self.gold, mask=self.mask, reduction="mean")
        loss.backward()
        return loss.detach()

    def our_best(self) -> Tensor:
        return self.ours.find_best_tags(self.x, self.lengths)

    def their_best(self) -> list[list[int]]:
        return self.theirs.decode(self.x, mask=self.mask)

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients of emissions, start, transitions and end, and reset them."""
        ours, theirs = self.ours, self.theirs
        of_ours = (ours.start, ours.transitions, ours.end)
        of_theirs = (
            theirs.start_transitions,
            theirs.transitions,
            theirs.end_transitions,
        )
        leaves = of_theirs if of_ours[0].grad is None else of_ours
        gradients = [leaf.grad for leaf in (self.x, *leaves)]
        for leaf in (self.x, *leaves):
            leaf.grad = None
        return gradients


class CProgram:
    """The loss with its gradient in C, for one problem."""

    def __init__(self, library: ctypes.CDLL, problem: Problem) -> None:
        ours = problem.ours
        self.parameters = [ours.start, ours.transitions, ours.end]
        inputs = [
            problem.x,
            problem.lengths,
            problem.gold,
            torch.full((BATCH,), 1.0 / BATCH),
            *self.parameters,
        ]
        self.losses = torch.empty(BATCH)
        self.gradients = [torch.empty_like(x) for x in (problem.x, *self.parameters)]
        self.tensors = [x.detach() for x in (*inputs, self.losses, *self.gradients)]
        self.function = library.loss_with_gradient
        self.arguments = [ctypes.c_int64(n) for n in problem.x.shape]
        self.arguments += [ctypes.c_void_p(x.data_ptr()) for x in self.tensors]

    def loss(self) -> Tensor:
        assert self.function(*self.arguments) == 0
        return self.losses.mean()


def compile_c(folder: Path) -> ctypes.CDLL | None:
    """Return the compiled C program, or None if there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("no cc on this machine: the comparison with C is skipped")
        return None
    path = folder / "forward_backward.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run(
        [compiler, *flags, str(C_SOURCE), "-o", str(path), "-lm"], check=True
    )
    return ctypes.CDLL(str(path))


def require_equal_results(problem: Problem, in_c: CProgram | None) -> None:
    """Raise AssertionError unless all programs agree."""
    ours = [problem.our_loss(), *problem.take_gradients()]
    others = [[problem.their_loss(), *problem.take_gradients()]]
    if in_c is not None:
        others.append([in_c.loss(), *in_c.gradients])
    for other in others:
        for our_value, other_value in zip(ours, other, strict=True):
            torch.testing.assert_close(our_value, other_value, atol=1e-4, rtol=1e-5)
    assert problem.our_best().tolist() == problem.their_best()


def time_in_turns(
    functions: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Return the median seconds of each function.

    They are called in turns, so that other load on the machine affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            begin = time.thread_time()
            function()
            seconds[name].append(time.thread_time() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(
    task: str, functions: dict[str, Callable[[], object]], runs: int, repeats: int
) -> dict[tuple[str, str], float]:
    """Print the times of a task; return the median ratio by (task, other program)."""
    times = [time_in_turns(functions, repeats) for _ in range(runs)]
    for name in functions:
        milliseconds = [run[name] * 1e3 for run in times]
        print(
            f"{task} {name}: {statistics.median(milliseconds):.3f} ms "
            f"({min(milliseconds):.3f} to {max(milliseconds):.3f})"
        )
    return {
        (task, name): statistics.median(run[name] / run["ours"] for run in times)
        for name in functions
        if name != "ours"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)

    ratios: dict[tuple[str, str], float] = {}
    with scratch() as folder:
        library = compile_c(folder)
        for tokens in TOKENS:
            problem = Problem(tokens)
            in_c = None if library is None else CProgram(library, problem)
            require_equal_results(problem, in_c)
            losses = {"ours": problem.our_loss, "pytorch-crf": problem.their_loss}
            if in_c is not None:
                losses["C"] = in_c.loss
            best = {"ours": problem.our_best, "pytorch-crf": problem.their_best}
            for task, functions in (("loss", losses), ("decode", best)):
                ratios |= measure(
                    f"crf-{task}-{tokens}", functions, args.runs, args.repeats
                )
    for (task, other), ratio in ratios.items():
        name = f"{task}-in-c" if other == "C" else task
        print(f"{name} ratio={ratio:.1f} against {other}")


if __name__ == "__main__":
    main()
