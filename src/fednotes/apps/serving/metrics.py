"""The metrics of `fednotes serve` in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable


class Metrics:
    """The values of `GET /metrics`: counts and durations, never content.

    Attributes:
        under_way: A gauge of the requests that are being answered.

    Raises:
        ImportError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        # A client chooses the path of a request, so unknown paths share one counter.
        self._paths: frozenset[str] = frozenset()
        self._requests = Counter(
            "fednotes_requests",
            "Number of requests answered.",
            ("path", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "fednotes_request_seconds",
            "Seconds until a request was answered.",
            ("path",),
            registry=self._registry,
        )
        self.under_way = Gauge(
            "fednotes_under_way",
            "Number of requests that are being answered.",
            registry=self._registry,
        )
        self._texts = Counter(
            "fednotes_texts",
            "Number of texts given to the model.",
            registry=self._registry,
        )
        self._characters = Counter(
            "fednotes_characters",
            "Number of characters of these texts.",
            registry=self._registry,
        )

    def name_paths(self, paths: Iterable[str]) -> None:
        """Set the paths that are counted by name; all others are counted together."""
        self._paths = frozenset(paths)

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count one answered request and its duration in seconds."""
        name = path if path in self._paths else "other"
        self._requests.labels(name, status).inc()
        self._seconds.labels(name).observe(seconds)

    def count_text(self, characters: int) -> None:
        """Count one text that the model reads, and its characters."""
        self._texts.inc()
        self._characters.inc(characters)

    def render(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()
