"""A small owner of the storage of a KV cache: sequences that come and go, in slots of their own or in pages.

`flash_attn_with_kvcache` and `append_kv` do without it: they take tensors, and so does everything here in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cute_attn import decode, kv, validate
from cute_attn.append import append_kv
from cute_attn.kernels.config import HEAD_DIMS_16BIT
from cute_attn.quantize import rotation_signs, scale_norm, walsh_hadamard

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of up to `sequences` sequences of up to `capacity` tokens each.

    Lengths and pages are kept on the host. A sequence is the int that `allocate` gave.

    Args:
        sequences: how many there may be at a time.
        capacity: tokens that a sequence may have.
        heads_k: heads of keys and values.
        head_dim: of keys; a multiple of 8 from 32 to 256, of 16 with float8_e4m3fn.
        head_dim_v: of values, likewise; default head_dim.
        dtype: bfloat16, float16, or float8_e4m3fn, with a scale for each token and head.
        page_size: slots of a page; None for slots of its own for each sequence.
        pages: pages that all sequences share; default enough for all of them.
        rotation_seed: of the random signs with which keys are rotated before they are quantised (arXiv 2407.08608,
            section 3.3); None without. Only with float8_e4m3fn.
        device: where the storage is.

    Attributes:
        k, v: (sequences, capacity, heads_k, head_dim or head_dim_v), or (pages, page_size, heads_k, ...).
        k_descale, v_descale: float32, (sequences, capacity, heads_k) or (pages, page_size, heads_k); None with 16 bits.
        rotation_signs: (head_dim,) float32; None without a rotation.

    Raises:
        TypeError: a size that is no int, or a dtype that is not allowed.
        ValueError: a size that is not allowed, or a seed or pages where there are none.
    """

    def __init__(
        self,
        sequences: int,
        capacity: int,
        heads_k: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int | None = None,
        pages: int | None = None,
        rotation_seed: int | None = None,
        device: torch.device | str = "cuda",
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name, size in (
            ("sequences", sequences),
            ("capacity", capacity),
            ("heads_k", heads_k),
            ("head_dim", head_dim),
            ("head_dim_v", head_dim_v),
            ("page_size", page_size),
            ("pages", pages),
        ):
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} is a {type(size).__name__}; allowed: an int")
            if size < 1:
                raise ValueError(f"{name} is {size}; allowed: at least 1")
        if dtype not in (*validate.IN_DTYPES, kv.E4M3):
            raise TypeError(
                f"dtype is {dtype!r}; allowed: {', '.join(map(str, validate.IN_DTYPES))}, {kv.E4M3}"
            )
        step = 16 if dtype == kv.E4M3 else 8
        for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            if size not in HEAD_DIMS_16BIT or size % step:
                raise ValueError(f"{name} is {size}; allowed: multiples of {step} from 32 to 256")
        if pages is not None and page_size is None:
            raise ValueError(f"pages is {pages} and page_size is None; allowed: None without a page_size")
        if rotation_seed is not None and dtype != kv.E4M3:
            raise ValueError(f"rotation_seed is {rotation_seed} with {dtype}; allowed: None, or {kv.E4M3}")
        self.capacity = capacity
        self.page_size = page_size
        self._blocks = 0 if page_size is None else -(-capacity // page_size)
        if page_size is None:
            shape: tuple[int, int, int] = (sequences, capacity, heads_k)
        else:
            pages = sequences * self._blocks if pages is None else pages
            shape = (pages, page_size, heads_k)
        self.k = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(*shape, head_dim_v, dtype=dtype, device=device)
        # Scales of a head lie one behind another: side by side with those of other heads, a head's copies of four bytes
        # would each load a line of L2.
        scales = (shape[0], heads_k, shape[1]) if dtype == kv.E4M3 else None
        self.k_descale, self.v_descale = (
            None if scales is None else torch.ones(scales, device=device).transpose(1, 2) for _ in range(2)
        )
        self.rotation_signs = (
            None if rotation_seed is None else rotation_signs(head_dim, rotation_seed, self.k.device)
        )
        self._lengths: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}
        self._free_sequences = list(range(sequences))[::-1]
        self._free_pages = [] if page_size is None else list(range(shape[0]))[::-1]

    @property
    def sequences(self) -> list[int]:
        """Those that are allocated, the oldest first."""
        return list(self._lengths)

    @property
    def free_tokens(self) -> int | None:
        """Tokens that the free pages hold; None without pages."""
        return None if self.page_size is None else len(self._free_pages) * self.page_size

    def allocate(self) -> int:
        """A new sequence, without tokens.

        Raises:
            RuntimeError: all are taken.
        """
        if not self._free_sequences:
            raise RuntimeError(f"all {len(self._lengths)} sequences are taken; allowed: to free one first")
        sequence = self._free_sequences.pop()
        self._lengths[sequence], self._pages[sequence] = 0, []
        return sequence

    def free(self, sequence: int) -> None:
        """Give a sequence and its pages back.

        Raises:
            ValueError: it is not allocated.
        """
        self._check([sequence])
        del self._lengths[sequence]
        self._free_pages += self._pages.pop(sequence)[::-1]
        self._free_sequences.append(sequence)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence. Raises ValueError where it is not allocated."""
        self._check([sequence])
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the tokens of a sequence from `length` on, and pages without any other.

        Raises:
            ValueError: the sequence is not allocated, or shorter.
        """
        self._check([sequence])
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(
                f"length is {length}; allowed: 0 to the length of the sequence, {self._lengths[sequence]}"
            )
        self._lengths[sequence] = length
        if self.page_size is not None:
            held = self._pages[sequence]
            kept = -(-length // self.page_size)
            self._free_pages += held[kept:][::-1]
            del held[kept:]

    def arguments(self, sequences: Iterable[int], seqlen_new: int = 0) -> dict[str, Any]:
        """Keyword arguments of `flash_attn_with_kvcache` or `append_kv` for a batch of these sequences.

        Takes pages for `seqlen_new` more tokens of each; the lengths stay as they are, see `advance`.

        Raises:
            ValueError: a sequence is not allocated, comes twice, or has no room.
            RuntimeError: there are not enough free pages; none is taken then.
        """
        batch = self._check(sequences)
        for sequence in batch:
            if self._lengths[sequence] + seqlen_new > self.capacity:
                raise ValueError(
                    f"sequence {sequence} has {self._lengths[sequence]} tokens; allowed: up to "
                    f"{self.capacity - seqlen_new}, as {seqlen_new} more are to fit its capacity, {self.capacity}"
                )
        device = self.k.device
        lengths = [self._lengths[sequence] for sequence in batch]
        found: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device)}
        if self.page_size is None:
            found["cache_batch_idx"] = torch.tensor(batch, dtype=torch.int32, device=device)
        else:
            self._take_pages(batch, seqlen_new)
            rows = [
                self._pages[sequence] + [0] * (self._blocks - len(self._pages[sequence]))
                for sequence in batch
            ]
            table = torch.tensor(rows, dtype=torch.int32, device=device)
            found["block_table"] = table.view(len(batch), self._blocks)
        if self.k_descale is not None:
            found |= {"k_descale": self.k_descale, "v_descale": self.v_descale}
        if self.rotation_signs is not None:
            found["rotation_signs"] = self.rotation_signs
        return found

    def advance(self, sequences: Iterable[int], tokens: int) -> None:
        """Count `tokens` more of each sequence, which have been written.

        Raises:
            ValueError: a sequence is not allocated, comes twice, or has no slots for them.
        """
        batch = self._check(sequences)
        for sequence in batch:
            slots = self.capacity
            if self.page_size is not None:
                slots = min(slots, len(self._pages[sequence]) * self.page_size)
            if not 0 <= tokens <= slots - self._lengths[sequence]:
                raise ValueError(
                    f"tokens is {tokens}; allowed: 0 to {slots - self._lengths[sequence]}, the free slots of sequence "
                    f"{sequence}"
                )
        for sequence in batch:
            self._lengths[sequence] += tokens

    def append(self, sequences: Iterable[int], k: Tensor, v: Tensor, **options: Any) -> None:
        """Write new tokens behind those of each sequence.

        Args:
            k: (len(sequences), seqlen_new, heads_k, head_dim) float16 or bfloat16; that of the cache with 16 bits.
            v: (..., head_dim_v), likewise.
            options: rotary embedding and backend, as those of `append_kv`.

        Raises:
            TypeError, ValueError, RuntimeError: as `append_kv` and `arguments`.
        """
        batch = self._check(sequences)
        validate._check_tensor("k", k, validate.IN_DTYPES)
        append_kv(k, v, self.k, self.v, **self.arguments(batch, k.shape[1]), **options)
        self.advance(batch, k.shape[1])

    def attend(
        self,
        sequences: Iterable[int],
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """`flash_attn_with_kvcache` for these sequences; new k and v are appended first.

        Args:
            q: (len(sequences), seqlen_q, heads_q, head_dim).
            k, v: as those of `append`, or None.
            options: further arguments of `flash_attn_with_kvcache`.

        Raises:
            TypeError, ValueError, RuntimeError: as `flash_attn_with_kvcache` and `arguments`.
        """
        batch = self._check(sequences)
        if k is not None:
            validate._check_tensor("k", k, validate.IN_DTYPES)
        tokens = 0 if k is None else k.shape[1]
        result = decode.flash_attn_with_kvcache(
            q, self.k, self.v, k, v, **self.arguments(batch, tokens), **options
        )
        self.advance(batch, tokens)
        return result

    def gather(self, sequence: int) -> tuple[Tensor, Tensor]:
        """What the cache holds of a sequence: (k, v) float32, (length, heads_k, head_dim or head_dim_v), scaled and
        rotated back. For looking at.

        Raises:
            ValueError: the sequence is not allocated.
        """
        self._check([sequence])
        slot = torch.arange(self._lengths[sequence], device=self.k.device)
        if self.page_size is None:
            place: tuple[Any, Tensor] = (sequence, slot)
        else:
            pages = torch.tensor(self._pages[sequence], dtype=torch.int64, device=self.k.device)
            place = (pages[slot // self.page_size], slot % self.page_size)
        parts = []
        for cache, scale in ((self.k, self.k_descale), (self.v, self.v_descale)):
            if scale is None:
                parts.append(cache[place].float())
            else:
                codes = cache.view(torch.uint8)[place].view(cache.dtype)
                parts.append(codes.float() * scale[place].unsqueeze(-1))
        k, v = parts
        if self.rotation_signs is not None:
            k = walsh_hadamard(k) * scale_norm(k.shape[-1], "hadamard") * self.rotation_signs
        return k, v

    def _check(self, sequences: Iterable[int]) -> list[int]:
        batch = list(sequences)
        for i, sequence in enumerate(batch):
            if sequence not in self._lengths:
                raise ValueError(
                    f"sequence is {sequence!r}; allowed: one that is allocated, {self.sequences}"
                )
            if sequence in batch[:i]:
                raise ValueError(f"sequence {sequence} comes twice; allowed: each once")
        return batch

    def _take_pages(self, batch: list[int], seqlen_new: int) -> None:
        assert self.page_size is not None
        lacking = {
            sequence: -(-(self._lengths[sequence] + seqlen_new) // self.page_size)
            - len(self._pages[sequence])
            for sequence in batch
        }
        wanted = sum(max(0, n) for n in lacking.values())
        if wanted > len(self._free_pages):
            raise RuntimeError(
                f"{wanted} pages are wanted and {len(self._free_pages)} are free; allowed: to free sequences first"
            )
        for sequence, n in lacking.items():
            for _ in range(n):
                self._pages[sequence].append(self._free_pages.pop())
