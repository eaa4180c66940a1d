"""The table of GPUs: found by the names that nvidia-smi gives, told apart by memory, with sane numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.plan.gpus import GPUS, MIB, Gpu, cpu_device, custom_gpu, find_gpu


@pytest.mark.parametrize(
    ("name", "mib", "gbs", "tflops", "capability"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, 360, 25.5, (8, 6)),
        ("NVIDIA GeForce RTX 3060", 8192, 240, 25.5, (8, 6)),
        ("NVIDIA GeForce RTX 3090", 24576, 936, 71.0, (8, 6)),
        ("NVIDIA GeForce RTX 4090", 24564, 1008, 165.2, (8, 9)),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, 288, 44.1, (8, 9)),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, 672, 88.2, (8, 9)),
        ("NVIDIA GeForce RTX 5090", 32607, 1792, 209.5, (12, 0)),
        ("NVIDIA RTX A6000", 49140, 768, 154.8, (8, 6)),
        ("NVIDIA RTX 6000 Ada Generation", 49140, 960, 364.2, (8, 9)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, 1792, 503.8, (12, 0)),
        ("Tesla V100-SXM2-32GB", 32768, 900, 125.0, (7, 0)),
        ("Tesla T4", 15360, 320, 65.0, (7, 5)),
        ("Tesla P40", 23040, 346, 11.8, (6, 1)),
        ("NVIDIA A10", 23028, 600, 125.0, (8, 6)),
        ("NVIDIA A100-SXM4-40GB", 40960, 1555, 312.0, (8, 0)),
        ("NVIDIA A100 80GB PCIe", 81920, 1935, 312.0, (8, 0)),
        ("NVIDIA A100-SXM4-80GB", 81920, 2039, 312.0, (8, 0)),
        ("NVIDIA L4", 23034, 300, 121.0, (8, 9)),
        ("NVIDIA L40S", 46068, 864, 362.0, (8, 9)),
        ("NVIDIA H100 PCIe", 81559, 2039, 756.0, (9, 0)),
        ("NVIDIA H100 80GB HBM3", 81559, 3352, 989.4, (9, 0)),
        ("NVIDIA H200", 143771, 4800, 989.4, (9, 0)),
        ("NVIDIA B200", 183359, 8000, 2250.0, (10, 0)),
        ("NVIDIA GB10", 0, 273, 125.0, (12, 1)),
        ("NVIDIA GH200 480GB", 97871, 4000, 989.4, (9, 0)),
        ("Orin (nvgpu)", 62841, 204.8, 42.5, (8, 7)),
        ("NVIDIA Thor", 125772, 273, 258.0, (11, 0)),
    ],
)
def test_a_gpu_is_found_by_the_name_of_nvidia_smi(
    name: str, mib: int, gbs: float, tflops: float, capability: tuple[int, int]
) -> None:
    found = find_gpu(name, mib * MIB)
    assert found is not None
    assert (found.bandwidth / 1e9, found.bf16_flops / 1e12) == pytest.approx((gbs, tflops))
    assert found.capability == capability
    if mib:
        assert found.memory_bytes == mib * MIB


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376),  # another chip
        ("GRID A100-40C", 40960),  # a share of a card
        ("NVIDIA A100-SXM4-80GB", 9856),  # a MIG slice
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9856),
        ("AMD Instinct MI300X", 196608),
        ("", 24576),
    ],
)
def test_what_the_table_does_not_have_is_not_guessed(name: str, mib: int) -> None:
    assert find_gpu(name, mib * MIB) is None


@pytest.mark.parametrize("name", ["RTX 4090", "geforce rtx 4090", "  NVIDIA  GeForce RTX  4090 "])
def test_people_may_write_less_than_nvidia_smi(name: str) -> None:
    found = find_gpu(name, 0)
    assert found is not None
    assert found.name == "GeForce RTX 4090"


def test_a_card_rebuilt_with_more_memory_keeps_its_rates() -> None:
    found = find_gpu("NVIDIA GeForce RTX 4090", 49140 * MIB)
    assert found is not None
    assert (found.memory_bytes, found.bandwidth) == (49140 * MIB, 1008e9)


def test_shared_memory_may_be_given_in_part_to_the_gpu() -> None:
    found = find_gpu("NVIDIA GB10", 60000 * MIB)
    assert found is not None
    assert found.memory_bytes == 60000 * MIB


def test_the_table_has_at_least_30_gpus() -> None:
    assert len({gpu.name for gpu in GPUS}) >= 30


@pytest.mark.parametrize("gpu", GPUS, ids=[f"{gpu.name} {gpu.memory_bytes // MIB}" for gpu in GPUS])
def test_the_numbers_of_a_gpu_are_sane(gpu: Gpu) -> None:
    assert gpu.source
    assert 8e9 < gpu.memory_bytes < 300e9
    assert 1e11 < gpu.bandwidth < 1e13
    assert 1e13 < gpu.bf16_flops < 3e15
    # Each narrower type doubles the rate, within rounding; FP4 in the chips with GeForce's halved bf16 does more.
    if gpu.fp8_flops:
        assert gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02)
    if gpu.fp4_flops:
        assert gpu.fp8_flops is not None
        assert 1.9 * gpu.fp8_flops < gpu.fp4_flops < 4.2 * gpu.fp8_flops
    # FP8 tensor cores came with Ada (8.9), FP4 ones with Blackwell (10.0).
    assert (gpu.fp8_flops is not None) == (gpu.capability >= (8, 9))
    assert (gpu.fp4_flops is not None) == (gpu.capability >= (10, 0))
    assert find_gpu(gpu.name, gpu.memory_bytes) == gpu


def test_an_owner_describes_a_gpu_by_two_numbers() -> None:
    known = custom_gpu("Board", 16 * 1024 * MIB, bandwidth_gbs=400, bf16_tflops=50, capability=(8, 9))
    assert (known.bandwidth, known.bf16_flops, known.fp8_flops, known.fp4_flops) == (4e11, 5e13, 1e14, None)
    old = custom_gpu("Board", 16 * 1024 * MIB, bandwidth_gbs=400, bf16_tflops=50, capability=(7, 5))
    assert old.fp8_flops is None


def test_a_cpu_is_slower_than_any_gpu() -> None:
    cpu = cpu_device(8 * 1024 * MIB)
    assert cpu.bandwidth < min(gpu.bandwidth for gpu in GPUS)
    assert cpu.bf16_flops < min(gpu.bf16_flops for gpu in GPUS)


@settings(max_examples=50)
@given(name=st.text(max_size=60), memory=st.integers(-1, 2**50))
def test_no_name_makes_the_search_fail(name: str, memory: int) -> None:
    found = find_gpu(name, memory)
    assert found is None or found.name in {gpu.name for gpu in GPUS}
