"""Hosts on one machine: network, process and host-name namespaces on a bridge. Needs Linux, root and iproute2."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self


def missing() -> str | None:
    """What this machine lacks to have such hosts; None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces need Linux and root"
    if tools := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"{' and '.join(tools)} not found: install iproute2 and util-linux"
    made = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True)
    return None if made.returncode == 0 else f"this kernel or container gives no namespaces: {made.stderr.strip()}"


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


class Host:
    """One host: its name, its address, and the processes that were started on it."""

    def __init__(self, network: str, number: int, subnet: str, folder: Path) -> None:
        self.name = f"host{number}"
        self.address = f"{subnet}.{number + 1}"
        self._namespace, self._link = f"{network}-{number}", f"{network}v{number}"
        self._bridge, self._folder = network, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        _run("ip", "netns", "add", self._namespace)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        _run("ip", "link", "set", self._link, "master", network)
        _run("ip", "-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", self._namespace, "link", "set", link, "up")
        self.mend()

    def start(self, name: str, command: Sequence[object], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Run a command here, in a process namespace of its own. Its output goes to `log(name)`.

        Processes of one host that are to see each other are started by one command.
        """
        # /proc of the namespace, and the host's name: torchrun and shardwise tell machines apart by it.
        own = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = 'hostname "$0"; exec "$@"'
        words = ["ip", "netns", "exec", self._namespace, *own, "bash", "-c", script, self.name, *map(str, command)]
        with self.log(name).open("wb") as log:
            variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **environment}
            process = subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def signal(self, process: subprocess.Popen[bytes], pid: int, number: signal.Signals) -> None:
        """Send a signal to a process that `process` started, which has the number `pid` in its namespace."""
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        _run("nsenter", "--target", first, "--pid", "--mount", "kill", f"-{number.value}", pid)

    def log(self, name: str) -> Path:
        return self._folder / f"{self.name}-{name}.log"

    def cut(self) -> None:
        """Take the link down: packets to and from this host are lost, and no connection is closed."""
        _run("ip", "link", "set", self._link, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self._link, "up")

    def kill(self) -> None:
        """End all processes here at once, with SIGKILL."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # of unshare, whose child it ends, and that the whole namespace
            process.wait()

    def remove(self) -> None:
        self.kill()
        for words in (("link", "del", self._link), ("netns", "del", self._namespace)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", *words)


class Network:
    """Hosts that reach each other over a bridge. Use as a context manager: leaving it removes all of it."""

    def __init__(self, hosts: int, folder: Path) -> None:
        self._count, self._folder = hosts, folder
        self._bridge = f"sw{os.getpid() % 10**6}"
        self._subnet = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for number in range(self._count):
                self.hosts.append(Host(self._bridge, number, self._subnet, self._folder))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for host in self.hosts:
            host.remove()
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "link", "del", self._bridge)
