"""A real Slurm on this machine: one controller and two nodes, each with its own daemon and address.

Debian and Ubuntu provide it as the packages slurm-wlm and munge. Without them, the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import moeverify

ROOT = Path(moeverify.__file__).parents[1]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
# Nodes have loopback addresses as names, so names resolve to the nodes as in a cluster.
NODES = ("127.0.0.2", "127.0.0.3")
_SBIN = "/usr/sbin:/sbin"

# The scheduler runs every second: by default a requeued job waits for half a minute.
CONFIGURATION = """\
ClusterName=moeverify
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
ReturnToService=2
KillWait=5
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """The daemons and the environment of commands; `folder` has all files that they write."""

    folder: Path
    nodes: tuple[str, str] = NODES
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        own = {
            name: value
            for name, value in os.environ.items()
            if name != "CI" and not name.startswith("SLURM_")
        }
        return own | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:{_SBIN}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHON": sys.executable,
            "DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        user = os.environ.get("USER") or "root"
        text = CONFIGURATION.format(folder=self.folder, ports=_find_ports(3), user=user, nodes=NODES)
        (self.folder / "slurm.conf").write_text(text)
        files = {
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            started = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.daemons.append(started)

    def wait_until_up(self) -> bool:
        for _ in range(60):
            found = self.run("sinfo", "-h", "-o", "%D %T")
            if found.stdout.strip() == "2 idle":
                return True
            time.sleep(0.5)
        return False

    def run(self, *command: str, timeout: float = 280.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def stop(self) -> None:
        if len(self.daemons) > 1:
            self.run("scancel", "--state=RUNNING,PENDING", f"--user={os.environ.get('USER') or 'root'}")
            for _ in range(60):  # the daemons of the nodes end the ranks
                if not self.run("squeue", "-h").stdout.strip():
                    break
                time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(timeout=20)


def _find_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{_SBIN}") is None]
    if missing:
        pytest.skip(f"needs Slurm: {', '.join(missing)} not found (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts the ranks of others, so it is tested as root alone")
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        found.start()
        assert found.wait_until_up(), "\n".join(path.read_text() for path in found.folder.glob("*.out"))
        yield found
    finally:
        found.stop()
