"""Which precision each layer of a model attends in, as a file that the integrations read.

Layers differ in how much 8-bit attention costs them: `python -m cute_attn.eval` measures it and writes a policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cute_attn.dispatch import EXACT
from cute_attn.quantize import PRESETS

__all__ = ["LayerPolicy"]

FORMAT: Final = "cute_attn-policy-1"


@dataclass(frozen=True)
class LayerPolicy:
    """Precision by layer: "bf16" (the 16-bit kernel) or the name of a recipe.

    Attributes:
        default: of layers that `layers` does not name.
        layers: precision by layer index.
        about: what it was made from, flat; for people, not read.

    Raises:
        ValueError: an unknown precision or a negative layer.
        TypeError: a layer that is no int.
    """

    default: str = EXACT
    layers: Mapping[int, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        allowed = (EXACT, *PRESETS)
        for layer, precision in (("default", self.default), *self.layers.items()):
            if precision not in allowed:
                raise ValueError(
                    f"precision of layer {layer} is {precision!r}; allowed: {', '.join(map(repr, allowed))}"
                )
        for layer in self.layers:
            if isinstance(layer, bool) or not isinstance(layer, int):
                raise TypeError(f"layer {layer!r} is a {type(layer).__name__}; allowed: an int")
            if layer < 0:
                raise ValueError(f"layer is {layer}; allowed: 0 or more")

    def precision(self, layer: int | None) -> str:
        """Precision of a layer; the default for None."""
        return self.default if layer is None else self.layers.get(layer, self.default)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "format": FORMAT,
            "default": self.default,
            "layers": {str(layer): self.layers[layer] for layer in sorted(self.layers)},
            "about": dict(self.about),
        }
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerPolicy:
        """Read a policy.

        Raises:
            ValueError: the file holds no policy; the message names it and says what is wrong.
            OSError: the file cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError(f"not a policy: an object with 'format' {FORMAT!r} is expected")
            default, layers = content.get("default"), content.get("layers", {})
            if not isinstance(default, str) or not isinstance(layers, dict):
                raise ValueError("'default' must be a text and 'layers' an object")
            if not all(name.isdecimal() for name in layers):
                raise ValueError(f"layers are {sorted(layers)}; allowed: integers")
            return cls(default, {int(name): layers[name] for name in layers}, content.get("about", {}))
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(f"{os.fspath(path)}: {error}") from error
