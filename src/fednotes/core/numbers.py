"""Types of bounded numbers, for settings, policies and result files.

`fednotes.core.settings.checked` and pydantic refuse other numbers. All bounded floats
are finite.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Interval
from pydantic import AllowInfNan

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), AllowInfNan(allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Ge(0), AllowInfNan(allow_inf_nan=False)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
FractionBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Epochs = Annotated[float, Interval(gt=0, le=1e6)]
OpenFraction = Annotated[float, Interval(gt=0, lt=1)]
