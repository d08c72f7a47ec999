"""How a metric of a million steps stays a few hundred points: one every so many steps, ever fewer. Pure."""

from __future__ import annotations

from itertools import pairwise
from statistics import median_low

from prefect_torch_elastic.runfacts import Curve

MAX_POINTS = 200


class CurveBuilder:
    """Takes the values of one metric and keeps at most `MAX_POINTS` of them, and the newest."""

    def __init__(self, curve: Curve) -> None:
        self._name = curve.name
        self._points = list(curve.points)
        self._newest: tuple[int, float] | None = None
        gaps = [after - before for (before, _), (after, _) in pairwise(self._points)]
        self._stride = max(1, median_low(gaps)) if gaps else 1

    def add(self, step: int, value: float) -> None:
        """Take a value; what was known of this step and later ones was of work that is done again."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        if self._points and step - self._points[-1][0] < self._stride:
            self._newest = (step, value)
            return
        self._newest = None
        self._points.append((step, value))
        if len(self._points) > MAX_POINTS:
            self._thin()

    def curve(self) -> Curve:
        """Return the curve."""
        newest = [self._newest] if self._newest is not None else []
        return Curve(name=self._name, points=(*self._points, *newest))

    def _thin(self) -> None:
        span = self._points[-1][0] - self._points[0][0]
        self._stride = -(-2 * span // MAX_POINTS)
        kept = [self._points[0]]
        for point in self._points[1:]:
            if point[0] - kept[-1][0] >= self._stride:
                kept.append(point)
        self._points = kept
