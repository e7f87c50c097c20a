"""Device arrays over a torch process group: through pinned host memory, since gloo moves no other."""

from __future__ import annotations

from collectives.cuda.device import Device
from collectives.device_transport import DeviceTransport
from collectives.process_group import Meeting, ProcessGroupTransport
from collectives.staging import StagedTransport


class StagedGroupTransport(DeviceTransport, StagedTransport, ProcessGroupTransport):
    """Device arrays over gloo."""

    def __init__(self, comm: Meeting, device: Device) -> None:
        super().__init__(comm, device, device)


def connect_device(host: ProcessGroupTransport, device: Device) -> StagedGroupTransport:
    """The transport for device arrays among the ranks of `host`, which the caller closes. Collective."""
    return StagedGroupTransport(host.comm, device)
