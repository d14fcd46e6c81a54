"""The simulated device itself: what it counts, and that each kind of fault is told, with its operator."""

from __future__ import annotations

import re

import pytest
import simulated_accelerator  # noqa: F401  (registers the device)
import torch
from simulated_accelerator import counts, memory
from simulated_accelerator.counts import DeviceFault
from simulated_accelerator.graphs import SimulatedRecorder
from torch.nn.attention.varlen import varlen_attn

SIM = torch.device("sim", 0)


def told(fragment: str) -> None:
    """Take a fault that was expected off the list."""
    assert any(re.search(fragment, each) for each in counts.faults), counts.faults
    counts.faults.clear()


def test_results_views_and_gradients_are_those_of_the_cpu() -> None:
    host = torch.randn(6, 8, requires_grad=True)
    device = host.detach().to(SIM).requires_grad_()
    for each in (host, device):
        half = each[1::2].t() @ each[::2]
        half.softmax(0).square().sum().backward()
    assert device.device == SIM and device.grad is not None and host.grad is not None
    torch.testing.assert_close(device.grad.cpu(), host.grad, rtol=0, atol=0)
    view = device.detach()[2:, 3]
    assert view.untyped_storage().data_ptr() == device.untyped_storage().data_ptr()
    assert not view.is_contiguous()


def test_host_and_device_never_mix() -> None:
    device = torch.ones(3, 3, device=SIM)
    with pytest.raises(RuntimeError, match=r"aten::mm.*: Expected all tensors to be on the same device"):
        device @ torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"on the same device"):
        torch.ones(3) + device
    assert (device * torch.tensor(2.0)).sum().item() == 18  # a number of the host is allowed
    before = counts.total.num_waits
    assert device[torch.tensor([0, 2])].shape == (2, 3)
    assert counts.total.num_waits == before + 1  # an index of the host is a wait


def test_a_number_that_comes_to_one_place_is_a_wait() -> None:
    device = torch.zeros(3, 2, device=SIM)
    with counts.phase("one place") as phase:
        device[1, 0] = 4
        device[:, 0][2] = 5.0
    assert phase.num_waits == 2 and device[:, 0].tolist() == [0, 4, 5]
    with counts.phase("filled") as phase:
        device[0] = 1
        device[1:, 1] = 2
        device[2, 1].fill_(3)
    assert phase.num_waits == 0 and device[:, 1].tolist() == [1, 2, 3]


def test_waits_launches_and_bytes_are_counted_by_phase() -> None:
    with counts.phase("copies") as phase:
        device = torch.arange(4.0).to(SIM)
        pinned = torch.arange(4.0).pin_memory().to(SIM, non_blocking=True)
    assert phase.num_waits == 1 and phase.to_device == 32 and phase.launches["copy from host"] == 2
    with counts.phase("work") as phase:
        assert (device + pinned).sum().item() == 12
        (device > 1).nonzero()
        assert device[device > 1].shape == (2,)
        device[device > 1] = 0.0  # one number: no wait
        device[device > 1] = device[:0]
    kinds = [reason for reason, _ in phase.waits.elements()]
    assert sorted(kinds) == ["aten::nonzero", "aten::nonzero", "index by a mask", "item"]
    assert phase.to_host == 4
    assert phase.launches["aten::add.out"] == 1 and counts.total.num_waits == 5


def test_new_memory_holds_poison() -> None:
    assert torch.empty(3, device=SIM).isnan().all().item()
    assert (torch.empty(3, dtype=torch.int64, device=SIM) == torch.iinfo(torch.int64).min).all().item()


def test_memory_is_counted_by_storage() -> None:
    before = memory.taken()
    tensor = torch.zeros(1024, device=SIM)
    view = tensor[10:]
    assert memory.taken() - before == 4096
    memory.reset_peak()
    with counts.phase("more") as phase:
        other = torch.zeros(100, device=SIM)
        del other
    assert memory.peak() == phase.peak == before + 4096 + 512
    del tensor
    assert memory.taken() - before == 4096  # the view keeps it
    del view
    assert memory.taken() == before
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(memory.CAPACITY // 4 + 1, device=SIM)


def test_a_copy_to_the_host_that_is_read_too_early_is_told() -> None:
    device = torch.arange(4.0, device=SIM)
    pinned = torch.empty(4).pin_memory().copy_(device, non_blocking=True)
    event = torch.get_device_module(SIM).Event()
    event.record()
    with pytest.raises(DeviceFault, match="read before the copy to it has arrived"):
        pinned.numpy()
    told("read before the copy")
    assert (pinned * 1).isnan().all()  # poison, for the operators of the CPU
    event.synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]
    pageable = torch.empty(4).copy_(device, non_blocking=True)  # waits, as on CUDA
    assert pageable.tolist() == [0, 1, 2, 3]


def test_a_pinned_source_that_changes_too_early_is_told() -> None:
    pinned = torch.arange(4.0).pin_memory()
    pinned.to(SIM, non_blocking=True)
    pinned[0] = 7
    with pytest.raises(DeviceFault, match="pinned memory was changed while a copy"):
        torch.accelerator.synchronize()
    told("pinned memory was changed")


