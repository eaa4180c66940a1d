"""Real systemd hosts on one Linux machine, to rehearse an apply, an upgrade or a dead node without a GPU.

from ppdeploy.lab import Lab

lab = Lab()
lab.up(nodes=2)
lab.exec_ssh("node1", ["uname", "-n"]).stdout
lab.down()
"""

from ppdeploy.lab.core import Lab
from ppdeploy.lab.host import Nic, Overlay
from ppdeploy.lab.inventory import LabInventory, LabPipeline
from ppdeploy.lab.status import LabStatus, NodeStatus

__all__ = ["Lab", "LabInventory", "LabPipeline", "LabStatus", "Nic", "NodeStatus", "Overlay"]
