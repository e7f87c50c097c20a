"""Ends a process while another one copies from its memory. One GPU: `python docs/results/mapped_memory.py`.

One line for each way in which the owner ends: whether it lives, seconds in which 2,000 copies of 1 GiB were put on the stream and
ended, and whether a copy that begins afterwards has the owner's bytes.
"""

import multiprocessing
import os
import signal
import time

import cupy
from cupy.cuda import runtime

NBYTES, COPIES, BYTE = 1 << 30, 2000, 7
DEVICE_TO_DEVICE = 3


def owner(pipe, way):
    """Share memory, and end."""
    address = runtime.malloc(NBYTES)
    runtime.memset(address, BYTE, NBYTES)
    runtime.deviceSynchronize()
    pipe.send(bytes(runtime.ipcGetMemHandle(address)))
    pipe.recv()
    if way == "exit":
        os._exit(0)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    runtime.free(address)
    pipe.recv()


def read(way):
    """Copy while the owner ends, and afterwards."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=owner, args=(there, way))
    process.start()
    address = runtime.ipcOpenMemHandle(here.recv(), runtime.cudaIpcMemLazyEnablePeerAccess)
    copy = cupy.zeros(NBYTES, cupy.uint8)
    runtime.deviceSynchronize()
    began = time.perf_counter()
    for _ in range(COPIES):
        runtime.memcpyAsync(copy.data.ptr, address, NBYTES, DEVICE_TO_DEVICE, 0)
    here.send("end")
    time.sleep(0.2)
    queued = time.perf_counter() - began
    runtime.deviceSynchronize()
    ended = time.perf_counter() - began
    if way != "free":
        process.join()
    lives = process.is_alive()
    copy.fill(0)
    other = cupy.full(NBYTES, BYTE + 1, cupy.uint8)
    runtime.memcpyAsync(copy.data.ptr, address, NBYTES, DEVICE_TO_DEVICE, 0)
    right = bool((copy == BYTE).all()) and bool((other == BYTE + 1).all())
    print(f"{way}: lives {lives}, put in {queued:.3f} s, ended in {ended:.3f} s, right {right}", flush=True)
    runtime.ipcCloseMemHandle(address)
    if lives:
        here.send("end")
    process.join()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    for each in ("exit", "kill", "free"):
        read(each)
