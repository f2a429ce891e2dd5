"""What every implementation of the expert ops may take for granted: shapes, dtypes, contiguity.

Knows shapes only; what breaks it is a bug of the caller, not a mistake of a user.
"""

from __future__ import annotations

import torch

from hotset.core.geometry import ExpertSpec


def check_inputs(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    out: torch.Tensor | None,
) -> None:
    """Of `expert_outputs`."""
    num_tokens, top_k = ids_TK.shape
    assert x_TH.shape == (num_tokens, spec.hidden), (x_TH.shape, spec.hidden)
    assert x_TH.dtype == getattr(torch, spec.dtype), (x_TH.dtype, spec.dtype)
    assert address_E.dtype == torch.int64 and address_E.ndim == 1
    assert x_TH.is_contiguous() and address_E.is_contiguous()
    if out is not None:
        assert out.shape == (num_tokens, top_k, spec.hidden), out.shape
        assert out.dtype == torch.float32 and out.is_contiguous()


def check_plain_records(
    address_N: torch.Tensor,
    spec: ExpertSpec,
    out_ND: torch.Tensor,
    counts_N: torch.Tensor | None,
) -> None:
    """Of `dequantise_records`."""
    assert address_N.dtype == torch.int64 and address_N.ndim == 1 and address_N.is_contiguous()
    assert out_ND.shape == (len(address_N), spec.as_plain().record_bytes), out_ND.shape
    assert out_ND.dtype == torch.uint8 and out_ND.is_contiguous()
    if counts_N is not None:
        assert counts_N.shape == address_N.shape and counts_N.is_contiguous()
        assert counts_N.dtype in (torch.int32, torch.int64)
