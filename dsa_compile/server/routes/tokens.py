"""``POST /tokenize`` and ``POST /detokenize``."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from dsa_compile.server.chat_text import encode_chat
from dsa_compile.server.errors import bad_request
from dsa_compile.server.openai_types import DetokenizeRequest, TokenizeRequest
from dsa_compile.server.prompt_encoding import in_thread
from dsa_compile.server.service import Service
from dsa_compile.server.streaming import JsonResponse
from dsa_compile.server.token_text import token_text


def tokens_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Show the token ids of a text, or the exact prompt of a conversation."""
        service.check_model(body.model)
        _tokenizer(service, "prompt")
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        answer: dict[str, Any] = {}
        if body.messages is not None:
            answer["prompt"], ids = await encode_chat(
                service,
                body.messages,
                tools=body.tools or None,
                add_generation_prompt=body.add_generation_prompt,
                **body.encoding(),
            )
        else:
            assert body.prompt is not None
            ids = await service.encode(body.prompt, "prompt", special=body.add_special_tokens)
        if body.return_token_strs:
            answer["token_strs"] = await in_thread(
                len(ids), list, map(partial(token_text, service.text.tokenizer), ids)
            )
        answer |= {
            "count": len(ids),
            "max_model_len": service.engine.limits.max_model_len,
            "tokens": ids,
        }
        return JsonResponse(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Show the text of token ids, special tokens included."""
        service.check_model(body.model)
        tokenizer = _tokenizer(service, "tokens")
        ids = await service.encode(body.tokens, "tokens") if body.tokens else []
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        text = await in_thread(len(ids), decode, ids)
        return JsonResponse({"prompt": text})

    return router


def _tokenizer(service: Service, param: str) -> Any:
    if service.text.tokenizer is None:
        raise bad_request("the model has no tokenizer; use token ids", param)
    return service.text.tokenizer
