"""Entries of `override_config` in a model's configuration, and rotary embeddings under all of their names.

    override_config ─► entries of the language model inside a model of pictures go to its `text_config` ─►
    `rope_scaling`, `rope_theta` become `rope_parameters`, `type` becomes `rope_type` ─►
    merged into what the model's config.json says ─► checked ─► configuration

transformers 5 keeps all rotary settings in `rope_parameters`; model cards and older configurations say
`rope_scaling` (with `type`) and `rope_theta`. Both ways are understood. Settings that contradict each other
are refused, so that no model trains without the scaling that was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridflow.errors import ModelError

logger = logging.getLogger(__name__)

ROPE = "rope_parameters"
ROPE_SCALING = "rope_scaling"
ROPE_THETA = "rope_theta"
ORIGINAL_POSITIONS = "original_max_position_embeddings"

_KEPT_BY_EVERY_TYPE = (
    "rope_theta",
    "partial_rotary_factor",
    ORIGINAL_POSITIONS,
    "mrope_section",
    "mrope_interleaved",
)
"""Entries that describe the model and not one way of scaling: they stay where `rope_type` changes."""
_ONLY_OF_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_NEEDS_ORIGINAL_POSITIONS = ("llama3", "yarn", "longrope")
_ATTENTION = ("attn_implementation", "_attn_implementation")
_ONE_ATTENTION = "one attention over packed rows serves training and generation; the log names its kernels"
_EXPERTS = "experts_implementation"
_SET_ELSEWHERE = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
}
_DROPOUT = ("dropout", "pdrop", "drop")


def apply_override(config: PretrainedConfig, override: Mapping[str, Any]) -> None:
    """Merge `override` into `config` in place.

    A block of keys is merged into a block of the configuration, anything else replaces the entry. Raises
    ModelError for an entry that this configuration does not have, and for rotary settings that contradict
    each other, lack an entry that their type needs, or name a type that does not exist. An entry that
    another key decides is refused too, and so is dropout, which is always 0 here.
    """
    given = _routed(config, override)
    for name in _ATTENTION:
        if name in given:
            logger.info("override_config.%s=%s has no effect: %s", name, given.pop(name), _ONE_ATTENTION)
    if _EXPERTS in given:
        config._experts_implementation = given.pop(_EXPERTS)  # checked where the model is made
    for name, value in given.items():
        if name in _SET_ELSEWHERE:
            raise ModelError(f"override_config.{name}={value!r}: set {_SET_ELSEWHERE[name]} instead")
        if name.endswith(_DROPOUT) and isinstance(value, (int, float)) and value:
            raise ModelError(
                f"override_config.{name}={value!r}: dropout is always 0 here, since the log-probs of "
                "training must be those of generation; leave it out"
            )
    rope = _take_rope(config, given)
    moved = ORIGINAL_POSITIONS in given and hasattr(config, ORIGINAL_POSITIONS)
    if moved:
        setattr(config, ORIGINAL_POSITIONS, given.pop(ORIGINAL_POSITIONS))
    if rope or (moved and getattr(config, ROPE, None)):
        _override_rope(
            config, rope
        )  # before max_position_embeddings changes: yarn starts from the model's own
    for name, value in given.items():
        if not hasattr(config, name):
            raise ModelError(f"override_config: {type(config).__name__} has no entry {name!r}")
        current = getattr(config, name)
        if isinstance(current, PretrainedConfig) and isinstance(value, Mapping):
            apply_override(current, value)
        elif isinstance(current, dict) and isinstance(value, Mapping):
            setattr(config, name, {**current, **value})
        else:
            setattr(config, name, value)


def effective_override(config: PretrainedConfig, override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `override` with rotary settings as `config` has them after `apply_override`, complete.

    For other engines, which read the model's folder themselves and merge these entries in their own way.
    """
    ours = (*_ATTENTION, _EXPERTS)
    given = {name: value for name, value in _routed(config, override).items() if name not in ours}
    names = (ROPE, ROPE_SCALING) if ROPE_THETA in vars(config) else (ROPE, ROPE_SCALING, ROPE_THETA)
    rest: dict[str, Any] = {}
    for name, value in given.items():
        current = getattr(config, name, None)
        if isinstance(current, PretrainedConfig) and isinstance(value, Mapping):
            rest[name] = effective_override(current, value)
        elif name not in names:
            rest[name] = value
    if len(rest) == len(given):
        return rest
    return {**rest, ROPE: getattr(config, ROPE)}


