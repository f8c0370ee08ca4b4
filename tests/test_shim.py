"""System calls that fail below all of Python: an error, and no signal."""

import errno
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.page_cache import needs_page_cache
from tests.processes import run_script

HWPOISON = 133  # Python has no name for it

# The next call of the armed function fails with the requested errno; later ones do not.
SHIM = r"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <errno.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/types.h>

    static char armed[32];
    static int code, hits;

    void arm(const char *name, int error) { strncpy(armed, name, 31); code = error; hits = 0; }
    int struck(void) { return hits; }

    static int fails(const char *name) {
        if (strcmp(armed, name)) return 0;
        armed[0] = 0; hits++; errno = code;
        return 1;
    }

    #define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

    void *mmap(void *at, size_t size, int rights, int flags, int fd, off_t from) {
        return fd >= 0 && fails("mmap") ? MAP_FAILED : REAL(mmap)(at, size, rights, flags, fd, from);
    }
    int madvise(void *at, size_t size, int advice) {
        return advice == 22 && fails("madvise") ? -1 : REAL(madvise)(at, size, advice);
    }
    ssize_t sendfile64(int out, int in, off64_t *from, size_t size) {
        return fails("sendfile") ? -1 : REAL(sendfile64)(out, in, from, size);
    }
    int fsync(int fd) { return fails("fsync") ? -1 : REAL(fsync)(fd); }
"""

SCRIPT = """
    import ctypes, errno, json, os, sys, torch, offload
    from offload import OffloadedTensor
    from offload.storage.file import TensorFile

    libc, HWPOISON = ctypes.CDLL(None), 133
    folder, values = sys.argv[1], torch.arange(1 << 18)

    def shared():
        return OffloadedTensor.from_original_tensor(values, f"w{len(said)}", folder)

    def referenced():
        torch.save({"w": values}, folder + f"/{len(said)}.pt")
        return OffloadedTensor.from_file(folder + f"/{len(said)}.pt", "w")

    def cold(weight):
        fd = os.open(weight.offload_path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return weight

    def read(weight):
        return torch.equal(weight.materialize(), values)

    def written(weight):
        weight.update_values(values)
        return read(weight)

    def changed(weight):
        return torch.equal(weight.add_(0), values)

    def flushed(weight):
        weight.fill_(7)
        weight.flush()
        return bool((weight == 7).all())

    said = []
    for begin, act, name, code in [
        (shared, read, "mmap", errno.ENOMEM),
        (referenced, read, "mmap", errno.ENODEV),
        (lambda: cold(shared()), read, "madvise", errno.EFAULT),
        (lambda: cold(shared()), read, "madvise", errno.EIO),
        (lambda: cold(referenced()), read, "madvise", HWPOISON),
        (lambda: cold(shared()), read, "madvise", errno.EINTR),
        (shared, written, "fsync", errno.EIO),
        (shared, flushed, "fsync", errno.ENOSPC),
        (referenced, changed, "sendfile", errno.EIO),
        (referenced, changed, "sendfile", errno.EINTR),
    ]:
        weight = begin()
        libc.arm(name.encode(), code)
        try:
            found = act(weight)
        except OSError as error:
            found = f"{type(error).__name__} {error.errno}" if folder in str(error) else str(error)
        said.append([name, code, libc.struck(), found, act(weight)])
    print(json.dumps(said))
"""
EXPECTED = [
    ["mmap", errno.ENOMEM, 1, f"ReadError {errno.ENOMEM}", True],
    ["mmap", errno.ENODEV, 1, f"ReadError {errno.ENODEV}", True],
    ["madvise", errno.EFAULT, 1, f"ReadError {errno.EIO}", True],  # the kernel's error where a read would be a SIGBUS
    ["madvise", errno.EIO, 1, f"ReadError {errno.EIO}", True],
    ["madvise", HWPOISON, 1, f"ReadError {HWPOISON}", True],
    ["madvise", errno.EINTR, 1, True, True],
    ["fsync", errno.EIO, 1, f"WriteError {errno.EIO}", True],
    ["fsync", errno.ENOSPC, 1, f"WriteError {errno.ENOSPC}", True],
    ["sendfile", errno.EIO, 1, True, True],  # what the kernel can't copy goes through memory
    ["sendfile", errno.EINTR, 1, True, True],
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that is loaded before libc."""
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "shim.so"), str(folder / "shim.c"), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the shim is not compiled here: {done.stderr.splitlines()[:1]}")
    return folder / "shim.so"


@needs_page_cache
def test_a_failing_libc_call_is_an_error_or_is_done_another_way(shim, tmp_path):
    """Which function, with which errno, how often it failed, what happened, and what the next call gives."""
    assert EXPECTED == json.loads(run_script(SCRIPT, tmp_path, env={"LD_PRELOAD": str(shim)}))
