"""Small arrays on their way to a GPU: right however many are in flight, and not behind records."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotset.experts.transfer import send, sent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _ready() -> None:
    """Memory for uploads and their kernel, without which the first one waits for both."""
    sent(np.arange(2000), DEVICE)
    torch.cuda.synchronize()


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 1024, 16384, 16388, 100_003])
def test_what_arrives_is_what_was_sent(num_bytes: int) -> None:
    array = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    assert torch.equal(sent(array, DEVICE).cpu(), torch.from_numpy(array))


def test_more_are_sent_than_there_are_places_before_the_first_is_read() -> None:
    arrays = [np.full(300, number, dtype=np.int64) for number in range(300)]
    outs = [torch.zeros(300, dtype=torch.int64, device=DEVICE) for _ in arrays]
    torch.cuda._sleep(200_000_000)  # 0.1 s
    slept = torch.cuda.Event()
    slept.record()
    for number, (array, out) in enumerate(zip(arrays, outs, strict=True)):
        send(array, out)
        array[:] = -1  # the caller's again at once
        if number == 100:
            assert not slept.query(), "none of them has been read"
    assert [out.unique().tolist() for out in outs] == [[number] for number in range(300)]


def test_an_upload_does_not_wait_for_copies_of_records() -> None:
    records = torch.empty(2**29, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**29, dtype=torch.uint8, device=DEVICE)
    copies, copied = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(copies):
        target.copy_(records, non_blocking=True)
        copied.record()
    found = sent(np.arange(2000), DEVICE)
    torch.cuda.current_stream().synchronize()
    assert not copied.query(), "the records arrive at 55 GB/s at most, so in 9 ms"
    assert torch.equal(found.cpu(), torch.arange(2000))
    torch.cuda.synchronize()
    del target
    torch.cuda.empty_cache()  # others compare this process with a plan
    torch.cuda.reset_peak_memory_stats()
