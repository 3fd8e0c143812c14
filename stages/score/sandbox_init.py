"""The inside of a sandbox: shuts itself off from the machine, then runs one program and watches it.

    python -I -S sandbox_init.py ORDER          ORDER: JSON, see ``sandbox.py``

Standard library alone: this file runs before anything else of ours could. Three processes: the
outer one makes new namespaces and waits; the init, process 1 of the new process space, mounts a
read-only view of the interpreter and nothing else, watches memory and time, and takes everything
down with it when it ends; the program runs as a user of its own without any capability.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
SPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 1, 2, 4, 8, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

# A user for each sandbox, so that its processes are counted by themselves: the limit on their
# number is one of the user's, and never binds root.
FIRST_UID = 0x40000000
INNER_UID = 1000
DEVICES = ("null", "zero", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
ENVIRONMENT = {
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/box",
}
WATCH_SECONDS = 0.01
OPEN_FILES = 64


def main(order: dict) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    uid = FIRST_UID + os.getpid()
    try:
        has_own_user = enter_spaces()
    except OSError as error:
        report(order, error=f"{error.strerror} on {error.filename}")
        return
    init = os.fork()
    if init == 0:
        # Whatever happens, this process returns to nothing.
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            run_init(order, None if has_own_user else uid)
        except OSError as error:
            report(order, error=f"{error.strerror} on {error.filename}")
        finally:
            os._exit(0)
    os.waitpid(init, 0)


def enter_spaces() -> bool:
    """Take namespaces of our own: as root by right, else in a user namespace, which is True."""
    if LIBC.unshare(SPACES) == 0:
        return False
    uid, gid = os.geteuid(), os.getegid()
    check(LIBC.unshare(SPACES | CLONE_NEWUSER), "unshare")
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{INNER_UID} {uid} 1")
    write("/proc/self/gid_map", f"{INNER_UID} {gid} 1")
    return True


def run_init(order: dict, uid: int | None) -> None:
    # Its open files and memory are no business of the program's.
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    with open(order["program_fd"], "rb") as file:
        program = file.read()
    enter_root(order, uid)
    with open("/box/main.py", "wb") as file:
        file.write(program)
    os.chmod("/box/main.py", 0o444)
    child = os.fork()
    if child == 0:
        try:
            run_program(order, uid)
        finally:
            os._exit(127)
    report(order, **watch(order, child))


def enter_root(order: dict, uid: int | None) -> None:
    """A root of the interpreter and the system's libraries, read-only, and an empty /box."""
    root = order["root"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in dict.fromkeys([*SYSTEM, *order["interpreter"]]):
        show(root, path)
    os.mkdir(f"{root}/dev")
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{root}/box")
    size = f"size={order['folder_bytes']},nr_inodes=1000,mode=700"
    mount("tmpfs", f"{root}/box", "tmpfs", MS_NOSUID | MS_NODEV, size)
    if uid is not None:
        os.chown(f"{root}/box", uid, uid)
    if not os.path.lexists(f"{root}/tmp"):  # else the interpreter lies there
        os.symlink("box", f"{root}/tmp")
    os.chdir(root)
    check(LIBC.syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/box")
    protect("/", 0)


def show(root: str, path: str) -> None:
    """Put ``path`` of the machine at the same place below ``root``, read-only."""
    if not os.path.lexists(path) or os.path.lexists(root + path):
        return
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
        return
    os.mkdir(root + path)
    mount(path, root + path, None, MS_BIND | MS_REC)
    protect(root + path, AT_RECURSIVE)


def run_program(order: dict, uid: int | None) -> None:
    """Become the program: no way back to what this process may do."""
    os.setsid()
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The init counts too where it is of the same user.
    set_limits(order, order["processes"] + (uid is None))
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.closerange(3, 4096)
    os.execve(order["python"], [order["python"], "-I", "/box/main.py"], ENVIRONMENT)


def set_limits(order: dict, processes: int) -> None:
    # One more second of processor time than of the wall's would never be used up.
    seconds = max(1, int(order["seconds"]) + 1)
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, processes),
    ):
        resource.setrlimit(name, (value, value))


def watch(order: dict, child: int) -> dict:
    """Wait for the program, and end everything when it ends, or passes time or memory."""
    end = time.monotonic() + order["seconds"]
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_SECONDS)
        status = reap(child)
        found: dict | None
        if status is not None:
            found = {"status": os.waitstatus_to_exitcode(status)}
        elif time.monotonic() >= end:
            found = {"limit": "time"}
        elif (found := over_limit(order)) is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return found


def reap(child: int) -> int | None:
    """Collect what has ended; the program's own status once it is among it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def over_limit(order: dict) -> dict | None:
    """What the processes in here, this one left out, have too much of; None for nothing."""
    names = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    # The kernel counts processes itself, but not those of root in a user namespace.
    if len(names) > 2 * order["processes"]:
        return {"limit": "processes"}
    pages = 0
    for name in names:
        try:
            with open(f"/proc/{name}/statm") as file:
                pages += int(file.read().split()[1])
        except OSError:  # it has ended since
            continue
    is_over = pages * resource.getpagesize() > order["memory_bytes"]
    return {"limit": "memory"} if is_over else None


def report(order: dict, **found: object) -> None:
    os.write(order["report_fd"], json.dumps(found).encode())


class MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def protect(path: str, flags: int) -> None:
    """Make the mount at ``path`` read-only; those below it too, with AT_RECURSIVE."""
    attributes = MountAttr(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    done = LIBC.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size
    )
    check(done, f"read-only {path}")


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    first, second, third, last = (
        None if word is None else word.encode() for word in (source, target, kind, options)
    )
    check(LIBC.mount(first, second, third, ctypes.c_ulong(flags), last), f"mount {target}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
