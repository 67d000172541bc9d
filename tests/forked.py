"""Processes that are forked from one that has imported the backends.

An import takes two seconds of a core, a fork some hundredths. A forked process
has the arguments, environment, folder, session and random numbers of a new
one. Modules and their settings are those of the server, whose backends compute
on one thread. It ends without Python's finalization. Processes that it starts
with `sys.executable` are forked too, except with the option -I, and except
the roles of a parameter server, which MXNet assumes when it is imported.

`python` is a program for `subprocess`; `Process` is for jobs that get signals.
"""
import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def folder():
    """Start the server; the folder with its socket and with the programs
    ``python`` and ``mgpu``, which ask it for a process."""
    import shutil
    import tempfile
    found = Path(tempfile.mkdtemp(prefix="forked-"))
    for name, more in (("python", ""), ("mgpu", "-m mgpu")):
        (found / name).write_text(f"""#!/bin/sh
case "$1 $DMLC_ROLE" in
-I*|*scheduler|*server) exec "{sys.executable}" "$@";;
esac
exec "{sys.executable}" -IS "{__file__}" "{found}" {more} "$@"
""")
        (found / name).chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", found,
         *{"mxnet", "torch"} & sys.modules.keys()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={
            **{k: v for k, v in os.environ.items()
               if not k.startswith(("MGPU_", "PYTHONPATH"))},
            "OMP_NUM_THREADS": "1"})
    server.stdout.readline()
    atexit.register(shutil.rmtree, found)
    atexit.register(server.communicate)
    return found


def python():
    """A program that starts as ``python`` does."""
    return str(folder() / "python")


class Process:
    """As `subprocess.Popen`, of ``python ARGUMENTS``, with its output in a
    file. The process leads a session."""

    def __init__(self, arguments, stdout, cwd, env):
        self.returncode = None
        with open(os.devnull) as nothing:
            self._call, self.pid = _ask(
                folder(), [str(x) for x in arguments], str(cwd), env,
                [nothing.fileno(), stdout.fileno(), stdout.fileno()])

    def poll(self):
        return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            self._call.settimeout(timeout)
            try:
                self.returncode = int(self._call.recv(99))
            except BlockingIOError:
                pass
            except TimeoutError as error:
                raise subprocess.TimeoutExpired("python", timeout) from error
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _ask(place, arguments, cwd, env, files):
    """The socket that gets the status of the new process, and its PID."""
    call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    call.connect(f"{place}/socket")
    socket.send_fds(call, [json.dumps([arguments, cwd, dict(env)]).encode()],
                    files)
    return call, int(call.recv(99))


def _client(place, *arguments):
    """The program ``python``: it hands on signals, and ends as the process
    does."""
    call, pid = _ask(place, arguments, os.getcwd(), os.environ, [0, 1, 2])
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(call.recv(99))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -- the server ---------------------------------------------------------------

def _serve(place, *backends):
    """Fork a process for each call, and return in it: its arguments. It ends
    where its caller ends."""
    import gc
    import importlib
    import random
    import select

    path = sys.path[1:]
    sys.path[0] = str(ROOT)
    import numpy as np
    import pytest  # noqa: F401, which programs import

    from mgpu.utils import environment as settings
    from mgpu.backends import ENTRIES
    from mgpu.distributed import launch, world  # noqa: F401
    loaded = [importlib.import_module(ENTRIES[name].module)
              for name in sorted(backends)]
    if "torch" in backends:     # what a first step of torch imports
        import torch._dynamo  # noqa: F401
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{place}/socket")
    listener.listen(99)
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(flush=True)
    gc.collect()
    gc.freeze()
    calls = {}          # by PID
    answer = 1
    while answer:
        ready, _, _ = select.select(
            [0, wakes, listener, *calls.values()], [], [])
        if wakes in ready:
            wakes.recv(99)
        for pid, call in list(calls.items()):
            if call in ready or 0 in ready:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if call in ready else
                                       os.WNOHANG)
            if ended:
                if call not in ready:
                    call.send(str(os.waitstatus_to_exitcode(status)).encode())
                calls.pop(pid).close()
        if 0 in ready:
            os._exit(0)
        if listener in ready:
            call, _ = listener.accept()
            question, files, _, _ = socket.recv_fds(call, 1 << 20, 3)
            answer = os.fork()
            if answer:
                calls[answer] = call
                call.send(str(answer).encode())
                for file in files:
                    os.close(file)
    for open_ in (listener, wakes, woken, call, *calls.values()):
        open_.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    sys.executable = f"{place}/python"
    arguments, cwd, environment = json.loads(question)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(
        ":")), *path]
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if settings.strict_devices():
        for backend in loaded:
            backend.strict.always(backend.Ledger())
    random.seed()
    np.random.seed()
    return arguments


def _run(how, *others):
    """Run a program as ``python HOW ...`` does."""
    import runpy
    import types
    import warnings
    if how == "-u":
        sys.stdout.reconfigure(write_through=True)
        return _run(*others)
    if how == "-W":
        warnings.simplefilter(others[0])
        return _run(*others[1:])
    if how == "-m":
        sys.argv[:], sys.path[:0] = others, [os.getcwd()]
        return runpy.run_module(others[0], run_name="__main__",
                                alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if how == "-c":
        sys.argv[:], sys.path[:0] = ["-c", *others[1:]], [""]
        file, text = "<string>", others[0]
    else:
        sys.argv[:] = [how, *others]
        sys.path[:0] = [os.path.dirname(os.path.abspath(how))]
        file = main.__file__ = how
        text = Path(how).read_text("utf-8")
    exec(compile(text, file, "exec"), vars(main))


def _end():
    """What the server has imported takes long to tear down."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__" and sys.argv[1] != "serve":
    _client(*sys.argv[1:])
elif __name__ == "__main__":
    atexit.register(_end)       # the first one, which is run last
    status, program = 0, _serve(*sys.argv[2:])
    try:
        _run(*program)
    except KeyboardInterrupt:
        atexit.unregister(_end)     # Python ends itself by SIGINT
        raise
    except BaseException as error:
        status = 1
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            status = int(error.code or 0) & 255
        raise
