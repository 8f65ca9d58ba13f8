"""Loads models and tokenizers from a folder or the hub, the same way for every engine that runs on transformers.

No code and no pickle of the checkpoint is ever run, and every dropout is off: the policy ratio of an on-policy token
is 1 only when sampling and training compute the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from rollcli.engines.vision import sees
from rollcli.errors import EngineError, ModelNotFound

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HEADS = ("score.weight", "score.bias", "classifier.weight", "classifier.bias")
"""Parameters of a critic's last layer, as `transformers` calls them."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_causal_lm(
    path: str,
    *,
    dtype: str,
    device: str | torch.device,
    revision: str | None = None,
    attention: str | None = None,
    critic: bool = False,
) -> PreTrainedModel:
    """Returns a causal language model, or a critic on such a one, in evaluation mode, with every dropout off.

    Args:
        path: a folder in the hub's layout, or a hub id.
        dtype: `float32`, `bfloat16`, or `auto`: float32 on a CPU, bfloat16 elsewhere.
        device: where the weights go.
        revision: branch, tag or commit on the hub.
        attention: attention implementation, transformers' own choice when None.
        critic: one value for each position in place of logits; where the checkpoint has no such head, it is all zeros.

    Raises:
        ModelNotFound: nothing at `path`, or the folder lacks a file.
        EngineError: the weights are pickled, lack a tensor, or are of other sizes than the configuration says; or
            transformers does not know the architecture, or has no critic of it.
    """
    model, missing = _pretrained(path, dtype, torch.device(device), revision, attention, critic=critic)
    if critic:
        _zero(model, missing)
    return model


def load_classifier(
    path: str, *, dtype: str, device: torch.device, revision: str | None, attention: str | None
) -> PreTrainedModel:
    """Returns a sequence classifier in evaluation mode, as `load_causal_lm` does; its head must be there.

    Raises:
        ModelNotFound, EngineError: as `load_causal_lm`.
    """
    return _pretrained(path, dtype, device, revision, attention, classifier=True)[0]


def _pretrained(
    path: str, dtype: str, device: torch.device, revision: str | None, attention: str | None, *,
    critic: bool = False, classifier: bool = False,
) -> tuple[PreTrainedModel, list[str]]:  # fmt: skip
    """Returns a whole model, and which parameters of a critic's head the checkpoint lacks."""
    _check_folder(path, "config.json", weights=True)
    common: dict[str, Any] = {
        "dtype": torch_dtype(dtype, device),
        "attn_implementation": attention,
        "trust_remote_code": False,
    }
    with _quiet(), _explained(path, revision):
        config = transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        disable_dropout_fields(config)
        kind = _kind(config, critic, classifier)
        model, report = kind.from_pretrained(
            path,
            config=config,
            revision=revision,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **common,
        )
        missing = report["missing_keys"]
        _check_complete(path, set(missing) - set(HEADS if critic else ()), report["mismatched_keys"])
    disable_dropout_modules(model)
    return model.to(device).eval(), list(missing)


def initialize(
    settings: dict[str, Any],
    *,
    seed: int,
    dtype: str,
    device: torch.device,
    attention: str | None,
    critic: bool = False,
    classifier: bool = False,
) -> PreTrainedModel:
    """Returns a model of an architecture that `settings` describe (`model_type`, sizes), its weights random."""
    torch.manual_seed(seed)
    settings = dict(settings)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    disable_dropout_fields(config)
    kind = _kind(config, critic, classifier)
    model = kind.from_config(config, dtype=torch_dtype(dtype, device), attn_implementation=attention)
    if critic:
        _zero(model, HEADS)
    disable_dropout_modules(model)
    return model.to(device).eval()


def _kind(config: PretrainedConfig, critic: bool, classifier: bool) -> type:
    """Returns the class that loads the model; a critic is a token classifier with one class."""
    if classifier:
        return transformers.AutoModelForSequenceClassification
    if not critic:
        return transformers.AutoModelForImageTextToText if sees(config) else transformers.AutoModelForCausalLM
    check_critic(config.model_type)
    config.num_labels = 1
    return transformers.AutoModelForTokenClassification


def check_critic(model_type: str) -> None:
    """Checks, from the `model_type` of a configuration alone, that there can be a critic on such a model.

    Raises:
        EngineError: transformers has no token classifier of the architecture.
    """
    if model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise EngineError(
            f"a `{model_type}` model cannot be a critic: transformers {transformers.__version__} has no token "
            "classifier of this architecture",
            hint="set `critic.path` to a model of another architecture with the same tokenizer, or use an algorithm "
            "without a critic, such as `grpo`",
        )


