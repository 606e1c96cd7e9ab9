"""Conversations as prompts: what the tokenizer's chat template makes of messages."""

import inspect
import json
from typing import Any

from paged.server.errors import TOO_LONG, ApiError
from paged.server.schema import ChatRequest, TokenizeRequest
from paged.server.service import Service

LONGEST_REASON = 1000  # characters of a template's error, which may quote the request
# Parameters of `apply_chat_template` that a request may set beside a template's own variables.
ALLOWED = {"tools", "documents", "continue_final_message"}


def chat_prompt(service: Service, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The token ids of a conversation. Raises ApiError without a template, or if it refuses."""
    if not service.chat_template:
        message = (
            "messages: the served model has no chat template, and the server was given none "
            "(--chat_template); /v1/completions takes a prompt"
        )
        raise ApiError(400, message, "messages", "no_chat_template")
    given, most = body.messages or (), service.config.max_model_len
    if len(given) > most:  # each has a token at least, and rendering them takes seconds
        message = f"messages: {len(given):,} messages; max_model_len is {most}"
        raise ApiError(400, message, "messages", TOO_LONG)
    messages = [
        {"role": message.role, "content": message.text}
        | ({} if message.name is None else {"name": message.name})
        for message in given
    ]
    prompt, variables = body.add_generation_prompt is not False, _variables(service, body)
    try:
        service.check_length(json.dumps(variables), "chat_template_kwargs")
        text = service.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt,
            chat_template=service.chat_template, **variables,
        )  # fmt: skip
    except ApiError:
        raise
    except Exception as error:  # a template is a program, and the request is its input
        why = str(error) or type(error).__name__
        message = f"messages: the chat template refuses them: {why[:LONGEST_REASON]}"
        raise ApiError(400, message, "messages") from None
    service.check_length(text, "messages")
    return service.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))


def _variables(service: Service, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The request's variables for the template. Raises ApiError for reserved names: other
    parameters, and special tokens, whose text a template may repeat for each message."""
    given = body.chat_template_kwargs or {}
    taken = {*inspect.signature(service.tokenizer.apply_chat_template).parameters}
    taken |= {*service.tokenizer.special_tokens_map}
    for name in given:
        if name in taken - ALLOWED:
            message = f"chat_template_kwargs: {name!r} is not the request's to say"
            raise ApiError(400, message, "chat_template_kwargs")
    return given
