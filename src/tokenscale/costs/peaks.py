"""Peak throughput of accelerators by the exact name that their driver reports. Unknown devices have
no peak.

Dense products at the boost clock, as in the data sheet; power limits allow less. A MIG partition
has another name, and so no peak.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of a device by number format, with the source; None if the device has no units for a
    format.
    """

    #: without `NVIDIA`, which older drivers leave out
    names: tuple[str, ...]
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float  # outside of the matrix units, as torch multiplies fp32 unless TF32 is allowed
    fp8: float | None
    source: str


PEAKS = (
    Peak(
        # the memory of Grace, or of a later Hopper
        ("GH200 480GB", "GH200 120GB", "GH200 144G HBM3e"),
        *(989.4, 989.4, 494.7, 66.9, 1978.9),
        "NVIDIA GH200 Grace Hopper data sheet (with sparsity, halved)",
    ),
    Peak(
        names=("H200",),
        bf16=989.4,
        fp16=989.4,
        tf32=494.7,
        fp32=66.9,
        fp8=1978.9,
        source="NVIDIA H200 data sheet, SXM (with sparsity, halved)",
    ),
    Peak(
        names=("H200 NVL",),
        bf16=835.5,
        fp16=835.5,
        tf32=417.5,
        fp32=60.0,
        fp8=1670.5,
        source="NVIDIA H200 data sheet, NVL (with sparsity, halved)",
    ),
    Peak(
        names=("H100 80GB HBM3",),
        bf16=989.4,
        fp16=989.4,
        tf32=494.7,
        fp32=66.9,
        fp8=1978.9,
        source="NVIDIA H100 whitepaper, table of SXM5",
    ),
    Peak(
        names=("H100 PCIe",),
        bf16=756.0,
        fp16=756.0,
        tf32=378.0,
        fp32=51.2,
        fp8=1513.0,
        source="NVIDIA H100 whitepaper, table of PCIe",
    ),
    Peak(
        names=("H100 NVL",),
        bf16=835.5,
        fp16=835.5,
        tf32=417.5,
        fp32=60.0,
        fp8=1670.5,
        source="NVIDIA H100 data sheet, NVL (with sparsity, halved)",
    ),
    Peak(
        ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"),
        *(312.0, 312.0, 156.0, 19.5, None),
        "NVIDIA A100 data sheet: all forms alike",
    ),
    Peak(
        names=("L40S",),
        bf16=362.05,
        fp16=362.05,
        tf32=183.0,
        fp32=91.6,
        fp8=733.0,
        source="NVIDIA L40S data sheet, dense column",
    ),
    Peak(
        names=("B200",),
        bf16=2250.0,
        fp16=2250.0,
        tf32=1100.0,
        fp32=75.0,
        fp8=4500.0,
        source="NVIDIA Blackwell data sheet, HGX B200 (halved)",
    ),
    Peak(
        names=("GB200",),
        bf16=2500.0,
        fp16=2500.0,
        tf32=1250.0,
        fp32=80.0,
        fp8=5000.0,
        source="NVIDIA Blackwell data sheet, GB200 (halved)",
    ),
    Peak(
        ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        *(None, 125.0, None, 15.7, None),
        "NVIDIA V100 data sheet",
    ),
    Peak(
        names=("AMD Instinct MI300X",),
        bf16=1307.4,
        fp16=1307.4,
        tf32=653.7,
        fp32=163.4,
        fp8=2614.9,
        source="AMD Instinct MI300X data sheet",
    ),
)


def find_peak(device_name: str) -> Peak | None:
    return next((peak for peak in PEAKS if _bare(device_name) in peak.names), None)


def peak_flops(device_name: str, number: str = "bf16") -> float | None:
    """Return the peak dense FLOP/s of a device in a number format (bf16, fp16, tf32, fp32, fp8);
    None if unknown.
    """
    peak = find_peak(device_name)
    found = getattr(peak, number) if peak else None
    return None if found is None else found * 1e12


def _bare(device_name: str) -> str:
    return device_name.removeprefix("NVIDIA ").strip()
