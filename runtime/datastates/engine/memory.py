"""How much memory this process may use: what the machine has, or what its control groups and its own limits leave of it."""

from __future__ import annotations

import resource
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """Bytes of memory that this process can have at most: the machine's, or the smallest limit that is set to it."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _limits())])


def memory_available() -> int:
    """Bytes of memory that this process could take now without pushing anything out of memory."""
    return max(0, min([_meminfo("MemAvailable"), *(limit - used for limit, used in _limits())]))


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")


def _limits() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of everything that limits the memory of this process."""
    return [*_cgroups(), *_address_space()]


def _address_space() -> list[tuple[int, int]]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return [(limit, pages * resource.getpagesize())]


def _cgroups() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of every control group around this process that limits memory."""
    found = []
    for directory in _cgroup_directories():
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(directory / limit_name), _number(directory / used_name)
            if limit is not None:
                found.append((limit, used or 0))
    return found


def _cgroup_directories() -> list[Path]:
    """The groups of this process and all that contain them, of version 1 and 2; inside a container the root is its own."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    directories = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / "memory" if controllers else _CGROUP_ROOT
        group = root / path.lstrip("/")
        directories += [parent for parent in (group, *group.parents) if parent.is_relative_to(root)]
    return directories


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says that there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
