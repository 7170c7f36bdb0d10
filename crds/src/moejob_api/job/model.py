"""The model that is trained, and its data."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moejob_api.job.base import ApiModel, Count, CountOrZero, Dtype, LongText, Positive, ShortText, TextMap

# Files that hold records.
DATA_FILES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")
# A folder that `save_to_disk` of the datasets library has written has one of them.
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json")


def is_place(source: str) -> bool:
    """Return whether a source is a file or folder, and no name on the hub."""
    return source.startswith(("pvc://", "/", "./", "../"))


class Implementation(StrEnum):
    """The layers that compute a model."""

    AUTO = "Auto"
    NATIVE = "Native"
    MEGATRON = "Megatron"


class Model(ApiModel):
    """The model to start from."""

    source: Annotated[
        LongText,
        Field(
            description="Where the model comes from: a Hugging Face name (Qwen/Qwen3-30B-A3B), pvc://claim/path, "
            "or a path inside the image or on the storage volume. A folder may be a torch_dist checkpoint of Megatron."
        ),
    ]
    config: Annotated[
        LongText | None,
        Field(
            description="Of a checkpoint of Megatron: the config.json and tokenizer of its model, as a Hugging Face "
            "name, pvc://claim/path or a path. Absent: the checkpoint's folder has them, as exportMegatron writes them."
        ),
    ] = None
    revision: Annotated[
        ShortText | None, Field(description="Branch, tag or commit on the hub. Absent: the default branch.")
    ] = None
    dtype: Annotated[
        Literal[Dtype.BFLOAT16, Dtype.FLOAT32],
        Field(description="Type of the weights during forward and backward. float32 is for CPU runs and for tests."),
    ] = Dtype.BFLOAT16
    implementation: Annotated[
        Implementation,
        Field(
            description="The layers that train. Native: moejob's own. Megatron: GPTModel of Megatron-Core, as "
            "Megatron-Bridge configures it. Auto: Native."
        ),
    ] = Implementation.AUTO
    transformer: Annotated[
        TextMap | None,
        Field(
            max_length=64,
            description="implementation Megatron only: keys of Megatron's TransformerConfig and their values as text, "
            'such as moe_permute_fusion: "true". What other fields decide is refused.',
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Field(
            description="Run Python code that comes with the model's tokenizer, and with the model in engines; the "
            "trainer runs none of its own. Only for sources you trust."
        ),
    ] = False

    @property
    def is_folder(self) -> bool:
        """Return whether the source is a folder, and no name on the hub."""
        return is_place(self.source)

    @property
    def config_source(self) -> str:
        """The folder or the name on the hub that has the model's config.json and tokenizer."""
        return self.source if self.config is None else self.config


class DataFormat(StrEnum):
    """The format of a data set's records."""

    CHAT = "Chat"
    PROMPT_COMPLETION = "PromptCompletion"
    TEXT = "Text"
    PROMPTS = "Prompts"


class DataShape(StrEnum):
    """A widespread shape of records that is turned into the one of the format."""

    ALPACA = "Alpaca"
    SHARE_GPT = "ShareGPT"
    GSM8K = "GSM8K"


class TrainedTurns(StrEnum):
    """The part of a conversation whose assistant messages are trained on."""

    ALL = "All"
    LAST = "Last"


class OverlongSamples(StrEnum):
    """The treatment of a sample longer than maxLength."""

    DROP = "Drop"
    TRUNCATE = "Truncate"
    REFUSE = "Refuse"


class Dataset(ApiModel):
    """One source of samples."""

    source: Annotated[
        LongText,
        Field(
            description="A Hugging Face data set name, a .jsonl, .csv or .parquet file (the first two also as .gz), a "
            "folder of them, or pvc://claim/path."
        ),
    ]
    configuration: Annotated[
        ShortText | None, Field(description="Configuration (subset) of a hub data set, such as main of openai/gsm8k.")
    ] = None
    split: Annotated[ShortText, Field(description="Split of a hub data set; files have none and ignore it.")] = "train"
    format: Annotated[
        DataFormat,
        Field(
            description="Chat: a list of messages, trained on the assistant's. PromptCompletion: trained on the "
            "completion. Text: trained on every token. Prompts: answers are generated, for GRPO or an evaluation."
        ),
    ]
    shape: Annotated[
        DataShape | None,
        Field(
            description="Shape of the records. Alpaca: instruction, input, output. ShareGPT: conversations of from and "
            "value. GSM8K: question, answer with #### before the number. Absent: that of the format."
        ),
    ] = None
    trained_turns: Annotated[
        TrainedTurns,
        Field(
            description="Of a Chat. All: every assistant message is trained on. Last: those of the last turn, behind "
            "what the user said last before an answer. Either way, no message whose weight is 0."
        ),
    ] = TrainedTurns.ALL
    where: Annotated[
        TextMap | None,
        Field(max_length=16, description="Only records whose columns have these values; the others are not read."),
    ] = None
    columns: Annotated[
        TextMap | None,
        Field(
            max_length=16, description="Columns under other names: the name that format or shape reads, and the own."
        ),
    ] = None
    streaming: Annotated[
        bool,
        Field(
            description="Read a hub data set over the network while it is prepared and keep none of its files: for "
            "more than fits on the disk, or for the first of many records."
        ),
    ] = False
    max_examples: Annotated[Count | None, Field(description="Only the first records, after where. Absent: all.")] = None
    weight: Annotated[
        Positive, Field(description="Share of this source in the mixture, relative to the other sources.")
    ] = 1.0


class Data(ApiModel):
    """Training and evaluation data and how they become batches."""

    train: Annotated[
        tuple[Dataset, ...], Field(min_length=1, max_length=64, description="Sources that are mixed for training.")
    ]
    eval: Annotated[
        tuple[Dataset, ...],
        Field(max_length=64, description="Sources that are evaluated every training.evalEvery steps."),
    ] = ()
    chat_template: Annotated[
        str | None,
        Field(max_length=65_536, description="Jinja chat template. Absent: the tokenizer's own."),
    ] = None
    max_length: Annotated[
        Count,
        Field(
            description="Longest training sequence in tokens, and the length of a packed row. "
            "For GRPO: prompt and answer together."
        ),
    ] = 4096
    overlong: Annotated[
        OverlongSamples,
        Field(
            description="A sample longer than maxLength: Drop it (counted in the report), Truncate it at the end, "
            "or Refuse to train."
        ),
    ] = OverlongSamples.DROP
    packing: Annotated[
        bool, Field(description="Fill every row with several samples that do not see each other. Off: pad each sample.")
    ] = True
    seed: Annotated[CountOrZero, Field(description="Seed of the shuffling and of the mixture.")] = 42
    shuffle: Annotated[bool, Field(description="Shuffle the samples again in every epoch.")] = True
