"""The GPUs that people own, as the speed model needs them: memory bandwidth and tensor core rates, sources named.

Rates are dense (no sparsity) and with FP32 accumulation, which is what vLLM's kernels use. NVIDIA halves that rate on
GeForce cards of Ampere, Ada and Blackwell: an RTX 3090 is 71 TFLOPS here, not the 142 of FP16 accumulation; the white
papers give both. Cards older than Ampere have no bf16 tensor cores: their number is FP16's, which vLLM uses there.
Where a data sheet gives only the rate with sparsity, it is halved, and an FP8 rate is halved again for bf16.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

GB = 1e9
TERA = 1e12
MIB = 2**20

PCIE_BYTES = 20e9
"""What two GPUs of one host reach over PCIe 4.0 x16, in bytes/s each way; rough, used only for tensor parallelism."""


@dataclass(frozen=True)
class Gpu:
    """What a GPU can do, by its maker's word; `ppdeploy.plan.speed` says which share of it vLLM reaches."""

    name: str
    """As `nvidia-smi` gives it, without NVIDIA in front."""
    memory_bytes: int
    """As `nvidia-smi` reports it (`memory.total`); some of it belongs to the driver."""
    bandwidth: float
    """Of its memory, bytes/s."""
    bf16_flops: float
    """Dense tensor core rate with FP32 accumulation, FLOP/s; FP16's where there is no bf16."""
    fp8_flops: float | None
    """None where the tensor cores do not know FP8: weights in FP8 are widened and computed in bf16."""
    fp4_flops: float | None
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) for a CPU."""
    source: str
    peer_bandwidth: float = PCIE_BYTES
    """Between GPUs of one host, bytes/s each way: NVLink where the card has it as shipped, else PCIe."""


AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper and the GeForce specification pages"
ADA = "NVIDIA Ada GPU architecture white paper and the GeForce specification pages"
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper and the GeForce specification pages"
TURING = "NVIDIA Turing GPU architecture white paper"


def _gpu(
    name: str,
    mib: int,
    gbs: float,
    bf16: float,
    fp8: float | None,
    fp4: float | None,
    capability: tuple[int, int],
    source: str,
    peer: float = PCIE_BYTES,
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=mib * MIB,
        bandwidth=gbs * GB,
        bf16_flops=bf16 * TERA,
        fp8_flops=fp8 * TERA if fp8 else None,
        fp4_flops=fp4 * TERA if fp4 else None,
        capability=capability,
        source=source,
        peer_bandwidth=peer,
    )


#: Columns: name, MiB as nvidia-smi reports them, GB/s, TFLOPS in bf16, FP8 and FP4, capability, source, peer bytes/s.
GPUS: tuple[Gpu, ...] = (
    # ---- GeForce and Titan
    _gpu("GeForce RTX 2080 Ti", 11264, 616, 53.8, None, None, (7, 5), TURING),
    _gpu("TITAN RTX", 24576, 672, 130.5, None, None, (7, 5), TURING),
    _gpu("GeForce RTX 3060", 12288, 360, 25.5, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3060", 8192, 240, 25.5, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3060 Ti", 8192, 448, 32.4, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3070", 8192, 448, 40.6, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3080", 10240, 760, 59.5, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3080", 12288, 912, 61.3, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3080 Ti", 12288, 912, 68.2, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3090", 24576, 936, 71.0, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 3090 Ti", 24564, 1008, 80.0, None, None, (8, 6), AMPERE),
    _gpu("GeForce RTX 4060", 8188, 272, 30.2, 60.4, None, (8, 9), ADA),
    _gpu("GeForce RTX 4060 Ti", 16380, 288, 44.1, 88.3, None, (8, 9), ADA),
    _gpu("GeForce RTX 4060 Ti", 8188, 288, 44.1, 88.3, None, (8, 9), ADA),
    _gpu("GeForce RTX 4070", 12282, 504, 58.3, 116.6, None, (8, 9), ADA),
    _gpu("GeForce RTX 4070 SUPER", 12282, 504, 71.0, 141.9, None, (8, 9), ADA),
    _gpu("GeForce RTX 4070 Ti", 12282, 504, 80.2, 160.4, None, (8, 9), ADA),
    _gpu("GeForce RTX 4070 Ti SUPER", 16376, 672, 88.2, 176.4, None, (8, 9), ADA),
    _gpu("GeForce RTX 4080", 16376, 717, 97.5, 194.9, None, (8, 9), ADA),
    _gpu("GeForce RTX 4080 SUPER", 16376, 736, 104.4, 208.9, None, (8, 9), ADA),
    _gpu("GeForce RTX 4090", 24564, 1008, 165.2, 330.3, None, (8, 9), ADA),
    _gpu("GeForce RTX 4090 D", 24564, 1008, 147.1, 294.2, None, (8, 9), ADA),
    _gpu("GeForce RTX 5060 Ti", 16311, 448, 47.4, 94.8, 379.0, (12, 0), BLACKWELL),
    _gpu("GeForce RTX 5060 Ti", 8151, 448, 47.4, 94.8, 379.0, (12, 0), BLACKWELL),
    _gpu("GeForce RTX 5070", 12227, 672, 61.7, 123.5, 494.0, (12, 0), BLACKWELL),
    _gpu("GeForce RTX 5070 Ti", 16303, 896, 87.9, 175.8, 703.0, (12, 0), BLACKWELL),
    _gpu("GeForce RTX 5080", 16303, 960, 112.6, 225.1, 900.4, (12, 0), BLACKWELL),
    _gpu("GeForce RTX 5090", 32607, 1792, 209.5, 419.0, 1676.0, (12, 0), BLACKWELL),
    # ---- workstations: tensor cores at the full rate
    _gpu("Quadro RTX 6000", 24576, 672, 130.5, None, None, (7, 5), TURING),
    _gpu("Quadro RTX 8000", 49152, 672, 130.5, None, None, (7, 5), TURING),
    _gpu("RTX A4000", 16376, 448, 76.7, None, None, (8, 6), "RTX A4000 data sheet"),
    _gpu("RTX A4500", 20470, 640, 94.6, None, None, (8, 6), "RTX A4500 data sheet"),
    _gpu("RTX A5000", 24564, 768, 111.1, None, None, (8, 6), "RTX A5000 data sheet"),
    _gpu("RTX A6000", 49140, 768, 154.8, None, None, (8, 6), "RTX A6000 data sheet"),
    _gpu("RTX 4000 Ada Generation", 20475, 360, 81.9, 163.8, None, (8, 9), "RTX 4000 Ada Generation data sheet"),
    _gpu(
        "RTX 4000 SFF Ada Generation", 20475, 280, 76.7, 153.4, None, (8, 9), "RTX 4000 SFF Ada Generation data sheet"
    ),
    _gpu("RTX 4500 Ada Generation", 24570, 432, 158.5, 317.0, None, (8, 9), "RTX 4500 Ada Generation data sheet"),
    _gpu("RTX 5000 Ada Generation", 32760, 576, 261.1, 522.2, None, (8, 9), "RTX 5000 Ada Generation data sheet"),
    _gpu("RTX 6000 Ada Generation", 49140, 960, 364.2, 728.5, None, (8, 9), "RTX 6000 Ada Generation data sheet"),
    _gpu(
        "RTX PRO 6000 Blackwell Workstation Edition",
        *(97887, 1792, 503.8, 1007.6, 2015.2, (12, 0)),
        "NVIDIA RTX PRO Blackwell GPU architecture white paper",
    ),
    _gpu(
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        *(97887, 1792, 438.9, 877.8, 1755.7, (12, 0)),
        "NVIDIA RTX PRO Blackwell GPU architecture white paper",
    ),
    _gpu(
        "RTX PRO 6000 Blackwell Server Edition",
        *(97887, 1597, 503.8, 1007.6, 2015.2, (12, 0)),
        "RTX PRO 6000 Blackwell Server Edition data sheet",
    ),
    _gpu("RTX PRO 5000 Blackwell", 48935, 1344, 258.0, 516.0, 1032.0, (12, 0), "RTX PRO 5000 Blackwell data sheet"),
    # ---- servers
    _gpu("Tesla P40", 23040, 346, 11.8, None, None, (6, 1), "Tesla P40 data sheet (FP32, there are no tensor cores)"),
    _gpu("Tesla P100-PCIE-16GB", 16384, 732, 18.7, None, None, (6, 0), "Tesla P100 data sheet (FP16, no tensor cores)"),
    _gpu("Tesla V100-PCIE-16GB", 16384, 900, 112.0, None, None, (7, 0), "V100 data sheet"),
    _gpu("Tesla V100-PCIE-32GB", 32768, 900, 112.0, None, None, (7, 0), "V100 data sheet"),
    _gpu("Tesla V100-SXM2-16GB", 16384, 900, 125.0, None, None, (7, 0), "V100 data sheet", 150e9),
    _gpu("Tesla V100-SXM2-32GB", 32768, 900, 125.0, None, None, (7, 0), "V100 data sheet", 150e9),
    _gpu("Tesla V100S-PCIE-32GB", 32768, 1134, 130.0, None, None, (7, 0), "V100 data sheet"),
    _gpu("Tesla T4", 15360, 320, 65.0, None, None, (7, 5), "T4 data sheet"),
    _gpu("A2", 15356, 200, 18.0, None, None, (8, 6), "A2 data sheet"),
    _gpu("A10", 23028, 600, 125.0, None, None, (8, 6), "A10 data sheet"),
    _gpu("A10G", 23028, 600, 70.0, None, None, (8, 6), "Amazon EC2 G5 instances' page (70 TFLOPS dense)"),
    _gpu("A16", 15356, 200, 17.9, None, None, (8, 6), "A16 data sheet (one of the board's four GPUs)"),
    _gpu("A30", 24576, 933, 165.0, None, None, (8, 0), "A30 data sheet"),
    _gpu("A40", 46068, 696, 149.7, None, None, (8, 6), "A40 data sheet"),
    _gpu("A100-PCIE-40GB", 40960, 1555, 312.0, None, None, (8, 0), "A100 data sheet"),
    _gpu("A100-SXM4-40GB", 40960, 1555, 312.0, None, None, (8, 0), "A100 data sheet", 300e9),
    _gpu("A100 80GB PCIe", 81920, 1935, 312.0, None, None, (8, 0), "A100 data sheet"),
    _gpu("A100-SXM4-80GB", 81920, 2039, 312.0, None, None, (8, 0), "A100 data sheet", 300e9),
    _gpu("L4", 23034, 300, 121.0, 242.0, None, (8, 9), "L4 data sheet"),
    _gpu("L40", 46068, 864, 181.0, 362.0, None, (8, 9), "L40 data sheet"),
    _gpu("L40S", 46068, 864, 362.0, 733.0, None, (8, 9), "L40S data sheet"),
    _gpu("H100 PCIe", 81559, 2039, 756.0, 1513.0, None, (9, 0), "H100 data sheet"),
    _gpu("H100 80GB HBM3", 81559, 3352, 989.4, 1978.9, None, (9, 0), "H100 data sheet", 450e9),
    _gpu("H100 NVL", 95830, 3938, 835.5, 1671.0, None, (9, 0), "H100 NVL data sheet"),
    _gpu("H20", 97871, 4000, 148.0, 296.0, None, (9, 0), "H20 specification as published by its resellers", 450e9),
    _gpu("H200", 143771, 4800, 989.4, 1978.9, None, (9, 0), "H200 data sheet", 450e9),
    _gpu("H200 NVL", 143771, 4800, 835.5, 1671.0, None, (9, 0), "H200 data sheet"),
    _gpu("GH200 480GB", 97871, 4000, 989.4, 1978.9, None, (9, 0), "GH200 Grace Hopper data sheet"),
    _gpu("GH200 144G HBM3e", 147456, 4900, 989.4, 1978.9, None, (9, 0), "GH200 Grace Hopper data sheet"),
    _gpu("B200", 183359, 8000, 2250.0, 4500.0, 9000.0, (10, 0), "DGX B200 data sheet, a GPU's eighth", 900e9),
    # ---- memory shared with the processor
    # FP4 is half of the petaflop with sparsity, FP8 and bf16 a half and a quarter of that: full ratios, not GeForce's
    # halved ones, since 356 TFLOPS in FP4 and 188 in FP8 were measured (NVIDIA developer forum, thread 359960).
    _gpu("GB10", 122502, 273, 125.0, 250.0, 500.0, (12, 1), "DGX Spark data sheet, and measured in NVIDIA's forum"),
    _gpu("Orin (nvgpu)", 62841, 204.8, 42.5, None, None, (8, 7), "Jetson AGX Orin technical brief (INT8 rate halved)"),
    _gpu("Thor", 125772, 273, 258.0, 517.0, 1035.0, (11, 0), "Jetson Thor data sheet"),
)
"""All GPUs of the table. A name may stand here twice, for two sizes of memory."""

CPU_BANDWIDTH = 20e9
"""Bytes/s of a CPU host's memory that a rank reaches; rough: two to four cores of a virtual machine."""

