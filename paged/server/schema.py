"""What requests hold: OpenAI's fields, and the engine's others beside them."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from paged.checks import help_of
from paged.requests.sampling_params import SamplingParams

HELP = help_of(SamplingParams)
T = TypeVar("T")  # each `type` would be a schema of its own in the server's document
MOST_FIELDS = 1000  # of any map
# Bounds on what each generated token is compared with.
MOST_STOPS, LONGEST_STOP, MOST_STOP_TOKENS = 64, 1024, 1024


def nothing(value: Any) -> None:
    if value not in (None, "", [], {}):
        raise ValueError("this server does not support it: leave it out, empty or null")


Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Items = Annotated[list[T], Field(fail_fast=True)]  # a message for each bad item takes minutes
# Fields of OpenAI's that clients send empty. Others are refused: they change what a request means.
Unsupported = Annotated[
    Any,
    AfterValidator(nothing),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 0},
                   {"type": "array", "maxItems": 0}, {"type": "object", "maxProperties": 0}]}
    ),
]  # fmt: skip


def option(name: str, more: str = "") -> Any:
    """A field of SamplingParams that may be left out."""
    return Field(None, description=HELP.get(name, name) + more)


class Body(BaseModel):
    """Of exactly these fields, of exactly these types; null is the default."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="whether the last chunk counts tokens")
    include_obfuscation: Literal[False] | None = None


class Sampling(Body):
    """What both APIs share. Defaults are OpenAI's: temperature 1."""

    model: str = Field(description="the served model, or an adapter")
    stream: bool | None = Field(None, description="whether to answer by server-sent events")
    stream_options: StreamOptions | None = None
    n: int | None = option("n")
    temperature: float | None = option("temperature", "; 1 by default")
    top_p: float | None = option("top_p")
    presence_penalty: float | None = option("presence_penalty")
    frequency_penalty: float | None = option("frequency_penalty")
    seed: int | None = option("seed")
    stop: Stop | Annotated[Items[Stop], Field(max_length=MOST_STOPS)] | None = option("stop")
    logit_bias: dict[str, float] | None = Field(None, description="token id → added to its logit")
    # The engine's own.
    top_k: int | None = option("top_k")
    min_p: float | None = option("min_p")
    repetition_penalty: float | None = option("repetition_penalty")
    stop_token_ids: Annotated[Items[int], Field(max_length=MOST_STOP_TOKENS)] | None = option(
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
    # Taken, and of no effect.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Sampling):
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


class ChatRequest(Sampling, Conversation):
    max_tokens: int | None = option("max_tokens", "; by default what the context leaves")
    max_completion_tokens: int | None = option("max_tokens", "; the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="whether to report log-probabilities")
    top_logprobs: int | None = Field(None, description="of so many alternatives, with logprobs")
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
