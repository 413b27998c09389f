"""Energy that a GPU's board has used, by the counter of NVML. No package: the driver's library is asked directly."""

import ctypes


class Energy:
    """Joules since the driver was loaded, of one board, found by the PCI address that torch knows; None without one.

    nvmlDeviceGetTotalEnergyConsumption counts millijoules on boards of Volta and later.
    """

    def __init__(self, pci_bus_id: str | None):
        self._library = self._device = None
        if pci_bus_id is None:
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            if library.nvmlInit_v2() == 0 and not library.nvmlDeviceGetHandleByPciBusId_v2(
                pci_bus_id.encode(), ctypes.byref(handle)
            ):
                self._library, self._device = library, handle
        except (OSError, AttributeError):
            return

    def joules(self) -> float | None:
        """The counter now; None where nothing counts."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3