def _zero(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Sets the head's parameters among `names` to 0."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in set(names) & set(HEADS) & set(parameters):
            parameters[name].zero_()


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model; it need not have a chat template.

    Raises:
        ModelNotFound: nothing at `path`, or no tokenizer there.
    """
    _check_folder(path, "tokenizer*.json", weights=False)
    with _quiet(), _explained(path, revision, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)


def vocabulary_size(path: str, revision: str | None, settings: dict[str, Any] | None) -> int:
    """Returns the number of tokens that a model embeds.

    Args:
        path: of the model, which tells unless `settings` do.
        revision: branch, tag or commit on the hub.
        settings: what `initialize` makes the model of.
    """
    return load_config(path, revision, settings).get_text_config().vocab_size


def load_config(path: str, revision: str | None, settings: dict[str, Any] | None) -> PretrainedConfig:
    """Returns the configuration of a model, by the arguments of `vocabulary_size`."""
    with _quiet(), _explained(path, revision):
        if settings is None:
            return transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        return transformers.AutoConfig.for_model(**settings)


def load_image_processor(path: str, revision: str | None = None) -> BaseImageProcessor:
    """Returns the image processor of a vision-language model; it computes by PIL and NumPy on every machine.

    Raises:
        ModelNotFound: the model has no settings of one.
    """
    _check_folder(path, "preprocessor_config.json", weights=False)
    with _quiet(), _explained(path, revision, "image processor"):
        return transformers.AutoImageProcessor.from_pretrained(
            path, revision=revision, backend="pil", trust_remote_code=False
        )


def check_tokens(what: str, ids: Mapping[str, int], vocabulary: int) -> None:
    """Checks that a model embeds every token.

    Args:
        what: whose tokens they are, for the error.
        ids: token ids by their texts or their use.
        vocabulary: `vocabulary_size` of the model.

    Raises:
        EngineError: a token has a number beyond the embedding.
    """
    beyond = {text: number for text, number in ids.items() if not 0 <= number < vocabulary}
    if beyond:
        text, number = max(beyond.items(), key=lambda item: item[1])
        raise EngineError(
            f"{what} does not match the model: {len(beyond)} of its {len(ids)} tokens are beyond the {vocabulary} that "
            f"the model embeds, the last is `{text}` with number {number}",
            hint="give the tokenizer that the model was trained with, or a model whose `vocab_size` is large enough",
        )


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the precision a recipe names; `auto` depends on the device."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in ("float32", "bfloat16"):
        raise EngineError(f"unknown dtype `{name}`", hint="write auto, float32 or bfloat16")
    return getattr(torch, name)


def _check_folder(path: str, needed: str, weights: bool) -> None:
    """Says which file a local model lacks; a hub id passes."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise ModelNotFound(f"no model at `{path}`: no such folder", hint="check the path, or give a hub id")
        return
    if not any(folder.glob(needed)):
        raise ModelNotFound(f"`{path}` is not a model: no {needed} in it", hint="give the folder that holds one")
    if weights and not any(folder.glob("*.safetensors")):
        if any(file for pattern in PICKLED for file in folder.glob(pattern)):
            raise _pickled(path)
        raise ModelNotFound(f"`{path}` has no weights: no *.safetensors in it", hint="was the download complete?")


def _check_complete(path: str, missing: set[str], mismatched: Iterable[tuple]) -> None:
    """Refuses weights that transformers would fill up with random ones, and says nothing but in a log."""
    if missing:
        raise EngineError(f"the weights of `{path}` lack `{min(missing)}`", hint="was the download complete?")
    for name, found, wanted in sorted(mismatched, key=str):
        raise EngineError(f"`{name}` of `{path}` is of size {tuple(found)}, where the model wants {tuple(wanted)}")


def _pickled(path: str) -> EngineError:
    return EngineError(
        f"the weights of `{path}` are pickled, and loading a pickle runs code of whoever wrote it",
        hint="convert them once, where you trust them, with `model.save_pretrained(folder)`, which writes safetensors",
    )


def disable_dropout_fields(config: PretrainedConfig) -> None:
    """Turns off the dropouts that a model built from `config` would read from it."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(part, name, 0.0)


def disable_dropout_modules(model: torch.nn.Module) -> None:
    """Turns off the dropouts whose rates stand in the code of the model, not in its configuration."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0


@contextmanager
def _explained(path: str, revision: str | None, what: str = "model") -> Iterator[None]:
    """Turns what transformers raises about a checkpoint into an error that says what to do next."""
    at = f"`{path}`" + (f" at revision `{revision}`" if revision else "")
    try:
        yield
    except OSError as error:
        if Path(path).is_dir():
            raise ModelNotFound(f"the {what} at {at} does not load: {_first_line(error)}") from error
        if "safetensors" in str(error):
            raise _pickled(path) from error
        raise ModelNotFound(
            f"no {what} {at}: no such folder here, and the hub gave none ({_first_line(error)})",
            hint="check the name; offline, download it first with `hf download` or give a folder",
        ) from error
    except (ValueError, ImportError, StrictDataclassError) as error:
        raise EngineError(f"the {what} {at} does not load: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps progress bars and load reports of transformers off the terminal."""
    verbosity, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()