CPU_FLOPS = 0.2e12
"""FLOP/s of a CPU rank in bf16; rough, as above. A CPU rank is for rehearsal, and its speed is no promise."""

_ALIASES = {
    "dgx spark": "gb10",
    "jetson agx orin": "orin (nvgpu)",
    "orin": "orin (nvgpu)",
    "jetson agx thor": "thor",
    "jetson thor": "thor",
    "p40": "tesla p40",
    "t4": "tesla t4",
    "h100 sxm5": "h100 80gb hbm3",
    "h100": "h100 80gb hbm3",
    "h200 sxm": "h200",
    "gh200": "gh200 480gb",
    "rtx 6000 ada": "rtx 6000 ada generation",
    "rtx 5000 ada": "rtx 5000 ada generation",
    "rtx 4000 ada": "rtx 4000 ada generation",
    "rtx pro 6000 blackwell": "rtx pro 6000 blackwell workstation edition",
}
"""Names that people and other tools use, for `--what-if`; nvidia-smi's own need no alias."""

WHOLE_CARD = 0.7
"""A device that reports less than this share of the card's memory is a slice of it (MIG, vGPU)."""


def _key(name: str) -> str:
    """Return a name as it is compared: lower case, without the maker, single spaces."""
    return re.sub(r"\s+", " ", name.lower().replace("nvidia", " ")).strip()


