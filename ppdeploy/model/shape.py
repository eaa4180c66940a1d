"""What a checkpoint is made of, as far as a plan needs it: its layers, and what lies before and after them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Attention = Literal["full", "sliding", "linear", "mamba", "mla", "none"]
"""What a layer keeps of the past: all keys and values, those of a window, a state of fixed size (linear attention,
Mamba), MLA's latent, or nothing, as the layers of some hybrids that are a feed-forward part only."""


class Layer(BaseModel):
    """One hidden layer of the language model. Bytes are those in GPU memory, scales of quantised weights included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attention: Attention = Field(description="what the layer keeps of the past")
    parameters: int = Field(ge=0, description="values in the weights, scales of a quantisation not counted")
    active_parameters: int = Field(
        ge=0, description="values that one token's forward pass reads: all but the routed experts not chosen"
    )
    weight_bytes: int = Field(ge=0, description="bytes of the weights as the checkpoint's quantisation stores them")
    active_bytes: int = Field(ge=0, description="bytes of weights read for one token")
    expert_bytes: int = Field(ge=0, default=0, description="bytes of all routed experts in the layer; 0: dense")
    experts: int = Field(ge=0, default=0, description="routed experts in the layer; 0: dense")
    experts_per_token: int = Field(ge=0, default=0, description="routed experts that one token is sent to")
    kv_values: int = Field(
        ge=0,
        description="values kept for each token, keys and values of all heads together; MLA: the latent, which tensor "
        "parallelism does not divide; 0: the layer keeps a state of fixed size",
    )
    kv_window: int | None = Field(default=None, description="tokens kept at most; None: all")
    state_bytes: int = Field(ge=0, default=0, description="bytes of state for each sequence; 0: none")


class Vision(BaseModel):
    """A tower for images: what a trial of it with the largest image needs is worked out from these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1, description="values of one patch's hidden state")
    intermediate_size: int = Field(ge=1, description="width of the feed-forward part")
    patches_per_token: int = Field(ge=1, description="patches that become one token of the language model")
    item_tokens: int = Field(ge=1, description="tokens of the largest image")
    output_values: int = Field(ge=1, description="values that are kept for each token until the language model has it")
    inputs: tuple[str, ...] = Field(description="kinds of input that go through it; it is loaded for any of them")


class ModelShape(BaseModel):
    """The numbers of a checkpoint that decide how it is split over nodes and what it needs there.

    Counts of parameters are the published kind: without the layers for multi-token prediction, which
    `mtp_parameters` has, and with tied embeddings counted once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architectures: tuple[str, ...] = Field(description="vLLM's names of the model class, as in config.json")
    model_type: str | None = Field(description="transformers' name of the model family")
    num_hidden_layers: int = Field(description="layers of the language model, the ones a pipeline splits")
    hidden_size: int = Field(description="values of one token's hidden state, what a handoff carries")
    num_attention_heads: int = Field(description="query heads; tensor parallelism divides them")
    num_key_value_heads: int = Field(description="key and value heads; equal to the query heads without GQA")
    head_dim: int = Field(description="values of one head")
    vocab_size: int = Field(description="rows of the embedding")
    max_position_embeddings: int | None = Field(description="longest context in tokens; None: not said")
    default_length: int | None = Field(
        default=None, description="tokens that vLLM serves at most when no length is asked for; None: not said"
    )
    dtype: str | None = Field(description="the checkpoint's number format, such as bfloat16; None: not said")
    tie_word_embeddings: bool | None = Field(
        description="the output head is the embedding; None: not said, the architecture's default holds"
    )
    quantization: str | None = Field(description="quantization method, such as fp8 or awq; None: none")
    weight_bytes: int = Field(description="bytes of the weight files; 0 when there are none (dummy weights)")

    intermediate_size: int | None = Field(description="width of a dense layer's feed-forward part; None: not said")
    moe_intermediate_size: int | None = Field(description="width of one routed expert; None: no experts")
    num_experts: int = Field(description="routed experts of a layer that has any; 0: a dense model")
    experts_per_token: int = Field(description="routed experts that one token is sent to; 0: a dense model")
    linear_key_heads: int = Field(
        description="key heads of linear attention, which tensor parallelism divides too; 0: there is none"
    )
    quantization_block: int | None = Field(
        description="values in one block or group of the quantisation, which a TP slice of a matrix must be a multiple "
        "of; None: no blocks"
    )

    layers: tuple[Layer, ...] = Field(description="the hidden layers, first to last")
    embedding_parameters: int = Field(ge=0, description="values of the input embedding")
    embedding_bytes: int = Field(ge=0, description="bytes of the input embedding, on the first stage")
    head_parameters: int = Field(ge=0, description="values of the output head; 0 when it is the embedding")
    head_bytes: int = Field(
        ge=0,
        description="bytes of the output head, on the last stage. With tied embeddings: the copy of the embedding that "
        "the last stage holds when it is not the first one too (then it costs nothing more)",
    )
    other_parameters: int = Field(ge=0, description="values of all else: final norm, vision tower, audio tower")
    other_first_bytes: int = Field(ge=0, description="vision tower, projector, audio tower: on the first stage")
    other_last_bytes: int = Field(ge=0, description="the final norm: on the last stage")
    mtp_parameters: int = Field(
        ge=0,
        description="values of the layers for multi-token prediction that are stored, with the copies of embedding and "
        "head that some checkpoints store with them",
    )
    mtp_bytes: int = Field(
        ge=0,
        description="bytes of those, on the last stage, loaded when speculative decoding uses them. Where no copy of "
        "the embedding is stored with them, vLLM loads one all the same, unless the last stage is the first",
    )
    mtp_layers: int = Field(ge=0, default=0, description="layers for multi-token prediction that are stored")
    vision: Vision | None = Field(
        default=None, description="the tower for images, where one is known and loaded; None: none, or not known"
    )
    cache_dtype: str | None = Field(
        default=None, description="format of the KV cache that the checkpoint asks for, such as fp8; None: its own"
    )
    exact: bool = Field(
        description="the layers are known matrix by matrix; False: they are estimated, and `note` says how"
    )
    note: str = Field(default="", description="what a reader of the sizes must know, in sentences; empty: nothing")

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.head_parameters == 0

    @property
    def total_parameters(self) -> int:
        """Values of the whole model but its multi-token prediction layers, as publishers count them."""
        outside = self.embedding_parameters + self.head_parameters + self.other_parameters
        return outside + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Values read and multiplied for one token of text: the layers' active ones and the output head.

        The embedding is looked up, not multiplied, so it counts only where it is the head too. This is how the model
        cards of gpt-oss and DeepSeek V3 count; others add the embedding.
        """
        head = self.embedding_parameters if self.tied else self.head_parameters
        return head + self.hidden_size + sum(layer.active_parameters for layer in self.layers)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights in GPU memory on one GPU that has them all, without multi-token prediction layers."""
        head = 0 if self.tied else self.head_bytes
        outside = self.embedding_bytes + self.other_first_bytes + head + self.other_last_bytes
        return outside + sum(layer.weight_bytes for layer in self.layers)
