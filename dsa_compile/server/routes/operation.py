"""``/health``, ``/ready``, ``/version``, ``/metrics`` and ``/v1/models``."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from dsa_compile.server.service import Service
from dsa_compile.server.streaming import JsonResponse
from dsa_compile.server.supervisor import State
from dsa_compile.version import __version__


def operation_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/health")
    async def health() -> Response:
        """Whether the engine runs (200), or is being started or has failed (503)."""
        state = service.supervisor.state
        body = {"status": state.value, "restarts": service.supervisor.restarts}
        return JsonResponse(body, 200 if state is State.READY else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether new requests are taken (200), or not because of loading or draining (503)."""
        state = "draining" if service.admission.draining else service.supervisor.state.value
        return JsonResponse({"status": state}, 200 if state == State.READY.value else 503)

    @router.get("/version")
    async def version() -> Response:
        """The version of dsa-compile, and which artifact is served."""
        return JsonResponse({"version": __version__, "artifact": service.text.digest})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        supervisor = service.supervisor
        service.metrics.engine_state(supervisor.state is State.READY, supervisor.restarts)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    def described(name: str) -> dict[str, Any]:
        supervisor = service.supervisor
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "dsa-compile",
            "max_model_len": supervisor.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The model's names."""
        data = [described(name) for name in service.settings.model_names]
        return JsonResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One name of the model."""
        service.check_model(model)
        return JsonResponse(described(model))

    return router