_BY_NAME: dict[str, list[Gpu]] = {}
for _entry in GPUS:
    _BY_NAME.setdefault(_key(_entry.name), []).append(_entry)


_FAMILIES = {
    "a100": ("a100-sxm4-80gb", "a100-sxm4-40gb"),
    "v100": ("tesla v100-sxm2-32gb", "tesla v100-sxm2-16gb"),
}
"""Names that people use for cards of several sizes, which have names of their own."""


def cards(name: str) -> tuple[Gpu, ...]:
    """Return the rows of a card, by nvidia-smi's name or one that people use: one for each size of its memory."""
    key = _key(name)
    key = _ALIASES.get(key, key)
    return tuple(
        row
        for known in _FAMILIES.get(key, (key,))
        for row in _BY_NAME.get(known) or _BY_NAME.get(f"geforce {known}") or ()
    )


def nearest_card(name: str) -> str | None:
    """Return the name of the card that a misspelt one was meant to be, None when none is near."""
    known = {_key(row.name).removeprefix("geforce "): row.name.removeprefix("GeForce ") for row in GPUS}
    close = difflib.get_close_matches(_key(name).removeprefix("geforce "), known, n=1, cutoff=0.8)
    return known[close[0]] if close else None


def find_gpu(nvidia_smi_name: str, memory_bytes: int) -> Gpu | None:
    """Return the GPU that `nvidia-smi` calls so, with the memory it reports, or None when the table has none.

    Two cards of one name are told apart by `memory_bytes`. More memory than the card was sold with is taken as it is
    (cards are rebuilt with more). Much less means a slice of a card, whose share of the bandwidth nobody tells: None.
    0 means unknown (`nvidia-smi` gives no total where memory is shared): the first of the table.
    `GeForce` may be left out; a laptop's GPU is another chip than the desktop's of that name, so it is never found.
    """
    rows = cards(nvidia_smi_name)
    if not rows:
        return None
    if memory_bytes <= 0:
        return rows[0]
    best = min(rows, key=lambda row: abs(row.memory_bytes - memory_bytes))
    shared = best.name in ("GB10", "Orin (nvgpu)", "Thor")
    if memory_bytes < WHOLE_CARD * best.memory_bytes and not shared:
        return None
    return replace(best, memory_bytes=memory_bytes)


