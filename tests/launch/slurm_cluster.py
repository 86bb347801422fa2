"""A real Slurm cluster of two nodes on this machine, with daemons, ports, key and folder of its own.

`Cluster.start` runs munged, slurmctld and two slurmd in the foreground as children of this process and as its user;
`stop` ends exactly these. Nothing of the host's own Slurm is read or touched. Needs Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

NODES = ("node1", "node2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

CONFIGURATION = """\
ClusterName=rlflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
InactiveLimit=0
SchedulerParameters=sched_interval=1,batch_sched_delay=1,sched_min_interval=100000
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """What a cluster needs and this machine does not have."""
    return [program for program in PROGRAMS if shutil.which(program, path=SYSTEM_PATH) is None]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """A running cluster; `environment` makes Slurm's commands talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self, cpus: int = 2) -> None:
        """Start all daemons and wait until the nodes take jobs. RuntimeError with the logs where they do not."""
        (self.folder / "state").mkdir(parents=True)
        self._write_configuration(cpus)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        # Forced: munged dislikes folders that others could write to, as a temporary folder's parents are.
        self._run_daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        self._wait("munged", lambda: (self.folder / "munge.socket").exists())
        self._run_daemon("slurmctld", "-D")
        for node in NODES:
            self._run_daemon("slurmd", "-D", "-N", node)
        self._wait("the nodes", lambda: self._states() == {"idle"})

    def stop(self) -> None:
        """End the jobs, then the daemons, the last started first."""
        for job in self.command("squeue", "--noheader", "--format=%A", check=False).split():
            self.command("scancel", "--signal=KILL", "--full", job, check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []

    def command(self, *words: str, check: bool = True, **environment: str) -> str:
        """The standard output of one of Slurm's commands."""
        environ = {**os.environ, **self.environment, **environment}
        done = subprocess.run(words, env=environ, text=True, capture_output=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def wait_for(self, job: str, seconds: float = 240) -> Mapping[str, str]:
        """What `scontrol show job` says of a job, or of a task of an array (17_0), once it has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            words = self.command("scontrol", "show", "job", job).split()
            fields = dict(word.split("=", 1) for word in words if "=" in word)
            if fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return fields
            time.sleep(0.3)
        raise TimeoutError(f"job {job} has not ended after {seconds:.0f} s\n{self.command('squeue')}")

    def _write_configuration(self, cpus: int) -> None:
        host = socket.gethostname().split(".")[0]
        controller_port, *node_ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
            for node, port in zip(NODES, node_ports, strict=True)
        )
        text = CONFIGURATION.format(
            host=host, user=getpass.getuser(), folder=self.folder, controller_port=controller_port, nodes=nodes
        )
        Path(self.environment["SLURM_CONF"]).write_text(text)

    def _run_daemon(self, program: str, *options: str) -> None:
        command = [str(shutil.which(program, path=SYSTEM_PATH)), *options]
        environment = {**os.environ, **self.environment}
        with (self.folder / f"{program}.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def _states(self) -> set[str]:
        return set(self.command("sinfo", "--noheader", "--Node", "--format=%T", check=False).split())

    def _wait(self, what: str, ready: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                self.stop()
                logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
                raise RuntimeError(f"{what} did not start\n" + "\n".join(logs))
            time.sleep(0.2)
