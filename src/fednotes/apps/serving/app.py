"""The FastAPI application behind `fednotes serve`.

The `Gate` checks each request before it arrives here. FastAPI and prometheus-client
come with the extra `serve`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fednotes import __version__
from fednotes.apps.serving.gate import FHIR_JSON, REFUSED_STATUS, Gate
from fednotes.apps.serving.limits import Limits, require_unicode
from fednotes.apps.serving.metrics import Metrics
from fednotes.apps.serving.model_queue import ModelQueue
from fednotes.apps.serving.schemas import (
    About,
    Mentions,
    PatientNotes,
    Question,
    Refusal,
    Results,
    Threshold,
    keep_confident_spans,
)
from fednotes.apps.serving.tables import add_table_route
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import DataError, ParameterError, needs
from fednotes.core.http_server import Refused
from fednotes.data.formats import fhir
from fednotes.jobs.patient_models import PatientFinding
from fednotes.jobs.saved_models import ModelInput, SavedModel

if TYPE_CHECKING:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError


class AddRoutes(Protocol):
    """Adds the routes of a class of models to an application."""

    def __call__(
        self, app: FastAPI, queue: ModelQueue, limits: Limits, *, batch: bool
    ) -> None:
        """Add the routes."""


# Maximum number of invalid values listed in a refusal.
_LISTED_ERRORS = 5
# The names that a refusal may repeat.
_FIELD_NAMES = frozenset(
    {"body", "query", "format", "column", "id_column", "encoding", "threshold"}
    | Question.model_fields.keys()
    | PatientNotes.model_fields.keys()
)


def create_app(
    model: SavedModel,
    limits: Limits | None = None,
    token: str = "",
    *,
    batch: bool = False,
) -> FastAPI:
    """Return the FastAPI application that serves a model.

    Args:
        model: The model.
        limits: The limits on requests; the defaults if None.
        token: The token that requests must carry; "" admits loopback names only.
        batch: Whether `POST /batch` accepts tables of notes.

    Raises:
        ParameterError: `batch` is set, but the model predicts patients, not mentions.
        MissingExtra: The extra "serve" is not installed.
    """
    with needs("", "serve"):
        from fastapi import FastAPI
        from fastapi.exceptions import RequestValidationError

        metrics = Metrics()

    limits = limits or Limits()
    queue = ModelQueue(model, metrics)

    @asynccontextmanager
    async def running_queue(_app: FastAPI) -> AsyncIterator[None]:
        """Process the queue of the model while the application runs."""
        worker = asyncio.ensure_future(queue.run())
        yield
        worker.cancel()

    app = FastAPI(
        title="fednotes",
        version=__version__,
        # The documentation pages would load scripts from other servers.
        docs_url=None,
        redoc_url=None,
        # A redirect would go to the host that the request names, whatever that is.
        redirect_slashes=False,
        lifespan=running_queue,
        responses={status: {"model": Refusal} for status in REFUSED_STATUS},
        # Telemetry would send exception messages, which may contain text, to a
        # collector that the environment names.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
        },
    )
    app.add_middleware(
        Gate,
        limits=limits,
        token=token,
        metrics=metrics,
        retry_seconds=queue.estimate_waiting_seconds,
        takes_tables=batch,
    )
    app.exception_handler(RequestValidationError)(_refuse_invalid)

    add_routes = _ROUTES[model.reads]
    add_routes(app, queue, limits, batch=batch)
    _add_status_routes(app, model, metrics)
    metrics.name_paths(app.openapi()["paths"])
    return app


async def _refuse_invalid(_request: object, error: RequestValidationError) -> None:
    """Raise Refused with the locations of invalid values, without the values."""
    messages = []
    for each in islice(error.errors(), _LISTED_ERRORS):
        place = ".".join(_hide_unknown_name(part) for part in each["loc"])
        messages.append(clean(f"{place}: {each['msg']}", 2 * NAME))
    raise Refused(422, "; ".join(messages))


def _hide_unknown_name(part: str | int) -> str:
    """Return a part of the path to an invalid value; "…" if its name is unknown.

    A name that is not a field of this API may be note text or a patient's name.
    """
    return str(part) if isinstance(part, int) or part in _FIELD_NAMES else "…"


# ---- routes --------------------------------------------------------------------------


def _add_mention_routes(
    app: FastAPI, queue: ModelQueue, limits: Limits, *, batch: bool
) -> None:
    """Add the routes for a model that finds mentions.

    Args:
        app: The application.
        queue: The queue before the model.
        limits: The limits on requests.
        batch: Whether to accept tables of notes.
    """
    from fastapi.responses import JSONResponse

    class FhirResponse(JSONResponse):
        media_type = FHIR_JSON

    @app.post("/predict")
    async def predict(question: Question) -> Results[Mentions]:
        """Find the mentions in one text or in several texts."""
        if (question.text is None) == (question.texts is None):
            raise Refused(422, "send either `text` or `texts`")
        if question.text is not None:
            texts = [question.text]
        else:
            texts = question.texts or []
        limits.require_texts(texts)
        documents = await queue.predict(texts)
        return Results(results=[question.select_mentions(each) for each in documents])

    @app.post("/fhir", response_class=FhirResponse)
    async def annotate(
        resource: dict[str, Any], threshold: Threshold = 0.0
    ) -> dict[str, Any]:
        """Find the mentions in FHIR resources that contain notes.

        Send a DocumentReference, a DiagnosticReport or a Bundle. The response is a
        Bundle of the resources with notes, each with an extension for every mention;
        the other resources of a Bundle are omitted. Errors are an OperationOutcome.
        """
        resources, texts = _read_fhir(resource)
        limits.require_texts(texts)
        documents = await queue.predict(texts)
        return fhir.make_bundle(
            fhir.replace_mentions(note, keep_confident_spans(document.spans, threshold))
            for note, document in zip(resources, documents, strict=True)
        )

    if batch:
        add_table_route(app, queue, limits)


def _read_fhir(resource: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the resources with notes in a resource or Bundle, and their texts.

    Raises:
        Refused: A note cannot be read, a resource that is not a Bundle has none, or a
            name or text contains a lone surrogate.
    """
    resources: list[Any] = []
    texts: list[str] = []
    # The response repeats the resource. A JSON escape can produce a lone surrogate,
    # which UTF-8 cannot encode.
    require_unicode("the resource", json.dumps(resource, ensure_ascii=False))
    try:
        for each in fhir.list_resources(resource):
            text = fhir.extract_text(each)
            if text is not None:
                fhir.replace_mentions(each, ())  # refuses impossible extensions now
                resources.append(each)
                texts.append(text)
    except DataError as error:
        raise Refused(422, f"a resource cannot be read: {error}") from None
    if not texts and resource.get("resourceType") != "Bundle":
        with_notes = " or a ".join(fhir.PLACES)
        raise Refused(
            422,
            f"this resource has no notes: send a {with_notes}, or a Bundle of these",
        )
    return resources, texts


