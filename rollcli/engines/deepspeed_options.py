"""What `engine_args` of the engine `deepspeed` may say: DeepSpeed's own configuration, less what the recipe decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollcli.config.schema import PolicyConfig
from rollcli.engines import facts
from rollcli.errors import EngineError
from rollcli.suggest import did_you_mean

if TYPE_CHECKING:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

STAGE = 3
"""Stage of ZeRO where the options name none."""


def check_options(config: PolicyConfig, options: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Returns what DeepSpeed makes of `zero_optimization`.

    Args:
        config: the recipe's block of the role.
        options: its `engine_args`.

    Raises:
        EngineError: a key is unknown, decided by the recipe, not supported or of the wrong type; or the recipe asks for
            what the engine has not.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    facts.check_options("deepspeed", options, "policy")
    try:
        zero = DeepSpeedZeroConfig(**{"stage": STAGE, **dict(options.get("zero_optimization") or {})})
    except (TypeError, ValueError) as error:  # ValidationError is one
        raise _refusal(error) from error
    _check_supported(config, zero)
    return zero


def _refusal(error: Exception) -> EngineError:
    """Returns what DeepSpeed finds wrong with `zero_optimization`, with the key that was meant."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    place, why, meant = ["zero_optimization"], str(error), ""
    if isinstance(error, ValidationError):
        wrong = error.errors()[0]
        place += [str(part) for part in wrong["loc"]]
        why = wrong["msg"]
        if wrong["type"] == "extra_forbidden":
            why = "DeepSpeed has no such key"
            if len(place) == 2:
                fields = DeepSpeedZeroConfig.model_fields
                meant = _meant(did_you_mean(place[-1], {field.alias or name for name, field in fields.items()}))
    return EngineError(
        f"`engine_args.{'.'.join(place)}`: {why}{meant}",
        hint="https://www.deepspeed.ai/docs/config-json describes the keys",
    )


def _check_supported(config: PolicyConfig, zero: DeepSpeedZeroConfig) -> None:
    """Refuses what leaves the float32 state where it cannot be saved, and what ZeRO does not spread."""
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    for name, offload in (("optimizer", optimizer), ("param", parameters)):
        if offload is not None and offload.device == "nvme":
            raise EngineError(
                f"`engine_args.zero_optimization.offload_{name}.device`: `nvme` is not supported", hint="write `cpu`"
            )
    halves = optimizer is not None and (optimizer.super_offload or optimizer.ratio < 1)
    if zero.zenflow is not None or halves:
        raise EngineError(
            "`engine_args.zero_optimization`: an optimizer in two places (`zenflow`, `super_offload`, a `ratio` below "
            "1) is not supported",
            hint="write `offload_optimizer: {device: cpu}` alone",
        )
    facts.check_abilities("deepspeed", config, {}, "policy")


def _meant(word: str | None) -> str:
    return f" (did you mean `{word}`?)" if word else ""
