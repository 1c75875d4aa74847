"""What a rollout must know of a host before it touches it, as JSON on standard output. Reads only.

Runs with whatever Python the host has, from 3.8 on, so that one that is too old can be told so: standard library only.
Arguments: the folder to be installed to, the Python to be installed with, the name of the service.
"""

import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys

CAP_SYS_RESOURCE = 24
LISTEN = "0A"
ALL_IDS = 4294967295
MIB = 1024 * 1024


def text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def number(path):
    found = text(path).strip()
    return int(found) if found.isdigit() else None


def output(*command):
    """Standard output of a command; empty where there is no such program, or it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def first_number(words):
    found = re.search(r"\d+(?:\.\d+)*", words)
    return found.group() if found else ""


def open_files_of(pid):
    """RLIMIT_NOFILE of a process, [soft, hard]; None for unlimited and for what cannot be read."""
    line = re.search(r"^Max open files +(\S+) +(\S+)", text(f"/proc/{pid}/limits"), re.MULTILINE)
    return [int(word) if word.isdigit() else None for word in line.groups()] if line else [None, None]


def may_raise_limits():
    """Whether the service manager can set a hard limit above its own: CAP_SYS_RESOURCE, and no user namespace."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", text("/proc/1/status"), re.MULTILINE)
    whole = text("/proc/1/uid_map").split() == ["0", "0", str(ALL_IDS)]
    return bool(effective and whole and int(effective.group(1), 16) >> CAP_SYS_RESOURCE & 1)


def properties(*command):
    return dict(line.split("=", 1) for line in output("systemctl", "show", *command).splitlines() if "=" in line)


def unit(name):
    """The unit as the manager has it, and which of its drop-ins say something about descriptors."""
    shown = properties(name, "--property=LoadState,ActiveState,MainPID,LimitNOFILE,LimitNOFILESoft,DropInPaths")
    said = [path for path in shown.get("DropInPaths", "").split() if re.search(r"(?m)^\s*LimitNOFILE", text(path))]
    last = re.findall(r"(?m)^\s*LimitNOFILE\s*=\s*(\S*)", text(said[-1])) if said else []
    return dict(shown, nofile_from=said[-1] if said else "", nofile_says=last[-1] if last else "")


def memory_bytes():
    """Of the machine, or what a container's cgroup leaves of it."""
    total = re.search(r"^MemTotal: *(\d+) kB", text("/proc/meminfo"), re.MULTILINE)
    bounds = [int(total.group(1)) * 1024] if total else []
    bounds += filter(None, map(number, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")))
    return min(bounds, default=0)


def processors():
    """As the proxy counts them for `workers = "auto"`: affinity, bounded by a container's quota, rounded up."""
    count = len(os.sched_getaffinity(1))
    words = text("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        count = min(count, max(1, -(-int(words[0]) // int(words[1]))))
    return count


def free_bytes(folder):
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def address(word, family):
    """An address of /proc/net/tcp: words of 32 bits in the machine's order."""
    raw = bytes.fromhex(word)
    raw = b"".join(raw[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(raw), 4))
    return socket.inet_ntop(family, raw)


def owners():
    """Inode of each socket -> the processes that hold it: pid, name, cgroups."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))
        except OSError:
            continue
        if inode:
            found.setdefault(inode.group(1), set()).add(path.split("/")[2])
    return found


def listening():
    """Every TCP port that somebody listens on, with who does."""
    held = owners()
    ports = []
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in text(path).splitlines()[1:]:
            words = line.split()
            if words[3] != LISTEN:
                continue
            host, port = words[1].split(":")
            pids = sorted(held.get(words[9], ()), key=int)[:1]
            about = [(pid, text(f"/proc/{pid}/comm").strip(), text(f"/proc/{pid}/cgroup")) for pid in pids]
            pid, name, cgroup = about[0] if about else ("", "", "")
            ports.append(
                {
                    "address": address(host, family),
                    "port": int(port, 16),
                    "ipv6": family == socket.AF_INET6,
                    "pid": pid,
                    "name": name,
                    "unit": "".join(re.findall(r"/([^/\n]+\.(?:service|scope))", cgroup)[:1]),
                }
            )
    return ports


def ipv6():
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def python(program):
    """Version, tag and machine of the Python that the release is to be installed with."""
    code = (
        "import json, platform, sys, sysconfig\n"
        "print(json.dumps({'version': platform.python_version(), 'implementation': sys.implementation.name,"
        " 'tag': sys.implementation.cache_tag.replace('cpython-', 'cp'), 'machine': platform.machine()}))"
    )
    found = output(program, "-I", "-c", code)
    venv = output(program, "-I", "-c", "import ensurepip, venv; print('yes')") == "yes"
    return dict(json.loads(found), venv=venv) if found else {}


def main(folder, program, service):
    soft, hard = open_files_of(1)
    manager = properties("--property=DefaultLimitNOFILE,DefaultLimitNOFILESoft,Version")
    systemd = os.path.isdir("/run/systemd/system")
    print(
        json.dumps(
            {
                "nr_open": number("/proc/sys/fs/nr_open"),
                "file_max": number("/proc/sys/fs/file-max"),
                "manager": dict(manager, soft=soft, hard=hard, may_raise=may_raise_limits()),
                "unit": unit(service) if systemd else {},
                "container": output("systemd-detect-virt", "--container"),
                "memory_mib": memory_bytes() // MIB,
                "disk_mib": free_bytes(folder) // MIB,
                "processors": processors(),
                "ipv6": ipv6(),
                "listening": listening(),
                "python": python(program),
                "systemd": first_number(output("systemctl", "--version")) if systemd else "",
                "engines": {
                    name: first_number(output(name, "--version")) for name in ("docker", "podman") if shutil.which(name)
                },
                "compose": first_number(output("docker", "compose", "version")),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
