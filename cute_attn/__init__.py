"""Attention with 8-bit and 16-bit operands on NVIDIA Hopper GPUs.

Names are loaded on first use: `import cute_attn` pulls in neither torch nor the CUTLASS Python DSL, and the
DSL only comes with the first kernel that has to be compiled.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cute_attn.api import explain, flash_attn_fp8_func, fp8_attention, fp8_attention_quantized, quantize
    from cute_attn.append import append_kv
    from cute_attn.decode import DecodePlan, decode_explain, decode_kernel, flash_attn_with_kvcache
    from cute_attn.dispatch import AttentionLog, Support, is_supported
    from cute_attn.flash import (
        flash_attn_explain,
        flash_attn_func,
        flash_attn_kernel,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
    )
    from cute_attn.flash_varlen import (
        flash_attn_varlen_func,
        flash_attn_varlen_kernel,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from cute_attn.fp8_varlen import fp8_attention_varlen, fp8_attention_varlen_kernel
    from cute_attn.kvcache import KVCache
    from cute_attn.policy import LayerPolicy
    from cute_attn.precompile import ModelShapes, model_shapes, warmup
    from cute_attn.quantize import PRESETS, Fp8Recipe, QuantizedQKV
    from cute_attn.torch_sdpa import (
        SdpaPlan,
        explain_sdpa,
        register_flash_attention_impl,
        sdpa,
        sdpa_log,
        sdpa_region,
    )

    __version__: str

__all__ = [
    "PRESETS",
    "AttentionLog",
    "DecodePlan",
    "Fp8Recipe",
    "KVCache",
    "LayerPolicy",
    "ModelShapes",
    "QuantizedQKV",
    "SdpaPlan",
    "Support",
    "__version__",
    "append_kv",
    "decode_explain",
    "decode_kernel",
    "explain",
    "explain_sdpa",
    "flash_attn_explain",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_kernel",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kernel",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fp8_attention",
    "fp8_attention_quantized",
    "fp8_attention_varlen",
    "fp8_attention_varlen_kernel",
    "is_supported",
    "model_shapes",
    "quantize",
    "register_flash_attention_impl",
    "sdpa",
    "sdpa_log",
    "sdpa_region",
    "warmup",
]

_HOME: Final = {
    "PRESETS": "cute_attn.quantize",
    "AttentionLog": "cute_attn.dispatch",
    "Fp8Recipe": "cute_attn.quantize",
    "LayerPolicy": "cute_attn.policy",
    "ModelShapes": "cute_attn.precompile",
    "QuantizedQKV": "cute_attn.quantize",
    "SdpaPlan": "cute_attn.torch_sdpa",
    "Support": "cute_attn.dispatch",
    "DecodePlan": "cute_attn.decode",
    "KVCache": "cute_attn.kvcache",
    "append_kv": "cute_attn.append",
    "decode_explain": "cute_attn.decode",
    "decode_kernel": "cute_attn.decode",
    "explain": "cute_attn.api",
    "flash_attn_explain": "cute_attn.flash",
    "explain_sdpa": "cute_attn.torch_sdpa",
    "flash_attn_fp8_func": "cute_attn.api",
    "flash_attn_func": "cute_attn.flash",
    "flash_attn_kernel": "cute_attn.flash",
    "flash_attn_kvpacked_func": "cute_attn.flash",
    "flash_attn_qkvpacked_func": "cute_attn.flash",
    "flash_attn_varlen_func": "cute_attn.flash_varlen",
    "flash_attn_varlen_kernel": "cute_attn.flash_varlen",
    "flash_attn_varlen_kvpacked_func": "cute_attn.flash_varlen",
    "flash_attn_varlen_qkvpacked_func": "cute_attn.flash_varlen",
    "flash_attn_with_kvcache": "cute_attn.decode",
    "fp8_attention": "cute_attn.api",
    "fp8_attention_quantized": "cute_attn.api",
    "fp8_attention_varlen": "cute_attn.fp8_varlen",
    "fp8_attention_varlen_kernel": "cute_attn.fp8_varlen",
    "is_supported": "cute_attn.dispatch",
    "model_shapes": "cute_attn.precompile",
    "register_flash_attention_impl": "cute_attn.torch_sdpa",
    "sdpa": "cute_attn.torch_sdpa",
    "sdpa_log": "cute_attn.torch_sdpa",
    "sdpa_region": "cute_attn.torch_sdpa",
    "warmup": "cute_attn.precompile",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cute-attn")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0+unknown"


class _Package(ModuleType):
    """This package, whose attribute `quantize` is the public function although a submodule has that name too.

    The first import of a submodule binds its name in the package, whatever stood there. A property decides
    the same way whichever import comes first; `from cute_attn.quantize import ...` reaches the submodule all
    the same.
    """

    @property
    def quantize(self) -> Any:
        return importlib.import_module("cute_attn.api").quantize

    @quantize.setter
    def quantize(self, submodule: ModuleType) -> None:
        """Called by the import of the submodule; the name stays with the function."""


sys.modules[__name__].__class__ = _Package
