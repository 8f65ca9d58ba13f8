"""Where rollouts come from: which rollcli, which model, which tokenizer, which version of the policy.

Every file of rollouts says so in its schema's metadata, so that nobody trains on another model's tokens unawares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rollcli import __version__
from rollcli.config.schema import ModelConfig
from rollcli.errors import ModelNotFound
from rollcli.runs.locations import resolve_model

PREFIX = "rollcli."
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
    "merges.txt", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip
"""What a tokenizer consists of; a model has some of them."""


@dataclass(frozen=True)
class Origin:
    """What produced a file of rollouts.

    Attributes:
        version: rollcli's.
        model_path: the model as the recipe names it.
        model: digest of its configuration, and of its commit where it is the hub's.
        tokenizer: digest of the tokenizer's files.
        policy_version: steps that the policy had behind it when it was about to learn from them.
    """

    version: str
    model_path: str
    model: str
    tokenizer: str
    policy_version: int

    def metadata(self) -> dict[str, str]:
        """Returns what the schema's metadata holds."""
        return {PREFIX + name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> Origin | None:
        """Returns what a schema's metadata says, or None where it does not."""
        said = {key.decode(): value.decode() for key, value in (metadata or {}).items()}
        try:
            values = {name: said[PREFIX + name] for name in cls.__dataclass_fields__}
            return cls(**{**values, "policy_version": int(values["policy_version"])})
        except (KeyError, ValueError):
            return None

    def differences(self, other: Origin) -> Iterator[str]:
        """Yields in words what differs from `other`, which is what should be there."""
        if self.model != other.model:
            same = self.model_path == other.model_path
            which = f"`{self.model_path}` as it was" if same else f"`{self.model_path}`"
            yield f"their model is {which} ({self.model}), not `{other.model_path}` ({other.model})"
        if self.tokenizer != other.tokenizer:
            yield f"their tokenizer is another one ({self.tokenizer}, not {other.tokenizer})"
        if self.policy_version != other.policy_version:
            yield f"they belong to version {self.policy_version} of the policy, not {other.policy_version}"
        if self.version != other.version:
            yield f"rollcli {self.version} recorded them, this is {other.version}"


def origin_of(model: ModelConfig, policy_version: int) -> Origin:
    """Returns the origin of rollouts that a model's policy samples here and now.

    The digests cover what is there: of a hub model the files in its cache, and their commit.
    """
    folder, commit = _folder(model)
    configuration = folder / "config.json"
    if model.initialize is not None:
        described = json.dumps(model.initialize, sort_keys=True, default=str).encode()
    else:
        described = configuration.read_bytes() if configuration.is_file() else b""
    files = [folder / name for name in TOKENIZER_FILES]
    tokenizer = [part for file in files if file.is_file() for part in (file.name.encode(), file.read_bytes())]
    return Origin(
        version=__version__,
        model_path=model.path,
        model=_digest(commit.encode(), described),
        tokenizer=_digest(commit.encode(), *tokenizer),
        policy_version=policy_version,
    )


def _folder(model: ModelConfig) -> tuple[Path, str]:
    """Returns the folder of a model's files, and for one of the hub its commit, as far as it is known."""
    try:
        path = resolve_model(model.path)
    except ModelNotFound:
        path = model.path
    if Path(path).is_dir():
        return Path(path), ""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json", revision=model.revision)
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        return Path(path), f"{path}@{model.revision or 'main'}"
    return Path(cached).parent, f"{path}@{Path(cached).parent.name}"


def _digest(*parts: bytes) -> str:
    """Returns a digest that depends on each part and on where it ends."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()[:16]
