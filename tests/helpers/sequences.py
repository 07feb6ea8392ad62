"""Enumerate every tag sequence of a sentence, to check the recursions of a CRF."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from fednotes.taggers.crf import CRF, TorchOps


def computing(crf: CRF, backend: str) -> CRF:
    """The same, by the compiled kernels or by the torch operations of other devices."""
    if backend == "torch":
        crf._choose_recursions = lambda device: TorchOps()
    return crf


@dataclass
class Enumerated:
    """All allowed sequences of one sentence (paths, tokens), with their
    probabilities."""

    paths: np.ndarray
    scores: np.ndarray
    log_z: float
    p: np.ndarray

    @classmethod
    def of(
        cls, x: np.ndarray, start: np.ndarray, matrix: np.ndarray, end: np.ndarray
    ) -> Enumerated:
        """Enumerate from x (tokens, tags); start, matrix and end are -inf where
        forbidden."""
        paths = np.array(list(itertools.product(range(x.shape[1]), repeat=len(x))))
        scores = start[paths[:, 0]] + end[paths[:, -1]]
        scores = scores + x[np.arange(len(x)), paths].sum(1)
        scores = scores + matrix[paths[:, :-1], paths[:, 1:]].sum(1)
        paths, scores = paths[scores > -np.inf], scores[scores > -np.inf]
        log_z = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        return cls(paths, scores, log_z, np.exp(scores - log_z))

    def tag_counts(self, tags: int) -> np.ndarray:
        """Return expected counts (tokens, tags)."""
        return np.einsum("p,ptj->tj", self.p, np.eye(tags)[self.paths])

    def pair_counts(self, tags: int) -> np.ndarray:
        """Return expected counts (tags, tags)."""
        hot = np.eye(tags)[self.paths]
        return np.einsum("p,pti,ptj->ij", self.p, hot[:, :-1], hot[:, 1:])


def masked(crf: CRF) -> list[np.ndarray]:
    """Return start, transitions and end in float64, -inf where forbidden."""
    pairs = (crf.start, crf.start_mask), (crf.transitions, crf.transition_mask)
    return [
        (p if mask is None else p.masked_fill(~mask, -torch.inf))
        .detach()
        .double()
        .numpy()
        for p, mask in (*pairs, (crf.end, crf.end_mask))
    ]