def test_copies_of_one_stream_through_the_same_host_memory_keep_their_order() -> None:
    device = torch.arange(4.0, device=SIM)
    pinned = torch.zeros(4).pin_memory()
    before = pinned.to(SIM, non_blocking=True)
    pinned.copy_(device, non_blocking=True)
    after = pinned[1:].to(SIM, non_blocking=True)
    with pytest.raises(DeviceFault, match="read before the copy"):
        pinned.numpy()
    told("read before the copy")
    side = torch.get_device_module(SIM).Stream()
    with torch.get_device_module(SIM).stream(side), pytest.raises(DeviceFault, match="before the copy to it"):
        pinned.to(SIM, non_blocking=True)
    told("before the copy to it")
    torch.accelerator.synchronize()
    assert before.tolist() == [0, 0, 0, 0] and after.tolist() == [1, 2, 3] and pinned.tolist() == [0, 1, 2, 3]


def test_streams_that_do_not_wait_for_each_other_are_told() -> None:
    module = torch.get_device_module(SIM)
    side = module.Stream()
    device = torch.ones(4, device=SIM)
    not_waited = pytest.raises(DeviceFault, match=r"aten::mul.* reads memory on a stream that has not waited")
    with not_waited, module.stream(side):
        device * 2
    told("reads memory")
    side.wait_stream(module.current_stream())
    with module.stream(side):
        double = device * 2
    with pytest.raises(DeviceFault, match=r"aten::add.* writes memory"):
        device.add_(1)  # the other stream still reads it
    told("writes memory")
    event = side.record_event()
    module.current_stream().wait_event(event)
    device.add_(1)
    assert double.sum().item() == 8


def test_memory_that_another_stream_uses_is_not_taken_again() -> None:
    module = torch.get_device_module(SIM)
    side = module.Stream()
    for waits in (True, False):
        device = torch.ones(4, device=SIM)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            device * 2
        del device
        if waits:
            module.current_stream().wait_stream(side)
            torch.ones(4, device=SIM)
    with pytest.raises(DeviceFault, match="is taken again while another stream may still use it"):
        torch.ones(4, device=SIM)
    told("record_stream was not called")


def test_a_recorded_step_runs_on_the_same_memory_and_refuses_what_a_graph_refuses() -> None:
    inputs = torch.zeros(3, device=SIM)
    weight = torch.full((3,), 2.0, device=SIM)
    recorder = SimulatedRecorder(SIM)
    replay = recorder.record(lambda: (inputs * weight + 1).cumsum(0))
    for number in (1.0, 5.0):
        inputs.fill_(number)
        with counts.phase(f"replay {number}") as phase:
            out = replay()
        assert phase.num_launches == 1 and phase.num_waits == 0
        torch.testing.assert_close(out.cpu(), (torch.full((3,), number) * 2 + 1).cumsum(0))
    for wrong in (
        lambda: inputs * inputs.sum().item(),
        lambda: inputs[inputs > 1],
        lambda: inputs.cpu().to(SIM),
    ):
        with pytest.raises(RuntimeError, match="not permitted when a stream is capturing"):
            recorder.record(wrong)
    with pytest.raises(DeviceFault, match="copy from the host in a recording"):
        recorder.record(lambda: inputs + torch.ones(3).pin_memory().to(SIM, non_blocking=True))
    told("copy from the host in a recording")
    weight.data = torch.full((3,), 3.0, device=SIM)  # its old memory is gone
    with pytest.raises(DeviceFault, match="replayed on memory that has moved"):
        replay()
    told("memory that has moved")


def test_attention_over_rows_of_any_length_refuses_what_the_kernel_refuses() -> None:
    torch.manual_seed(0)
    states = torch.randn(3, 7, 2, 16).bfloat16()
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    out = varlen_attn(*states.to(SIM), bounds.to(SIM), bounds.to(SIM), 4, 4, window_size=(-1, 0))
    for first, last in ((0, 3), (3, 7)):
        row = [each[first:last].transpose(0, 1)[None] for each in states.float()]
        wanted = torch.nn.functional.scaled_dot_product_attention(*row, is_causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(out[first:last].cpu().float(), wanted, atol=0.02, rtol=0.02)
    one = bounds.to(SIM)
    with pytest.raises(RuntimeError, match="only supports fp16 and bf16"):
        varlen_attn(*states.float().to(SIM), one, one, 4, 4)
    turned = states.transpose(2, 3).contiguous().transpose(2, 3).to(SIM)
    with pytest.raises(RuntimeError, match="contiguous last dimension"):
        varlen_attn(*turned, one, one, 4, 4)
    with pytest.raises(RuntimeError, match="must have dtype int32"):
        varlen_attn(*states.to(SIM), one.long(), one.long(), 4, 4)


def test_float8_products_refuse_what_the_kernel_refuses() -> None:
    left = torch.randn(16, 32).to(torch.float8_e4m3fn).to(SIM)
    right = torch.randn(32, 32).to(torch.float8_e4m3fn).to(SIM).t()
    ones = torch.ones(16, 1, device=SIM), torch.ones(1, 32, device=SIM)
    out = torch._scaled_mm(left, right, scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16)
    wanted = left.cpu().double() @ right.cpu().double()
    torch.testing.assert_close(out.cpu().double(), wanted, atol=0.1, rtol=0.01)
    with pytest.raises(RuntimeError, match="mat2 must be col_major"):
        torch._scaled_mm(left, right.contiguous(), scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Only bf16"):
        torch._scaled_mm(left, right, scale_a=ones[0], scale_b=ones[1], out_dtype=torch.float32)
