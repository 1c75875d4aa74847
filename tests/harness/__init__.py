"""What integration tests are written with: an appliance, raw upstreams, and wires to talk over byte for byte."""

from tests.harness.appliance import Appliance, cli
from tests.harness.ports import FreePorts
from tests.harness.processes import alive, children, descriptor_count, wait_until
from tests.harness.upstream import RawUpstream, Script, answering
from tests.harness.wire import Response, Wire, connect_tcp, connect_tls

__all__ = [
    "Appliance",
    "FreePorts",
    "RawUpstream",
    "Response",
    "Script",
    "Wire",
    "alive",
    "answering",
    "children",
    "cli",
    "connect_tcp",
    "connect_tls",
    "descriptor_count",
    "wait_until",
]
