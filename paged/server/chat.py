"""Conversations as prompts: what the tokenizer's chat template makes of messages."""

import jinja2

from paged.server.errors import ApiError
from paged.server.schema import ChatRequest, TokenizeRequest
from paged.server.service import Service


def chat_prompt(service: Service, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The token ids of a conversation. Raises ApiError without a template, or if it refuses."""
    if not service.chat_template:
        message = (
            "messages: the served model has no chat template, and the server was given none "
            "(--chat_template); /v1/completions takes a prompt"
        )
        raise ApiError(400, message, "messages", "no_chat_template")
    messages = [
        {"role": message.role, "content": message.text}
        | ({} if message.name is None else {"name": message.name})
        for message in body.messages or ()
    ]
    prompt = body.add_generation_prompt is not False
    try:
        text = service.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt,
            chat_template=service.chat_template, **(body.chat_template_kwargs or {}),
        )  # fmt: skip
        service.check_length(text, "messages")
        # The template says which special tokens there are.
        return service.tokenizer.encode(text, add_special_tokens=False)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise ApiError(
            400, f"messages: the chat template refuses them: {error}", "messages"
        ) from None
