"""The format of OpenAI's API: bodies of requests, with the engine's fields beside OpenAI's, and
errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import fastapi
from fastapi import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from paged.checks import help_of
from paged.requests.sampling_params import SamplingParams
from paged.validation import PromptTooLong

CLIENT_LEFT = 499  # status in logs and metrics of a request whose client has disconnected
TOO_LONG = "context_length_exceeded"  # OpenAI's error code: clients then shorten the conversation
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MAX_FIELDS = 1000  # fields of a map
# Stops are limited, because each generated token is compared with all stops.
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_TOKENS = 64, 1024, 1024
HELP = help_of(SamplingParams)
T = TypeVar("T")  # A `type` statement would become a schema of its own in the OpenAPI document.


class ApiError(fastapi.HTTPException):
    """An error response: `{"error": {"message", "type", "param", "code"}}`.

    param: the wrong field of the request.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(status, message, headers)
        self.message, self.param, self.code = message, param, code

    @property
    def content(self) -> dict[str, Any]:
        status = self.status_code
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> "Json":
        return Json(self.content, self.status_code, self.headers)


def engine_error(error: ValueError, names: Mapping[str, str], default: str) -> ApiError:
    """The error of a request that the engine refuses.

    names: the engine's field names → the request's field names.
    default: the request's field for an engine's message that names no field.
    """
    message = str(error)
    words = message.replace(":", " ").replace("(", " ").split()
    param = next((names[word] for word in words if word in names), default)
    code = TOO_LONG if isinstance(error, PromptTooLong) else None
    return ApiError(400, message if param in words else f"{param}: {message}", param, code)


def body_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error of a body that pydantic refuses, with all reasons for the first wrong field."""
    if not errors or not errors[0]["loc"]:
        if errors and errors[0]["type"] == "json_invalid":
            return ApiError(400, f"the body is no JSON: {errors[0]['ctx']['error']}")
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    param = errors[0]["loc"][0]
    reasons = [str(each["msg"]) for each in errors if each["loc"][0] == param]
    reasons = [*dict.fromkeys(reason.removeprefix("Value error, ") for reason in reasons)]
    return ApiError(400, f"{param}: {'; or: '.join(reasons)}", param)


def dumps(content: Any) -> bytes:
    """JSON in ASCII, because a message may quote half a surrogate pair, which UTF-8 cannot
    encode."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def _require_empty(value: Any) -> None:
    if value not in (None, "", [], {}):
        raise ValueError("this server does not support it: leave it out, empty or null")


def option(name: str, more: str = "") -> Any:
    """An optional field of a body. Its description: `SamplingParams`' help text, then `more`."""
    return Field(None, description=HELP.get(name, name) + more)


Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Items = Annotated[list[T], Field(fail_fast=True)]  # Errors for all bad items would take minutes.
# OpenAI's fields that clients send empty. Other values would change a request's meaning, and are
# refused.
Unsupported = Annotated[
    Any,
    AfterValidator(_require_empty),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 0},
                   {"type": "array", "maxItems": 0}, {"type": "object", "maxProperties": 0}]}
    ),
]  # fmt: skip


class Body(BaseModel):
    """A request body. It may have only declared fields of the declared types. A null stands for
    the default."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="whether the last chunk counts tokens")
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Body):
    """The fields of completions and chat completions. Defaults are OpenAI's: temperature 1."""

    model: str = Field(description="the served model, or an adapter")
    stream: bool | None = Field(None, description="whether to answer by server-sent events")
    stream_options: StreamOptions | None = None
    n: int | None = option("n")
    temperature: float | None = option("temperature", "; 1 by default")
    top_p: float | None = option("top_p")
    presence_penalty: float | None = option("presence_penalty")
    frequency_penalty: float | None = option("frequency_penalty")
    seed: int | None = option("seed")
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = option("stop")
    logit_bias: dict[str, float] | None = Field(None, description="token id → added to its logit")
    # Fields of the engine, which OpenAI's API lacks.
    top_k: int | None = option("top_k")
    min_p: float | None = option("min_p")
    repetition_penalty: float | None = option("repetition_penalty")
    stop_token_ids: Annotated[Items[int], Field(max_length=MAX_STOP_TOKENS)] | None = option(
        "stop_token_ids"
    )
    ignore_eos: bool | None = option("ignore_eos")
    forced_output: Items[int] | None = Field(None, description="tokens that the output begins with")
    prompt_logprobs: int | None = option("prompt_logprobs")
    return_token_ids: bool | None = Field(
        None, description="whether choices have the ids of their tokens, as `token_ids`"
    )
    best_of: int | None = option("best_of")
    beam_width: int | None = option("beam_width")
    length_penalty: float | None = option("length_penalty")
    early_stopping: bool | Literal["never"] | None = option("early_stopping")
    cache_salt: str | None = Field(
        None, description="cached prefixes are shared only among requests of the same salt"
    )
    # Accepted, without effect.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(
        description="text or token ids, one or several"
    )
    max_tokens: int | None = option("max_tokens", "; 16 by default; 0 only with echo")
    echo: bool | None = Field(None, description="whether to give the prompt back before the output")
    logprobs: int | None = option("logprobs")
    add_special_tokens: bool | None = Field(
        None, description="whether texts begin with the tokenizer's special tokens; true by default"
    )
    suffix: Unsupported = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str
    content: str | Items[TextPart] | None = None
    name: str | None = None
    # Fields of an assistant's message, which clients send back.
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None
    function_call: Unsupported = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ResponseFormat(Body):
    type: Literal["text"]


class Conversation(Body):
    messages: Items[Message] = Field(min_length=1)
    add_special_tokens: bool | None = Field(
        None,
        description="whether the tokenizer adds special tokens to those that the chat template "
        "writes; false by default",
    )
    add_generation_prompt: bool | None = Field(
        None, description="whether the prompt ends where the assistant begins; true by default"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="further variables of the chat template"
    )


class ChatRequest(GenerationRequest, Conversation):
    max_tokens: int | None = option("max_tokens", "; by default what the context leaves")
    max_completion_tokens: int | None = option("max_tokens", "; the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="whether to report log-probabilities")
    top_logprobs: int | None = Field(
        None, description="number of alternatives for each token; needs logprobs"
    )
    response_format: ResponseFormat | None = None
    modalities: Items[Literal["text"]] | None = None
    tools: Unsupported = None
    functions: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Items[int]


class LoadAdapterRequest(Body):
    lora_name: str = Field(min_length=1, description="the name that requests give as `model`")
    lora_path: str = Field(min_length=1, description="its folder, as PEFT writes it")
