"""`KVCache` against a dict of lists of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_attn import KVCache, flash_attn_with_kvcache

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FORMS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "paged": {"page_size": 4, "pages": 9},
    "pages_of_1": {"page_size": 1, "pages": 40},
    "e4m3": {"dtype": E4M3, "page_size": 4, "rotation_seed": 1},
    "e4m3_contiguous": {"dtype": E4M3},
}


def tokens(batch: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, count, 2, d, generator=generator).to(BF16) for d in (32, 48))
    return k, v


def cache(form: str) -> KVCache:
    return KVCache(4, 20, 2, 32, head_dim_v=48, device="cpu", **FORMS[form])


def holds(c: KVCache, sequence: int, k: Tensor, v: Tensor) -> bool:
    found = c.gather(sequence)
    if c.k_descale is None:
        return torch.equal(found[0], k.float()) and torch.equal(found[1], v.float())
    # Rotation spreads the error of a key over its row.
    return bool(((found[0] - k.float()).abs() < 0.4).all() and ((found[1] - v.float()).abs() < 0.2).all())


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["allocate", "append", "append", "append", "free", "truncate"]),
            st.integers(0, 3),
            st.integers(0, 7),
        ),
        max_size=25,
    ),
)
def test_against_a_dict(form: str, steps: list[tuple[str, int, int]]) -> None:
    c = cache(form)
    model: dict[int, tuple[Tensor, Tensor]] = {}
    for seed, (step, which, count) in enumerate(steps):
        if step == "allocate":
            if len(model) == 4:
                with pytest.raises(RuntimeError, match="all 4 sequences are taken"):
                    c.allocate()
                continue
            sequence = c.allocate()
            assert sequence not in model
            k, v = tokens(1, 0, 0)
            model[sequence] = (k[0], v[0])
            continue
        if not model:
            continue
        batch = list(model)[which % len(model) :]
        sequence = batch[0]
        if step == "free":
            c.free(sequence)
            del model[sequence]
        elif step == "truncate":
            kept = min(count, c.length(sequence))
            c.truncate(sequence, kept)
            model[sequence] = tuple(x[:kept] for x in model[sequence])  # type: ignore[assignment]
        else:
            k, v = tokens(len(batch), count, seed)
            full = any(c.length(each) + count > 20 for each in batch)
            room = True
            if c.page_size is not None:
                size = c.page_size
                used = sum(-(-c.length(each) // size) for each in model)
                wanted = sum(
                    -(-(c.length(each) + count) // size) - -(-c.length(each) // size) for each in batch
                )
                room = used + wanted <= c.k.shape[0]
            if full or not room:
                with pytest.raises(ValueError if full else RuntimeError):
                    c.append(batch, k, v, backend="reference")
            else:
                c.append(batch, k, v, backend="reference")
                for i, each in enumerate(batch):
                    old = model[each]
                    model[each] = (torch.cat((old[0], k[i])), torch.cat((old[1], v[i])))
        assert c.sequences == list(model)
        for each, (k, v) in model.items():
            assert c.length(each) == len(k) and holds(c, each, k, v)
    for sequence in list(model):
        c.free(sequence)
    if c.page_size is not None:
        assert c.free_tokens == c.k.shape[0] * c.page_size


@pytest.mark.parametrize("form", sorted(FORMS))
def test_attend_appends_and_sees(form: str) -> None:
    c = cache(form)
    first, second = c.allocate(), c.allocate()
    k, v = tokens(2, 9, 0)
    c.append([second], k[1:, :5], v[1:, :5], backend="reference")
    q = torch.randn(2, 2, 4, 32).to(BF16)
    out = c.attend([second, first], q, k[:, 7:], v[:, 7:], causal=True, backend="reference")
    assert (c.length(first), c.length(second)) == (2, 7)
    for i, sequence in enumerate((second, first)):
        keys, values = c.gather(sequence)
        exact = flash_attn_with_kvcache(
            q[i : i + 1],
            keys.to(BF16).unsqueeze(0),
            values.to(BF16).unsqueeze(0),
            causal=True,
            backend="reference",
        )
        assert (out[i] - exact[0]).abs().max() < 0.03
    again = c.attend([first], q[1:], causal=True, backend="reference")
    assert torch.equal(again, out[1:])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"capacity": 0}, ValueError, "capacity is 0"),
        ({"sequences": 1.5}, TypeError, "sequences is a float"),
        ({"dtype": torch.float32}, TypeError, "dtype is torch.float32"),
        ({"head_dim": 36}, ValueError, "head_dim is 36; allowed: multiples of 8"),
        ({"dtype": E4M3, "head_dim": 40}, ValueError, "head_dim is 40; allowed: multiples of 16"),
        ({"pages": 4}, ValueError, "pages is 4 and page_size is None"),
        ({"rotation_seed": 1}, ValueError, "rotation_seed is 1 with torch.bfloat16"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], match: str) -> None:
    sizes: dict[str, Any] = {"sequences": 2, "capacity": 8, "heads_k": 2, "head_dim": 32, "device": "cpu"}
    KVCache(**sizes)
    with pytest.raises(error, match=match):
        KVCache(**{**sizes, **change})


def test_refused_calls_change_nothing() -> None:
    c = KVCache(3, 8, 2, 32, head_dim_v=48, page_size=4, pages=3, device="cpu")
    one, two = c.allocate(), c.allocate()
    k, v = tokens(2, 5, 0)
    for call, error, match in (
        (lambda: c.append([one, 7], k, v), ValueError, "sequence is 7"),
        (lambda: c.append([one, one], k, v), ValueError, "comes twice"),
        (lambda: c.append([one, two], k, v), RuntimeError, "4 pages are wanted and 3 are free"),
        (lambda: c.append([one], k[:1].repeat(1, 2, 1, 1), v), ValueError, "sequence 0 has 0 tokens"),
        (lambda: c.advance([one], 1), ValueError, "tokens is 1; allowed: 0 to 0"),
        (lambda: c.truncate(one, 1), ValueError, "length is 1"),
        (lambda: c.free(2), ValueError, "sequence is 2"),
    ):
        with pytest.raises(error, match=match):
            call()
        assert c.free_tokens == 12 and c.length(one) == c.length(two) == 0