def custom_gpu(
    name: str, memory_bytes: int, *, bandwidth_gbs: float, bf16_tflops: float, capability: tuple[int, int]
) -> Gpu:
    """Return a GPU that is not in the table, from the two numbers that its owner gives.

    `bandwidth_gbs` is `ppdeploy_gpu_bandwidth_gbs` (GB/s), `bf16_tflops` is `ppdeploy_gpu_bf16_tflops` (dense).
    Tensor cores of Ada and later (8.9 and up) compute FP8 at twice the bf16 rate, as all of the table do.
    """
    bf16 = bf16_tflops * TERA
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth_gbs * GB,
        bf16_flops=bf16,
        fp8_flops=2 * bf16 if capability >= (8, 9) else None,
        fp4_flops=4 * bf16 if capability >= (10, 0) else None,
        capability=capability,
        source="ppdeploy_gpu_bandwidth_gbs and ppdeploy_gpu_bf16_tflops",
    )


def cpu_device(memory_bytes: int) -> Gpu:
    """Return the stand-in for a CPU host's one world rank (`ppdeploy_device: cpu`); its rates are rough."""
    return Gpu(
        name="CPU",
        memory_bytes=memory_bytes,
        bandwidth=CPU_BANDWIDTH,
        bf16_flops=CPU_FLOPS,
        fp8_flops=None,
        fp4_flops=None,
        capability=(0, 0),
        source="rough constants of this file",
    )
