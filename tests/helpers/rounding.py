"""How far two correct programs may differ in float32, from the size of the
computation."""

from __future__ import annotations

import math

# products, sums and normalisations that follow each other in a layer of BERT
IN_A_ROW = 8
EPSILON = 2.0**-23


def transformer(layers: int, width: int, largest: float = 1.0) -> float:
    """Return how much two orders of additions may differ after so many layers.

    A sum of n products is off by about √n ε of its terms, whatever the order (Higham
    2002, 4.2: the errors are as good as random); those of `IN_A_ROW` such sums a layer
    add up. largest: of the values that are compared.
    """
    return IN_A_ROW * layers * math.sqrt(width) * EPSILON * largest