def _add_patient_route(
    app: FastAPI, queue: ModelQueue, limits: Limits, *, batch: bool
) -> None:
    """Add the route for a phenotyping model.

    Args:
        app: The application.
        queue: The queue before the model.
        limits: The limits on requests.
        batch: Must be False.

    Raises:
        ParameterError: `batch` is True.
    """
    if batch:
        raise ParameterError(
            "`batch` needs a model that finds mentions; this one predicts phenotypes "
            "of patients"
        )

    @app.post("/predict")
    async def predict_patients(request: PatientNotes) -> Results[PatientFinding]:
        """Predict the phenotypes of patients from their notes."""
        limits.require_patients(request.patients)
        for name in request.patients:
            require_unicode("the name of a patient", name)
        limits.require_texts(
            [text for texts in request.patients.values() for text in texts]
        )
        findings = await queue.predict(list(request.patients.values()))
        return Results(
            results=[
                replace(finding, patient=name)
                for name, finding in zip(request.patients, findings, strict=True)
            ]
        )


# The routes of a model, by what it reads.
_ROUTES: dict[ModelInput, AddRoutes] = {
    "documents": _add_mention_routes,
    "patients": _add_patient_route,
}


def _add_status_routes(app: FastAPI, model: SavedModel, metrics: Metrics) -> None:
    """Add the routes that describe the model and the server's state."""
    from fastapi.responses import PlainTextResponse

    @app.get("/model")
    async def about() -> About:
        """Describe what the model finds and what its confidences mean."""
        return About(
            types=list(model.types), confidence=model.confidence, version=__version__
        )

    @app.get("/health")
    async def health() -> dict[Literal["status"], Literal["ok"]]:
        """Report that the server is running; needs no token."""
        return {"status": "ok"}

    @app.get("/metrics", name="metrics", response_class=PlainTextResponse)
    async def show_metrics() -> str:
        """Return the metrics in the Prometheus text format."""
        return metrics.render()