def _routed(config: PretrainedConfig, override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `override` with entries that only the language model inside has moved into its block."""
    text = config.get_text_config()
    if text is config:
        return dict(override)
    block = next(name for name, value in vars(config).items() if value is text)
    given = dict(override)
    inner = dict(given.pop(block, {}))
    for name in list(given):
        if hasattr(config, name) or not (name in (ROPE_SCALING, ROPE_THETA) or hasattr(text, name)):
            continue
        if name in inner and inner[name] != given[name]:
            raise ModelError(
                f"override_config.{name}={given[name]!r} and override_config.{block}.{name}="
                f"{inner[name]!r} are one entry of this model's configuration and differ: give it once"
            )
        inner[name] = given.pop(name)
    if inner:
        given[block] = inner
    return given


def _take_rope(config: PretrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Remove the rotary settings from `given` and return them under the names of transformers 5."""
    if not hasattr(config, ROPE):
        return {}
    blocks = [name for name in (ROPE, ROPE_SCALING) if name in given]
    if len(blocks) == 2:
        raise ModelError(
            f"override_config names both {ROPE} and {ROPE_SCALING}, which are one entry of the model's "
            f"configuration: put everything into {ROPE}"
        )
    rope: dict[str, Any] = {}
    for name in blocks:
        block = given.pop(name)
        if not isinstance(block, Mapping):
            raise ModelError(
                f"override_config.{name}={block!r}: wanted a block of keys, for example "
                f"override_config.{name}.rope_type=yarn override_config.{name}.factor=4; to switch scaling "
                f"off, set override_config.{name}.rope_type=default"
            )
        rope = dict(block)
    if ROPE_THETA in given and ROPE_THETA not in vars(config):  # a separate entry in older configurations
        theta = given.pop(ROPE_THETA)
        if rope.setdefault(ROPE_THETA, theta) != theta:
            raise ModelError(
                f"override_config sets rope_theta to {theta!r} and, inside {blocks[0]}, to "
                f"{rope[ROPE_THETA]!r}: give it once"
            )
    return rope


def _override_rope(config: PretrainedConfig, rope: dict[str, Any]) -> None:
    current = dict(getattr(config, ROPE) or {})
    by_layer_type = [name for name, value in current.items() if isinstance(value, dict)]
    if not by_layer_type:
        merged = _merge(config, current, rope, ROPE)
    else:
        odd = sorted(set(rope) - set(by_layer_type))
        if odd:
            raise ModelError(
                f"override_config.{ROPE}.{odd[0]}: {type(config).__name__} has rotary settings for each type "
                f"of layer, so name it: override_config.{ROPE}.{by_layer_type[0]}.{odd[0]} (types of layers: "
                f"{', '.join(by_layer_type)})"
            )
        merged = dict(current)
        for name, block in rope.items():
            merged[name] = _merge(config, current[name], dict(block), f"{ROPE}.{name}")
    setattr(config, ROPE, deepcopy(merged))  # transformers changes it in place
    if getattr(config, "head_dim", 0) is None:  # scaled frequencies are computed of it; attention derives it
        config.head_dim = config.hidden_size // config.num_attention_heads
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError) as error:
        raise ModelError(f"override_config.{ROPE}: {error.args[0]}") from error
    _check_taken(merged, getattr(config, ROPE))


def _merge(
    config: PretrainedConfig, current: Mapping[str, Any], given: dict[str, Any], where: str
) -> dict[str, Any]:
    """Return the rotary settings of one kind of layer: `given` over what of `current` still applies."""
    old_name = given.pop("type", None)
    if old_name is not None and given.setdefault("rope_type", old_name) != old_name:
        raise ModelError(
            f"override_config.{where}: type={old_name!r} and rope_type={given['rope_type']!r} are two names "
            "of one entry and differ: give rope_type only"
        )
    before = current.get("rope_type", current.get("type", "default"))
    kind = given.setdefault("rope_type", before)
    known = sorted({"default", str(before), *ROPE_INIT_FUNCTIONS})
    if kind not in known:
        raise ModelError(f"override_config.{where}.rope_type={kind!r}: wanted one of {', '.join(known)}")
    idle = [name for name in _ONLY_OF_SCALING if name in given]
    if kind == "default" and idle:
        raise ModelError(
            f"override_config.{where} sets {', '.join(idle)}, but its rope_type is 'default', which scales "
            f"nothing: set override_config.{where}.rope_type too, for example to yarn"
        )
    kept = {name: value for name, value in current.items() if name != "type"}
    if kind != before:
        kept = {name: value for name, value in kept.items() if name in _KEPT_BY_EVERY_TYPE}
    merged = {**kept, **given}
    own = getattr(config, ORIGINAL_POSITIONS, None)  # Phi's configurations have it outside of the block too
    if kind in _NEEDS_ORIGINAL_POSITIONS and own is not None and ORIGINAL_POSITIONS not in given:
        merged[ORIGINAL_POSITIONS] = own
    elif kind in _NEEDS_ORIGINAL_POSITIONS:
        merged.setdefault(ORIGINAL_POSITIONS, getattr(config, "max_position_embeddings", None))
    return merged


def _check_taken(wanted: Mapping[str, Any], got: Mapping[str, Any], where: str = ROPE) -> None:
    """Raise ModelError where transformers has put another value in the place of one that was asked for."""
    for name, value in wanted.items():
        if isinstance(value, dict):
            _check_taken(value, got[name], f"{where}.{name}")
        elif got.get(name) != value:
            raise ModelError(
                f"override_config.{where}.{name}={value!r}: the model's configuration fixes it at "
                f"{got.get(name)!r}; leave it out, or change it in the model's config.json"
            )
