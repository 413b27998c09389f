"""Peak dense bf16 throughput of accelerators, by the name the driver gives. An unknown device has none: no guess."""

#: (part of the name, FLOP/s, source); the first part that occurs in the name decides, so the longer names stand first.
PEAKS = (
    ("GH200", 989.4e12, "NVIDIA GH200 data sheet, dense"),
    ("H200", 989.4e12, "NVIDIA H200 data sheet, dense"),
    ("H100 NVL", 835.5e12, "NVIDIA H100 data sheet, dense"),
    ("H100 PCIe", 756e12, "NVIDIA H100 data sheet, dense"),
    ("H100", 989.4e12, "NVIDIA H100 SXM data sheet, dense"),
    ("A100", 312e12, "NVIDIA A100 data sheet, dense"),
)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device, or None when it is not in the table.

    >>> peak_flops("NVIDIA GH200 120GB")
    989400000000000.0
    >>> peak_flops("AMD EPYC") is None
    True
    """
    words = device_name.replace("-", " ")
    return next((peak for part, peak, _ in PEAKS if f" {part} " in f" {words} "), None)
